"""Run a plan between a Hugging Face folder and an engine's checkpoint, slab by slab, in bounded memory.

Each slab is read, permuted and written by one thread of a small pool, so that the disk and the processor overlap
while at most `workers` slabs are held.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.converters import bits
from bridge.converters.hf_store import HfSink, HfSource
from bridge.converters.layout import Axes, axes_of, scale_of
from bridge.converters.orbax_store import TreeSink, TreeSource
from bridge.converters.plan import ITEM_BYTES, Move, Tensor
from bridge.converters.slabs import Cutting, along_chunks, chunk_shape, cut, read_chunk_shape, region, unit_elements
from bridge.model_spec import ModelSpec

WORKERS = 3
# A slab lives about four times at once: source rows, the slab, TensorStore's copy, the encoded chunk.
COPIES = 4
# Python, numpy, XLA and TensorStore themselves.
BASE_BYTES = 256 << 20

Progress = Callable[[int], None]
"""Called with the number of bytes that were just finished, from any thread."""


def no_progress(_: int) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Budget:
    """How much memory a transfer may hold, and so how large a slab is."""

    memory: int = 1 << 30
    workers: int = WORKERS

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab on its larger side."""
        return max(1 << 20, (self.memory - BASE_BYTES) // (COPIES * self.workers))


def engine_dtype(move: Move, sources: Iterable[str], choice: str) -> str:
    """The dtype of an engine array: the source's by default, float32 where the engine folds a scale into it.

    MaxText's 1/sqrt(head_dim) in the query kernel costs 14.7 % of the bf16 values a bit at head_dim 128, and subnormal
    ones at any; float32 holds them all.
    """
    if choice != "source":
        return choice
    kinds = set(sources)
    if move.rule.scale is not None or len(kinds) > 1:
        return "float32"
    return kinds.pop()


def import_checkpoint(
    plan: tuple[Move, ...],
    model: ModelSpec,
    source: HfSource,
    sink: TreeSink,
    dtype: str = "source",
    budget: Budget = Budget(),  # noqa: B008 - frozen
    progress: Progress = no_progress,
) -> None:
    """Write every array of a plan from a Hugging Face folder.

    Args:
        plan: checked against `source`.
        model: gives the axes.
        source, sink: open.
        dtype: `source`, `bfloat16` or `float32`.
        budget: bounds the memory.
        progress: called with source bytes.
    """
    axes = axes_of(model)
    jobs: list[Callable[[], None]] = []
    for move in plan:
        kinds = [source.headers[name].dtype for name in move.hf]
        target = engine_dtype(move, kinds, dtype)
        width = max(ITEM_BYTES[target], *(ITEM_BYTES[kind] for kind in kinds))
        cutting = cut(move, axes, width, budget.slab_bytes)
        chunk = chunk_shape(move, cutting)
        array = sink.create(move.engine, move.engine_shape, target, chunk, read_chunk_shape(move, chunk))
        for layers, units in cutting.slabs():
            jobs.append(_Import(move, model, axes, source, array, target, cutting, layers, units, progress))
    _run(jobs, budget.workers)


@dataclass(frozen=True)
class _Import:
    move: Move
    model: ModelSpec
    axes: Axes
    source: HfSource
    array: Any
    target: str
    cutting: Cutting
    layers: range
    units: range
    progress: Progress

    def __call__(self) -> None:
        move, rule = self.move, self.move.rule
        part = region(move, self.layers, self.units)
        shape = [len(range(*s.indices(n))) for s, n in zip(part, move.engine_shape, strict=True)]
        slab = np.empty(shape, dtype=bits.bits_dtype(self.target))
        unit = unit_elements(move, self.axes)
        scale = scale_of(rule, self.model)
        for index, layer in enumerate(self.layers):
            name = move.hf[layer]
            kind = self.source.headers[name].dtype
            for block in self.cutting.blocks(self.units):
                raw = self.source.read(name, block.start * unit, len(block) * unit)
                moved = bits.import_block(raw, rule.block(self.axes, len(block)), kind, self.target, scale)
                slab[_inside(move, index, block, self.units)] = moved
                self.progress(raw.nbytes)
        self.array[part].write(slab.view(bits.numpy_dtype(self.target)), can_reference_source_data_indefinitely=True).result()


def export_checkpoint(
    plan: tuple[Move, ...],
    model: ModelSpec,
    source: TreeSource,
    sink: HfSink,
    budget: Budget = Budget(),  # noqa: B008 - frozen
    progress: Progress = no_progress,
    paths: Mapping[tuple[str, ...], tuple[str, ...]] | None = None,
) -> None:
    """Write every Hugging Face tensor of a plan from an engine's checkpoint; each value is rounded at most once.

    Args:
        plan: checked against `source`.
        model: gives the axes.
        source, sink: open.
        budget: bounds the memory; a stored chunk larger than a slab is decoded whole.
        progress: called with target bytes.
        paths: where each of the plan's arrays lies in the source's tree, if not under its own path.
    """
    axes = axes_of(model)
    jobs: list[Callable[[], None]] = []
    for move in plan:
        path = paths[move.engine] if paths else move.engine
        leaf = source.leaves[path]
        width = max(ITEM_BYTES[leaf.tensor.dtype], *(ITEM_BYTES[sink.stored[name].tensor.dtype] for name in move.hf))
        cutting = cut(move, axes, width, budget.slab_bytes)
        layer_dim = move.rule.engine_layer_dim
        layer_chunk = leaf.chunk[layer_dim] if layer_dim is not None else 1
        cutting = along_chunks(cutting, max(1, layer_chunk), max(1, leaf.chunk[move.rule.engine_cut_dim]))
        array = source.open(path)
        for layers, units in cutting.slabs():
            jobs.append(_Export(move, model, axes, array, sink, leaf.tensor.dtype, cutting, layers, units, progress))
    _run(jobs, budget.workers)


@dataclass(frozen=True)
class _Export:
    move: Move
    model: ModelSpec
    axes: Axes
    array: Any
    sink: HfSink
    dtype: str
    cutting: Cutting
    layers: range
    units: range
    progress: Progress

    def __call__(self) -> None:
        move, rule = self.move, self.move.rule
        slab = self.array[region(move, self.layers, self.units)].read().result()
        slab = np.asarray(slab).view(bits.bits_dtype(self.dtype))
        unit = unit_elements(move, self.axes)
        scale = scale_of(rule, self.model)
        for index, layer in enumerate(self.layers):
            name = move.hf[layer]
            kind = self.sink.stored[name].tensor.dtype
            for block in self.cutting.blocks(self.units):
                piece = np.ascontiguousarray(slab[_inside(move, index, block, self.units)])
                moved = bits.export_block(piece, rule.block(self.axes, len(block)), self.dtype, kind, scale)
                self.sink.write(name, block.start * unit, moved)
                self.progress(moved.nbytes)


def _inside(move: Move, layer: int, block: range, units: range) -> tuple[slice | int, ...]:
    """Where a block of one layer lies in its slab."""
    part: list[slice | int] = [slice(None)] * len(move.engine_shape)
    part[move.rule.engine_cut_dim] = slice(block.start - units.start, block.stop - units.start)
    if move.rule.engine_layer_dim is not None:
        part[move.rule.engine_layer_dim] = layer
    return tuple(part)


def hf_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all values."""
    return sum(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in tensors.values())


def _run(jobs: list[Callable[[], None]], workers: int) -> None:
    """Run jobs on a bounded pool; the first failure stops what has not begun and is raised."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
