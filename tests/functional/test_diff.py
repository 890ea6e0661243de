"""`bridge diff`: equal across every pair of formats, and each kind of change found by name and by size."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import engine_trees
import numpy as np
import pytest
from checkpoints import convert, restore, run, save
from conftest import Tiny

import oracles
from bridge.commands.diff import open_side
from bridge.converters import slabs
from bridge.converters.difference import Form, compare, max_difference
from bridge.converters.transfer import Budget
from bridge.errors import CheckpointError, UnsupportedError

QUERY = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
UP_MAXTEXT = "params.params.decoder.layers.mlp.wi_1.kernel"


def diff(*args: object) -> tuple[int, dict[str, Any]]:
    result = run("diff", *args, "--json")
    return result.code, json.loads(result.stdout)


def formats(source: Path, out: Path) -> dict[str, Path]:
    """A model in every format that bridge writes."""
    return {
        "hf": source,
        "maxtext": convert(source, out / "maxtext").parent,
        "unscanned": convert(source, out / "unscanned", "--unscanned").parent,
        "tunix": convert(source, out / "tunix", engine="tunix").parent,
    }


@pytest.mark.parametrize("name", ["head_dim_96", "tied", "head_dim_128"])
def test_conversions_are_equal_in_every_pair(name: str, tiny: Tiny, tmp_path: Path) -> None:
    folders = formats(tiny(name, edge_values=True), tmp_path)
    for a, first in folders.items():
        for b, second in folders.items():
            code, found = diff(first, second)
            assert (code, found["equal"], found["value"]) == (0, True, {}), (a, b)
            kinds = [] if "maxtext" in (a, b) and a == b else list(found["dtype"])
            assert all("q_proj" in kind for kind in kinds), (a, b)
            assert bool(kinds) == ((a in ("maxtext", "unscanned")) != (b in ("maxtext", "unscanned")))


def test_the_size_of_a_change_is_that_of_the_oracle(tiny: Tiny, tmp_path: Path) -> None:
    """Two models of other seeds: every max |Δ| equals the one that numpy finds on the safetensors."""
    first, second = tiny("head_dim_96"), tiny("head_dim_96", seed=1)
    a, b = (oracles.read_hf(folder)[0] for folder in (first, second))
    wanted = {name: float(np.abs(a[name].astype(np.float64) - b[name].astype(np.float64)).max()) for name in a}
    ours, theirs = formats(first, tmp_path / "a"), formats(second, tmp_path / "b")
    for left, right in [
        ("hf", "hf"),
        ("hf", "maxtext"),
        ("tunix", "hf"),
        ("maxtext", "unscanned"),
        ("tunix", "maxtext"),
    ]:
        code, found = diff(ours[left], theirs[right])
        assert (code, found["equal"]) == (1, False)
        assert found["value"] == pytest.approx(wanted, rel=1e-6), (left, right)


@pytest.mark.parametrize("form", ["maxtext", "tunix", "hf"])
def test_one_element_is_found(form: str, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("head_dim_96", dtype="float32")
    tensors, config = oracles.read_hf(source)
    tensors = {name: array.copy() for name, array in tensors.items()}
    tensors[UP][3, 5] += np.float32(0.5)
    if form == "hf":
        from safetensors.numpy import save_file

        changed = Path(shutil.copytree(source, tmp_path / "changed"))
        save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    else:
        tree = oracles.tunix_tree(tensors, config) if form == "tunix" else oracles.maxtext_tree(tensors, config, True)
        changed = save(tmp_path / "changed" / "4", "model_params" if form == "tunix" else "items", tree)
    for pair in [(source, changed), (changed, source)]:
        code, found = diff(*pair)
        assert code == 1
        assert found["value"] == {UP: pytest.approx(0.5, rel=1e-5)}
        assert (found["only_in_a"], found["only_in_b"], found["shape"]) == ([], [], {})


def test_not_a_number_is_null(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("head_dim_96")
    tree = restore(convert(source, tmp_path / "ckpt") / "items")
    broken = {**tree, UP_MAXTEXT: tree[UP_MAXTEXT].copy()}
    broken[UP_MAXTEXT][0, 1, 0] = np.nan
    item = save(tmp_path / "broken" / "0", "items", broken)
    assert diff(source, item)[1]["value"] == {UP: None}
    people = run("diff", source, item)
    assert f"value      {UP}  max |Δ| not finite on one side" in people.stdout.splitlines()
    assert people.stdout.endswith("different\n")


def test_names_shapes_and_dtypes(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("mha")
    _, found = diff(source, tiny("mha", layers=3, mlp=80))
    assert found["only_in_a"] == []
    assert len(found["only_in_b"]) == 9
    assert all(name.startswith("model.layers.2.") for name in found["only_in_b"])
    assert found["shape"][UP] == [[96, 64], [80, 64]]
    assert UP not in found["value"]
    _, found = diff(source, tiny("mha", dtype="float32"))
    assert found["dtype"][UP] == ["bfloat16", "float32"]
    assert not found["equal"]
    wider = convert(source, tmp_path / "wide", "--dtype", "float32")
    code, found = diff(source, wider.parent)
    assert (code, found["equal"], found["value"]) == (0, True, {})
    assert found["dtype"][UP] == ["bfloat16", "float32"]


def test_a_tied_head_that_equals_the_embedding_is_left_out(tiny: Tiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny("tied")
    with_head = Path(shutil.copytree(source, tmp_path / "head"))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, with_head / "model.safetensors", metadata={"format": "pt"})
    assert diff(source, with_head)[0] == 0
    tensors["lm_head.weight"] += 1
    save_file(tensors, with_head / "model.safetensors", metadata={"format": "pt"})
    assert diff(source, with_head)[1]["only_in_b"] == ["lm_head.weight"]


def test_what_cannot_be_compared_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        run("diff", tiny("mha"), tmp_path / "nothing")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="is an adapter"):
        run("diff", tiny("mha"), adapter)
    tree = engine_trees.marked(tiny("mha"), 2.0)
    bare = save(tmp_path / "bare" / "0", "model_params", tree)
    with pytest.raises(CheckpointError, match="nothing says what model it is"):
        run("diff", bare, bare)
    assert diff(bare, bare, "--base", tiny("mha"))[0] == 0


def test_a_folded_scale_is_no_difference_but_one_ulp_is() -> None:
    scale = float(np.float32(96**-0.5))
    weights = np.linspace(-2, 2, 4001, dtype=np.float32)
    stored = weights * np.float32(scale)
    folded, plain = Form("float32", scale), Form("float32")
    assert max_difference(stored, weights, folded, plain) == 0.0
    assert max_difference(weights, stored, plain, folded) == 0.0
    stored[17] = np.nextafter(stored[17], np.float32(9))
    assert 0 < max_difference(stored, weights, folded, plain) < 1e-6
    assert max_difference(weights, weights, plain, plain) == 0.0
    assert np.isnan(max_difference(weights, np.where(weights == 2, np.inf, weights), plain, plain))


class Small(Budget):
    """Slabs of 2 kB: every array of the tiny models is cut several times."""

    @property
    def slab_bytes(self) -> int:
        return 2048


@pytest.mark.parametrize("pair", [("hf", "hf"), ("hf", "maxtext"), ("tunix", "unscanned"), ("maxtext", "tunix")])
def test_cut_into_small_slabs_it_finds_the_same(
    pair: tuple[str, str], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "BLOCK_BYTES", 900)
    monkeypatch.setattr(slabs, "STORED_BYTES", 2900)
    monkeypatch.setattr(slabs, "CHUNK_ELEMENTS", 16)
    first, second = formats(tiny("mha"), tmp_path / "a"), formats(tiny("mha", seed=1), tmp_path / "b")
    with open_side(first[pair[0]], None, None) as a, open_side(second[pair[1]], None, None) as b:
        done: list[int] = []
        small, whole = compare(a.side, b.side, Small(), done.append), compare(a.side, b.side)
        assert sum(done) == sum(4 * math.prod(tensor.shape) for tensor in a.side.tensors.values())
    assert len(done) > 4 * len(whole.value)
    assert small.value == whole.value
    assert len(whole.value) == whole.compared == 21
