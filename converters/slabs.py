"""Slabs: the unit of memory. Every array is moved in pieces that are bounded whatever the model's size.

A slab is a range of layers times a range along the rule's cut axis: contiguous rows of a safetensors file on one
side, whole chunks of the engine's array on the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bridge.converters.layout import LAYER, Axes
from bridge.converters.plan import Move

BLOCK_BYTES = 4 << 20  # stays in a core's cache while it is transposed (measured: 5-6 GB/s against 1.2 for 64 MiB)
STORED_BYTES = 16 << 20
"""Of a stored block, put together from those: its chunks, of 1 MiB, lie far apart in their file."""
PARTS = 16
"""Shares along the embedding that a stored block falls into: as many FSDP devices decode only their own."""
CHUNK_ELEMENTS = 4096
"""Smaller chunks cost a reader more than the bytes it is spared."""


@dataclass(frozen=True)
class Tiling:
    """How an array is stored: blocks of `units` along the cut axis of one layer, each in `parts` along the embedding.

    `inner` is the shape of one stored chunk, 1 along the layers where they are stacked. A block is permuted `step`
    units at a time.
    """

    shape: tuple[int, ...]
    inner: tuple[int, ...]
    units: int
    step: int
    parts: int
    cut_dim: int
    layer_dim: int | None
    embed_dim: int | None

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each dimension."""
        return tuple(math.ceil(size / side) for size, side in zip(self.shape, self.inner, strict=True))

    @property
    def shard(self) -> tuple[int, ...]:
        """The shape of the whole array in whole chunks."""
        return tuple(count * side for count, side in zip(self.counts, self.inner, strict=True))

    @property
    def blocks(self) -> int:
        """The number of blocks of a layer."""
        return self.counts[self.cut_dim]

    def place(self, layer: int, block: int, part: int) -> tuple[int, ...]:
        """Which chunk one part of a block is."""
        at = [0] * len(self.shape)
        at[self.cut_dim] = block
        if self.layer_dim is not None:
            at[self.layer_dim] = layer
        if self.embed_dim is not None and self.embed_dim != self.cut_dim:
            at[self.embed_dim] = part
        return tuple(at)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of a block's chunks together: (parts, ...inner without layers)."""
        return (self.parts, *(side for dim, side in enumerate(self.inner) if dim != self.layer_dim))

    def part_of_block(self, start: int, stop: int) -> tuple[slice, ...]:
        """Where units `start` to `stop` of a block lie in an array of `block_shape`."""
        cut = self.cut_dim - (self.layer_dim is not None and self.layer_dim < self.cut_dim)
        return (*[slice(None)] * (1 + cut), slice(start, stop))

    def steps(self, count: int) -> Iterator[tuple[int, int]]:
        """(first, end) of every part of a block that is permuted at once; `count` are the units that it has."""
        for start in range(0, count, self.step):
            yield start, min(start + self.step, count)


@dataclass(frozen=True)
class Cutting:
    """How one array is cut: slabs of `layers` x `units`, each permuted in blocks of `block_units`."""

    layers: int
    units: int
    block_units: int
    total_layers: int
    total_units: int

    @property
    def count(self) -> int:
        """The number of slabs."""
        return math.ceil(self.total_layers / self.layers) * math.ceil(self.total_units / self.units)

    def slabs(self) -> Iterator[tuple[range, range]]:
        """(layers, units) of every slab, in the order of the file."""
        for layer in range(0, self.total_layers, self.layers):
            for unit in range(0, self.total_units, self.units):
                yield (
                    range(layer, min(layer + self.layers, self.total_layers)),
                    range(unit, min(unit + self.units, self.total_units)),
                )

    def blocks(self, units: range) -> Iterator[range]:
        """The blocks of one layer of a slab."""
        for start in range(units.start, units.stop, self.block_units):
            yield range(start, min(start + self.block_units, units.stop))


def unit_elements(move: Move, axes: Axes) -> int:
    """Elements of one step along the cut axis of one Hugging Face tensor; contiguous in its file."""
    return math.prod(move.hf_shape) // axes[move.rule.cut_axis]


def cut(move: Move, axes: Axes, itemsize: int, slab_bytes: int) -> Cutting:
    """Cut an array into slabs of at most `slab_bytes`, or one unit of one layer if that is larger."""
    unit = unit_elements(move, axes) * itemsize
    units, layers = axes[move.rule.cut_axis], len(move.hf)
    slab_units = max(1, min(units, slab_bytes // (unit * layers)))
    slab_layers = layers if unit * layers <= slab_bytes else max(1, min(layers, slab_bytes // unit))
    return Cutting(slab_layers, slab_units, max(1, min(slab_units, BLOCK_BYTES // unit)), layers, units)


def cut_stored(move: Move, axes: Axes, itemsize: int, slab_bytes: int, layer_chunk: int, unit_chunk: int) -> Cutting:
    """Cut a stored array by whole chunks, each decoded once: one row of them, or as many as make up a block.

    A row is what holds whole rows of a Hugging Face tensor; where chunks are large, it may exceed `slab_bytes`.
    """
    unit, layers, units = unit_elements(move, axes) * itemsize, len(move.hf), axes[move.rule.cut_axis]
    layer_chunk, unit_chunk = min(layer_chunk, layers), min(unit_chunk, units)
    limit = min(BLOCK_BYTES, slab_bytes)
    slab_units = min(units, max(1, limit // (unit * unit_chunk * layer_chunk)) * unit_chunk)
    return Cutting(layer_chunk, slab_units, max(1, min(slab_units, BLOCK_BYTES // unit)), layers, units)


def region(move: Move, layers: range, units: range) -> tuple[slice, ...]:
    """The part of the engine's array that a slab is."""
    part = [slice(None)] * len(move.engine_shape)
    part[move.rule.engine_cut_dim] = slice(units.start, units.stop)
    if move.rule.engine_layer_dim is not None:
        part[move.rule.engine_layer_dim] = slice(layers.start, layers.stop)
    return tuple(part)


def tile(move: Move, axes: Axes, itemsize: int) -> Tiling:
    """Store an array by blocks whose chunks a reader likes; `itemsize` is the larger of both sides."""
    rule = move.rule
    embed = rule.engine_embed_dim
    elements, total = unit_elements(move, axes), axes[rule.cut_axis]
    step = max(1, BLOCK_BYTES // (elements * itemsize))
    if embed == rule.engine_cut_dim:
        share = max(math.ceil(total / PARTS), math.ceil(CHUNK_ELEMENTS / elements))
        units = _even(total, min(share, step))
    else:
        units = _even(total, max(1, STORED_BYTES // (elements * itemsize)))
    inner = [
        1 if group == (LAYER,) else size for group, size in zip(rule.engine_groups, move.engine_shape, strict=True)
    ]
    inner[rule.engine_cut_dim] = units
    parts = 1
    if embed is not None and embed != rule.engine_cut_dim:
        parts = _parts(inner[embed], math.prod(inner))
        inner[embed] //= parts
    shape, dims = move.engine_shape, (rule.engine_cut_dim, rule.engine_layer_dim, embed)
    return Tiling(shape, tuple(inner), units, _even(units, step), parts, *dims)


def _even(total: int, limit: int) -> int:
    """The largest divisor of `total` up to `limit`; `limit` itself where that leaves less than a quarter of it."""
    if limit >= total:
        return total
    divisor = next(size for size in range(limit, 0, -1) if total % size == 0)
    return divisor if divisor * 4 >= limit else limit


def _parts(embed: int, elements: int) -> int:
    """Into how many shares the embedding axis of a chunk is split: at most `PARTS`, none of them tiny."""
    parts = PARTS
    while parts > 1 and (embed % parts or elements // parts < CHUNK_ELEMENTS):
        parts //= 2
    return parts


def chunk_shape(move: Move, cutting: Cutting) -> tuple[int, ...]:
    """The write chunk of an engine array: one slab."""
    shape = list(move.engine_shape)
    shape[move.rule.engine_cut_dim] = cutting.units
    if move.rule.engine_layer_dim is not None:
        shape[move.rule.engine_layer_dim] = cutting.layers
    return tuple(shape)


def read_chunk_shape(move: Move, chunk: tuple[int, ...]) -> tuple[int, ...]:
    """The inner chunk of a write chunk: split along the embedding axis, as `tile` does."""
    shape = list(chunk)
    embed = move.rule.engine_embed_dim
    if embed is not None:
        shape[embed] //= _parts(shape[embed], math.prod(shape))
    return tuple(shape)
