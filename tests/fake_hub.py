"""A Hugging Face hub on loopback: just enough of its API for huggingface_hub, and every way in which it refuses.

Source: huggingface_hub/utils/_http.py (`hf_raise_for_status`), file_download.py and _snapshot_download.py, 1.33.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fake_hub_writes
from fake_hub_writes import Writes

SHA = "0123456789abcdef0123456789abcdef01234567"
GOOD = "hf_" + "G00dDummyToken" * 2 + "AAAAAA"
WRONG = "hf_" + "Wr0ngDummyToken" * 2 + "BBBB"
APPROVED = "hf_" + "Appr0vedDummy" * 2 + "CCCCCCCC"


@dataclass
class Hub:
    """The files that every repository of the hub has, and what was asked of it."""

    files: dict[str, bytes]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Repositories whose weights break off in the middle."""
    head: str = SHA
    """The commit that `main` stands for; every commit that it ever had is there still, with the files of now."""
    commits: set[str] = field(default_factory=lambda: {SHA})
    writes: Writes = field(default_factory=Writes)

    def move(self, commit: str) -> None:
        """Another commit on `main`."""
        self.head = commit
        self.commits.add(commit)


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub for the length of a block; a request is answered as its repository's name says."""
    hub = Hub(files)

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            answer(self, hub)

        def do_GET(self) -> None:
            answer(self, hub)

        def do_POST(self) -> None:
            answer(self, hub)

        def do_PUT(self) -> None:
            answer(self, hub)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def answer(request: BaseHTTPRequestHandler, hub: Hub) -> None:
    """Answer one request."""
    path = request.path.partition("?")[0]
    token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
    hub.requests.append(f"{request.command} {path}")
    if fake_hub_writes.answer(request, hub, path, token):
        return None
    about = re.fullmatch(r"/api/models/((?:team|meta-llama)/[\w.-]+)(?:/revision/(\w+)|/tree/(\w+))?", path)
    file = re.fullmatch(r"/((?:team|meta-llama)/[\w.-]+)/resolve/(\w+)/(.+)", path)
    match = about or file
    if match is None:
        return reply(request, 404, b"{}")
    name = match[1].partition("/")[2]
    if token == WRONG:
        return refuse(request, 401, None, "Invalid credentials in Authorization header")
    if name == "private" and token != APPROVED:
        return refuse(request, 404 if token else 401, "RepoNotFound")
    if name == "missing":
        return refuse(request, 404 if token else 401, "RepoNotFound")
    if name == "forbidden":
        return refuse(request, 403, None, "not for you")
    if name == "down":
        return refuse(request, 500, None, "on fire")
    revision = match[2]
    commit = hub.head if revision in (None, "main") else revision
    if commit not in hub.commits:
        return refuse(request, 404, "RevisionNotFound")
    if about is not None:
        if about[3]:
            tree = [
                {"type": "file", "path": key, "size": len(data), "oid": oid(data)} for key, data in hub.files.items()
            ]
            return reply(request, 200, json.dumps(tree).encode())
        siblings = [{"rfilename": key} for key in hub.files]
        return reply(request, 200, json.dumps({"id": match[1], "sha": commit, "siblings": siblings}).encode())
    if name == "gated" and token != APPROVED:
        return refuse(request, 403 if token else 401, "GatedRepo")
    data = hub.files[match[3]]
    return reply(request, 200, data, {"ETag": f'"{oid(data)}"', "X-Repo-Commit": str(commit)}, cut=name in hub.broken)


def oid(data: bytes) -> str:
    """A name for some content."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def refuse(request: BaseHTTPRequestHandler, status: int, code: str | None, message: str = "no") -> None:
    """An error as the hub sends it."""
    headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    reply(request, status, json.dumps({"error": message}).encode(), headers)


def reply(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None, cut: bool = False
) -> None:
    """A whole answer; with `cut` a large one breaks off after half."""
    start = 0
    wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range") or "")
    if status == 200 and wanted and int(wanted[1]) < len(body):
        start, status = int(wanted[1]), 206
        headers = {**(headers or {}), "Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
    body = body[start:]
    request.send_response(status)
    for key, value in (headers or {}).items():
        request.send_header(key, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command == "HEAD":
        return
    if cut and len(body) > 4096:
        request.wfile.write(body[: len(body) // 2])
        request.close_connection = True
        return
    request.wfile.write(body)
