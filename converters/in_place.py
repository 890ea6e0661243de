"""Blocks moved between a Hugging Face folder and the shards of `shard_store`, each read and written where it lies.

A stored block is larger than what a core's cache holds, so it is permuted in steps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from bridge.converters import bits
from bridge.converters.hf_store import HfSink, HfSource
from bridge.converters.layout import Axes, Block, axes_of, scale_of
from bridge.converters.plan import Move
from bridge.converters.pool import Progress
from bridge.converters.shard_reader import ShardReader
from bridge.converters.shard_store import ShardWriter
from bridge.converters.slabs import Tiling, unit_elements
from bridge.model_spec import ModelSpec


def import_jobs(
    writer: ShardWriter, move: Move, dtype: str, model: ModelSpec, source: HfSource, progress: Progress
) -> Iterator[Callable[[], None]]:
    """A job for every block of one array.

    Args:
        writer: of the array.
        move: the array's.
        dtype: as it is to be stored.
        model: gives the axes.
        source: open.
        progress: called with source bytes.
    """
    axes, tiling = axes_of(model), writer.tiling
    unit, scale = unit_elements(move, axes), scale_of(move.rule, model)

    def write(layer: int, block: int) -> None:
        name = move.hf[layer]
        kind = source.headers[name].dtype
        beyond = (block + 1) * tiling.units > axes[move.rule.cut_axis]  # the array: zeros lie there
        whole = (np.zeros if beyond else np.empty)(tiling.block_shape, bits.bits_dtype(dtype))
        for units, shape, place in _steps(move, axes, tiling, block):
            raw = source.read(name, units.start * unit, len(units) * unit)
            step = bits.import_block(raw, shape, kind, dtype, scale)
            progress(raw.nbytes)
            if len(units) == tiling.units:
                whole = step
            else:
                part = whole[place]
                part[...] = step.reshape(part.shape)
        writer.write(layer, block, whole)

    for layer, block in itertools.product(range(len(move.hf)), range(tiling.blocks)):
        yield functools.partial(write, layer, block)


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
    unit, scale = unit_elements(move, axes), scale_of(move.rule, model)

    def copy(layer: int, block: int) -> None:
        name, chunks = move.hf[layer], reader.read(layer, block)
        kind = sink.stored[name].tensor.dtype
        for units, shape, place in _steps(move, axes, tiling, block):
            values = bits.export_block(chunks[place], shape, dtype, kind, scale)
            sink.write(name, units.start * unit, values)
            progress(values.nbytes)

    for layer, block in itertools.product(range(len(move.hf)), range(tiling.blocks)):
        yield functools.partial(copy, layer, block)


def _steps(move: Move, axes: Axes, tiling: Tiling, block: int) -> Iterator[tuple[range, Block, tuple[slice, ...]]]:
    """(units of the array, permutation, place in the block) of all that is permuted at once."""
    first = block * tiling.units
    for start, stop in tiling.steps(min(tiling.units, axes[move.rule.cut_axis] - first)):
        shape = move.rule.block(axes, stop - start, tiling.parts)
        yield range(first + start, first + stop), shape, tiling.part_of_block(start, stop)
