"""Arrays whose chunks are too large to be decoded whole: unpacked as streams into a file, and read from there.

MaxText and Tunix by themselves store a device's share of an array, all layers of it, as one compressed chunk: 7.5 GB
for a matrix of Llama 3.1 8B in float32 on one device. Layers lie one behind the other in the file, so that an export,
which goes layer by layer, reads what lies together.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.converters.chunk_streams import Encoding, Index, encoding_of, open_chunk, read_into
from bridge.converters.ranges import read_all, write_all

GROUP_BYTES = 32 << 20
"""Of a chunk that are put in order at a time, or of chunks that are decoded at once."""


class Unpacked:
    """An array unpacked into a file that has no name: it is gone when it is closed, or with the process."""

    def __init__(self, array: Any, scratch: Path, major: int | None) -> None:
        """Unpack all of it.

        Args:
            array: open, of TensorStore.
            scratch: a folder with room for `file_bytes`.
            major: the dimension that is to lie outermost, the layers'.

        Raises:
            ValueError: its chunks are damaged.
            OSError: the folder has no room.
        """
        self._shape: Index = tuple(array.shape)
        self._dtype: np.dtype[Any] = array.dtype.numpy_dtype
        chunk = tuple(array.chunk_layout.read_chunk.shape)
        self._box = _box(self._shape, chunk, self._dtype.itemsize)
        self._box_bytes = math.prod(self._box) * self._dtype.itemsize
        self._order = _order(len(self._shape), major)
        self._file = tempfile.TemporaryFile(dir=scratch, buffering=0)  # noqa: SIM115 - lives as long as this object
        encoding = encoding_of(array) if self._box_bytes > GROUP_BYTES else None
        places = list(itertools.product(*(range(-(-s // b)) for s, b in zip(self._shape, self._box, strict=True))))
        self._starts = {place: index * self._box_bytes for index, place in enumerate(places)}
        os.ftruncate(self._file.fileno(), len(places) * self._box_bytes)
        for place in places:
            pieces = self._streamed(array, encoding, place) if encoding else self._decoded(array, place)
            for row, layer, values in pieces:
                self._write(values, self._starts[place], row, layer)

    def read(self, region: Sequence[slice]) -> NDArray[Any]:
        """The values of a region.

        Raises:
            OSError: the file cannot be read.
        """
        bounds = [range(*part.indices(size)) for part, size in zip(region, self._shape, strict=True)]
        values = np.empty([len(bounds[dim]) for dim in self._order], self._dtype)
        sides = zip(bounds, self._box, strict=True)
        covered = [range(bound.start // box, -(-bound.stop // box)) for bound, box in sides]
        for place in itertools.product(*covered):
            inside, target = [], []
            for at, bound, box in zip(place, bounds, self._box, strict=True):
                first, last = max(bound.start, at * box), min(bound.stop, (at + 1) * box)
                inside.append(range(first - at * box, last - at * box))
                target.append(slice(first - bound.start, last - bound.start))
            part = values[tuple(target[dim] for dim in self._order)]
            if part.flags.c_contiguous:
                self._fill(part, place, inside)
            else:
                apart = np.empty_like(part, order="C")
                self._fill(apart, place, inside)
                part[...] = apart
        return values.transpose(np.argsort(self._order))

    def close(self) -> None:
        """Give the disk back; nothing is read afterwards."""
        self._file.close()

    def _fill(self, part: NDArray[Any], place: Index, inside: list[range]) -> None:
        """Read a part of one box, given in the array's order; `part` is contiguous and has the file's."""
        shape = [self._box[dim] for dim in self._order]
        size, positions = _runs(shape, [inside[dim] for dim in self._order])
        size *= self._dtype.itemsize
        positions = positions * self._dtype.itemsize + self._starts[place]
        file, target = self._file.fileno(), memoryview(part.reshape(-1).view(np.uint8))
        for done, position in zip(range(0, len(target), size), positions.tolist(), strict=True):
            piece = [target[done : done + size]]
            # There may be a million of them, and a short read is rare: `read_all` costs more than the read.
            if os.preadv(file, piece, position) != size and not read_all(file, piece, position):
                raise OSError("a temporary file ends early")

    @property
    def _sides(self) -> tuple[int, int, int]:
        """A box as (rows, layers, elements); the file has it as (layers, rows, elements)."""
        major = self._order[0]
        return math.prod(self._box[:major]), self._box[major], math.prod(self._box[major + 1 :])

    def _streamed(self, array: Any, encoding: Encoding, place: Index) -> Iterator[tuple[int, int, NDArray[Any]]]:
        """(first row, first layer, values) of every piece of a chunk, which is decoded as a stream."""
        rows, layers, elements = self._sides
        room = max(1, GROUP_BYTES // (elements * self._dtype.itemsize))
        some = max(1, min(rows, room // layers))
        part = min(layers, room)
        stream = open_chunk(array, encoding, place)
        if stream is None:
            # TensorStore knows whether that is a fault, and what stands there otherwise.
            buffer = np.full(some * part * elements, array[self._region(place, 1)].read().result().item(), self._dtype)
        else:
            buffer = np.empty(some * part * elements, self._dtype)
        for row, layer in itertools.product(range(0, rows, some), range(0, layers, part)):
            shape = min(some, rows - row), min(part, layers - layer), elements
            piece = buffer[: math.prod(shape)]
            if stream is not None and not read_into(stream, memoryview(piece.view(np.uint8))):
                raise ValueError(f"the chunk {place} ends early")
            yield row, layer, piece.reshape(shape)
        if stream is not None and read_into(stream, memoryview(bytearray(1))):
            raise ValueError(f"the chunk {place} is longer than its shape")

    def _decoded(self, array: Any, place: Index) -> Iterator[tuple[int, int, NDArray[Any]]]:
        """The same of a box that TensorStore decodes: of many small chunks, or of one whose codec is not known here."""
        values = array[self._region(place)].read().result()
        if values.shape != self._box:  # the last ones end with the array
            whole = np.zeros(self._box, self._dtype)
            whole[tuple(slice(side) for side in values.shape)] = values
            values = whole
        yield 0, 0, np.ascontiguousarray(values).reshape(self._sides)

    def _region(self, place: Index, side: int | None = None) -> tuple[slice, ...]:
        """What of the array a box holds; or the first `side` of it along each dimension."""
        starts = [at * box for at, box in zip(place, self._box, strict=True)]
        sides = zip(starts, self._box, self._shape, strict=True)
        return tuple(slice(start, min(start + (side or box), size)) for start, box, size in sides)

    def _write(self, values: NDArray[Any], start: int, row: int, layer: int) -> None:
        """Write a piece of a box, (rows, layers, elements), in the file's order."""
        rows, _, elements = self._sides
        together = values if rows == 1 else values.swapaxes(0, 1)
        for index, each in enumerate(together, layer):
            position = start + (index * rows + row) * elements * self._dtype.itemsize
            write_all(self._file.fileno(), [np.ascontiguousarray(each).view(np.uint8)], position, cached=True)


def file_bytes(shape: Index, chunk: Index, itemsize: int) -> int:
    """What an array of a shape, stored in chunks, takes unpacked."""
    box = _box(shape, chunk, itemsize)
    return math.prod(-(-size // side) * side for size, side in zip(shape, box, strict=True)) * itemsize


def _box(shape: Index, chunk: Index, itemsize: int) -> Index:
    """What is unpacked at once: a chunk, or as many neighbours as `GROUP_BYTES` hold."""
    box = list(chunk)
    for dim in reversed(range(len(box))):
        times = max(1, GROUP_BYTES // (math.prod(box) * itemsize))
        box[dim] = chunk[dim] * min(times, -(-shape[dim] // chunk[dim]))
    return tuple(box)


def _order(dims: int, major: int | None) -> tuple[int, ...]:
    """All dimensions, `major` before the others."""
    return tuple(sorted(range(dims), key=lambda dim: (dim != major, dim)))


def _runs(shape: Sequence[int], bounds: Sequence[range]) -> tuple[int, NDArray[np.int64]]:
    """What lies together of a region of a contiguous array: the elements of a run, and the first one of each."""
    whole = len(shape)
    while whole and len(bounds[whole - 1]) == shape[whole - 1]:
        whole -= 1
    inner = math.prod(shape[whole:])
    if not whole:
        return inner, np.zeros(1, np.int64)
    starts = np.array([bounds[whole - 1].start * inner], np.int64)
    step = inner * shape[whole - 1]
    for bound, size in zip(reversed(bounds[: whole - 1]), reversed(shape[: whole - 1]), strict=True):
        starts = np.add.outer(np.arange(bound.start, bound.stop) * step, starts).reshape(-1)
        step *= size
    return inner * len(bounds[whole - 1]), starts
