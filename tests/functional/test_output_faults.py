"""What stops a write, other than a kill: outputs are whole or absent, nothing earlier is harmed, errors are clear."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoints
import fault_models
import pytest

from bridge import outputs
from bridge.errors import CheckpointError, OutputError

JOBS = ("convert-maxtext", "convert-tunix", "export-maxtext", "export-tunix")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_models.write_model(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def converted(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("converted")
    return {engine: checkpoints.convert(hf, folder / engine, engine=engine).parent for engine in ("maxtext", "tunix")}


Job = Callable[..., None]


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, hf: Path, converted: dict[str, Path]) -> Job:
    """`job(out, *options)`: a conversion or an export into `out`."""
    verb, engine = request.param.split("-")
    source, to = (hf, engine) if verb == "convert" else (converted[engine], "hf")

    def start(out: Path, *options: object) -> None:
        checkpoints.run(verb, source, "--to", to, "--out", out, *options)

    return start


@contextmanager
def mounted(*options: str) -> Iterator[Path]:
    """A small file system in memory; the test is skipped where this user may not mount one."""
    with tempfile.TemporaryDirectory() as name:
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", name]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount a tmpfs")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", name], check=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check of free space pass, so that the disk fills up in the middle of the work."""
    usage = shutil.disk_usage("/")._replace(free=1 << 50)
    monkeypatch.setattr(outputs.shutil, "disk_usage", lambda _: usage)


def test_a_disk_that_is_too_small_is_refused_before_any_work(job: Job) -> None:
    with mounted("size=100k") as disk:
        with pytest.raises(OutputError, match=r"out needs .* GB, its disk has 0.00 GB free"):
            job(disk / "out")
        assert names(disk) == []


def test_a_disk_that_fills_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy(monkeypatch)
    with mounted("size=200k") as disk:
        with pytest.raises(OutputError, match="out cannot be written: No space left on device") as found:
            job(disk / "out")
        assert "nothing was left behind" in str(found.value)
        assert names(disk) == []


def test_a_disk_that_fills_up_does_not_harm_what_was_there(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy(monkeypatch)
    with mounted("size=200k") as disk:
        (disk / "out").mkdir()
        (disk / "out" / "precious").write_text("weeks")
        with pytest.raises(OutputError, match="No space left on device"):
            job(disk / "out", "--overwrite")
        assert (disk / "out" / "precious").read_text() == "weeks"
        assert names(disk) == ["out"]


def test_a_file_that_may_not_grow(job: Job, tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
    try:
        with pytest.raises(OutputError, match="out cannot be written: File too large"):
            job(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert names(tmp_path) == []


def test_a_read_only_disk(job: Job) -> None:
    with mounted("ro") as disk, pytest.raises(OutputError, match="Read-only file system") as found:
        job(disk / "a" / "out")
    assert "--out" in str(found.value)


def test_a_file_where_a_folder_should_be(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match=r"out cannot be written: .*file is a file, not a folder"):
        job(tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_a_system_call_that_fails(call: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mkdir` fails within the temporary folder, `rename` at the end, `fsync` of the first file."""
    original = getattr(os, call)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if call != "mkdir" or outputs.TEMPORARY in str(Path(args[0]).parent):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*args, **kwargs)

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("weeks")
    monkeypatch.setattr(os, call, failing)
    if call == "mkdir" and "export" in os.environ["PYTEST_CURRENT_TEST"]:
        monkeypatch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(OutputError, match="out cannot be written: Input/output error"):
        job(tmp_path / "out", "--overwrite")
    monkeypatch.undo()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "precious").read_text() == "weeks"


def test_folders_made_for_an_output_that_failed_are_removed(hf: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(hf, tmp_path / "hf")
    arrays = fault_models.arrays_of(hf)
    arrays["model.norm.weight"] = arrays["model.norm.weight"] * float("nan")
    fault_models.write_tensors(broken, arrays)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has NaN or Inf"):
        checkpoints.convert(broken, tmp_path / "a" / "b" / "out", "--check")
    assert names(tmp_path) == ["hf"]


def test_an_output_may_not_replace_its_source(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shutil.copytree(hf, tmp_path / "models" / "tiny")
    (tmp_path / "link").symlink_to(tmp_path / "models")
    for out in (model, tmp_path / "models", tmp_path / "link"):
        with pytest.raises(OutputError, match="holds what is read"):
            checkpoints.convert(model, out, "--overwrite")
    step = checkpoints.convert(model, tmp_path / "run")
    for out in (tmp_path / "run", step, tmp_path / "run" / "hf"):
        with pytest.raises(OutputError, match="holds what is read"):
            checkpoints.export(step, out, "--overwrite")
    elsewhere = tmp_path / "here" / "below"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    for relative in (".", ".."):
        with pytest.raises(OutputError, match="is the current folder, or holds it"):
            checkpoints.convert(model, Path(relative), "--overwrite")
    with pytest.raises(OutputError, match="cannot be an output"):
        checkpoints.convert(model, Path("/"), "--overwrite")
    assert fault_models.arrays_of(model).keys() == fault_models.arrays_of(hf).keys()
    assert (step / "items" / "_METADATA").is_file()


def test_what_someone_else_made_meanwhile_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def work() -> None:
        with outputs.new_folder(out) as folder:
            (folder / "new").touch()
            out.mkdir()
            (out / "theirs").touch()

    with pytest.raises(OutputError, match="was made by someone else meanwhile"):
        work()
    assert names(out) == ["theirs"]
    assert names(tmp_path) == ["out"]


def test_an_empty_folder_made_since_a_kill_does_not_cost_what_was_moved_aside(tmp_path: Path) -> None:
    aside = tmp_path / f".out{outputs.ASIDE}12345678"
    aside.mkdir()
    (aside / "precious").touch()
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists"), outputs.new_folder(tmp_path / "out"):
        pytest.fail("the block must not begin")
    assert names(tmp_path / "out") == ["precious"]
    assert names(tmp_path) == ["out"]


def test_leftovers_beside_a_finished_output_are_cleaned_by_the_next_run(tmp_path: Path) -> None:
    for mark in (outputs.ASIDE, outputs.TEMPORARY):
        (tmp_path / f".out{mark}1").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "whole").touch()
    with pytest.raises(OutputError, match="exists"), outputs.new_folder(tmp_path / "out"):
        pytest.fail("the block must not begin")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["whole"]


@pytest.mark.parametrize("verb", ["export", "inspect"])
def test_a_leftover_is_never_taken_for_a_checkpoint(verb: str, converted: dict[str, Path], tmp_path: Path) -> None:
    left = tmp_path / f".ck{outputs.TEMPORARY}0123abcd"
    shutil.copytree(converted["maxtext"], left)
    options = ["--out", tmp_path / "x"] if verb == "export" else []
    for path in (left, left / "0", left / "0" / "items"):
        with pytest.raises(CheckpointError, match="was never finished"):
            checkpoints.run(verb, path, *options)
    if verb == "export":
        with pytest.raises(CheckpointError, match="is not a folder") as found:
            checkpoints.run(verb, tmp_path / "ck", *options)
        assert f"{left.name} was never finished" in str(found.value)
        assert "run the command that wrote it again" in str(found.value)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_modes_follow_the_umask_and_never_exceed_it(mask: int, job: Job, tmp_path: Path) -> None:
    old = os.umask(mask)
    try:
        job(tmp_path / "out")
    finally:
        os.umask(old)
    paths = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    modes = {stat.S_IMODE(path.stat().st_mode) & ~(0o777 if path.is_dir() else 0o666) for path in paths}
    assert modes == {0}, "no file may be executable"
    assert all(path.stat().st_mode & mask == 0 for path in paths)
    assert all(path.stat().st_mode & 0o600 == 0o600 for path in paths)


@pytest.mark.parametrize("name", ["with space", "quote's \"", "$(touch owned)", "line\nfeed", "été 😀", "a%20b?c#d"])
def test_any_name_can_be_an_output(name: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = checkpoints.convert(hf, tmp_path / name)
    back = checkpoints.export(step, Path(f"{name} back"))
    assert checkpoints.folders_differ(hf, back) == []
    assert not (tmp_path / "owned").exists()


def test_a_name_that_is_no_text_is_refused(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="the name is no UTF-8 text"):
        checkpoints.convert(hf, tmp_path / os.fsdecode(b"\xff\xfe"))
    assert names(tmp_path) == []
