"""Slabs: the unit of memory. Every array is moved in pieces that are bounded whatever the model's size.

A slab is a range of layers times a range along the rule's cut axis: contiguous rows of a safetensors file on one
side, whole chunks of the engine's array on the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bridge.converters.layout import Axes
from bridge.converters.plan import Move

BLOCK_BYTES = 4 << 20  # stays in a core's cache while it is transposed (measured: 5-6 GB/s against 1.2 for 64 MiB)


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


def along_chunks(cutting: Cutting, layer_chunk: int, unit_chunk: int) -> Cutting:
    """Widen slabs to whole chunks of a stored array: a chunk is then decoded once, not once a slab."""
    layers = min(cutting.total_layers, math.ceil(cutting.layers / layer_chunk) * layer_chunk)
    units = min(cutting.total_units, math.ceil(cutting.units / unit_chunk) * unit_chunk)
    return Cutting(layers, units, cutting.block_units, cutting.total_layers, cutting.total_units)


def region(move: Move, layers: range, units: range) -> tuple[slice, ...]:
    """The part of the engine's array that a slab is."""
    part = [slice(None)] * len(move.engine_shape)
    part[move.rule.engine_cut_dim] = slice(units.start, units.stop)
    if move.rule.engine_layer_dim is not None:
        part[move.rule.engine_layer_dim] = slice(layers.start, layers.stop)
    return tuple(part)


def chunk_shape(move: Move, cutting: Cutting) -> tuple[int, ...]:
    """The write chunk of an engine array: one slab."""
    shape = list(move.engine_shape)
    shape[move.rule.engine_cut_dim] = cutting.units
    if move.rule.engine_layer_dim is not None:
        shape[move.rule.engine_layer_dim] = cutting.layers
    return tuple(shape)


def read_chunk_shape(move: Move, chunk: tuple[int, ...], parts: int = 16) -> tuple[int, ...]:
    """The inner chunk: split along the embedding axis, so that each of `parts` FSDP devices decodes only its share."""
    shape = list(chunk)
    embed = next((i for i, group in enumerate(move.rule.engine_groups) if group == ("embed",)), None)
    if embed is not None:
        while parts > 1 and (shape[embed] % parts or math.prod(shape) // parts < 4096):
            parts //= 2
        shape[embed] //= parts
    return tuple(shape)
