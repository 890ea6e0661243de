"""Merging an adapter into its base: (base + B A alpha / rank), summed in float32 and rounded once, row by row.

The order of operations is PEFT's `merge_and_unload` on a CPU (peft/tuners/lora/layer.py, `get_delta_weight`), so the
results are equal to the bit, save where two libraries sum the rank in another order.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bridge.converters.adapter_facts import AdapterFacts
from bridge.converters.adapter_layout import Factor, FactorArray, plan_adapter
from bridge.converters.adapters import AdapterSource
from bridge.converters.bits import from_float32, to_float32
from bridge.converters.hf_store import HfSink, HfSource
from bridge.converters.nf4 import SMALLEST_SCALE, check_base, through_nf4
from bridge.converters.plan import Tensor, check_hf, make_plan, table_for
from bridge.errors import CheckpointError
from bridge.model_spec import FLOAT_DTYPES, ModelSpec

Floats = NDArray[np.float32]
MergeBase = Literal["dequantized", "original"]

WORKERS = 2
# Elements of one block of rows; about eight float32 copies of it live at once in each worker.
BLOCK_ELEMENTS = 2 << 20


@dataclass(frozen=True)
class MergeReport:
    """What a merge did."""

    merged: int
    """Tensors that the adapter changed."""
    requantized: int
    """Tensors without an adapter whose values are those that NF4 left of them."""
    copied: int
    """Tensors that were only copied."""
    base: MergeBase | None
    """For a quantized base: the one that was merged into. None where the base was not quantized."""
    differences: dict[str, float] = field(default_factory=dict)
    """For a quantized base, by tensor: max |dequantized - original|, what the other choice would differ by. Empty where
    the base is merged into as it is and its quantization cannot be rebuilt (float16)."""

    @property
    def max_difference(self) -> float:
        """The largest of `differences`, 0 where there are none."""
        return max(self.differences.values(), default=0.0)


@dataclass(frozen=True)
class Quantized:
    """How the engine quantized one weight: on its own values, which are Hugging Face's times `scale`."""

    dtype: str
    tile: int
    shared: int
    """Heads that share the scales of an output projection."""
    scale: float

    def rows(self, values: Floats) -> Floats:
        """The rows (rows, inputs) as the engine computed with them, in Hugging Face's scale."""
        if self.scale == 1.0:
            return through_nf4(values, self.dtype, self.tile, self.shared)
        scaled = through_nf4(values * np.float32(self.scale), self.dtype, self.tile, self.shared)
        return (scaled.astype(np.float64) / self.scale).astype(np.float32)


@dataclass(frozen=True)
class _Task:
    """One tensor that is not only copied: its factors in float32, if any, and how its base was quantized."""

    name: str
    factors: tuple[Floats, Floats] | None
    """A (rank, in) and B (out, rank)."""
    scale: float
    quantized: Quantized | None
    merge_base: MergeBase


def export_merged(
    checkpoint_item: Path,
    base: Path,
    facts: AdapterFacts,
    model: ModelSpec,
    engine: str,
    scanned: bool,
    out: Path,
    dtype: str = "source",
    max_shard_bytes: int = 5_000_000_000,
    merge_base: MergeBase = "dequantized",
) -> MergeReport:
    """Write the base model with the adapter merged in as safetensors; the caller copies the small files.

    Args:
        checkpoint_item: the adapter, `<step>/model_params`.
        base: a Hugging Face folder with the model that the adapter was trained on.
        facts: of the adapter.
        model: the base model.
        engine, scanned: how the adapter's checkpoint is laid out.
        out: exists and is empty.
        dtype: `source` (each tensor as in the base), `bfloat16`, `float16` or `float32`.
        max_shard_bytes: of one safetensors file.
        merge_base: of a QLoRA adapter: `dequantized`, the weights that were trained with, or `original`, the base
            before its quantization, which is another model.

    Raises:
        CheckpointError: the adapter or the base is incomplete, or not of this model.
        UnsupportedError: the base cannot be quantized as the facts say.
    """
    if dtype not in ("source", *FLOAT_DTYPES) or merge_base not in ("dequantized", "original"):
        raise CheckpointError(f"dtype {dtype!r} or merge base {merge_base!r} is unknown")
    adapter = AdapterSource(checkpoint_item, facts, model, engine, scanned)
    table = table_for(model, engine)
    with HfSource(base) as source:
        plan = make_plan(table, model, scanned)
        left_out = check_hf(plan, source.headers, table, str(base))
        kept = {name: tensor for name, tensor in source.headers.items() if name not in left_out}
        tensors = {n: Tensor(t.shape, t.dtype if dtype == "source" else dtype) for n, t in kept.items()}
        differences: dict[str, float] = {}
        done: dict[str, bool] = {}
        with HfSink(out, tensors, max_shard_bytes) as sink, concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            for task in _tasks(adapter, facts, model, engine, scanned, source, merge_base):
                worst = list(pool.map(_Rows(task.name, source, sink, task), _blocks(tensors[task.name].shape)))
                done[task.name] = task.factors is not None
                if task.quantized is not None:
                    differences[task.name] = max(worst)
            for name in tensors.keys() - done.keys():
                list(pool.map(_Rows(name, source, sink, None), _blocks(tensors[name].shape)))
    merged = sum(done.values())
    return MergeReport(
        merged=merged,
        requantized=len(done) - merged if merge_base == "dequantized" else 0,
        copied=len(tensors) - (merged if merge_base == "original" else len(done)),
        base=merge_base if facts.quantization else None,
        differences=differences,
    )


def merged_rows(base: Floats, b: Floats, a: Floats, scale: float) -> Floats:
    """(rows, in) of base + (B A) scale in float32, in PEFT's order: product, scale, sum."""
    delta: Floats = (b @ a) * np.float32(scale)
    return base + delta


@dataclass(frozen=True)
class _Rows:
    """Carries blocks of rows of one tensor from the base to the output."""

    name: str
    source: HfSource
    sink: HfSink
    task: _Task | None

    def __call__(self, rows: range) -> float:
        stored, target = self.source.stored[self.name].tensor, self.sink.stored[self.name].tensor.dtype
        width = stored.bytes // max(1, stored.shape[0]) // stored_width(stored.dtype)
        bits = self.source.read(self.name, rows.start * width, len(rows) * width)
        if self.task is None:
            same = stored.dtype == target
            self.sink.write(self.name, rows.start * width, bits if same else _cast(bits, stored.dtype, target))
            return 0.0
        task = self.task
        original = to_float32(bits, stored.dtype).reshape(len(rows), width)
        values, difference = original, 0.0
        if task.quantized is not None:
            values = task.quantized.rows(original)
            difference = float(np.abs(values - original).max(initial=0.0))
            if task.merge_base == "original":
                values = original
        if task.factors is not None:
            a, b = task.factors
            values = merged_rows(values, b[rows.start : rows.stop], a, task.scale)
        self.sink.write(self.name, rows.start * width, from_float32(values.reshape(-1), target))
        return difference


def stored_width(dtype: str) -> int:
    """Bytes of one element."""
    return Tensor((1,), dtype).bytes


def _cast(bits: NDArray[Any], source: str, target: str) -> NDArray[Any]:
    return from_float32(to_float32(bits, source), target)


def _blocks(shape: tuple[int, ...]) -> list[range]:
    """Runs of rows of about `BLOCK_ELEMENTS`."""
    width = int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return [range(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _tasks(
    adapter: AdapterSource,
    facts: AdapterFacts,
    model: ModelSpec,
    engine: str,
    scanned: bool,
    source: HfSource,
    merge_base: MergeBase,
) -> Iterator[_Task]:
    """Every tensor that is adapted or was quantized, with its factors, one at a time."""

    def task(name: str, b: FactorArray, factors: tuple[Floats, Floats] | None) -> _Task:
        stored = source.stored[name].tensor
        quantized = quantized_as(b.factor, facts, model, stored.dtype)
        if merge_base == "original" and quantized is not None and quantized.dtype not in SMALLEST_SCALE:
            quantized = None  # nothing to compare with
        if quantized is not None:
            check_base(name, stored.shape[1], quantized.dtype, quantized.tile, quantized.shared)
        return _Task(name, factors, facts.scale, quantized, merge_base)

    by_target: dict[str, dict[str, list[FactorArray]]] = {target: {"A": [], "B": []} for target in facts.targets}
    for array in adapter.arrays:
        by_target[array.factor.target][array.factor.letter].append(array)
    for arrays in by_target.values():
        a_layers = (layer for array in arrays["A"] for layer in _peft_layers(adapter, array))
        b_layers = (layer for array in arrays["B"] for layer in _peft_layers(adapter, array))
        for (name, a, _), (_, b, array) in zip(a_layers, b_layers, strict=True):
            yield task(name, array, (a, b))
    others = tuple(target for target in facts.held_in_nf4 if target not in facts.targets)
    for array in plan_adapter(model, engine, scanned, others, facts.rank):
        if array.factor.letter == "B":
            for layer in array.layers:
                yield task(array.weight(layer), array, None)


def _peft_layers(adapter: AdapterSource, array: FactorArray) -> Iterator[tuple[str, Floats, FactorArray]]:
    shape, dtype = array.factor.hf_shape(adapter.axes), adapter.peft_dtype(array)
    for layer, bits in adapter.layers(array):
        yield array.weight(layer), to_float32(adapter.to_peft(array, bits), dtype).reshape(shape), array


def quantized_as(b: Factor, facts: AdapterFacts, model: ModelSpec, base_dtype: str) -> Quantized | None:
    """How the engine held the base of a target; None where it was not quantized.

    qwix tiles the last axis that a product sums over and shares the scales along the others: the output projection
    sums over heads and head_dim, so all heads share one scale a tile.

    Args:
        b: the target's factor B, which is scaled as the weight is.
        facts: of the adapter.
        model: gives the number of heads.
        base_dtype: of the tensor in the base's file, taken where the facts do not say another.
    """
    if b.target not in facts.held_in_nf4 or facts.tile_size is None:
        return None
    shared = model.heads if b.target == "o" else 1
    return Quantized(facts.base_dtype or base_dtype, facts.tile_size, shared, b.scale)
