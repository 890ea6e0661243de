"""Run a plan between a Hugging Face folder and an engine's checkpoint, slab by slab, in bounded memory.

Each slab is read, permuted and written by one thread of a small pool, so that the disk and the processor overlap
while at most `workers` slabs are held.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.converters import bits, in_place
from bridge.converters.bits import Array
from bridge.converters.hf_store import HfSink, HfSource
from bridge.converters.layout import Block, axes_of, scale_of
from bridge.converters.orbax_source import Leaf, TreeSource
from bridge.converters.orbax_store import TreeSink
from bridge.converters.plan import ITEM_BYTES, Move
from bridge.converters.pool import Progress, Room, no_progress, run_bounded
from bridge.converters.shard_reader import open_shard
from bridge.converters.slabs import (
    Cutting,
    chunk_shape,
    cut,
    cut_stored,
    read_chunk_shape,
    region,
    tile,
    unit_elements,
)
from bridge.errors import CheckpointError
from bridge.model_spec import ModelSpec

WORKERS = min(8, len(os.sched_getaffinity(0)) + 1) if hasattr(os, "sched_getaffinity") else 3
"""One more than the cores, as one of them waits for the disk."""
# A slab lives about four times at once: source rows, the slab, TensorStore's copy, the encoded chunk.
COPIES = 4
# Python, numpy, XLA and TensorStore themselves.
BASE_BYTES = 256 << 20


@dataclass(frozen=True)
class Budget:
    """How much memory a transfer may hold, and so how large a slab is."""

    memory: int = 1 << 30
    workers: int = WORKERS

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab on its larger side."""
        return max(1 << 20, (self.memory - BASE_BYTES) // (COPIES * self.workers))

    @property
    def whole_bytes(self) -> int:
        """The largest slab that stored chunks may make: moved on its own, see `room`."""
        return max(16 << 20, (self.memory - BASE_BYTES) // COPIES)

    def room(self) -> Room:
        """For the slabs of one transfer: those that a stored chunk makes too large are moved one at a time."""
        return Room(self.slab_bytes * self.workers)


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


@dataclass(frozen=True)
class Slab:
    """One slab of one array, with all that is needed to compute it from either side."""

    move: Move
    model: ModelSpec
    cutting: Cutting
    layers: range
    units: range
    engine_dtype: str

    @property
    def region(self) -> tuple[slice, ...]:
        """Its place in the engine's array."""
        return region(self.move, self.layers, self.units)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape on the engine's side."""
        sides = zip(self.region, self.move.engine_shape, strict=True)
        return tuple(len(range(*part.indices(size))) for part, size in sides)

    @property
    def nbytes(self) -> int:
        """Bytes on the engine's side."""
        return math.prod(self.shape) * ITEM_BYTES[self.engine_dtype]

    def stored(self, source: TreeSource) -> Array:
        """Its values in an engine's checkpoint."""
        return np.asarray(source.read(self.move.engine, self.region, self.move.rule.engine_layer_dim))

    def pieces(self) -> Iterator[tuple[str, range, Block, tuple[slice | int, ...]]]:
        """(Hugging Face tensor, units, permutation, place in the slab) of every cache-sized block."""
        axes = axes_of(self.model)
        for index, layer in enumerate(self.layers):
            for block in self.cutting.blocks(self.units):
                place = _inside(self.move, index, block, self.units)
                yield self.move.hf[layer], block, self.move.rule.block(axes, len(block)), place

    def from_hf(self, source: HfSource, progress: Progress = no_progress, finite: bool = False) -> Array:
        """The slab as the engine stores it, bits, computed from the Hugging Face side."""
        slab = np.empty(self.shape, dtype=bits.bits_dtype(self.engine_dtype))
        unit = unit_elements(self.move, axes_of(self.model))
        scale = scale_of(self.move.rule, self.model)
        for name, units, block, place in self.pieces():
            kind = source.headers[name].dtype
            raw = source.read(name, units.start * unit, len(units) * unit)
            if finite and not np.isfinite(bits.to_float32(raw, kind)).all():
                raise CheckpointError(f"{name} has NaN or Inf in it")
            slab[place] = bits.import_block(raw, block, kind, self.engine_dtype, scale)
            progress(raw.nbytes)
        return slab

    def to_hf(self, slab: Array, kinds: Mapping[str, str]) -> Iterator[tuple[str, int, Array]]:
        """(tensor, first element, bits) of every block, computed from the engine's side; `kinds` are target dtypes."""
        unit = unit_elements(self.move, axes_of(self.model))
        scale = scale_of(self.move.rule, self.model)
        slab = np.asarray(slab).view(bits.bits_dtype(self.engine_dtype))
        for name, units, block, place in self.pieces():
            piece = np.ascontiguousarray(slab[place])
            yield name, units.start * unit, bits.export_block(piece, block, self.engine_dtype, kinds[name], scale)


def slabs_of(move: Move, model: ModelSpec, engine_dtype: str, cutting: Cutting) -> Iterator[Slab]:
    """Every slab of an array."""
    for layers, units in cutting.slabs():
        yield Slab(move, model, cutting, layers, units, engine_dtype)


def stored_slabs(move: Move, model: ModelSpec, leaf: Leaf, kinds: Iterable[str], budget: Budget) -> Iterator[Slab]:
    """Every slab of a stored array, widened to what is decoded at once of it; from a file, the longer the better."""
    layer_dim, axes = move.rule.engine_layer_dim, axes_of(model)
    width = max(ITEM_BYTES[leaf.tensor.dtype], *(ITEM_BYTES[kind] for kind in kinds))
    if leaf.unpacked:
        layer_chunk, unit_chunk = 1, max(1, budget.slab_bytes // (unit_elements(move, axes) * width))
    else:
        layer_chunk = max(1, leaf.chunk[layer_dim]) if layer_dim is not None else 1
        unit_chunk = max(1, leaf.chunk[move.rule.engine_cut_dim])
    cutting = cut_stored(move, axes, width, budget.slab_bytes, layer_chunk, unit_chunk)
    return slabs_of(move, model, leaf.tensor.dtype, cutting)


def unpack_large(source: TreeSource, plan: tuple[Move, ...], model: ModelSpec, budget: Budget) -> None:
    """Have the arrays of a plan unpacked whose chunks would make slabs larger than `budget.whole_bytes`."""
    for move in plan:
        slab = next(stored_slabs(move, model, source.leaves[move.engine], ["float32"], budget))
        if slab.nbytes > budget.whole_bytes:
            source.unpack(move.engine)


def import_checkpoint(
    plan: tuple[Move, ...],
    model: ModelSpec,
    source: HfSource,
    sink: TreeSink,
    dtype: str = "source",
    budget: Budget = Budget(),
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

    targets = _targets(plan, source, dtype)
    with contextlib.ExitStack() as opened:
        if sink.in_place:
            jobs = _blocks(targets, model, source, sink, opened, progress)
        else:
            jobs = _slabs(targets, model, source, sink, budget, progress)
        run_bounded(jobs, budget.workers)


def _targets(plan: tuple[Move, ...], source: HfSource, dtype: str) -> Iterator[tuple[Move, str, int]]:
    """(move, dtype on the engine's side, bytes of an element on the wider side)."""
    for move in plan:
        kinds = [source.headers[name].dtype for name in move.hf]
        target = engine_dtype(move, kinds, dtype)
        yield move, target, max(ITEM_BYTES[target], *(ITEM_BYTES[kind] for kind in kinds))


def _blocks(
    targets: Iterator[tuple[Move, str, int]],
    model: ModelSpec,
    source: HfSource,
    sink: TreeSink,
    opened: contextlib.ExitStack,
    progress: Progress,
) -> Iterator[Callable[[], None]]:
    """A job for every block of every array, each written in its place."""
    for move, target, width in targets:
        writer = sink.lay_out(move.engine, tile(move, axes_of(model), width), target)
        opened.callback(writer.close)
        yield from in_place.import_jobs(writer, move, target, model, source, progress)


def _slabs(
    targets: Iterator[tuple[Move, str, int]],
    model: ModelSpec,
    source: HfSource,
    sink: TreeSink,
    budget: Budget,
    progress: Progress,
) -> Iterator[Callable[[], None]]:
    """A job for every slab of every array, each a chunk that TensorStore encodes."""

    def write(array: Any, slab: Slab) -> None:
        values = slab.from_hf(source, progress).view(bits.numpy_dtype(slab.engine_dtype))
        sink.write(array, slab.region, values)

    for move, target, width in targets:
        cutting = cut(move, axes_of(model), width, budget.slab_bytes)
        chunk = chunk_shape(move, cutting)
        array = sink.create(move.engine, move.engine_shape, target, chunk, read_chunk_shape(move, chunk))
        for slab in slabs_of(move, model, target, cutting):
            yield functools.partial(write, array, slab)


def export_checkpoint(
    plan: tuple[Move, ...],
    model: ModelSpec,
    source: TreeSource,
    sink: HfSink,
    budget: Budget = Budget(),
    progress: Progress = no_progress,
) -> None:
    """Write every Hugging Face tensor of a plan from an engine's checkpoint; each value is rounded at most once.

    Args:
        plan: checked against `source`.
        model: gives the axes.
        source, sink: open.
        budget: bounds the memory; a stored chunk larger than a slab is decoded whole, unless `source` unpacks it.
        progress: called with target bytes.
    """
    kinds = {name: stored.tensor.dtype for name, stored in sink.stored.items()}

    axes = axes_of(model)

    room = budget.room()

    def write(slab: Slab) -> None:
        with room.hold(slab.nbytes):
            for name, start, moved in slab.to_hf(slab.stored(source), kinds):
                sink.write(name, start, moved)
                progress(moved.nbytes)

    def jobs() -> Iterator[Callable[[], None]]:
        for move in plan:
            leaf = source.leaves[move.engine]
            reader = open_shard(source.folder, move, axes, leaf.tensor)
            if reader is not None:
                yield from in_place.export_jobs(reader, move, leaf.tensor.dtype, model, sink, progress)
                continue
            for slab in stored_slabs(move, model, leaf, [kinds[name] for name in move.hf], budget):
                yield functools.partial(write, slab)

    run_bounded(jobs(), budget.workers)


def _inside(move: Move, layer: int, block: range, units: range) -> tuple[slice | int, ...]:
    """Where a block of one layer lies in its slab."""
    part: list[slice | int] = [slice(None)] * len(move.engine_shape)
    part[move.rule.engine_cut_dim] = slice(block.start - units.start, block.stop - units.start)
    if move.rule.engine_layer_dim is not None:
        part[move.rule.engine_layer_dim] = layer
    return tuple(part)
