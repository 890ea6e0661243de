"""Arrays written in place: every element in one chunk, and files that TensorStore and a reader by hand understand."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
from llama_shapes import LLAMA_405B
from numpy.typing import NDArray

from bridge.converters import ranges, slabs
from bridge.converters.layout import axes_of
from bridge.converters.orbax_store import TreeSink
from bridge.converters.plan import Move, make_plan, tables
from bridge.converters.ranges import read_all, write_all
from bridge.converters.shard_reader import ShardReader
from bridge.converters.slabs import BLOCK_BYTES, CHUNK_ELEMENTS, STORED_BYTES, Tiling, tile, unit_elements
from bridge.errors import CheckpointError
from bridge.model_spec import ModelSpec

FACTS: dict[str, Any] = {"rope_theta": 5e5, "rope_scaling": None, "norm_eps": 1e-5, "context": 64, "dtype": "float32"}
SMALL = ModelSpec(3, 32, 6, 3, 8, 50, 101, False, **FACTS)
ODD = ModelSpec(2, 2048, 32, 8, 64, 8192, 128257, False, **FACTS)


def plans(model: ModelSpec) -> list[Move]:
    return [
        move
        for table in tables().values()
        for scanned in (True, False)
        for move in make_plan(table, model, scanned)
        if move.hf[0].count("layers") == 0 or ".0." in move.hf[0]
    ]


@pytest.mark.parametrize("model", [SMALL, LLAMA_405B, ODD], ids=["small", "405b", "one token more"])
def test_a_block_fits_the_cache_and_falls_into_a_share_for_each_device(model: ModelSpec) -> None:
    for move in plans(model):
        tiling, unit = tile(move, axes_of(model), 2), unit_elements(move, axes_of(model))
        assert all(side <= size for side, size in zip(tiling.inner, move.engine_shape, strict=True))
        block = tiling.parts * math.prod(tiling.inner)
        assert block == unit * tiling.units
        assert block * 2 <= max(STORED_BYTES, unit * 2), move.name
        assert unit * tiling.step * 2 <= max(BLOCK_BYTES, unit * 2), move.name
        embed = next((i for i, group in enumerate(move.rule.engine_groups) if group == ("embed",)), None)
        if embed is not None and math.prod(tiling.inner) > CHUNK_ELEMENTS and model is LLAMA_405B:
            assert tiling.inner[embed] <= model.embed // 16, f"{move.name}: 16 devices decode more than their share"


@pytest.mark.parametrize("block_bytes", [1, 300, 3000, 1 << 20])
def test_every_element_lies_in_one_chunk(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(slabs, "CHUNK_ELEMENTS", 8)
    for move in plans(SMALL):
        tiling = tile(move, axes_of(SMALL), 4)
        seen = np.zeros(tiling.shard, np.int32)
        for layer, block, part in itertools.product(range(len(move.hf)), range(tiling.blocks), range(tiling.parts)):
            at = tiling.place(layer, block, part)
            seen[tuple(slice(i * side, (i + 1) * side) for i, side in zip(at, tiling.inner, strict=True))] += 1
        assert (seen == 1).all(), move.name


TILING = Tiling(shape=(4, 3, 10), inner=(2, 1, 4), units=4, step=2, parts=2, cut_dim=2, layer_dim=1, embed_dim=0)


def write(folder: Path, values: NDArray[Any]) -> Path:
    """(4, 3, 10) values through the writer, blocks in an order of their own; the shard's file."""
    sink = TreeSink(folder, "items")
    writer = sink.lay_out(("a", "b"), TILING, values.dtype.name)
    for layer, block in [(1, 2), (0, 0), (2, 1), (2, 2), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0)]:
        part = values[:, layer, block * 4 : block * 4 + 4]
        whole = np.zeros((2, 2, 4), values.dtype)
        whole[..., : part.shape[1]] = part.reshape(2, 2, -1)
        writer.write(layer, block, whole)
    return folder / "items" / "a.b" / "c" / "0" / "0" / "0"


def opened(file: Path) -> Any:
    store = {"driver": "file", "path": f"{file.parents[3]}/"}
    return tensorstore.open({"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False}).result()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensorstore_reads_what_was_written_in_place(dtype: str, tmp_path: Path) -> None:
    values = np.arange(120).reshape(4, 3, 10).astype(dtype)
    array = opened(write(tmp_path / "0", values))
    assert array.shape == (4, 3, 10)
    assert np.array_equal(array.read().result(), values)
    assert array.chunk_layout.read_chunk.shape == (2, 1, 4)


def test_the_file_is_the_format_read_by_hand(tmp_path: Path) -> None:
    """Index at the end, (offset, bytes) little-endian in the order of the chunks, each chunk and the index with its
    crc32c (polynomial 0x82F63B78, reflected)."""

    def crc32c(data: bytes) -> int:
        register = 0xFFFFFFFF
        for byte in data:
            register ^= byte
            for _ in range(8):
                register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
        return register ^ 0xFFFFFFFF

    values = np.arange(120, dtype="<f4").reshape(4, 3, 10)
    file = write(tmp_path / "0", values)
    data, counts = file.read_bytes(), (2, 3, 3)
    index = data[-math.prod(counts) * 16 - 4 : -4]
    assert crc32c(index) == int.from_bytes(data[-4:], "little")
    padded = np.zeros((4, 3, 12), "<f4")
    padded[:, :, :10] = values
    for number, (i, j, k) in enumerate(np.ndindex(*counts)):
        offset, size = struct.unpack_from("<QQ", index, number * 16)
        assert (offset, size) == (number * 36, 36), "a share along the first axis lies in one piece"
        chunk = data[offset : offset + size]
        assert crc32c(chunk[:-4]) == int.from_bytes(chunk[-4:], "little")
        assert chunk[:-4] == padded[2 * i : 2 * i + 2, j : j + 1, 4 * k : 4 * k + 4].tobytes()
    metadata = json.loads((file.parents[3] / "zarr.json").read_text())
    assert metadata["shape"] == [4, 3, 10]


def test_any_flipped_bit_is_found_by_tensorstore(tmp_path: Path) -> None:
    values = np.arange(120, dtype="float32").reshape(4, 3, 10)
    file = write(tmp_path / "0", values)
    whole = file.read_bytes()
    for position in range(0, len(whole), 7):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises((ValueError, IndexError, RuntimeError), match=r"[Cc][Rr][Cc]|checksum|digest|nvalid"):
            opened(file).read().result()
    file.write_bytes(whole)
    assert np.array_equal(opened(file).read().result(), values)


def test_an_array_that_lacks_a_block_is_no_array(tmp_path: Path) -> None:
    sink = TreeSink(tmp_path / "0", "items")
    writer = sink.lay_out(("a", "b"), TILING, "float32")
    writer.write(0, 0, np.zeros((2, 2, 4), "float32"))
    writer.close()
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        opened(tmp_path / "0" / "items" / "a.b" / "c" / "0" / "0" / "0").read().result()


def test_a_short_write_is_taken_up_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev

    def short(file: int, buffers: list[memoryview], position: int, flags: int = 0) -> int:
        return pwritev(file, [buffers[0][:3]] if len(buffers[0]) > 3 else buffers[:1], position, flags)

    monkeypatch.setattr(os, "pwritev", short)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(file, [b"0123456789", b"", b"abcd", np.array([1, 2], "<u2")], 2)
    os.close(file)
    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789abcd" + b"\1\0\2\0"


@pytest.mark.parametrize(
    ("system", "release", "uncached"),
    [
        ("Linux", "6.18.44-generic", True),
        ("Linux", "6.16.0", True),
        ("Linux", "7.0-rc1", True),
        ("Linux", "6.15.9", False),
        ("Linux", "6.8.0-1021-gcp", False),
        ("Linux", "unknown", False),
        ("Darwin", "24.3.0", False),
    ],
)
def test_pages_are_dropped_where_that_is_sound(system: str, release: str, uncached: bool) -> None:
    assert bool(ranges._uncached(system, release)) == uncached


def test_a_file_system_that_knows_no_uncached_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it answers; any other fault stays a fault."""
    answer = errno.EOPNOTSUPP
    monkeypatch.setattr(ranges, "UNCACHED", 0x80)
    for name in ("preadv", "pwritev"):
        original = getattr(os, name)

        def old(*args: Any, original: Any = original) -> Any:
            if len(args) > 3:
                raise OSError(answer, os.strerror(answer))
            return original(*args)

        monkeypatch.setattr(os, name, old)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    data = np.random.default_rng(0).integers(0, 256, 700_001, np.uint8)
    write_all(file, [data[:3], data[3:]], 5)
    parts = [np.empty(size, np.uint8) for size in (700_000, 1)]
    assert read_all(file, parts, 5)
    assert np.array_equal(np.concatenate(parts), data)
    assert not read_all(file, parts, 6), "one byte less than that"
    answer = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        read_all(file, parts, 5)
    with pytest.raises(OSError, match="Input/output error"):
        write_all(file, parts, 5)
    os.close(file)


def test_zeros_are_holes_that_read_as_zeros(tmp_path: Path) -> None:
    tiling = Tiling((64, 1 << 16), (32, 1 << 16), 1 << 16, 1 << 16, 2, 1, None, 0)
    sink = TreeSink(tmp_path / "0", "items")
    for name, value in (("zero", 0.0), ("minus zero", -0.0)):
        writer = sink.lay_out((name,), tiling, "float32")
        writer.write(0, 0, np.full((2, 32, 1 << 16), value, "float32"))
    zero, minus = (tmp_path / "0" / "items" / name / "c" / "0" / "0" for name in ("zero", "minus zero"))
    store = {"driver": "file", "path": f"{zero.parents[2]}/"}
    found = tensorstore.open({"driver": "zarr3", "kvstore": store}).result().read().result()
    assert not np.signbit(found).any()
    assert not found.any()
    assert zero.stat().st_size == minus.stat().st_size
    assert zero.stat().st_blocks * 512 < 64 << 10
    assert minus.stat().st_blocks * 512 > 15 << 20, "minus zero has a bit set"


def test_blocks_are_read_as_they_were_written(tmp_path: Path) -> None:
    values = np.arange(120, dtype="float32").reshape(4, 3, 10)
    file = write(tmp_path / "0", values)
    reader = ShardReader(file, "a.b", TILING, 4)
    for layer, block in itertools.product(range(3), range(3)):
        count = min(4, 10 - 4 * block)
        found = reader.read(layer, block).view("float32").reshape(4, 4)
        assert np.array_equal(found[:, :count], values[:, layer, 4 * block : 4 * block + count])
    # A file whose chunks lie in another order is as good: TensorStore writes them as they come.
    array = opened(file)
    array[...].write(values + 1).result()
    again = ShardReader(file, "a.b", TILING, 4)
    assert np.array_equal(again.read(1, 1).view("float32").reshape(4, 4), values[:, 1, 4:8] + 1)


def read_every_block(file: Path) -> None:
    for layer, block in itertools.product(range(3), range(3)):
        ShardReader(file, "a.b", TILING, 4).read(layer, block)


def test_any_flipped_bit_is_found_by_the_reader(tmp_path: Path) -> None:
    file = write(tmp_path / "0", np.arange(120, dtype="float32").reshape(4, 3, 10))
    whole = file.read_bytes()
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_every_block(file)
    for end in (0, 3, 100, len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match="cannot be read"):
            ShardReader(file, "a.b", TILING, 4)
