"""Merged exports against PEFT's `merge_and_unload`, the formula in f64, and qwix's own NF4 of the base."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import adapter_cases as cases
import ml_dtypes
import numpy as np
import pytest

import oracles
from bridge.converters import merge
from bridge.converters.adapters import AdapterFacts, export_peft
from bridge.converters.merge import export_merged
from bridge.errors import CheckpointError, UnsupportedError
from bridge.model_spec import ModelSpec

RANK, ALPHA = 4, 10.0
LAYOUTS = [("tunix", True), ("maxtext", True), ("maxtext", False)]


def prepare(
    base: Path, folder: Path, engine: str, scanned: bool, dtype: Any = np.float32, targets: tuple[str, ...] = cases.ALL
) -> tuple[Path, ModelSpec, cases.Factors]:
    """An adapter checkpoint written by stock Orbax; its item, the model, and the factors in PEFT's layout."""
    config = json.loads((base / "config.json").read_text())
    factors = cases.random_factors(config, RANK, targets=targets, dtype=dtype)
    item = cases.write_orbax(folder / "run", cases.engine_tree(factors, config, engine, scanned))
    return item, ModelSpec.from_folder(base), factors


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def ulps(ours: Any, theirs: Any) -> Any:
    """Units of the last place between two arrays of one dtype, sign and magnitude as integers."""
    kind = np.dtype(f"i{ours.dtype.itemsize}")
    whole = [np.where(x.view(kind) < 0, -(x.view(kind) & np.iinfo(kind).max), x.view(kind)) for x in (ours, theirs)]
    return np.abs(whole[0].astype(np.int64) - whole[1].astype(np.int64))


def by_peft(base: Path, adapter: Path, dtype: str) -> dict[str, Any]:
    import peft
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    load: Any = peft.PeftModel.from_pretrained
    merged = load(model, adapter).merge_and_unload()
    return {
        name: tensor.float().numpy().astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        for name, tensor in merged.state_dict().items()
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "engine", "scanned"), [("tied", *LAYOUTS[0]), ("head_dim_128", *LAYOUTS[1])])
def test_merging_is_pefts_merging(
    name: str, engine: str, scanned: bool, dtype: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "BLOCK_ELEMENTS", 5000)  # many blocks of rows, the last one shorter
    base = tiny(name, dtype=dtype)
    item, model, _ = prepare(base, tmp_path, engine, scanned)
    facts = AdapterFacts(RANK, ALPHA, cases.ALL)
    export_peft(item, facts, model, engine, scanned, new(tmp_path / "peft"))
    report = export_merged(item, base, facts, model, engine, scanned, new(tmp_path / "out"))
    expected = by_peft(base, tmp_path / "peft", dtype)
    ours, _ = oracles.read_hf(with_config(tmp_path / "out", base))
    tied = model.tied
    assert ours.keys() == expected.keys() - ({"lm_head.weight"} if tied else set())
    assert (report.merged, report.requantized, report.base) == (7 * model.layers, 0, None)
    assert report.copied == len(ours) - 7 * model.layers
    apart = np.concatenate([ulps(ours[key], expected[key]).ravel() for key in ours])
    assert apart.max() <= 1
    assert (apart > 0).sum() <= 1 + 5e-6 * apart.size
    # The check sees a wrong scale.
    wrong = AdapterFacts(RANK, ALPHA * 1.01, cases.ALL)
    export_merged(item, base, wrong, model, engine, scanned, new(tmp_path / "wrong"))
    other, _ = oracles.read_hf(with_config(tmp_path / "wrong", base))
    assert sum((ulps(other[key], expected[key]) > 0).sum() for key in ours) > 1000


def with_config(folder: Path, base: Path) -> Path:
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize(("engine", "scanned"), LAYOUTS)
def test_the_sum_is_rounded_once_to_the_dtype_that_was_asked_for(
    engine: str, scanned: bool, tiny: Any, tmp_path: Path
) -> None:
    base = tiny("untied", dtype="float32")
    targets = ("q", "o", "up")
    item, model, factors = prepare(base, tmp_path, engine, scanned, targets=targets)
    facts = AdapterFacts(RANK, ALPHA, targets)
    report = export_merged(
        item, base, facts, model, engine, scanned, new(tmp_path / "out"), dtype="bfloat16", max_shard_bytes=150_000
    )
    assert report.merged == 3 * model.layers
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    ours, _ = oracles.read_hf(with_config(tmp_path / "out", base))
    tensors, _ = oracles.read_hf(base)
    for key, tensor in tensors.items():
        exact = tensor.astype(np.float64)
        for (layer, target), (a, b) in factors.items():
            if key == f"{cases.module(layer, target)}.weight":
                exact = exact + b.astype(np.float64) @ a.astype(np.float64) * (ALPHA / RANK)
        rounded = oracles.round_once(exact, ml_dtypes.bfloat16)
        # f32 sums differ from exact ones in the last bits, which can tip a value that lies between two.
        apart = ulps(ours[key], rounded)
        assert apart.max() <= 1
        assert (apart > 0).mean() < 1e-3


QLORA = AdapterFacts(RANK, ALPHA, ("q", "o", "down"), "nf4", 32, None, "bfloat16")


@pytest.mark.parametrize(("engine", "scanned"), LAYOUTS)
@pytest.mark.parametrize("name", ["untied", "head_dim_128"])
def test_a_quantized_base_is_rebuilt_as_qwix_held_it(
    name: str, engine: str, scanned: bool, tiny: Any, tmp_path: Path
) -> None:
    """Every adapted weight of the engine (the oracle's) goes through qwix itself, and back to Hugging Face's layout."""
    import jax.numpy as jnp
    from qwix._src.core import qarray

    base = tiny(name, mlp=96)
    item, model, factors = prepare(base, tmp_path, engine, scanned, targets=QLORA.targets)
    report = export_merged(item, base, QLORA, model, engine, scanned, new(tmp_path / "out"), dtype="float32")
    ours, _ = oracles.read_hf(with_config(tmp_path / "out", base))
    tensors, _ = oracles.read_hf(base)
    assert report.base == "dequantized"
    assert len(report.differences) == 3 * model.layers
    for key, difference in report.differences.items():
        layer, target = int(key.split(".")[2]), key.split(".")[-2].removesuffix("_proj")
        a, b = factors[layer, target]
        weight = tensors[key].astype(np.float32)
        scale = np.float32(1)
        if engine == "maxtext" and target == "q":
            scale = np.float32(1 / np.sqrt(model.head_dim))
        # RoPE's interleaving permutes rows, and every row is quantized by itself, so it changes nothing here.
        held = (weight * scale).T.astype(ml_dtypes.bfloat16)
        how: dict[str, Any] = {"tiled_axes": {0: 32}, "channelwise_axes": [1]}
        if target == "o":
            held = held.reshape(model.heads, model.head_dim, model.embed)
            how = {"tiled_axes": {1: 32}, "channelwise_axes": [2]}
        quantized = qarray.quantize_api(jnp.asarray(held), "nf4", **how)
        back = np.asarray(qarray.dequantize(quantized)).astype(np.float64).reshape(-1, weight.shape[0]).T / scale
        exact = back + b.astype(np.float64) @ a.astype(np.float64) * (ALPHA / RANK)
        np.testing.assert_allclose(ours[key], exact, rtol=0, atol=1e-6)
        assert difference == pytest.approx(np.abs(back - weight).max(), rel=1e-6)
        assert difference > 1e-2  # far beyond the tolerance above: another base would be seen
    assert report.max_difference == max(report.differences.values())
    untouched = "model.layers.0.self_attn.v_proj.weight"
    assert np.array_equal(ours[untouched], tensors[untouched].astype(np.float32))


def test_merging_into_the_original_base_is_plain_lora_and_still_reports(tiny: Any, tmp_path: Path) -> None:
    base = tiny("untied")
    item, model, _ = prepare(base, tmp_path, "tunix", True, targets=QLORA.targets)
    plain = AdapterFacts(RANK, ALPHA, QLORA.targets)
    export_merged(item, base, plain, model, "tunix", True, new(tmp_path / "plain"))
    report = export_merged(item, base, QLORA, model, "tunix", True, new(tmp_path / "out"), merge_base="original")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()
    assert report.base == "original"
    assert report.max_difference > 1e-2
    dequantized = export_merged(item, base, QLORA, model, "tunix", True, new(tmp_path / "default"))
    assert dequantized.differences == report.differences
    assert (tmp_path / "default/model.safetensors").read_bytes() != (tmp_path / "out/model.safetensors").read_bytes()


@pytest.mark.parametrize(("engine", "scanned"), LAYOUTS)
def test_projections_without_an_adapter_may_have_been_quantized_too(
    engine: str, scanned: bool, tiny: Any, tmp_path: Path
) -> None:
    base = tiny("untied")
    item, model, _ = prepare(base, tmp_path, engine, scanned, targets=("v",))
    held = AdapterFacts(RANK, ALPHA, ("v",), "nf4", 32, None, "bfloat16", cases.ALL)
    report = export_merged(item, base, held, model, engine, scanned, new(tmp_path / "held"))
    assert (report.merged, report.requantized) == (model.layers, 6 * model.layers)
    assert len(report.differences) == 7 * model.layers
    # An adapter of zeros on every projection merges into the same values.
    zeros = {name: np.zeros_like(array) for name, array in every_projection(base, engine, scanned).items()}
    nothing = cases.write_orbax(tmp_path / "zeros", zeros)
    facts = AdapterFacts(RANK, ALPHA, cases.ALL, "nf4", 32, None, "bfloat16")
    export_merged(nothing, base, facts, model, engine, scanned, new(tmp_path / "zero"))
    ours, _ = oracles.read_hf(with_config(tmp_path / "held", base))
    theirs, _ = oracles.read_hf(with_config(tmp_path / "zero", base))
    assert set(cases.unequal(ours, theirs)) == {f"{cases.module(layer, 'v')}.weight" for layer in range(model.layers)}
    original = export_merged(item, base, held, model, engine, scanned, new(tmp_path / "o"), merge_base="original")
    assert (original.requantized, original.copied) == (0, len(ours) - model.layers)


def every_projection(base: Path, engine: str, scanned: bool) -> dict[str, Any]:
    config = json.loads((base / "config.json").read_text())
    return cases.engine_tree(cases.random_factors(config, RANK), config, engine, scanned)


def test_bases_that_do_not_fit_are_refused(tiny: Any, tmp_path: Path) -> None:
    base = tiny("untied")
    item, model, _ = prepare(base, tmp_path, "tunix", True, targets=QLORA.targets)
    with pytest.raises(CheckpointError, match=r"does not match its config\.json"):
        export_merged(item, tiny("tied"), QLORA, model, "tunix", True, new(tmp_path / "a"))
    wide = AdapterFacts(RANK, ALPHA, QLORA.targets, "nf4", 48, None, "bfloat16")
    with pytest.raises(UnsupportedError, match=r"q_proj.weight: 256 inputs cannot be cut into NF4 tiles of 48"):
        export_merged(item, base, wide, model, "tunix", True, new(tmp_path / "b"))
    half = tiny("untied", dtype="float16")
    unsaid = AdapterFacts(RANK, ALPHA, QLORA.targets, "nf4", 32)
    with pytest.raises(UnsupportedError, match=r"q_proj.weight: NF4 of a float16 base"):
        export_merged(item, half, unsaid, model, "tunix", True, new(tmp_path / "c"))
    report = export_merged(item, half, unsaid, model, "tunix", True, new(tmp_path / "d"), merge_base="original")
    assert (report.merged, report.differences) == (3 * model.layers, {})
    with pytest.raises(CheckpointError, match="merge base 'other'"):
        export_merged(item, base, QLORA, model, "tunix", True, tmp_path, merge_base="other")  # type: ignore[arg-type]


def test_memory_is_bounded_by_the_block_of_rows(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny("mha", vocab=16384)  # an embedding of 1 Mi elements
    item, model, _ = prepare(base, tmp_path, "tunix", True)
    facts = AdapterFacts(RANK, ALPHA, cases.ALL)

    def peak(block: int, out: str) -> int:
        monkeypatch.setattr(merge, "BLOCK_ELEMENTS", block)
        tracemalloc.start()
        export_merged(item, base, facts, model, "tunix", True, new(tmp_path / out), dtype="float32")
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(1 << 12, "warm")  # imports and compiled permutations are counted once
    small, large = peak(1 << 12, "small"), peak(1 << 21, "large")
    assert small < 2 << 20 < large
    assert (tmp_path / "small/model.safetensors").read_bytes() == (tmp_path / "large/model.safetensors").read_bytes()
