"""Output folders: all or nothing.

Work happens in a temporary sibling; the final name appears by one rename after everything was flushed. An output
that exists is refused, or moved aside until the new one is in place. A lock keeps two runs apart, and what a killed run
left behind is recognised and removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from bridge.errors import OutputError

TEMPORARY = ".bridge-tmp-"
ASIDE = ".bridge-old-"


@contextlib.contextmanager
def new_folder(final: Path, *, overwrite: bool = False, needs_bytes: int = 0) -> Iterator[Path]:
    """Give an empty temporary folder that becomes `final` when the block ends well.

    Args:
        final: the output; its parents are made.
        overwrite: replace what is there, once the new folder is complete.
        needs_bytes: free space checked before the block begins.

    Raises:
        OutputError: `final` exists, cannot be written, is being written by another process, or the disk is full.
    """
    final = Path(os.path.abspath(final))
    if not overwrite:
        refuse_existing(final)
    with _explained(final), _locked(final):
        _recover(final)
        if not overwrite:
            refuse_existing(final)
        free = shutil.disk_usage(final.parent).free
        if needs_bytes > free:
            raise OutputError(f"{final} needs {needs_bytes / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB free")
        temporary = final.with_name(f".{final.name}{TEMPORARY}{uuid.uuid4().hex[:8]}")
        temporary.mkdir()
        try:
            yield temporary
            flush(temporary)
            _put_in_place(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def refuse_existing(final: Path) -> None:
    """Raise an OutputError if something lies at `final`, other than an empty folder."""
    if os.path.lexists(final) and not (final.is_dir() and not final.is_symlink() and not any(final.iterdir())):
        raise OutputError(
            f"{final} exists", hint="--overwrite replaces it once the new one is complete, --out names another"
        )


def flush(folder: Path) -> None:
    """fsync every file and folder below `folder`, and itself."""
    for root, _, files in os.walk(folder):
        for name in files:
            _fsync(Path(root, name))
        _fsync(Path(root))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(temporary: Path, final: Path) -> None:
    aside = final.with_name(f".{final.name}{ASIDE}{uuid.uuid4().hex[:8]}")
    existed = os.path.lexists(final)
    if existed:
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except BaseException:
        if existed:
            os.rename(aside, final)
        raise
    _fsync(final.parent)
    if existed:
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _recover(final: Path) -> None:
    """Under the lock: remove what killed runs left, and put back what was moved aside and not replaced."""
    for path in sorted(final.parent.glob(f".{_escaped(final.name)}{ASIDE}*")):
        if os.path.lexists(final):
            _remove(path)
        else:
            os.rename(path, final)
    for path in final.parent.glob(f".{_escaped(final.name)}{TEMPORARY}*"):
        _remove(path)


def _escaped(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


@contextlib.contextmanager
def _locked(final: Path) -> Iterator[None]:
    final.parent.mkdir(parents=True, exist_ok=True)
    path = final.with_name(f".{final.name}.bridge-lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = path.stat().st_ino == os.fstat(descriptor).st_ino
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise OutputError(f"{final} is being written by another process")
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(final: Path) -> Iterator[None]:
    """Turn an OSError, or TensorStore's report of one, into an OutputError that says what happened."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{final} cannot be written: {error.strerror or error}", hint=_advice(error.errno)) from error
    except ValueError as error:
        text = str(error)
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS, errno.EFBIG):
            if os.strerror(code) in text:
                raise OutputError(f"{final} cannot be written: {os.strerror(code)}", hint=_advice(code)) from error
        raise


def _advice(code: int | None) -> str | None:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "nothing was left behind; free some space, or write to another disk with --out"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to with --out"
    return None
