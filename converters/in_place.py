"""Blocks moved between a Hugging Face folder and the shards of `shard_store`, each read and written where it lies.

A stored block is larger than what a core's cache holds, so it is permuted in steps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from bridge.converters import bits
from bridge.converters.bits import Array
from bridge.converters.hf_store import HfSink, HfSource
from bridge.converters.layout import axes_of, scale_of
from bridge.converters.orbax_store import TreeSink
from bridge.converters.plan import Move
from bridge.converters.pool import Progress
from bridge.converters.shard_reader import ShardReader
from bridge.converters.shard_store import ShardWriter
from bridge.converters.slabs import Tiling, tile, unit_elements
from bridge.model_spec import ModelSpec


def import_jobs(
    targets: Iterator[tuple[Move, str, int]],
    model: ModelSpec,
    source: HfSource,
    sink: TreeSink,
    opened: contextlib.ExitStack,
    progress: Progress,
) -> Iterator[Callable[[], None]]:
    """A job for every block of every array of a checkpoint.

    Args:
        targets: (move, dtype on the engine's side, bytes of an element on the wider side).
        model: gives the axes.
        source, sink: open.
        opened: closes the files of arrays that were not finished.
        progress: called with source bytes.
    """
    axes = axes_of(model)

    def moved(move: Move, tiling: Tiling, target: str, layer: int, block: int) -> Array:
        name, unit = move.hf[layer], unit_elements(move, axes)
        kind, scale = source.headers[name].dtype, scale_of(move.rule, model)
        first = block * tiling.units
        count = min(tiling.units, axes[move.rule.cut_axis] - first)
        # What lies beyond the array is zero.
        whole = (np.empty if count == tiling.units else np.zeros)(tiling.block_shape, bits.bits_dtype(target))
        for start, stop in tiling.steps(count):
            raw = source.read(name, (first + start) * unit, (stop - start) * unit)
            shape = move.rule.block(axes, stop - start, tiling.parts)
            step = bits.import_block(raw, shape, kind, target, scale)
            progress(raw.nbytes)
            if stop - start == tiling.units:
                return step
            part = whole[tiling.part_of_block(start, stop)]
            part[...] = step.reshape(part.shape)
        return whole

    def write(writer: ShardWriter, move: Move, tiling: Tiling, target: str, layer: int, block: int) -> None:
        writer.write(layer, block, moved(move, tiling, target, layer, block))

    for move, target, width in targets:
        tiling = tile(move, axes, width)
        writer = sink.lay_out(move.engine, tiling, target)
        opened.callback(writer.close)
        for layer, block in itertools.product(range(len(move.hf)), range(tiling.blocks)):
            yield functools.partial(write, writer, move, tiling, target, layer, block)


def export_jobs(
    reader: ShardReader, move: Move, dtype: str, model: ModelSpec, sink: HfSink, progress: Progress
) -> Iterator[Callable[[], None]]:
    """A job for every block of one array.

    Args:
        reader: of the array.
        move: the array's.
        dtype: as it is stored.
        model: gives the axes.
        sink: open.
        progress: called with target bytes.
    """
    axes, tiling = axes_of(model), reader.tiling

    def copy(layer: int, block: int) -> None:
        name, unit, first = move.hf[layer], unit_elements(move, axes), block * tiling.units
        chunks = reader.read(layer, block)
        for start, stop in tiling.steps(min(tiling.units, axes[move.rule.cut_axis] - first)):
            shape = move.rule.block(axes, stop - start, tiling.parts)
            part, kind = chunks[tiling.part_of_block(start, stop)], sink.stored[name].tensor.dtype
            moved = bits.export_block(part, shape, dtype, kind, scale_of(move.rule, model))
            sink.write(name, (first + start) * unit, moved)
            progress(moved.nbytes)

    for layer, block in itertools.product(range(len(move.hf)), range(tiling.blocks)):
        yield functools.partial(copy, layer, block)
