"""Places: folders of this host, and prefixes of Google Cloud Storage buckets (`gs://bucket/prefix`) beside them.

A `BucketPath` is a `Path` whose questions are answered by the bucket, so that what reads checkpoints need not know
where they lie. Small files go through gcsfs, as Orbax's own do (etils.epath); arrays go through TensorStore's gcs
driver. Both find the credentials that Google's tools share. A bucket has no folders, no links and no rename.
"""

from __future__ import annotations

import fnmatch
import io
import os
import re
import stat
from collections.abc import Generator
from datetime import datetime
from pathlib import Path, PosixPath
from typing import Any, NoReturn

from bridge.bucket_store import answered, store
from bridge.errors import CheckpointError, OutputError, UnsupportedError

SCHEME = "gs:"
REMOTE = re.compile(r"(?:.*/)?(?:gs|s3|s3a|az|abfss?|https?|hf|file|memory):/")
# `Path` folds the two slashes into one, and `absolute` puts the current folder before them.
BUCKET = re.compile(r"(?:.*/)?gs:/+")
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
BUFFER_BYTES, PIECE_BYTES = 1 << 20, 8 << 20
COPY = "copy it here first (gcloud storage cp -r), or mount the bucket"


class BucketPath(PosixPath):
    """`gs://bucket/prefix`. Kept as `//bucket/prefix`, an absolute path of its own root, so that joining works."""

    def __init__(self, *segments: str | os.PathLike[str]) -> None:
        super().__init__(*(part.removeprefix(SCHEME) if isinstance(part, str) else part for part in segments))

    def __str__(self) -> str:
        text = super().__str__()
        return f"{SCHEME}{text}" if text.startswith("//") else text  # else one relative to another

    def __fspath__(self) -> NoReturn:
        """Refuse: the operating system would take it for a folder `gs:` of this disk."""
        raise UnsupportedError(f"{self} lies in a bucket, and this works on folders of this host only", hint=COPY)

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """The name within the bucket; empty for the bucket itself."""
        return "/".join(self.parts[2:])

    @property
    def _name(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    def absolute(self) -> BucketPath:
        """Itself."""
        return self

    expanduser = absolute

    def resolve(self, strict: bool = False) -> BucketPath:
        """Itself: there are no links."""
        del strict
        return self

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is such an object, or any below it."""
        del follow_symlinks
        return self._info() is not None

    def is_file(self) -> bool:
        """Whether there is such an object."""
        info = self._info()
        return info is not None and info["type"] == "file"

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        info = self._info()
        return info is not None and info["type"] == "directory"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Kind, size in bytes, and time of change.

        Raises:
            FileNotFoundError: nothing is there.
        """
        del follow_symlinks
        info = self._info()
        if info is None:
            raise FileNotFoundError(2, "there is no such object", str(self))
        mode = stat.S_IFREG if info["type"] == "file" else stat.S_IFDIR
        changed = datetime.fromisoformat(info["updated"]).timestamp() if info.get("updated") else 0.0
        times = {"st_mtime": changed, "st_mtime_ns": int(changed * 1e9)}
        return os.stat_result((mode | 0o644, 0, 0, 1, 0, 0, info["size"], 0, int(changed), 0), times)

    def iterdir(self) -> Generator[BucketPath, None, None]:
        """What lies right below it, by name.

        Raises:
            FileNotFoundError: nothing is there.
        """
        with answered(self):
            names = store().ls(self._name, detail=False)
        for name in sorted(str(name).rstrip("/") for name in names):
            if name != self._name:
                yield type(self)(f"//{name}")

    def glob(self, pattern: str, *, case_sensitive: bool | None = None) -> Generator[BucketPath, None, None]:
        """What lies right below it and has a name of the pattern."""
        del case_sensitive
        if "/" in pattern:
            raise UnsupportedError(f"{self}: {pattern} reaches over several levels of a bucket")
        if self.is_dir():
            yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def objects(self) -> list[BucketPath]:
        """Every object below it, at any depth, by name."""
        with answered(self):
            names = store().find(self._name + "/") if self.key else store().find(self._name)
        return [type(self)(f"//{name}") for name in sorted(names) if not name.endswith("/")]

    def open(self, mode: str = "r", *args: Any, **options: Any) -> Any:
        """A stream of bytes, for reading only.

        Raises:
            FileNotFoundError: it is not there.
        """
        del args, options
        if mode != "rb":
            raise UnsupportedError(f"{self}: an object of a bucket is written whole, not opened with mode {mode}")
        return io.BufferedReader(_Object(self, self.stat().st_size), BUFFER_BYTES)

    def read_bytes(self) -> bytes:
        """The whole object.

        Raises:
            FileNotFoundError: it is not there.
        """
        with answered(self):
            data: bytes = store().cat_file(self._name)
        return data

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """The whole object as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def write_bytes(self, data: Any) -> int:
        """Write the whole object: readers see the old one or the new one."""
        content = bytes(data)
        with answered(self):
            store().pipe_file(self._name, content)
        return len(content)

    def write_text(
        self, data: str, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> int:
        """As `write_bytes`."""
        del newline
        return self.write_bytes(data.encode(encoding or "utf-8", errors or "strict"))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a bucket has no folders."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            with answered(self):
                store().rm_file(self._name)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def create(self, data: bytes) -> bool:
        """Write an object that is not there yet; whether this call did, by the bucket's own precondition."""
        try:
            with answered(self):
                store().pipe_file(self._name, data, mode="create")
        except FileExistsError:
            return False
        return True

    def copy_from(self, source: BucketPath) -> None:
        """Copy an object within the store; no byte comes through this host."""
        with answered(self):
            store().cp_file(source._name, self._name)

    def upload(self, file: Path) -> None:
        """Copy a file of this host, in pieces."""
        with answered(self):
            store().put_file(str(file), self._name, chunksize=PIECE_BYTES)

    def read_range(self, start: int, count: int) -> bytes:
        """`count` bytes from `start` on.

        Raises:
            CheckpointError: it is not there, or ends before.
        """
        try:
            with answered(self):
                data: bytes = store().cat_file(self._name, start=start, end=start + count) if count else b""
        except FileNotFoundError as error:
            raise CheckpointError(f"{self} is not there: was it deleted meanwhile?") from error
        if len(data) != count:
            raise CheckpointError(f"{self} ended at byte {start + len(data)}: was it changed meanwhile?")
        return data

    def _info(self) -> dict[str, Any] | None:
        if len(self.parts) < 2:
            return None
        try:
            with answered(self):
                info: dict[str, Any] = store().info(self._name)
        except FileNotFoundError:
            return None
        return info


class _Object(io.RawIOBase):
    """An object, read by ranges."""

    def __init__(self, path: BucketPath, size: int) -> None:
        self._path, self._size, self._position = path, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._position)
        buffer[:count] = self._path.read_range(self._position, count)
        self._position += count
        return count


def place(path: str | Path) -> Path:
    """The path that a text, or a `Path` made of one, means: in a bucket for `gs://`, else on this host as it is.

    Raises:
        OutputError: another store's address, or no proper address of a bucket.
    """
    if isinstance(path, BucketPath):
        return path
    text = str(path)
    found = BUCKET.match(text)
    if found is None:
        refuse_remote(text)
        return Path(path)
    rest = text[found.end() :]
    bucket = rest.partition("/")[0]
    if not BUCKET_NAME.fullmatch(bucket):
        raise OutputError(f"gs://{rest}: {bucket!r} is no name of a bucket", hint="gs://BUCKET/FOLDER")
    if ".." in rest.split("/") or re.search(r"[\x00-\x1f#?*\[\]]", rest):
        raise OutputError(f"gs://{rest}: the name has parts that tools of buckets take for something else")
    return BucketPath(f"//{rest}")


def refuse_remote(path: str | Path) -> None:
    """Raise an OutputError for the address of a store that is not supported: as a path it would name a folder of it."""
    if REMOTE.match(str(path)) and not in_bucket(path):
        raise OutputError(
            f"{path} is not on a file system of this host",
            hint="copy it here first (gcloud storage cp -r, aws s3 cp --recursive), or mount the bucket",
        )


def in_bucket(path: str | Path) -> bool:
    """Whether a path, or a text that means one, lies in a bucket."""
    return isinstance(path, BucketPath) or BUCKET.match(str(path)) is not None


def scratch(folder: Path) -> Path | None:
    """Where what a command needs for a while goes, as tempfile takes it: beside what it reads, else this host's own."""
    return None if isinstance(folder, BucketPath) else folder


def orbax_path(path: Path) -> Any:
    """The path as Orbax takes it: etils has a class of its own for a bucket."""
    if not isinstance(path, BucketPath):
        return path
    from etils import epath

    store()
    return epath.Path(str(path))


def kvstore(folder: Path) -> dict[str, Any]:
    """TensorStore's key-value store of a folder."""
    if isinstance(folder, BucketPath):
        store()  # sets where an emulator is
        return {"driver": "gcs", "bucket": folder.bucket, "path": f"{folder.key}/"}
    return {"driver": "file", "path": f"{folder}/"}
