"""Blocks read from where `shard_store` wrote them: one contiguous read, checked, and permuted as it lies.

Only arrays of that layout; all others, and all checks, go through TensorStore (`orbax_source`), which decodes the same
files at twice the processor time.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.converters.layout import Axes
from bridge.converters.orbax_source import DAMAGED
from bridge.converters.plan import ITEM_BYTES, Move, Tensor
from bridge.converters.ranges import read_all
from bridge.converters.shard_store import CHECKED, CHECKSUM_BYTES, checksum
from bridge.converters.slabs import Tiling, tile
from bridge.errors import CheckpointError
from bridge.places import BucketPath


class ShardReader:
    """Reads the blocks of one array, from any thread."""

    def __init__(self, file: Path, name: str, tiling: Tiling, itemsize: int) -> None:
        """Read and check the index.

        Raises:
            CheckpointError: the file is not there, or its index is damaged.
        """
        self._name, self._path, self.tiling, self._itemsize = name, file, tiling, itemsize
        self._chunk_bytes = math.prod(tiling.inner) * itemsize + CHECKSUM_BYTES
        self._offsets = self._index()

    def _index(self) -> NDArray[np.uint64]:
        counts = self.tiling.counts
        try:
            size, end = math.prod(counts) * 16, self._path.stat().st_size
        except OSError as error:
            raise self._damaged(f"{self._path}: {error.strerror}") from error
        raw, stored = np.empty(size, np.uint8), np.empty(CHECKSUM_BYTES, np.uint8)
        self._read([(end - size - CHECKSUM_BYTES, raw, stored)])
        self._check(raw, stored, "its index")
        index = raw.view("<u8").reshape(*counts, 2)
        offsets = index[..., 0]
        within = offsets <= np.uint64(max(0, end - size - CHECKSUM_BYTES - self._chunk_bytes))
        if not (index[..., 1] == self._chunk_bytes).all() or not within.all():
            raise self._damaged("its index names chunks that are not there")
        return offsets

    def read(self, layer: int, block: int) -> NDArray[Any]:
        """A block's chunks as unsigned integers of the dtype's width, of the tiling's `block_shape`.

        Args:
            layer, block: which; the block's number along the cut axis.

        Raises:
            CheckpointError: the file ends early, cannot be read, or has other bytes than were written.
        """
        tiling = self.tiling
        starts = [int(self._offsets[tiling.place(layer, block, part)]) for part in range(tiling.parts)]
        values = np.empty((tiling.parts, self._chunk_bytes - CHECKSUM_BYTES), np.uint8)
        stored = np.empty((tiling.parts, CHECKSUM_BYTES), np.uint8)
        self._read(list(zip(starts, values, stored, strict=True)))
        for chunk, each in zip(values, stored, strict=True):
            self._check(chunk, each, f"layer {layer}, block {block}")
        chunks: NDArray[Any] = values.view(f"u{self._itemsize}").reshape(tiling.block_shape)
        return chunks

    def _read(self, pieces: list[tuple[int, NDArray[np.uint8], NDArray[np.uint8]]]) -> None:
        """Fill pairs of arrays with what lies one behind the other from a position on."""
        try:
            # Opened for each block: a model has more arrays than a process may have files.
            with self._path.open("rb", buffering=0) as file:
                whole = all(start >= 0 and read_all(file.fileno(), pair, start) for start, *pair in pieces)
        except OSError as error:
            raise self._damaged(str(error)) from error
        if not whole:
            raise self._damaged(f"{self._path.name} ends early")

    def _check(self, values: NDArray[np.uint8], stored: NDArray[np.uint8], what: str) -> None:
        if checksum(values) != stored.tobytes():
            raise self._damaged(f"{what} has another checksum than when it was written")

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._name} cannot be read: {reason}", hint=DAMAGED)


def open_shard(item: Path, move: Move, axes: Axes, tensor: Tensor) -> ShardReader | None:
    """The array of a move, if it is stored as `shard_store` stores it; None for every other layout.

    Raises:
        CheckpointError: its file is not there, or its index is damaged.
    """
    if isinstance(item, BucketPath) or (item / "manifest.ocdbt").exists():
        return None
    name = ".".join(move.engine)
    try:
        metadata = json.loads((item / name / "zarr.json").read_text(encoding="utf-8"))
        grid, (sharding,) = metadata["chunk_grid"]["configuration"]["chunk_shape"], metadata["codecs"]
        settings = sharding["configuration"]
        inner, stored = tuple(settings["chunk_shape"]), (settings["codecs"], settings["index_codecs"])
        plain = metadata["chunk_key_encoding"]["name"] == "default"
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if sharding["name"] != "sharding_indexed" or stored != (CHECKED, CHECKED) or not plain:
        return None
    if settings.get("index_location", "end") != "end" or metadata.get("storage_transformers"):
        return None
    tiling = _tiling(move, axes, inner)
    if tiling is None or tuple(grid) != tiling.shard or len(inner) != len(tensor.shape):
        return None
    file = item.joinpath(name, "c", *("0" for _ in tiling.shape))
    return ShardReader(file, f"{item}: {name}", tiling, ITEM_BYTES[tensor.dtype])


def _tiling(move: Move, axes: Axes, inner: tuple[Any, ...]) -> Tiling | None:
    """The blocks that chunks of a shape make up, if they are a layer's."""
    like = tile(move, axes, 4)
    whole = all(type(side) is int and 0 < side <= size for side, size in zip(inner, like.shape, strict=False))
    if len(inner) != len(like.shape) or not whole:
        return None
    split = like.embed_dim if like.embed_dim != like.cut_dim else None
    for dim, (side, size) in enumerate(zip(inner, like.shape, strict=True)):
        wanted = 1 if dim == like.layer_dim else size
        if dim not in (like.cut_dim, split) and side != wanted:
            return None
    if split is not None and like.shape[split] % inner[split]:
        return None
    parts = like.shape[split] // inner[split] if split is not None else 1
    units = inner[like.cut_dim]
    return dataclasses.replace(like, inner=inner, units=units, step=min(units, like.step), parts=parts)
