"""Paths in buckets as values: what a text means, joining, and that nothing of this host is ever meant by one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bridge.bucket_outputs import _steps
from bridge.errors import OutputError, UnsupportedError
from bridge.places import BucketPath, in_bucket, kvstore, place


@pytest.mark.parametrize(
    ("text", "bucket", "key"),
    [
        ("gs://team/llama/ck", "team", "llama/ck"),
        ("gs://team/llama//ck/", "team", "llama/ck"),
        ("gs://team", "team", ""),
        (Path("gs://team/ck"), "team", "ck"),  # the two slashes are one by now
        (Path("/home/me") / "gs:/team/ck", "team", "ck"),
        ("gs://1-team_x.example.com/a b", "1-team_x.example.com", "a b"),
    ],
)
def test_a_text_means_a_place(text: str | Path, bucket: str, key: str) -> None:
    assert in_bucket(text)
    found = place(text)
    assert isinstance(found, BucketPath)
    assert (found.bucket, found.key) == (bucket, key)
    assert str(found) == f"gs://{bucket}/{key}".rstrip("/")
    assert place(str(found)) == found


@pytest.mark.parametrize("text", ["ck", "/tmp/ck", "gs/ck", "team/llama", "gs:", "./gs", "meta-llama/Llama-3.1-8B"])
def test_other_texts_are_paths_of_this_host(text: str) -> None:
    assert not in_bucket(text)
    assert type(place(text)) is type(Path(text))
    assert place(text) == Path(text)


@pytest.mark.parametrize(
    "text", ["gs://", "gs:///ck", "gs://Team/ck", "gs://te/ck", "gs://team/a/../b", "gs://team/a?b"]
)
def test_addresses_that_mean_no_place(text: str) -> None:
    with pytest.raises(OutputError):
        place(text)


def test_joining_as_paths_do() -> None:
    path = place("gs://team/llama")
    step = path / "ck" / "0"
    assert isinstance(step, BucketPath)
    assert str(step) == "gs://team/llama/ck/0"
    assert (step.name, str(step.parent), str(step.with_name("1"))) == (
        "0",
        "gs://team/llama/ck",
        "gs://team/llama/ck/1",
    )
    assert step.relative_to(path).as_posix() == "ck/0"
    assert path in step.parents
    assert step.parent == path.joinpath("ck")
    assert step != Path("gs://team/llama/ck/0")
    assert hash(step) == hash(path / "ck/0")
    assert (step.absolute(), step.resolve(), step.expanduser()) == (step, step, step)
    assert kvstore(step) == {"driver": "gcs", "bucket": "team", "path": "llama/ck/0/"}
    assert kvstore(Path("/disk/ck")) == {"driver": "file", "path": "/disk/ck/"}


def test_the_operating_system_never_sees_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gs:").mkdir()
    path = place("gs://team/ck")
    uses = (os.mkdir, os.listdir, shutil.rmtree, os.path.exists, shutil.disk_usage, lambda it: os.open(it, os.O_CREAT))
    for use in (*uses, Path.touch, Path.rmdir, lambda it: it.rename("x"), lambda it: next(it.walk())):
        with pytest.raises(UnsupportedError, match="gs://team/ck lies in a bucket"):
            use(path)
    assert [*tmp_path.rglob("*")] == [tmp_path / "gs:"]


def test_the_order_in_which_an_output_appears() -> None:
    folder = place("gs://team/ck")
    assert isinstance(folder, BucketPath)
    names = (
        "bridge.json",
        "0/commit_success.txt",
        "config.json",
        "hf/config.json",
        "0/items/commit_success.txt",
        "0/a",
    )
    steps = [
        [path.relative_to(folder).as_posix() for path in step] for step in _steps(folder, [folder / n for n in names])
    ]
    commits = ["0/commit_success.txt", "0/items/commit_success.txt"]
    assert steps == [["hf/config.json", "0/a"], commits, ["config.json"], ["bridge.json"]]
