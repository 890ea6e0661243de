"""Checkpoints stored in chunks too large to be decoded whole, as engines store them by themselves, by every command."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_bucket
import numpy as np
import pytest
from checkpoints import export, folders_differ, run, save
from conftest import Tiny
from fake_bucket import Bucket
from numpy.typing import NDArray

import oracles
from bridge.converters import chunk_streams, difference, orbax_source, transfer, unpacked
from bridge.converters.pool import run_bounded
from bridge.errors import BridgeError, CheckpointError

STORES = [(True, True), (True, False), (False, False)]  # zarr3 and zarr2 in OCDBT, zarr2 in plain files
GATE = "params.params.decoder.layers.mlp.wi_0.kernel"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int | None]]:
    """Where, and by which dimension first, each array was unpacked.

    Pieces are read one after another: arrays as small as these have too few to keep many threads at neighbours.
    """
    for module in (transfer, difference):
        monkeypatch.setattr(module, "run_bounded", lambda jobs, _: run_bounded(jobs, 1))
    seen: list[tuple[Path, int | None]] = []

    class Seen(orbax_source.Unpacked):
        def __init__(self, array: object, scratch: Path, major: int | None) -> None:
            seen.append((scratch, major))
            super().__init__(array, scratch, major)

    monkeypatch.setattr(orbax_source, "Unpacked", Seen)
    return seen


@pytest.fixture
def nothing_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no chunk fitted into memory."""
    monkeypatch.setattr(transfer.Budget, "whole_bytes", property(lambda _: 0))


@pytest.mark.usefixtures("nothing_whole")
@pytest.mark.parametrize(("ocdbt", "zarr3"), STORES)
@pytest.mark.parametrize("form", ["scanned", "unscanned", "tunix"])
def test_an_export_is_the_source(
    form: str,
    ocdbt: bool,
    zarr3: bool,
    tiny: Tiny,
    tmp_path: Path,
    made: list[tuple[Path, int | None]],
) -> None:
    source = tiny("head_dim_96", edge_values=True)
    files = oracles.read_hf(source)
    tree = oracles.tunix_tree(*files) if form == "tunix" else oracles.maxtext_tree(*files, scanned=form == "scanned")
    name = "model_params" if form == "tunix" else "items"
    save(tmp_path / "ckpt" / "7", name, tree, ocdbt=ocdbt, zarr3=zarr3)
    (tmp_path / "out").mkdir()
    result = run("export", tmp_path / "ckpt", "--to", "hf", "--out", tmp_path / "out" / "hf", "--base", source)
    assert "unpacked first" in result.stderr
    assert len(made) == len(tree)  # each array once
    assert {scratch for scratch, _ in made} == {tmp_path / "out"}
    assert {major for _, major in made} == ({None, 1} if form == "scanned" else {None})
    assert folders_differ(source, tmp_path / "out" / "hf") == []
    assert os.listdir(tmp_path / "out") == ["hf"]


@pytest.mark.usefixtures("nothing_whole")
@pytest.mark.parametrize(("ocdbt", "zarr3"), STORES)
def test_in_a_bucket(
    ocdbt: bool,
    zarr3: bool,
    bucket: Bucket,
    tiny: Tiny,
    tmp_path: Path,
    made: list[tuple[Path, int | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every chunk as a stream of requests; unpacked on this host, whether the output goes back there or not."""
    monkeypatch.setattr(unpacked, "GROUP_BYTES", 10_000)
    monkeypatch.setattr(chunk_streams, "READ_BYTES", 5_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))
    (tmp_path / "local").mkdir()
    source = tiny("head_dim_96")
    tree = oracles.maxtext_tree(*oracles.read_hf(source), scanned=True)
    save(tmp_path / "ckpt" / "7", "items", tree, ocdbt=ocdbt, zarr3=zarr3)
    address = bucket.put(tmp_path / "ckpt", "ckpt")
    assert folders_differ(source, export(address, tmp_path / "hf", "--base", source)) == []
    assert {scratch for scratch, _ in made} == {tmp_path}
    run("export", address, "--to", "hf", "--out", f"gs://{fake_bucket.NAME}/hf", "--base", source)
    assert folders_differ(source, bucket.fetch("hf", tmp_path / "fetched")) == []
    assert run("diff", address, source, "--base", source).code == 0
    assert {scratch for scratch, _ in made} == {tmp_path, tmp_path / "local"}
    assert os.listdir(tmp_path / "local") == []


def test_with_enough_memory_nothing_is_unpacked(
    tiny: Tiny, tmp_path: Path, made: list[tuple[Path, int | None]]
) -> None:
    source = tiny("head_dim_96")
    save(tmp_path / "ckpt" / "7", "items", oracles.maxtext_tree(*oracles.read_hf(source), scanned=True))
    assert folders_differ(source, export(tmp_path / "ckpt", tmp_path / "hf", "--base", source)) == []
    assert made == []


@pytest.mark.parametrize("broken", [False, True])
def test_comparisons_unpack_as_well(
    broken: bool, tiny: Tiny, tmp_path: Path, made: list[tuple[Path, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`diff` against a folder and against Tunix's layout, each large array unpacked once; one changed value shows."""
    monkeypatch.setattr(transfer.Budget, "whole_bytes", property(lambda _: 20_000))
    monkeypatch.setattr(transfer.Budget, "slab_bytes", property(lambda _: 4000))
    source = tiny("head_dim_96")
    files = oracles.read_hf(source)
    tree = oracles.maxtext_tree(*files, scanned=True)
    if broken:
        tree[GATE][3, 1, 5] += 1
    save(tmp_path / "maxtext" / "7", "items", tree)
    save(tmp_path / "tunix" / "3", "model_params", oracles.tunix_tree(*files), zarr3=False)
    ours, theirs = (
        sum(array.nbytes > 20_000 for array in each.values()) for each in (tree, oracles.tunix_tree(*files))
    )
    assert 0 < ours < len(tree)
    assert theirs > 0
    for other, arrays in ((source, ours), (tmp_path / "tunix", ours + theirs)):
        made.clear()
        result = run("diff", tmp_path / "maxtext", other, "--base", source)
        assert result.code == int(broken), result.stdout
        assert ("model.layers.1.mlp.gate_proj.weight" in result.stdout) == broken
        assert len(made) == arrays
        assert {scratch.name for scratch, _ in made} <= {"maxtext", "tunix", "7", "3"}


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_no_more_than_two_arrays_are_there_at_any_time(
    workers: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is being unpacked, too, and while others still read; every value is the stored one."""
    source = tiny("head_dim_96")
    tree = oracles.maxtext_tree(*oracles.read_hf(source), scanned=True)
    opened = orbax_source.TreeSource(save(tmp_path / "ckpt" / "7", "items", tree))
    alive: set[orbax_source.Unpacked] = set()
    most = []

    class Counted(orbax_source.Unpacked):
        def __init__(self, array: object, scratch: Path, major: int | None) -> None:
            alive.add(self)
            most.append(len(alive))
            super().__init__(array, scratch, major)

        def close(self) -> None:
            super().close()
            alive.remove(self)

        def read(self, region: Sequence[slice]) -> NDArray[Any]:
            time.sleep(0.001)
            return super().read(region)

    monkeypatch.setattr(orbax_source, "Unpacked", Counted)
    for path in opened.leaves:
        opened.unpack(path)
    different = []

    def read(path: tuple[str, ...], index: int) -> None:
        wanted = tree[".".join(path)]
        region = (slice(index, index + 8), *(slice(None) for _ in wanted.shape[1:]))
        if opened.read(path, region).tobytes() != np.ascontiguousarray(wanted[region]).tobytes():
            different.append(path)

    jobs = [
        functools.partial(read, path, index)
        for path, leaf in opened.leaves.items()
        for index in range(0, leaf.tensor.shape[0], 8)
    ]
    run_bounded(jobs, workers)
    assert different == []
    assert len(most) >= len(tree)
    assert max(most) == 2
    assert opened.scratch_bytes == sum(sorted(array.nbytes for array in tree.values())[-2:])


def test_a_third_array_waits_for_those_that_are_read(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = oracles.maxtext_tree(*oracles.read_hf(tiny("head_dim_96")), scanned=True)
    opened = orbax_source.TreeSource(save(tmp_path / "ckpt" / "7", "items", tree))
    go, both = threading.Event(), threading.Barrier(3)

    class Slow(orbax_source.Unpacked):
        def read(self, region: Sequence[slice]) -> NDArray[Any]:
            if not go.is_set():
                both.wait(30)
                go.wait(30)
            return super().read(region)

    monkeypatch.setattr(orbax_source, "Unpacked", Slow)
    paths = list(opened.leaves)[:3]
    for path in paths:
        opened.unpack(path)
    regions = [tuple(slice(None) for _ in opened.leaves[path].tensor.shape) for path in paths]
    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(opened.read, *each) for each in zip(paths[:2], regions, strict=False)]
        both.wait(30)
        third = pool.submit(opened.read, paths[2], regions[2])
        with pytest.raises(TimeoutError):
            third.result(0.5)
        go.set()
        values = [future.result(30) for future in (*reading, third)]
    for path, each in zip(paths, values, strict=True):
        assert each.tobytes() == tree[".".join(path)].tobytes()


@pytest.mark.usefixtures("nothing_whole")
def test_damage_is_named_and_nothing_stays(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("head_dim_96")
    tree = oracles.maxtext_tree(*oracles.read_hf(source), scanned=True)
    item = save(tmp_path / "ckpt" / "7", "items", tree, ocdbt=False, zarr3=False)
    chunk = item / GATE / "0.0.0"
    os.truncate(chunk, chunk.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="cannot be read") as found:
        export(tmp_path / "ckpt", tmp_path / "out" / "hf", "--base", source)
    assert GATE in str(found.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nothing_whole")
def test_a_disk_that_fills_up_is_not_taken_for_damage(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny("head_dim_96")
    save(tmp_path / "ckpt" / "7", "items", oracles.maxtext_tree(*oracles.read_hf(source), scanned=True))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(unpacked, "write_all", full)
    with pytest.raises(CheckpointError, match=r"cannot be unpacked in .*: No space left") as found:
        export(tmp_path / "ckpt", tmp_path / "out" / "hf", "--base", source)
    assert "make room" in str(found.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nothing_whole")
def test_room_is_asked_for_before_anything_is_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny("head_dim_96")
    tree = oracles.maxtext_tree(*oracles.read_hf(source), scanned=True)
    save(tmp_path / "ckpt" / "7", "items", tree)
    largest = sum(sorted(array.nbytes for array in tree.values())[-2:])
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    usage = shutil.disk_usage(tmp_path)._replace(free=total + largest // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(BridgeError, match=r"needs .* GB, its disk has"):
        export(tmp_path / "ckpt", tmp_path / "hf", "--base", source)
    assert not (tmp_path / "hf").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(CheckpointError, match=r"unpacked in .*: that needs .* GB are free"):
        run("diff", tmp_path / "ckpt", source, "--base", source)
