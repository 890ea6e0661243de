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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.converters.chunk_streams import Encoding, Index, open_chunk, read_into
from bridge.converters.ranges import read_all

GROUP_BYTES = 32 << 20
"""Of a chunk that are put in order at a time."""


class Unpacked:
    """An array unpacked into a file that has no name: it is gone when this object is, or the process."""

    def __init__(self, array: Any, encoding: Encoding, scratch: Path, major: int | None) -> None:
        """Unpack all of it.

        Args:
            array: open, of TensorStore.
            encoding: its own.
            scratch: a folder with room for all its values.
            major: the dimension that is to lie outermost, the layers'.

        Raises:
            ValueError: its chunks are damaged.
            OSError: they cannot be read, or the folder has no room.
        """
        self._chunk, self.shape = encoding.chunk, encoding.shape
        self.dtype: np.dtype[Any] = array.dtype.numpy_dtype
        self._order = _order(len(self.shape), major)
        self._chunk_bytes = math.prod(self._chunk) * self.dtype.itemsize
        self._file = tempfile.TemporaryFile(dir=scratch, buffering=0)  # noqa: SIM115 - lives as long as this object
        places = list(encoding.chunks)
        self._starts = {place: index * self._chunk_bytes for index, place in enumerate(places)}
        os.ftruncate(self._file.fileno(), len(places) * self._chunk_bytes)
        for place in places:
            self._unpack(array, encoding, place)

    def read(self, region: Sequence[slice]) -> NDArray[Any]:
        """The values of a region.

        Raises:
            OSError: the file cannot be read.
        """
        bounds = [range(*part.indices(size)) for part, size in zip(region, self.shape, strict=True)]
        values = np.empty([len(bounds[dim]) for dim in self._order], self.dtype)
        sides = zip(bounds, self._chunk, strict=True)
        covered = [range(bound.start // chunk, -(-bound.stop // chunk)) for bound, chunk in sides]
        for place in itertools.product(*covered):
            inside, target = [], []
            for at, bound, chunk in zip(place, bounds, self._chunk, strict=True):
                first, last = max(bound.start, at * chunk), min(bound.stop, (at + 1) * chunk)
                inside.append(range(first - at * chunk, last - at * chunk))
                target.append(slice(first - bound.start, last - bound.start))
            part = values[tuple(target[dim] for dim in self._order)]
            if part.flags.c_contiguous:
                self._fill(part, place, inside)
            else:
                apart = np.empty_like(part, order="C")
                self._fill(apart, place, inside)
                part[...] = apart
        return values.transpose(np.argsort(self._order))

    def _fill(self, part: NDArray[Any], place: Index, inside: list[range]) -> None:
        """Read a part of one chunk, given in the chunk's own order; `part` is contiguous and has the file's order."""
        shape = [self._chunk[dim] for dim in self._order]
        size, positions = _runs(shape, [inside[dim] for dim in self._order])
        size *= self.dtype.itemsize
        positions = positions * self.dtype.itemsize + self._starts[place]
        file, target = self._file.fileno(), memoryview(part.reshape(-1).view(np.uint8))
        for done, position in zip(range(0, len(target), size), positions.tolist(), strict=True):
            if os.preadv(file, [target[done : done + size]], position) != size and not read_all(
                file, [target[done : done + size]], position
            ):
                raise OSError("a temporary file ends early")

    def _unpack(self, array: Any, encoding: Encoding, place: Index) -> None:
        """Write one chunk's values in their order: from (rows, layers, elements) to (layers, rows, elements)."""
        major, itemsize, start = self._order[0], self.dtype.itemsize, self._starts[place]
        rows, layers, elements = math.prod(self._chunk[:major]), self._chunk[major], math.prod(self._chunk[major + 1 :])
        room = max(1, GROUP_BYTES // (elements * itemsize))
        some = max(1, min(rows, room // layers))
        part = min(layers, room)
        stream = open_chunk(array, encoding, place)
        if stream is None:
            # TensorStore knows whether that is a fault, and what stands there otherwise.
            first = tuple(at * chunk for at, chunk in zip(place, self._chunk, strict=True))
            buffer = np.full(some * part * elements, array[first].read().result(), self.dtype)
        else:
            buffer = np.empty(some * part * elements, self.dtype)
        for row, layer in itertools.product(range(0, rows, some), range(0, layers, part)):
            shape = min(some, rows - row), min(part, layers - layer), elements
            piece = buffer[: math.prod(shape)]
            if stream is not None and not read_into(stream, memoryview(piece.view(np.uint8))):
                raise ValueError(f"the chunk {place} ends early")
            together = [piece] if rows == 1 else piece.reshape(shape).swapaxes(0, 1)
            for index, each in enumerate(together, layer):
                self._write(each, start + (index * rows + row) * elements * itemsize)
        if stream is not None and read_into(stream, memoryview(bytearray(1))):
            raise ValueError(f"the chunk {place} is longer than its shape")

    def _write(self, values: NDArray[Any], position: int) -> None:
        """Through the page cache, as it is read again at once."""
        left = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        while left:
            done = os.pwrite(self._file.fileno(), left, position)
            position, left = position + done, left[done:]


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
