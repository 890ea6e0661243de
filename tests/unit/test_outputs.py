"""Output folders are all or nothing, whatever stops a run, and two runs keep apart."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bridge import flushing, outputs
from bridge.errors import OutputError
from bridge.outputs import new_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_final_name_appears_when_all_is_written(tmp_path: Path) -> None:
    final = tmp_path / "a" / "b"
    with new_folder(final) as folder:
        (folder / "x").write_text("1")
        assert not final.exists()
    assert names(final) == ["x"]
    assert names(final.parent) == ["b"]


def stopped_half_way(final: Path, error: BaseException) -> None:
    with new_folder(final) as folder:
        (folder / "half").write_text("1")
        raise error


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        stopped_half_way(tmp_path / "out", error)
    assert names(tmp_path) in ([], [".out.bridge-lock"])
    with new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").is_dir()


def test_what_exists_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "new").touch()
    assert names(tmp_path / "out") == ["new"], "an empty folder is no output"
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("out", "file", "link"):
        with pytest.raises(OutputError, match="exists") as found, new_folder(tmp_path / name):
            pytest.fail("the block must not begin")
        assert "--overwrite" in str(found.value)


def test_overwrite_replaces_once_the_new_one_is_complete(tmp_path: Path) -> None:
    final = tmp_path / "out"
    final.mkdir()
    (final / "old").touch()
    with pytest.raises(RuntimeError), new_folder(final, overwrite=True):
        raise RuntimeError
    assert names(final) == ["old"]
    with new_folder(final, overwrite=True) as folder:
        (folder / "new").touch()
        assert names(final) == ["old"]
    assert names(final) == ["new"]
    assert names(tmp_path) == ["out"]


def test_overwrite_of_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    (tmp_path / "out").symlink_to(target)
    with new_folder(tmp_path / "out", overwrite=True) as folder:
        (folder / "new").touch()
    assert names(target) == ["kept"]
    assert names(tmp_path / "out") == ["new"]


def test_a_failed_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "out"
    final.mkdir()
    (final / "old").touch()
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if outputs.TEMPORARY in Path(source).name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OutputError, match="Input/output error"), new_folder(final, overwrite=True):
        pass
    assert names(final) == ["old"]


def test_everything_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        assert (tmp_path / "out").exists() == (flushed[-1] == tmp_path.name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    with new_folder(tmp_path / "out") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
    assert {"file", "deep", folder.name, tmp_path.name} == set(flushed)
    assert flushed[-1] == tmp_path.name, "the folder that holds the name comes last"


def test_what_a_killed_run_left_is_removed_and_only_that(tmp_path: Path) -> None:
    body = f"""
import os, signal, sys
from pathlib import Path
from bridge.outputs import new_folder
with new_folder(Path({str(tmp_path / "o[u]t")!r})) as folder:
    (folder / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", body], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    left = [name for name in names(tmp_path) if outputs.TEMPORARY in name]
    assert len(left) == 1
    assert not (tmp_path / "o[u]t").exists()
    (tmp_path / f".out{outputs.TEMPORARY}1").mkdir()
    with new_folder(tmp_path / "o[u]t") as folder:
        (folder / "whole").touch()
    assert names(tmp_path) == [f".out{outputs.TEMPORARY}1", "o[u]t"]
    assert names(tmp_path / "o[u]t") == ["whole"]


def test_a_run_killed_between_its_two_renames_is_undone(tmp_path: Path) -> None:
    aside = tmp_path / f".out{outputs.ASIDE}12345678"
    aside.mkdir()
    (aside / "old").touch()
    with pytest.raises(OutputError, match="exists"), new_folder(tmp_path / "out"):
        pytest.fail("the block must not begin")
    assert names(tmp_path / "out") == ["old"]


def test_two_runs_keep_apart(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as folder:
        (folder / "first").touch()
        with pytest.raises(OutputError, match="being written by another process"), new_folder(tmp_path / "out"):
            pytest.fail("the block must not begin")
        with new_folder(tmp_path / "other"):
            pass
    assert names(tmp_path / "out") == ["first"]
    assert names(tmp_path) == ["other", "out"]


def test_space_is_checked_first(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"needs .* GB, its disk has"),
        new_folder(tmp_path / "out", needs_bytes=1 << 60),
    ):
        pytest.fail("the block must not begin")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "x"), "nothing was left behind"),
        (ValueError(f"RESOURCE_EXHAUSTED: {os.strerror(errno.ENOSPC)} [source ...]"), "nothing was left behind"),
        (OSError(errno.EACCES, "Permission denied"), "that you may write to"),
        (OSError(errno.EFBIG, "File too large"), "File too large"),
    ],
)
def test_a_write_that_fails_is_explained_and_leaves_nothing(error: Exception, message: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written") as found:
        stopped_half_way(tmp_path / "out", error)
    assert message in str(found.value)
    assert not [name for name in names(tmp_path) if "lock" not in name]


def test_another_error_keeps_its_type(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="something else"), new_folder(tmp_path / "out"):
        raise ValueError("something else")


def test_a_parent_that_is_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"), new_folder(tmp_path / "file" / "out"):
        pytest.fail("the block must not begin")


def test_a_write_that_fails_on_its_way_to_the_disk_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports it once, here to the flush that runs beside the work; the fsync at the end sees nothing."""
    asked = threading.Event()

    def failing(_: int) -> None:
        asked.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def work() -> None:
        with new_folder(tmp_path / "out") as out:
            (out / "file").write_text("bytes")
            assert asked.wait(10)

    monkeypatch.setattr(os, "fdatasync", failing)
    monkeypatch.setattr(flushing, "SECONDS", 0.001)
    with pytest.raises(OutputError, match="out cannot be written: Input/output error"):
        work()
    assert list(tmp_path.iterdir()) == []
