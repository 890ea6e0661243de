"""The chunks of a stored array decoded as streams, for those too large to be held: engines store a device's share of
an array, all layers of it, as one compressed chunk.

Source: the Zarr v2 and v3 specifications (sharding: zarr-specs.readthedocs.io, sharding-indexed v1.0).
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import zstandard

from bridge.converters.shard_store import BYTES, CHECKED, CHECKSUM_BYTES, UNWRITTEN, checksum

READ_BYTES = 8 << 20
"""Of one request; the next one is on its way while a chunk is decoded."""
V2_TYPES = ("<f2", "<f4", "bfloat16")
Index = tuple[int, ...]


@dataclass(frozen=True)
class Encoding:
    """How an array's chunks are stored: its keys, what a key holds, and what is decoded at once of that."""

    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    """What a key holds; more than a chunk only if `sharded`."""
    sharded: bool
    compressed: bool
    prefix: str
    separator: str

    def key(self, shard: Index) -> str:
        """The key of a place in the grid of shards."""
        return self.prefix + (self.separator.join(map(str, shard)) or "0")


def encoding_of(array: Any) -> Encoding | None:
    """How an open TensorStore array is stored; None where it is not known how to decode its chunks as streams."""
    spec = array.spec().to_json()
    metadata = spec.get("metadata", {})
    if spec["driver"] == "zarr":
        compressor = metadata["compressor"] or {"id": None}
        plain = metadata["order"] == "C" and not metadata["filters"] and metadata["dtype"] in V2_TYPES
        if not plain or compressor["id"] not in (None, "zstd"):
            return None
        chunk = tuple(metadata["chunks"])
        separator = metadata.get("dimension_separator", ".")
        return Encoding(chunk, chunk, False, compressor["id"] is not None, "", separator)
    if spec["driver"] != "zarr3":
        return None
    grid, keys, codecs = metadata["chunk_grid"], metadata["chunk_key_encoding"], metadata["codecs"]
    if grid["name"] != "regular" or keys["name"] != "default" or metadata.get("storage_transformers"):
        return None
    shard = chunk = tuple(grid["configuration"]["chunk_shape"])
    sharded = [codec["name"] for codec in codecs] == ["sharding_indexed"]
    if sharded:
        settings = codecs[0]["configuration"]
        if settings["index_codecs"] != CHECKED or settings.get("index_location", "end") != "end":
            return None
        chunk, codecs = tuple(settings["chunk_shape"]), settings["codecs"]
    names = [codec["name"] for codec in codecs]
    if codecs[:1] != [BYTES] or names not in (["bytes"], ["bytes", "zstd"]):
        return None
    separator = keys.get("configuration", {}).get("separator", "/")
    return Encoding(chunk, shard, sharded, len(names) == 2, f"c{separator}", separator)


def open_chunk(array: Any, encoding: Encoding, place: Index) -> BinaryIO | None:
    """A chunk's decoded values as a stream of bytes; None if nothing is stored for it.

    Raises:
        ValueError, OSError: as TensorStore reports it, or the shard's index is damaged.
    """
    each = tuple(shard // chunk for shard, chunk in zip(encoding.shard, encoding.chunk, strict=True))
    key = encoding.key(tuple(at // count for at, count in zip(place, each, strict=True)))
    if encoding.sharded:
        inside = tuple(at % count for at, count in zip(place, each, strict=True))
        found = _in_shard(array.kvstore, key, each, inside)
    else:
        # zstd's own bound of what values that cannot be compressed take, and more.
        most = math.prod(encoding.chunk) * array.dtype.numpy_dtype.itemsize
        found = 0, _size(array.kvstore, key, most + (most >> 7) + 1024)
    if found is None or found[1] == 0:
        return None
    stored = cast(BinaryIO, _Stored(array.kvstore, key, *found))
    if not encoding.compressed:
        return stored
    return cast(BinaryIO, zstandard.ZstdDecompressor().stream_reader(stored, read_size=READ_BYTES))


def read_into(stream: BinaryIO, buffer: memoryview) -> bool:
    """Fill a buffer from a stream; False if it ends before.

    Raises:
        ValueError: what is stored is no zstd frame, or a damaged one.
    """
    done = 0
    try:
        while done < len(buffer):
            count = stream.readinto(buffer[done:])  # type: ignore[attr-defined]
            if not count:
                return False
            done += count
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    return True


def _in_shard(kvstore: Any, key: str, counts: Index, inside: Index) -> tuple[int, int] | None:
    """(offset, bytes) of a chunk in its shard, by the index at the shard's end; None if it is not stored."""
    size = 16 * math.prod(counts)
    found = kvstore.read(key, byte_range=slice(-(size + CHECKSUM_BYTES), None)).result()
    if found.state == "missing":
        return None
    raw = np.frombuffer(found.value, np.uint8)
    if raw.size != size + CHECKSUM_BYTES or checksum(raw[:size]) != raw[size:].tobytes():
        raise ValueError(f"the index of {key} is damaged")
    start, length = (int(part) for part in raw[:size].view("<u8").reshape(*counts, 2)[inside])
    return None if start == UNWRITTEN else (start, length)


def _size(kvstore: Any, key: str, most: int) -> int:
    """The bytes that a key holds, 0 if there is none; a store says no size, and answers only for what is there."""
    if kvstore.read(key, byte_range=slice(0, 1)).result().state == "missing":
        return 0
    low, high = 1, most + 1  # there are `low` bytes, but not `high`
    while high - low > 1:
        middle = (low + high) // 2
        try:
            kvstore.read(key, byte_range=slice(middle - 1, middle)).result()
            low = middle
        except ValueError as error:
            if "OUT_OF_RANGE" not in str(error):
                raise
            high = middle
    return low


class _Stored(io.RawIOBase):
    """A range of a key's value, one request ahead of its reader."""

    def __init__(self, kvstore: Any, key: str, start: int, size: int) -> None:
        self._kvstore, self._key = kvstore, key
        self._next, self._end = start, start + size
        self._current = memoryview(b"")
        self._coming = self._request()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._current and self._coming is not None:
            self._current, self._coming = memoryview(self._coming.result().value), self._request()
        count = min(len(buffer), len(self._current))
        buffer[:count] = self._current[:count]
        self._current = self._current[count:]
        return count

    def _request(self) -> Any:
        start, self._next = self._next, min(self._next + READ_BYTES, self._end)
        return self._kvstore.read(self._key, byte_range=slice(start, self._next)) if start < self._next else None
