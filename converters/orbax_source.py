"""Orbax checkpoints read array by array and piece by piece, whoever wrote them: bridge, Orbax itself, or an engine.

Arrays whose chunks, or rows of chunks, are too large to be held are unpacked first (`unpacked`).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bridge.converters.orbax_store import TREE, Path_, Region, context, leaf_kvstore
from bridge.converters.plan import ITEM_BYTES, Tensor
from bridge.converters.unpacked import Unpacked, file_bytes
from bridge.errors import CheckpointError
from bridge.model_spec import read_json

UNFINISHED = ".orbax-checkpoint-tmp"
# What TensorStore raises for what it finds in files.
FAULTS = (ValueError, IndexError, NotImplementedError, OSError, RuntimeError)
DAMAGED = "its files are incomplete or damaged: copy the checkpoint again, or take another step"
ROOM = "make room there, or export with a larger --memory: what fits is decoded in memory"
KEPT = 2
"""Arrays that stay unpacked: neighbours are read side by side where one ends and the other begins."""


@dataclass(frozen=True)
class Leaf:
    """One array of a stored tree."""

    path: Path_
    tensor: Tensor
    array: Any
    """As TensorStore has it, open."""
    chunk: tuple[int, ...]
    """What is decoded at once."""
    unpacked: bool = False
    """Whether it is read from a file that it is unpacked into: its chunks, or a row of them, are too large to hold."""

    @property
    def unpacked_bytes(self) -> int:
        """What that file takes."""
        return file_bytes(self.tensor.shape, self.chunk, ITEM_BYTES[self.tensor.dtype])


@dataclass
class _Kept:
    """An unpacked array, and how many read it."""

    array: Unpacked
    readers: int = 0


class TreeSource:
    """The tree of one checkpoint item written by bridge, by Orbax, or by an engine."""

    def __init__(self, folder: Path, cache_bytes: int = 0, only: frozenset[Path_] | None = None) -> None:
        """Open every array; no value is read.

        Args:
            folder: of the tree.
            cache_bytes: decoded chunks that are kept.
            only: the arrays that are meant.

        Raises:
            CheckpointError: an array is missing, or its metadata are damaged.
        """
        self.folder = folder
        self.scratch = Path(tempfile.gettempdir())
        """Where arrays are unpacked."""
        self._kept: dict[Path_, _Kept] = {}
        self._changed = threading.Condition()
        self.leaves = _open_leaves(folder, context(cache_bytes), only)

    def unpack(self, path: Path_) -> None:
        """Have an array unpacked when it is first read."""
        self.leaves[path] = replace(self.leaves[path], unpacked=True)

    @property
    def scratch_bytes(self) -> int:
        """What is unpacked at a time, at most."""
        return sum(sorted(leaf.unpacked_bytes for leaf in self.leaves.values() if leaf.unpacked)[-KEPT:])

    @property
    def headers(self) -> dict[Path_, Tensor]:
        """Shape and dtype of every array."""
        return {path: leaf.tensor for path, leaf in self.leaves.items()}

    def read(self, path: Path_, region: Region, major: int | None = None) -> NDArray[Any]:
        """The values of a region; from any thread.

        Args:
            path: of the array.
            region: a slice for each dimension.
            major: the dimension of the layers, which an unpacked array is best read by.

        Raises:
            CheckpointError: files are missing, truncated or damaged, or there is no room to unpack them.
        """
        values: NDArray[Any]
        leaf = self.leaves[path]
        if leaf.unpacked:
            with self._unpacked(path, major) as array:
                values = array.read(region)
            return values
        try:
            values = leaf.array[region].read().result()
        except FAULTS as error:
            raise self._unreadable(path, error) from error
        return values

    @contextlib.contextmanager
    def _unpacked(self, path: Path_, major: int | None) -> Iterator[Unpacked]:
        """An array that nobody takes away; one is unpacked at a time, and no more than `KEPT` are there at any."""
        with self._changed:
            while path not in self._kept:
                if len(self._kept) < KEPT:
                    self._kept[path] = _Kept(self._unpack(path, major))
                elif idle := [each for each, kept in self._kept.items() if kept.readers == 0]:
                    self._kept.pop(idle[0]).array.close()
                else:
                    self._changed.wait()
            kept = self._kept[path] = self._kept.pop(path)  # the latest at the end
            kept.readers += 1
        try:
            yield kept.array
        finally:
            with self._changed:
                kept.readers -= 1
                self._changed.notify_all()

    def _unpack(self, path: Path_, major: int | None) -> Unpacked:
        leaf, name = self.leaves[path], ".".join(path)
        needed, free = leaf.unpacked_bytes, shutil.disk_usage(self.scratch).free
        if needed > free:
            raise CheckpointError(
                f"{self.folder}: {name} is stored in chunks too large to be held, which are unpacked in "
                f"{self.scratch}: that needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
                hint=ROOM,
            )
        try:
            return Unpacked(leaf.array, self.scratch, major)
        except OSError as error:  # of the temporary file; TensorStore has none of its own
            raise CheckpointError(
                f"{self.folder}: {name} cannot be unpacked in {self.scratch}: {error.strerror or error}", hint=ROOM
            ) from error
        except FAULTS as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: Path_, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {'.'.join(path)} cannot be read: {_reason(error)}", hint=DAMAGED)


def tree_paths(folder: Path) -> list[Path_]:
    """The paths of every array in a tree, by its metadata alone. Empty nodes are left out.

    Raises:
        CheckpointError: no metadata, damaged metadata, or a write that was never finished.
    """
    return [path for path, _ in _entries(folder)]


def _entries(folder: Path) -> list[tuple[Path_, dict[str, Any]]]:
    if any(UNFINISHED in part for part in folder.parts):
        raise CheckpointError(f"{folder} was never finished: the run or the conversion that wrote it was stopped")
    metadata = read_json(folder / TREE)
    entries = metadata.get("tree_metadata")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{folder / TREE} has no tree_metadata")
    found = []
    names: set[str] = set()
    for name, entry in entries.items():
        try:
            path = tuple(str(part["key"]) for part in entry["key_metadata"])
            kind = entry["value_metadata"]["value_type"]
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{folder / TREE}: the entry {name} is damaged") from error
        joined = ".".join(path)
        if re.search(r"[/\\\0]", joined) or ".." in path:
            raise CheckpointError(f"{folder / TREE}: the entry {name} leaves the folder")
        if joined in names:
            raise CheckpointError(f"{folder / TREE}: {joined} is there twice")
        names.add(joined)
        if kind not in ("Dict", "List", "Tuple", "None", "NamedTuple", "EmptyState") and path:
            found.append((path, metadata))
    if not found:
        raise CheckpointError(f"{folder} holds no arrays")
    return found


def _open_leaves(folder: Path, ts_context: Any, only: frozenset[Path_] | None) -> dict[Path_, Leaf]:
    leaves: dict[Path_, Leaf] = {}
    missing = []
    for path, metadata in _entries(folder):
        if only is not None and path not in only:
            continue
        try:
            array = _open(_leaf_spec(folder, ".".join(path), metadata), ts_context, folder, path)
        except CheckpointError as error:
            missing.append(error.message)
            continue
        chunk = tuple(array.chunk_layout.read_chunk.shape or ())
        written = tuple(array.chunk_layout.write_chunk.shape or ())
        if any(
            part > max(size, 1) or whole >= max(size, 1) + part
            for part, whole, size in zip(chunk, written, array.shape, strict=False)
        ):
            missing.append(f"{'.'.join(path)} is stored in chunks of {written}, larger than its shape {array.shape}")
            continue
        leaves[path] = Leaf(path, Tensor(tuple(array.shape), array.dtype.name), array, chunk)
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} arrays that its metadata names are not there", details=missing, hint=DAMAGED
        )
    return leaves


def _leaf_spec(folder: Path, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {"driver": "zarr3" if metadata.get("use_zarr3") else "zarr"}
    # A chunk that is not there reads as zeros by default: right only where zeros were left out when it was written.
    spec["fill_missing_data_reads"] = metadata.get("store_array_data_equal_to_fill_value") is not True
    return {**spec, "kvstore": leaf_kvstore(folder, name, (folder / "manifest.ocdbt").exists())}


def _open(spec: dict[str, Any], ts_context: Any, folder: Path, path: Path_) -> Any:
    import tensorstore as ts

    try:
        return ts.open(spec, open=True, create=False, context=ts_context).result()
    except FAULTS as error:
        raise CheckpointError(f"{folder}: {'.'.join(path)} cannot be opened: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """TensorStore's text without the places in its own sources."""
    return str(error).split("[source", 1)[0].strip()[:300]
