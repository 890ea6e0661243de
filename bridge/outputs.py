"""Output folders: all or nothing.

Work happens in a temporary sibling; the final name appears by one rename after everything was flushed. An output
that exists is refused, or moved aside until the new one is in place. A lock keeps two runs apart, and what a killed run
left behind is recognised and removed by the next one. In a bucket there is no rename: see `bucket_outputs`, where an
object written last makes an output.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from bridge import bucket_outputs, flushing
from bridge.errors import OutputError
from bridge.places import BucketPath, place

TEMPORARY = ".bridge-tmp-"
ASIDE = ".bridge-old-"
LOCK = ".bridge-lock"
LOCK_TRIES = 20
# What TensorStore says in a text only; it raises a ValueError for all of them.
CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.EMFILE)


@contextlib.contextmanager
def new_folder(
    final: Path,
    *,
    overwrite: bool = False,
    needs_bytes: int = 0,
    reads: Sequence[Path] = (),
    straight: bool = False,
) -> Iterator[Path]:
    """Give an empty temporary folder that becomes `final` when the block ends well.

    Args:
        final: the output; its parents are made, and removed again where the block fails.
        overwrite: replace what is there, once the new folder is complete.
        needs_bytes: free space checked before the block begins.
        reads: what the block reads; an output that would replace any of it is refused.
        straight: where `final` lies in a bucket, give a path there; the block then writes it object by object.

    Raises:
        OutputError: `final` exists, cannot be written, is being written by another process, or the disk is full.
    """
    final = place(final)
    if isinstance(final, BucketPath):
        read = [place(path) for path in reads]
        with bucket_outputs.new_prefix(
            final, overwrite=overwrite, needs_bytes=needs_bytes, reads=read, straight=straight
        ) as folder:
            yield folder
        return
    final = Path(os.path.abspath(final))
    _refuse_harm(final, overwrite, reads)
    if not overwrite and not unfinished(final):
        refuse_existing(final)
    with _explained(final), _parents(final), _locked(final):
        _recover(final)
        if not overwrite:
            refuse_existing(final)
        free = shutil.disk_usage(final.parent).free
        if needs_bytes > free:
            raise OutputError(f"{final} needs {needs_bytes / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB free")
        temporary = final.with_name(f".{final.name}{TEMPORARY}{uuid.uuid4().hex[:8]}")
        temporary.mkdir()
        try:
            with flushing.while_written(temporary):
                yield temporary
            flush(temporary)
            _put_in_place(temporary, final, overwrite)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def refuse_existing(final: Path) -> None:
    """Raise an OutputError if something lies at `final`, other than an empty folder."""
    if os.path.lexists(final) and not _is_empty_folder(final):
        raise OutputError(
            f"{final} exists", hint="--overwrite replaces it once the new one is complete, --out names another"
        )


def unfinished(final: Path) -> list[Path]:
    """What runs into `final` that were killed, or are at work, have beside it: temporary folders, and what they moved
    aside."""
    if isinstance(final, BucketPath):
        return [*bucket_outputs.unfinished(final)]
    if not final.name or not final.parent.is_dir():
        return []
    starts = tuple(f".{final.name}{mark}" for mark in (TEMPORARY, ASIDE))
    return sorted(path for path in final.parent.iterdir() if path.name.startswith(starts))


def is_unfinished(path: Path) -> bool:
    """Whether a path lies in a temporary folder of this module."""
    return any(TEMPORARY in part for part in path.absolute().parts)


def flush(folder: Path) -> None:
    """fsync every file and folder below `folder`, and itself."""
    for root, _, files in os.walk(folder):
        for name in files:
            _fsync(Path(root, name))
        _fsync(Path(root))


def _refuse_harm(final: Path, overwrite: bool, reads: Sequence[Path]) -> None:
    """An output may not replace what it is made from, nor the folder that the user stands in."""
    if not final.name:
        raise OutputError(f"{final} cannot be an output", hint="--out names a folder to make")
    if any("\ud800" <= char <= "\udfff" for char in str(final)):
        raise OutputError(f"{final} cannot be written: the name is no UTF-8 text, which TensorStore needs")
    real = Path(os.path.realpath(final))
    for path in (path for path in map(place, reads) if not isinstance(path, BucketPath)):
        source = Path(os.path.realpath(path))
        if real == source or real in source.parents:
            raise OutputError(f"{final} holds what is read, {path}", hint="--out names another folder")
    here = Path.cwd()
    if overwrite and (real == here or real in here.parents):
        raise OutputError(f"{final} is the current folder, or holds it", hint="--out names another folder")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(temporary: Path, final: Path, overwrite: bool) -> None:
    if not overwrite:
        try:
            os.rename(temporary, final)  # replaces nothing but an empty folder
        except OSError as error:
            if os.path.lexists(final) and not _is_empty_folder(final):
                raise OutputError(f"{final} was made by someone else meanwhile, it is left as it is") from error
            raise
        _fsync(final.parent)
        return
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
    for path in unfinished(final):
        replaced = os.path.lexists(final) and not _is_empty_folder(final)
        if replaced or not path.name.startswith(f".{final.name}{ASIDE}"):
            _remove(path)
            continue
        if os.path.lexists(final):
            final.rmdir()
        os.rename(path, final)


@contextlib.contextmanager
def _parents(final: Path) -> Iterator[None]:
    missing = [path for path in final.parents if not path.exists()]
    above = next(path for path in final.parents if path.exists())
    if not above.is_dir():
        raise OutputError(f"{final} cannot be written: {above} is a file, not a folder")
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):  # another run has put something there
                path.rmdir()
        raise


@contextlib.contextmanager
def _locked(final: Path) -> Iterator[None]:
    path = final.with_name(f".{final.name}{LOCK}")
    descriptor = _lock(path)
    if descriptor is None:
        raise OutputError(f"{final} is being written by another process")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """The locked file's descriptor; None where another process has the lock.

    A file that its owner removed between our opening and locking it locks nothing: a new one is made then.
    """
    for _ in range(LOCK_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


@contextlib.contextmanager
def _explained(final: Path) -> Iterator[None]:
    """Turn an OSError, or TensorStore's report of one, into an OutputError that says what happened."""
    try:
        yield
    except OSError as error:
        name = f"{error.filename}: " if error.filename and not _beside(final, error.filename) else ""
        raise OutputError(
            f"{final} cannot be written: {name}{error.strerror or error}", hint=_advice(error.errno)
        ) from error
    except ValueError as error:
        text = str(error)
        for code in CODES:
            if os.strerror(code) in text:
                raise OutputError(f"{final} cannot be written: {os.strerror(code)}", hint=_advice(code)) from error
        raise


def _beside(final: Path, name: object) -> bool:
    return isinstance(name, str | os.PathLike) and final.parent in Path(os.path.abspath(name)).parents


def _advice(code: int | None) -> str | None:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "nothing was left behind; free some space, or write to another disk with --out"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to with --out"
    return None
