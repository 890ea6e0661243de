"""The mapping language and every table: each rule, run as its string says, against the oracle written by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import Tiny
from numpy.typing import NDArray

import oracles
from bridge.configs import maxtext as maxtext_config
from bridge.converters.layout import Rule, Table, axes_of, parse_side, scale_of
from bridge.converters.plan import make_plan, table_for, tables
from bridge.errors import TableError, UnsupportedError
from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

MODEL = ModelSpec(
    layers=3,
    embed=10,
    heads=4,
    kv_heads=2,
    head_dim=6,
    mlp=14,
    vocab=9,
    tied=False,
    rope_theta=5e5,
    rope_scaling=None,
    norm_eps=1e-5,
    context=64,
    dtype="float32",
)
Q = Rule("l.{layer}.q", "d/q", "layer (heads two half) embed -> embed layer heads (half two)", scale="rsqrt_head_dim")


def test_a_side_is_axes_and_groups() -> None:
    assert parse_side(" a (b c)  d") == (("a",), ("b", "c"), ("d",))


@pytest.mark.parametrize("text", ["", "a (b", "a b)", "a ((b c))", "a-b", "()", "a, b"])
def test_a_side_that_is_no_list_of_axes_is_refused(text: str) -> None:
    with pytest.raises(TableError, match="not a list of axes"):
        parse_side(text)


@pytest.mark.parametrize(
    ("hf", "engine", "pattern", "message"),
    [
        ("a", "b", "embed embed -> embed", "named twice"),
        ("a", "b", "embed -> embed embed", "named twice"),
        ("a", "b", "vocab embed -> embed", "do not name the same axes"),
        ("a", "b", "vocab -> vocab mlp", "do not name the same axes"),
        ("a", "b", "layer embed -> embed layer", "go together"),
        ("a.{layer}", "b", "embed -> embed", "go together"),
        ("a.{layer}", "b.{layer}", "layer embed -> embed layer", "either an axis or part of the name"),
        ("a.{layer}", "b", "layer embed -> embed", "either an axis or part of the name"),
        ("a.{layer}", "b", "embed layer -> embed layer", "comes first"),
        ("a", "b", "(heads two) embed -> embed (two heads)", "must stand alone on the right"),
        ("a", "b", "vocab embed", "has no arrow"),
        ("a", "b", "vocab embed ->", "not a list of axes"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(hf: str, engine: str, pattern: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        Rule(hf, engine, pattern)


def test_a_rule_states_both_shapes_and_where_it_is_cut() -> None:
    axes = axes_of(MODEL)
    assert (Q.hf_shape(axes), Q.engine_shape(axes)) == ((24, 10), (10, 3, 4, 6))
    assert (Q.cut_axis, Q.engine_cut_dim, Q.engine_layer_dim) == ("heads", 2, 1)
    assert (Q.stacked, Q.per_layer) == (True, True)
    plain = Rule("n", "n", "embed -> embed")
    assert (plain.stacked, plain.per_layer, plain.engine_layer_dim) == (False, False, None)


def test_a_block_is_the_permutation_of_part_of_a_tensor_and_knows_its_inverse() -> None:
    block = Q.block(axes_of(MODEL), units=2)
    assert (block.hf_split, block.order, block.engine_shape) == ((2, 2, 3, 10), (3, 0, 2, 1), (10, 2, 6))
    values = np.arange(120)
    moved = values.reshape(block.hf_split).transpose(block.order).reshape(block.engine_shape)
    # Row 1 x 6 + 1 x 3 + 2 of the block is head 1, second half, pair 2: engine head 1, place 2 x 2 + 1.
    assert moved[7, 1, 5] == (1 * 6 + 1 * 3 + 2) * 10 + 7
    back = moved.reshape(block.engine_split).transpose(block.inverse_order).reshape(-1)
    assert back.tolist() == values.tolist()


def test_unscanned_drops_the_layer_axis_and_renames_the_path() -> None:
    rule = Rule(Q.hf, "decoder/layers/q", Q.pattern, scale=Q.scale).unscanned("layers/", "layers_{layer}/")
    assert (rule.engine, rule.scale) == ("decoder/layers_{layer}/q", "rsqrt_head_dim")
    assert rule.engine_shape(axes_of(MODEL)) == (10, 4, 6)
    assert not rule.stacked
    assert rule.unscanned("layers", "x") is rule


def test_a_table_without_an_unscanned_layout_says_so() -> None:
    table = Table("f", "e", (Q,), "items")
    assert table.rules_for(MODEL, scanned=True) == (Q,)
    with pytest.raises(TableError, match="no unscanned layout"):
        table.rules_for(MODEL, scanned=False)


def test_the_query_scale_is_the_float32_nearest_to_one_over_the_root() -> None:
    for head_dim in (6, 64, 96, 128):
        expected = float(np.float32(1 / math.sqrt(head_dim)))
        model = ModelSpec(**{**MODEL.__dict__, "head_dim": head_dim})
        assert scale_of(Q, model) == expected
    assert scale_of(Rule("n", "n", "embed -> embed"), MODEL) == 1.0


def test_an_engine_without_a_table_is_refused_with_what_there_is() -> None:
    assert {("llama", "maxtext"), ("llama", "tunix")} <= tables().keys()
    with pytest.raises(UnsupportedError, match="llama on megatron is not supported") as found:
        table_for(MODEL, "megatron")
    assert "llama on maxtext" in str(found.value)


# Every table, found by glob: what its strings say, carried out by plain numpy, must be what the oracle says.


def by_the_string(rule: Rule, tensors: list[NDArray[Any]], sizes: dict[str, int], scale: float) -> NDArray[Any]:
    """Carry out `a (b c) -> ...` on the tensors of all layers: independent of how the package does it."""
    left, _, right = rule.pattern.partition("->")
    names = left.replace("(", "").replace(")", "").split()
    stacked = np.stack(tensors) if names[0] == "layer" else tensors[0]
    split = stacked.astype(np.float32).reshape([sizes[name] for name in names])
    to = right.replace("(", " ( ").replace(")", " ) ").split()
    wanted = [name for name in to if name not in "()"]
    if "layer" in names and "layer" not in wanted:
        wanted = ["layer", *wanted]
    moved = np.einsum(split, range(len(names)), [names.index(name) for name in wanted])
    shape, group = ([sizes["layer"]] if wanted[0] == "layer" and "layer" not in to else []), None
    for word in to:
        if word == "(":
            group = 1
        elif word == ")":
            shape.append(group or 1)
            group = None
        elif group is None:
            shape.append(sizes[word])
        else:
            group *= sizes[word]
    result: NDArray[Any] = moved.reshape(shape) * np.float32(scale)
    return result


def engine_arrays(table: Table, folder: Path, scanned: bool) -> dict[str, NDArray[Any]]:
    tensors, config = oracles.read_hf(folder)
    heads, head_dim = config["num_attention_heads"], oracles.head_dim_of(config)
    sizes = {
        "layer": config["num_hidden_layers"],
        "heads": heads,
        "kv_heads": oracles.kv_heads_of(config),
        "head_dim": head_dim,
        "two": 2,
        "half": head_dim // 2,
        "embed": config["hidden_size"],
        "mlp": config["intermediate_size"],
        "vocab": config["vocab_size"],
    }
    found: dict[str, NDArray[Any]] = {}
    for rule in table.rules_for(ModelSpec.from_folder(folder), scanned):
        layers = range(sizes["layer"]) if "{layer}" in rule.hf else [None]
        scale = 1 / math.sqrt(head_dim) if rule.scale else 1.0
        array = by_the_string(rule, [tensors[rule.hf.format(layer=layer)] for layer in layers], sizes, scale)
        one_a_layer = "{layer}" in rule.engine
        for layer in layers if one_a_layer else [None]:
            name = ".".join(table.engine_path(rule, layer))
            found[name] = array if layer is None else array[layer]
    return found


def expected(engine: str, folder: Path, scanned: bool) -> dict[str, NDArray[Any]]:
    tensors, config = oracles.read_hf(folder)
    if engine == "maxtext":
        return oracles.maxtext_tree(tensors, config, scanned)
    return {name: array.astype(np.float32) for name, array in oracles.tunix_tree(tensors, config).items()}


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", ["untied", "tied", "mqa", "head_dim_96"])
@pytest.mark.parametrize("pair", tables(), ids="-".join)
def test_every_rule_is_what_the_oracle_says(pair: tuple[str, str], name: str, scanned: bool, tiny: Tiny) -> None:
    table, folder = tables()[pair], tiny(name)
    found, wanted = engine_arrays(table, folder, scanned), expected(pair[1], folder, scanned)
    assert found.keys() == wanted.keys()
    assert [key for key in found if not np.array_equal(found[key], wanted[key])] == []
    plan = make_plan(table, ModelSpec.from_folder(folder), scanned)
    assert {move.name: move.engine_shape for move in plan} == {key: array.shape for key, array in wanted.items()}
    tensors, _ = oracles.read_hf(folder)
    names = [hf for move in plan for hf in move.hf]
    assert sorted(names) == sorted(tensors)
    assert all(tensors[hf].shape == move.hf_shape for move in plan for hf in move.hf)


def test_the_comparison_sees_a_rule_without_the_interleave(tiny: Tiny) -> None:
    table = tables()["llama", "maxtext"]
    plain = [
        Rule(rule.hf, rule.engine, rule.pattern.replace("(half two)", "(two half)"), rule.scale, rule.when)
        for rule in table.rules
    ]
    broken = Table(**{**table.__dict__, "rules": tuple(plain)})
    found, wanted = engine_arrays(broken, tiny("mqa"), True), expected("maxtext", tiny("mqa"), True)
    wrong = {key.split(".")[-2] for key in found if not np.array_equal(found[key], wanted[key])}
    assert wrong == {"query", "key"}


def test_the_generated_config_states_what_the_table_requires() -> None:
    run = RunSpec.model_validate({"model": {"source": "somewhere"}})
    for scanned in (True, False):
        place = maxtext_config.Place("r", "/runs", "/ckpt", "/tok", scanned, "cpu")
        settings = yaml.safe_load(maxtext_config.render(run, MODEL, Mesh(1, 1, 1), place))
        required = tables()["llama", "maxtext"].requires
        assert required
        wanted = {key: yaml.safe_load(value) for key, value in required.items()}
        assert {key: settings.get(key) for key in wanted} == wanted
        assert settings["scan_layers"] is scanned
