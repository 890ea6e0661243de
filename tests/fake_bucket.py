"""A bucket on loopback: gcp-storage-emulator, with what it leaves out of the store's behaviour and bridge relies on.

Added are the precondition `ifGenerationMatch` and the header that says an object's generation (TensorStore and gcsfs
write on condition, and without them every write would succeed), and ranges that count from an object's end.
Source: https://cloud.google.com/storage/docs/request-preconditions, https://cloud.google.com/storage/docs/xml-api/
reference-headers#range, gcp_storage_emulator/handlers/objects.py.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from bridge import bucket_store

NAME = "bridge-test"


@dataclass(frozen=True)
class Bucket:
    """The bucket as its owner sees it, past all APIs."""

    url: str
    storage: Any

    @property
    def env(self) -> dict[str, str]:
        """An environment for a process that shall see this bucket in the place of Google's."""
        left_out = ("TENSORSTORE_GCS_HTTP_URL", "GOOGLE_APPLICATION_CREDENTIALS")
        own = {
            "STORAGE_EMULATOR_HOST": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        return {**{name: value for name, value in os.environ.items() if name not in left_out}, **own}

    def shown(self, monkeypatch: pytest.MonkeyPatch) -> Bucket:
        """Empty it, and let this process see it, too."""
        for name in self.names():
            self.delete(name)
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(bucket_store.TENSORSTORE_EMULATOR, self.url)
        bucket_store.store.cache_clear()
        return self

    def names(self, prefix: str = "") -> list[str]:
        """Every object whose name begins so, in order."""
        found, _ = self.storage.get_file_list(NAME, prefix, None)
        return sorted(entry["name"] for entry in found)

    def read(self, name: str) -> bytes:
        """An object."""
        return bytes(self.storage.get_file(NAME, name))

    def write(self, name: str, data: bytes) -> None:
        """Put an object there."""
        from gcp_storage_emulator.handlers import objects

        about = objects._make_object_resource(self.url, NAME, name, "application/octet-stream", str(len(data)))
        self.storage.create_file(NAME, name, data, objects._checksums(data, about))

    def delete(self, name: str) -> None:
        """Take an object away."""
        self.storage.delete_file(NAME, name)

    def fetch(self, prefix: str, folder: Path) -> Path:
        """A copy of the objects below a prefix, as a folder."""
        for name in self.names(f"{prefix}/"):
            file = folder / name.removeprefix(f"{prefix}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.read(name))
        return folder

    def put(self, folder: Path, prefix: str) -> str:
        """Copy a folder below a prefix; returns its address."""
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            self.write(f"{prefix}/{file.relative_to(folder)}", file.read_bytes())
        return f"gs://{NAME}/{prefix}"


@contextmanager
def serve() -> Iterator[Bucket]:
    """An empty bucket for the length of a block."""
    from gcp_storage_emulator import server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    _complete()
    running = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket=NAME)
    running.start()
    running._api._httpd.handle_error = lambda *_: None  # a client that hangs up
    port = running._api._httpd.server_address[1]
    try:
        yield Bucket(f"http://127.0.0.1:{port}", running._storage)
    finally:
        running.stop()


@functools.cache
def _complete() -> None:
    """Put the conditions around the emulator's own answers, once."""
    from gcp_storage_emulator import server
    from gcp_storage_emulator.handlers import objects

    wrapped = {objects.insert: _on_condition(objects.insert), objects.download: _with_generation(objects.download)}
    wrapped[objects.get] = _with_generation(objects.get)
    for _, handlers in server.HANDLERS:
        for method, answer in handlers.items():
            handlers[method] = wrapped.get(answer, answer)


def _on_condition(insert: Callable[..., None]) -> Callable[..., None]:
    def answer(request: Any, response: Any, storage: Any, *args: Any) -> None:
        wanted = request.query.get("ifGenerationMatch")
        if wanted:
            named = request.query.get("name")
            name = named[0] if named else request.data["meta"]["name"]
            if wanted[0] != _generation(storage, request.params["bucket_name"], name):
                response.status = HTTPStatus.PRECONDITION_FAILED
                response.json({"error": {"code": 412, "message": "At least one of the pre-conditions did not hold."}})
                return
        insert(request, response, storage, *args)

    return answer


def _with_generation(download: Callable[..., None]) -> Callable[..., None]:
    def answer(request: Any, response: Any, storage: Any, *args: Any) -> None:
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", request.get_header("range") or "")
        if wanted:
            size = len(storage.get_file(request.params["bucket_name"], request.params["object_id"]))
            if not wanted[1]:  # the emulator would send the whole object
                request._request_handler.headers.replace_header("range", f"bytes={max(size - int(wanted[2]), 0)}-")
            elif int(wanted[1]) >= size:  # it would send a range that is not there
                response.status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                response["Content-Range"] = f"bytes */{size}"
                response.json({"error": {"code": 416, "message": "The requested range cannot be satisfied."}})
                return
        download(request, response, storage, *args)
        generation = _generation(storage, request.params["bucket_name"], request.params["object_id"])
        if generation != "0":
            response["x-goog-generation"] = generation

    return answer


def _generation(storage: Any, bucket: str, name: str) -> str:
    from gcp_storage_emulator.exceptions import NotFound

    try:
        return str(storage.get_file_obj(bucket, name)["generation"])
    except NotFound:
        return "0"
