"""Outputs in buckets: finished by their last object, wherever the writing stops, and never mixed with another."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import fake_bucket
import pytest
from conftest import Tiny
from fake_bucket import Bucket

from bridge import outputs, sidecar
from bridge.bucket_outputs import COMMIT, MARKERS
from bridge.commands import checkpoint as commands
from bridge.errors import CheckpointError, OutputError
from bridge.places import BucketPath

ROOT = f"gs://{fake_bucket.NAME}"


@pytest.fixture
def source(tiny: Tiny) -> Path:
    """A tied model in bfloat16 with a tokenizer."""
    return tiny("tied", tokenizer="llama")


def test_an_output_is_finished_by_its_last_object(
    bucket: Bucket, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after any number of objects, what is there is no checkpoint; until the first, the old one stays."""
    final = BucketPath(f"//{fake_bucket.NAME}/ck")
    folder = checkpoints.convert(source, tmp_path / "local").parent
    for file in (folder / "0" / "items").rglob("*"):  # what is asked for first; without them this takes minutes
        if file.is_file() and file.name not in ("_METADATA", COMMIT):
            file.unlink()
    with outputs.new_folder(final) as made:
        copy(folder, made)
    names = bucket.names("ck/")
    assert commands.find(None, final, None, None).tree.engine == "maxtext"
    copy_from = BucketPath.copy_from
    placed: list[str] = []

    def stop_after(count: int) -> None:
        placed.clear()

        def copy_some(self: BucketPath, origin: BucketPath) -> None:
            if len(placed) >= count:
                raise KeyboardInterrupt
            copy_from(self, origin)
            placed.append(self.key)

        monkeypatch.setattr(BucketPath, "copy_from", copy_some)
        with outputs.new_folder(final, overwrite=True) as made:
            copy(folder, made)

    for count in range(len(names)):
        with pytest.raises(KeyboardInterrupt):
            stop_after(count)
        # One process at a time copies here, several at once elsewhere: all that counts is which ones come last.
        with pytest.raises(CheckpointError):
            commands.find(None, final, None, None)
        assert bucket.names(".") == []
    stop_after(len(names))
    assert commands.find(None, final, None, None).tree.engine == "maxtext"
    assert placed[-1] == "ck/bridge.json"
    assert {Path(name).name for name in placed[-3:-1]} == {COMMIT}

    def fail() -> None:
        with outputs.new_folder(final, overwrite=True) as made:
            copy(folder, made)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert bucket.names() == names  # a failure before the end touches nothing


def test_what_a_killed_conversion_leaves_is_no_checkpoint(bucket: Bucket, source: Path, tmp_path: Path) -> None:
    left = bucket.put(checkpoints.convert(source, tmp_path / "local").parent, ".ck.bridge-tmp-0123abcd")
    with pytest.raises(CheckpointError, match="was never finished"):
        checkpoints.run("inspect", left)
    with pytest.raises(CheckpointError, match=f"{ROOT}/ck is not a folder") as found:
        checkpoints.run("export", f"{ROOT}/ck", "--out", tmp_path / "hf")
    assert ".ck.bridge-tmp-0123abcd was never finished" in str(found.value)
    checkpoints.run("convert", source, "--to", "maxtext", "--out", f"{ROOT}/ck")
    assert checkpoints.run("verify", f"{ROOT}/ck", "--exact").code == 0


def test_two_replacements_do_not_mix(bucket: Bucket) -> None:
    final = BucketPath(f"//{fake_bucket.NAME}/out")
    with outputs.new_folder(final) as made:
        (made / "config.json").write_text("first")

    def replace() -> None:
        with outputs.new_folder(final, overwrite=True, straight=True) as made:
            (made / "config.json").write_text("second")

    bucket.write(".out.bridge-lock", b'{"host": "other"}')
    with pytest.raises(OutputError, match=r"being put in place by another process: .*other"):
        replace()
    assert (bucket.names(), bucket.read("out/config.json")) == ([".out.bridge-lock", "out/config.json"], b"first")
    bucket.delete(".out.bridge-lock")
    replace()
    assert (bucket.names(), bucket.read("out/config.json")) == (["out/config.json"], b"second")

    def make_beside() -> None:
        with outputs.new_folder(final / "new") as made:
            (made / "config.json").write_text("mine")
            bucket.write("out/new/config.json", b"theirs")

    with pytest.raises(OutputError, match="made by someone else meanwhile"):
        make_beside()
    assert bucket.read("out/new/config.json") == b"theirs"
    with pytest.raises(OutputError, match="holds what is read"), outputs.new_folder(final, reads=[final / "new"]):
        pass
    bucket.write("half/model.safetensors", b"")
    with pytest.raises(OutputError, match="not empty, and holds no finished output"):
        outputs.new_folder(final.parent / "half").__enter__()


def copy(folder: Path, target: Path) -> None:
    """Copy the files of a folder of this host into an output."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        (target / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        (target / file.relative_to(folder)).write_bytes(file.read_bytes())


def test_the_markers_are_what_readers_ask_for() -> None:
    assert (MARKERS[-1], COMMIT) == (sidecar.FILE, "commit_success.txt")
    assert {"config.json", "adapter_config.json"} < set(MARKERS)
