"""Arrays unpacked by streams against what TensorStore decodes, for every way that engines store chunks."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from bridge.converters import chunk_streams, unpacked
from bridge.converters.chunk_streams import encoding_of
from bridge.converters.unpacked import Unpacked

SHAPE = (10, 3, 14)
ZSTD2 = {"compressor": {"id": "zstd", "level": 1}}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD3 = [LITTLE, {"name": "zstd", "configuration": {"level": 3}}]


def v2(chunk: tuple[int, ...], dtype: str = "<f4", **more: Any) -> dict[str, Any]:
    return {"driver": "zarr", "metadata": {"shape": SHAPE, "chunks": chunk, "dtype": dtype, **ZSTD2, **more}}


def v3(chunk: tuple[int, ...], codecs: list[dict[str, Any]], dtype: str = "float32") -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    return {
        "driver": "zarr3",
        "metadata": {"shape": SHAPE, "data_type": dtype, "chunk_grid": grid, "codecs": codecs},
    }


def sharded(inner: tuple[int, ...], codecs: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    settings = {"chunk_shape": inner, "codecs": codecs, "index_codecs": [LITTLE, {"name": "crc32c"}], **more}
    return [{"name": "sharding_indexed", "configuration": settings}]


STORED = {
    "v2 zstd": v2(SHAPE),
    "v2 zstd in parts": v2((4, 3, 14)),
    "v2 zstd in parts of the last": v2((10, 2, 5)),
    "v2 plain": v2((4, 3, 14), compressor=None),
    "v2 bfloat16": v2((4, 3, 14), "bfloat16"),
    "v2 folders": v2((4, 3, 14), dimension_separator="/"),
    "v3 zstd": v3(SHAPE, ZSTD3),
    "v3 plain bfloat16": v3((4, 3, 14), [LITTLE], "bfloat16"),
    "v3 sharded": v3(SHAPE, sharded(SHAPE, ZSTD3)),
    "v3 sharded in parts": v3((8, 3, 14), sharded((4, 3, 7), ZSTD3)),
    "v3 sharded plain float16": v3((8, 3, 14), sharded((4, 1, 14), [LITTLE]), "float16"),
}
OTHERS = {
    "blosc": v2(SHAPE, compressor={"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}),
    "by columns": v2(SHAPE, order="F"),
    "integers": v2(SHAPE, "<i4"),
    "big end": v2(SHAPE, ">f4"),
    "transposed": v3(SHAPE, [{"name": "transpose", "configuration": {"order": [2, 1, 0]}}, *ZSTD3]),
    "gzip": v3(SHAPE, [LITTLE, {"name": "gzip", "configuration": {"level": 1}}]),
    "index before": v3(SHAPE, sharded(SHAPE, ZSTD3, index_location="start")),
    "checked": v3(SHAPE, [LITTLE, {"name": "crc32c"}]),
}


def store(folder: Path, spec: dict[str, Any], ocdbt: bool = False) -> Any:
    base = {"driver": "file", "path": f"{folder}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": "a.b/"} if ocdbt else base
    return ts.open({**spec, "kvstore": kvstore}, create=True).result()


def values_for(array: Any) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(array.dtype.numpy_dtype)
    array[...].write(values).result()
    return values


EVERYTHING = tuple(slice(None) for _ in SHAPE)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every chunk were too large to be decoded at once."""
    monkeypatch.setattr(unpacked, "GROUP_BYTES", 60)


@pytest.mark.parametrize("group", [50, 120, 500])  # of float32: less than a layer of a row, two of them, two rows
@pytest.mark.parametrize("major", [None, 0, 1, 2])
@pytest.mark.parametrize("ocdbt", [False, True])
@pytest.mark.parametrize("name", STORED)
def test_every_region_is_what_was_stored(
    name: str, ocdbt: bool, major: int | None, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacked, "GROUP_BYTES", group)
    monkeypatch.setattr(chunk_streams, "READ_BYTES", 64)
    array = store(tmp_path, STORED[name], ocdbt)
    values = values_for(array)
    assert encoding_of(array) is not None
    found = Unpacked(array, tmp_path, major)
    for region in (
        EVERYTHING,
        (slice(0, 10), slice(1, 2), slice(0, 14)),
        (slice(0, 10), slice(1, 3), slice(3, 9)),
        (slice(3, 9), slice(0, 3), slice(0, 14)),
        (slice(5, 6), slice(2, 3), slice(13, 14)),
        (slice(2, 5), slice(0, 1), slice(4, 8)),
    ):
        read = found.read(region)
        assert read.dtype == values.dtype
        assert read.tobytes() == np.ascontiguousarray(values[region]).tobytes()


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_streamed_is_left_to_tensorstore(name: str, tmp_path: Path) -> None:
    assert encoding_of(store(tmp_path, OTHERS[name])) is None


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("name", ["v2 zstd in parts", "v3 sharded in parts"])
def test_a_chunk_that_is_not_stored_has_the_fill_value(name: str, tmp_path: Path) -> None:
    spec = {**STORED[name], "metadata": {**STORED[name]["metadata"], "fill_value": 2.5}}
    array = store(tmp_path, spec)
    array[:4].write(np.ones((4, 3, 14), np.float32)).result()
    wanted = np.full(SHAPE, 2.5, np.float32)
    wanted[:4] = 1
    assert (Unpacked(array, tmp_path, 1).read(EVERYTHING) == wanted).all()


@pytest.mark.usefixtures("streams")
def test_a_chunk_that_must_be_there_is_an_error(tmp_path: Path) -> None:
    array = store(tmp_path, STORED["v2 zstd in parts"])
    array[:4].write(np.ones((4, 3, 14), np.float32)).result()
    array = ts.open({**array.spec().to_json(), "fill_missing_data_reads": False}).result()
    with pytest.raises(ValueError, match=r"0\.0|1\.0"):
        Unpacked(array, tmp_path, 1)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("where", [0.02, 0.5, 0.98])
@pytest.mark.parametrize("name", ["v2 zstd", "v3 sharded"])
def test_flipped_and_missing_bytes(name: str, where: float, tmp_path: Path) -> None:
    """As TensorStore: what it refuses of these is refused; what no checksum covers reads as it does there."""
    array = store(tmp_path, STORED[name])
    values_for(array)
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in (".zarray", "zarr.json")]
    whole = file.read_bytes()
    at = int(len(whole) * where)
    for broken in (whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :], whole[:at]):
        file.write_bytes(broken)
        reopened = ts.open({**STORED[name], "kvstore": {"driver": "file", "path": f"{tmp_path}/"}}).result()
        try:
            wanted = reopened[...].read().result()
        except ValueError:
            with pytest.raises(ValueError, match=r"rame|damaged|early|longer|zstd|size"):
                Unpacked(reopened, tmp_path, 1)
        else:
            assert Unpacked(reopened, tmp_path, 1).read(EVERYTHING).tobytes() == wanted.tobytes()


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("size", [1679, 1681])
def test_a_chunk_of_another_size_is_refused(size: int, tmp_path: Path) -> None:
    array = store(tmp_path, v2(SHAPE, compressor=None))
    values_for(array)
    (tmp_path / "0.0.0").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=r"ends early|longer"):
        Unpacked(array, tmp_path, 1)


@pytest.mark.parametrize("group", [1, 700, 1200, 1 << 20])  # a chunk at once; two; the layers' too; all
@pytest.mark.parametrize("major", [None, 1, 2])
@pytest.mark.parametrize("name", ["small", "uneven", *OTHERS])
def test_small_chunks_and_other_codecs_are_decoded_by_tensorstore(
    name: str, major: int | None, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacked, "GROUP_BYTES", group)
    spec = {"small": v2((5, 1, 14)), "uneven": v2((4, 2, 5)), **OTHERS}[name]
    array = store(tmp_path, spec)
    values = values_for(array)
    found = Unpacked(array, tmp_path, major)
    assert os.fstat(found._file.fileno()).st_size == unpacked.file_bytes(
        SHAPE, array.chunk_layout.read_chunk.shape, values.dtype.itemsize
    )
    for region in (EVERYTHING, (slice(3, 9), slice(1, 2), slice(0, 14)), (slice(0, 10), slice(0, 3), slice(4, 11))):
        assert found.read(region).tobytes() == np.ascontiguousarray(values[region]).tobytes()


@pytest.mark.parametrize(
    ("group", "box"), [(1, (5, 1, 14)), (700, (5, 2, 14)), (1200, (5, 3, 14)), (1 << 20, (10, 3, 14))]
)
def test_neighbours_are_decoded_together(group: int, box: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked, "GROUP_BYTES", group)
    assert unpacked._box(SHAPE, (5, 1, 14), 4) == box


def test_nothing_is_left_where_it_was_unpacked(tmp_path: Path) -> None:
    array = store(tmp_path / "stored", STORED["v2 zstd"])
    values_for(array)
    (tmp_path / "scratch").mkdir()
    found = Unpacked(array, tmp_path / "scratch", 1)
    assert os.listdir(tmp_path / "scratch") == []
    before = len(os.listdir("/proc/self/fd"))
    found.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_runs_are_what_lies_together() -> None:
    shape = (3, 4, 5)
    indices = np.arange(60).reshape(shape)
    for bounds in itertools.product(
        [range(3), range(1, 2)], [range(4), range(1, 3)], [range(5), range(2, 3), range(1, 4)]
    ):
        count, positions = unpacked._runs(shape, bounds)
        found = [position + k for position in positions.tolist() for k in range(count)]
        assert found == indices[tuple(slice(b.start, b.stop) for b in bounds)].reshape(-1).tolist()
    for outer, wanted in ((range(3), (60, [0])), (range(1, 3), (40, [20]))):
        count, positions = unpacked._runs(shape, [outer, range(4), range(5)])
        assert (count, positions.tolist()) == wanted
