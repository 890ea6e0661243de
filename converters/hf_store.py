"""safetensors in and out: headers, index, ranges of bytes. Nothing is unpickled and no tensor is read whole."""

from __future__ import annotations

import functools
import json
import math
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.converters.plan import ITEM_BYTES, Tensor
from bridge.converters.ranges import read_all, write_all
from bridge.converters.shard_store import all_zeros
from bridge.errors import CheckpointError
from bridge.model_spec import read_json, unique
from bridge.places import BucketPath
from bridge.sidecar import inside as inside

# safetensors/src/tensor.rs refuses headers above 100 MB.
MAX_HEADER_BYTES = 100_000_000
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
NAMES = {value: key for key, value in DTYPES.items()}
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
WIDTHS |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}
WIDTHS |= {key: ITEM_BYTES[value] for key, value in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_RANK = 16
PIECE = 8 << 20
"""Elements compared at once."""


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies: a file, the offset of its first byte, and what it is."""

    file: Path
    offset: int
    tensor: Tensor


class HfSource:
    """A Hugging Face folder, read by ranges of bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored = read_headers(folder)
        self._stack = ExitStack()
        self._files: dict[Path, int] = {}

    @functools.cached_property
    def headers(self) -> dict[str, Tensor]:
        """Shape and dtype of every tensor."""
        return {name: stored.tensor for name, stored in self.stored.items()}

    def __enter__(self) -> HfSource:
        for path in {stored.file for stored in self.stored.values() if not isinstance(stored.file, BucketPath)}:
            self._files[path] = os.open(path, os.O_RDONLY)
            self._stack.callback(os.close, self._files[path])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, name: str, start: int, count: int) -> NDArray[Any]:
        """`count` elements from element `start`, as unsigned integers of the dtype's width, shape (count,).

        Raises:
            CheckpointError: the file ended early or cannot be read.
        """
        stored = self.stored[name]
        width = ITEM_BYTES[stored.tensor.dtype]
        out = np.empty(count, dtype=f"u{width}")
        position = stored.offset + start * width
        if isinstance(stored.file, BucketPath):
            memoryview(out).cast("B")[:] = stored.file.read_range(position, out.nbytes)
            return out
        try:
            whole = read_all(self._files[stored.file], [out], position)
        except OSError as error:
            raise CheckpointError(f"{stored.file} cannot be read: {error}") from error
        if not whole:
            raise CheckpointError(f"{stored.file} ended within {name}: was it changed or truncated meanwhile?")
        return out

    def equals(self, other: HfSource, name: str, other_name: str | None = None) -> bool:
        """Whether a tensor has the same bits as one of another folder; both open."""
        count, theirs = math.prod(self.headers[name].shape), other_name or name
        return all(
            np.array_equal(self.read(name, start, size), other.read(theirs, start, size))
            for start in range(0, count, PIECE)
            for size in (min(PIECE, count - start),)
        )


def read_headers(folder: Path) -> dict[str, Stored]:
    """The headers of every safetensors file that the folder's index names, or of `model.safetensors`.

    Raises:
        CheckpointError: no safetensors, a missing or truncated file, or a damaged header or index.
    """
    files = _files_of(folder)
    found: dict[str, Stored] = {}
    problems: list[str] = []
    for path, expected in files.items():
        stored = read_header(path)
        for name in stored.keys() & found.keys():
            problems.append(f"{name} is in both {found[name].file.name} and {path.name}")
        if expected is not None:
            missing = sorted(expected - stored.keys())
            problems += [f"{path.name}: the index puts {name} there, the file has none" for name in missing]
            problems += [f"{path.name}: {name} is not in the index" for name in sorted(stored.keys() - expected)]
        found |= stored
    if problems:
        raise CheckpointError(f"{folder}: index and files disagree", details=problems)
    if not found:
        raise CheckpointError(f"{folder} holds no tensors")
    return found


def _files_of(folder: Path) -> dict[Path, set[str] | None]:
    index = folder / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
            raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
        expected: dict[Path, set[str] | None] = {}
        for name, file in weight_map.items():
            path = inside(folder, file, where=index)
            names = expected.setdefault(path, set())
            if names is not None:
                names.add(name)
        missing = [f"{path.name} is missing" for path in expected if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} is incomplete: {len(missing)} of {len(expected)} files",
                details=missing,
                hint="was the download interrupted? run it again",
            )
        return expected
    if (folder / SINGLE).is_file():
        return {inside(folder, SINGLE, where=folder): None}
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        raise CheckpointError(
            f"{folder} has {shards[0]} but neither {SINGLE} nor {INDEX}",
            hint="fetch the index too: without it nobody can tell whether a file is missing",
        )
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has only pickled weights ({pickles[0]}), which can run code when they are read",
            hint="save them as safetensors: model.save_pretrained(folder, safe_serialization=True)",
        )
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}", hint="is it a Hugging Face model folder?")


def read_header(path: Path) -> dict[str, Stored]:
    """Parse and check one file's header; no byte of a tensor is read.

    Raises:
        CheckpointError: the header is damaged, or the ranges it states do not fill the file exactly.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, or no file")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is truncated or no safetensors file: header of {length} in {size} bytes")
            header = json.loads(file.read(length), object_pairs_hook=unique)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    stored = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    position = 0
    for name, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = value["data_offsets"]
        if start != position:
            raise CheckpointError(f"{path}: {name} starts at byte {start} of the data, {position} was expected")
        position = end
    if position != size - 8 - length:
        raise CheckpointError(
            f"{path} is truncated or has bytes too many: {size} bytes, its header needs {8 + length + position}",
            hint="download or copy it again",
        )
    return stored


def _entry(path: Path, name: str, value: Any, base: int) -> Stored:
    try:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: the entry of {name} is damaged: {error}") from error
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise CheckpointError(
            f"{path}: {name} has dtype {str(dtype)[:40]}, which is not known here",
            hint=f"supported: {', '.join(DTYPES)}; save the model in one of them",
        )
    # Bounded before they are multiplied: a product of a million large numbers takes for ever.
    sound = isinstance(shape, list) and len(shape) <= MAX_RANK
    sound = sound and all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, end))
    if not sound or end - start != math.prod(shape) * WIDTHS[dtype]:
        stated = f"shape {str(shape)[:200]}, bytes {str(start)[:40]} to {str(end)[:40]}"
        raise CheckpointError(f"{path}: {name} says dtype {dtype}, {stated}: impossible")
    return Stored(path, base + start, Tensor(tuple(shape), DTYPES.get(dtype, dtype)))


class HfSink:
    """A new set of safetensors files, each laid out before its bytes arrive in any order."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
        self.folder = folder
        self.stored: dict[str, Stored] = {}
        self._stack = ExitStack()
        self._files: dict[Path, int] = {}
        self._writing: dict[Path, threading.Lock] = {}
        shards = _split(tensors, max_shard_bytes)
        with ExitStack() as opened:
            opened.push(self._stack)
            for number, names in enumerate(shards, 1):
                name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                self._lay_out(folder / name, {key: tensors[key] for key in names})
            opened.pop_all()
        if len(shards) > 1:
            total = sum(tensor.bytes for tensor in tensors.values())
            weight_map = {key: stored.file.name for key, stored in sorted(self.stored.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _lay_out(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
        position = 0
        for name, tensor in tensors.items():
            end = position + tensor.bytes
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [position, end]}
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        base = 8 + len(text)
        for name, tensor in tensors.items():
            self.stored[name] = Stored(path, base + header[name]["data_offsets"][0], tensor)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._files[path] = file
        self._writing[path] = threading.Lock()  # the kernel has all but one spin
        self._stack.callback(os.close, file)
        write_all(file, [len(text).to_bytes(8, "little") + text], 0)
        os.truncate(file, base + position)

    def __enter__(self) -> HfSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def write(self, name: str, start: int, bits: NDArray[Any]) -> None:
        """Write contiguous `bits` from element `start` on. Zeros stay the hole that the file was laid out as."""
        stored = self.stored[name]
        values = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
        if not all_zeros(values):
            position = stored.offset + start * ITEM_BYTES[stored.tensor.dtype]
            with self._writing[stored.file]:
                write_all(self._files[stored.file], [values.data], position)


def _split(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Tensor names by shard, in order; a shard exceeds the limit only when one tensor does."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.bytes
    return shards
