"""Outputs in a bucket: all or nothing, though a bucket has no rename.

A new output is written below a temporary prefix beside the final one, straight or from a folder of this host. Once it
is complete, the store itself copies its objects into place, and those that make it an output come last: the two
`commit_success.txt` that Orbax asks for on Google Cloud Storage, then `config.json` or `adapter_config.json` of a
Hugging Face folder, and `bridge.json` at the very end. Where an output is replaced, these go first. So a reader that
asks for them, as all of bridge does, never takes an unfinished output for a whole one, at whatever moment the copying
ends. A lock keeps two replacements apart. What a killed run leaves is its temporary prefix, which no reader accepts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from bridge.errors import OutputError
from bridge.places import BucketPath

TEMPORARY = ".bridge-tmp-"
LOCK = ".bridge-lock"
COMMIT = "commit_success.txt"
MARKERS = ("config.json", "adapter_config.json", "bridge.json")
"""At the top of an output; in the order in which they are written."""
AT_ONCE = 8


@contextlib.contextmanager
def new_prefix(
    final: BucketPath, *, overwrite: bool, needs_bytes: int, reads: Sequence[Path], straight: bool
) -> Iterator[Path]:
    """As `outputs.new_folder`, for `gs://`.

    Args:
        final: the output.
        overwrite: replace what is there, once the new one is complete.
        needs_bytes: where it is not straight, free space that is checked on this host's temporary folder.
        reads: what the block reads.
        straight: give a path in the bucket; else a folder of this host, which is copied when the block ends well.

    Raises:
        OutputError: `final` is not empty, is read, or is being put in place by another process.
    """
    if not final.key:
        raise OutputError(f"{final} cannot be an output", hint="gs://BUCKET/FOLDER")
    for path in reads:
        if final == path or final in path.parents:
            raise OutputError(f"{final} holds what is read, {path}", hint="--out names another folder")
    if not overwrite:
        refuse_existing(final)
    temporary = final.with_name(f".{final.name}{TEMPORARY}{uuid.uuid4().hex[:8]}")
    try:
        if straight:
            yield temporary
        else:
            with _local_folder(final, needs_bytes) as folder:
                yield folder
                _upload(folder, temporary)
        _put_in_place(temporary, final, overwrite)
    finally:
        _delete(temporary.objects())


def refuse_existing(final: BucketPath) -> None:
    """Raise an OutputError if there is anything at or below `final`."""
    if not final.exists():
        return
    whole = any((final / name).is_file() for name in MARKERS)
    raise OutputError(
        f"{final} exists" if whole else f"{final} is not empty, and holds no finished output",
        hint="--overwrite replaces it once the new one is complete, --out names another",
    )


def unfinished(final: BucketPath) -> list[BucketPath]:
    """Temporary prefixes beside `final`: of runs that are at work, or were killed."""
    if not final.key or not final.parent.is_dir():
        return []
    return [path for path in final.parent.iterdir() if path.name.startswith(f".{final.name}{TEMPORARY}")]


@contextlib.contextmanager
def _local_folder(final: BucketPath, needs_bytes: int) -> Iterator[Path]:
    home = tempfile.gettempdir()
    free = shutil.disk_usage(home).free
    if needs_bytes > free:
        needed = f"{needs_bytes / 1e9:.2f} GB, {home} has {free / 1e9:.2f} GB free"
        raise OutputError(f"{final} is made on this host first: it needs {needed}", hint="TMPDIR names another disk")
    with tempfile.TemporaryDirectory(prefix="bridge-", dir=home) as folder:
        yield Path(folder)


def _upload(folder: Path, target: BucketPath) -> None:
    files = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    with ThreadPoolExecutor(2) as pool:  # each holds a piece of a file
        list(pool.map(lambda file: target.joinpath(file.relative_to(folder)).upload(file), files))


def _put_in_place(temporary: BucketPath, final: BucketPath, overwrite: bool) -> None:
    objects = temporary.objects()
    if not objects:
        raise OutputError(f"{final}: nothing was written")
    with _locked(final):
        old = final.objects()
        if old and not overwrite:
            raise OutputError(f"{final} was made by someone else meanwhile, it is left as it is")
        for steps in reversed(_steps(final, old)):  # what makes it an output goes first
            _delete(steps)
        for steps in _steps(temporary, objects):
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda path: final.joinpath(path.relative_to(temporary)).copy_from(path), steps))


def _steps(folder: BucketPath, objects: Sequence[BucketPath]) -> list[list[BucketPath]]:
    """The objects of an output in the order in which they may appear: those of a step in any order."""
    last = [folder / name for name in MARKERS]
    commits = [path for path in objects if path.name == COMMIT]
    rest = [path for path in objects if path.name != COMMIT and path not in last]
    return [rest, commits, *([path] for path in last if path in objects)]


def _delete(objects: Sequence[BucketPath]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda path: path.unlink(missing_ok=True), objects))


@contextlib.contextmanager
def _locked(final: BucketPath) -> Iterator[None]:
    lock = final.with_name(f".{final.name}{LOCK}")
    owner = {"host": socket.gethostname(), "process": os.getpid(), "since": datetime.now(UTC).isoformat(" ", "seconds")}
    if not lock.create(json.dumps(owner).encode()):
        said = lock.read_text() if lock.is_file() else "just now"
        raise OutputError(
            f"{final} is being put in place by another process: {said}",
            hint=f"if that one was stopped, delete {lock} and run this again with --overwrite",
        )
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
