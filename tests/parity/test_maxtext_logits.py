"""The real MaxText model against PyTorch, through `bridge verify`; and what each kind of mistake does to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_trees
import numpy as np
import pytest
from checkpoints import Array, convert, export, restore, save, verify
from conftest import Tiny
from safetensors.numpy import save_file

import oracles
from bridge import engine_fixes, sidecar
from bridge.converters.orbax_source import TreeSource
from bridge.converters.parity.compare import FLOOR
from bridge.errors import CheckpointError

LAYERS = "params.params.decoder.layers."
QUERY, OUT = LAYERS + "self_attention.query.kernel", LAYERS + "self_attention.out.kernel"
GATE, UP = LAYERS + "mlp.wi_0.kernel", LAYERS + "mlp.wi_1.kernel"
# Scaling acts within 32 positions in `scaled`, and beyond 8192, as in the original models, in the other two.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama3", {}),
    "scaled": ("scaled", {}),
    "tied, factor 32": ("tied", {}),
    "head_dim 128, factor 8": ("head_dim_128", {"dtype": "float32", "layers": 4}),
}


@pytest.fixture(scope="module")
def converted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`converted("scaled")` is a MaxText checkpoint that the tests share: copy it before you change it."""
    made: dict[str, Path] = {}

    def build(name: str, *args: str, **changes: Any) -> Path:
        key = f"{name}{args}{changes}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("maxtext") / "ckpt"
            convert(tiny(name, **changes), made[key], *args)
        return made[key]

    return build


@pytest.mark.parametrize("preset", PRESETS)
def test_logits_are_pytorchs(preset: str, converted: Callable[..., Path]) -> None:
    name, changes = PRESETS[preset]
    code, report = verify(converted(name, **changes))
    assert (code, report["ok"]) == (0, True)
    assert report["max_abs"] <= report["tolerance"] <= 10 * FLOOR
    assert report["kl"] < 1e-6
    assert report["top1"] > 0.995
    assert abs(report["nll_reference"] - report["nll_checkpoint"]) < 1e-4
    # At least 512 tokens, and where RoPE is scaled positions beyond the original context.
    scaled = preset != "llama3"
    assert report["tokens"] == 512 + (64 if scaled else 0)
    last = int(report["positions"].rsplit(" ", 1)[1])
    assert last > 12000 if scaled else last == 511


def test_an_unscanned_checkpoint_gives_the_same(converted: Callable[..., Path]) -> None:
    code, report = verify(converted("scaled", "--unscanned"), "--tokens", 64)
    assert (code, report["ok"]) == (0, True)


def rewrite(checkpoint: Path, change: Callable[[dict[str, Array]], None]) -> None:
    """Change arrays of a checkpoint in place."""
    source = TreeSource(checkpoint / "0" / "items")
    arrays = {".".join(path): leaf.array for path, leaf in source.leaves.items()}
    values = {name: np.array(array.read().result()) for name, array in arrays.items()}
    before = {name: value.copy() for name, value in values.items()}
    change(values)
    changed = [name for name in values if not np.array_equal(values[name], before[name])]
    assert changed, "the mutation must change something"
    for name in changed:
        arrays[name].write(values[name]).result()


def one_head_in_halves(values: dict[str, Array]) -> None:
    """One query head of one layer keeps Hugging Face's order of the pairs."""
    head = values[QUERY][:, 1, 2].copy()
    values[QUERY][:, 1, 2] = np.concatenate([head[..., 0::2], head[..., 1::2]], axis=-1)


def gate_and_up(values: dict[str, Array]) -> None:
    values[GATE][:], values[UP][:] = values[UP].copy(), values[GATE].copy()


def two_layers(values: dict[str, Array]) -> None:
    values[OUT][:] = values[OUT][:, ::-1].copy()


def unscaled_query(values: dict[str, Array]) -> None:
    values[QUERY] *= np.float32(np.sqrt(values[QUERY].shape[-1]))


@pytest.mark.parametrize("change", [one_head_in_halves, gate_and_up, two_layers, unscaled_query])
def test_a_wrong_weight_fails(change: Any, converted: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = shutil.copytree(converted("scaled"), tmp_path / "ckpt")
    rewrite(checkpoint, change)
    code, report = verify(checkpoint, "--tokens", 64)
    assert (code, report["ok"]) == (1, False)
    assert report["max_abs"] > 100 * report["tolerance"]
    code, report = verify(checkpoint, "--exact")
    assert (code, report["ok"]) == (1, False)
    assert 0 < len(report["different"]) < report["tensors"]


def test_a_dropped_layer_is_an_error(converted: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = shutil.copytree(converted("scaled", "--unscanned"), tmp_path / "ckpt")
    tree = restore(checkpoint / "0" / "items")
    shutil.rmtree(checkpoint / "0")
    gone = "params.params.decoder.layers_1."
    save(checkpoint / "0", "items", {name: value for name, value in tree.items() if not name.startswith(gone)})
    with pytest.raises(CheckpointError, match="does not match the model: 9 of 30 tensors") as found:
        verify(checkpoint)
    assert f"missing      {gone}mlp.wi_0.kernel" in str(found.value)


@pytest.mark.parametrize("fact", ["rope_theta", "rope_scaling", "norm_eps", "heads"])
def test_a_wrong_fact_fails(fact: str, converted: Callable[..., Path], tmp_path: Path) -> None:
    """The engine is built from what the checkpoint remembers, PyTorch from the reference's config.json."""
    checkpoint = shutil.copytree(converted("scaled"), tmp_path / "ckpt")
    facts = sidecar.read(checkpoint)
    assert facts is not None
    assert facts.model.rope_scaling is not None
    wrong: dict[str, Any] = {
        "rope_theta": 2 * facts.model.rope_theta,
        "rope_scaling": replace(facts.model.rope_scaling, factor=9.0),
        "norm_eps": 1e-3,
        "heads": facts.model.heads * 2,
    }
    changes = {fact: wrong[fact]}
    replace(facts, model=replace(facts.model, **changes)).write(checkpoint)
    if fact == "heads":
        with pytest.raises(CheckpointError, match="does not match"):
            verify(checkpoint)
        return
    code, report = verify(checkpoint, "--tokens", 64)
    assert (code, report["ok"]) == (1, False)


def test_stock_maxtext_is_wrong_where_the_correction_is_needed(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its correction MaxText takes Llama 3.1's factor 8 for Llama 3.2's 32: `verify` must say so."""
    from maxtext.layers import attentions, embeddings

    monkeypatch.setattr(attentions, "LLaMARotaryEmbedding", embeddings.LLaMARotaryEmbedding)
    monkeypatch.setattr(engine_fixes, "apply", lambda *_: ())
    code, report = verify(converted("tied"), "--tokens", 64)
    assert (code, report["ok"]) == (1, False)
    assert report["max_abs"] > 10 * report["tolerance"]


def test_only_spaced_positions_show_the_scaling(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 tokens in a row say little of a scaling that begins at 8192: the probe that is spaced out is what finds it."""
    from bridge.converters.parity import compare

    checkpoint = converted("tied")
    reports = []
    from maxtext.layers import attentions, embeddings

    monkeypatch.setattr(attentions, "LLaMARotaryEmbedding", embeddings.LLaMARotaryEmbedding)
    monkeypatch.setattr(engine_fixes, "apply", lambda *_: ())
    both = compare.probes
    for part in (slice(0, 1), slice(1, 2)):
        monkeypatch.setattr(compare, "probes", lambda *args, part=part: both(*args)[part])
        reports.append(verify(checkpoint, "--tokens", 64)[1]["max_abs"])
    assert reports[1] > 10 * reports[0]


def test_a_trained_checkpoint_is_its_export_rounded_once(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("scaled")
    tensors, config = oracles.read_hf(source)
    random = np.random.default_rng(3)
    # Training moves weights off the bf16 grid.
    moved = {n: v.astype(np.float32) * (1 + 0.01 * random.standard_normal(v.shape)) for n, v in tensors.items()}
    trained = {name: value.astype(np.float32) for name, value in moved.items()}
    tree = engine_trees.nnx(oracles.maxtext_tree(trained, config, scanned=True))
    checkpoint = engine_trees.trained_run(tmp_path / "run", source, {5: tree})
    back = export(checkpoint, tmp_path / "hf")
    found, _ = oracles.read_hf(back)
    kind = tensors["model.norm.weight"].dtype
    exact = {name: value.astype(np.float64) for name, value in trained.items()}
    scale = float(np.float32(1 / np.sqrt(64)))
    for name in exact:
        if "q_proj" in name:
            exact[name] = (trained[name] * np.float32(scale)).astype(np.float64) / scale
    wrong = [n for n in exact if oracles.round_once(exact[n], kind).tobytes() != found[n].tobytes()]
    assert wrong == []
    code, report = verify(checkpoint, "--reference", back, "--tokens", 64)
    assert (code, report["ok"], report["exact"]) == (0, True, True)
    # Neither an export with one bit changed passes, nor the base.
    name = "model.layers.2.mlp.down_proj.weight"
    changed = found[name].copy()
    changed.view(np.uint16)[4, 5] ^= 1
    mutated = shutil.copytree(back, tmp_path / "mutated")
    save_file({**found, name: changed}, mutated / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"is not the export of .*: 1 of 30 tensors differ") as error:
        verify(checkpoint, "--reference", mutated)
    assert error.value.details == (name,)
    with pytest.raises(CheckpointError, match="is not the export of"):
        verify(checkpoint, "--reference", source)
