"""The writing side of the hub on loopback: logins, new repositories, uploads of large files, and commits.

Source: huggingface_hub/hf_api.py (`whoami`, `create_repo`), _commit_api.py and lfs.py, 1.33, without Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fake_hub import Hub

WRITER = "hf_" + "Wr1terDummy" * 2 + "DDDDDDDDDDDD"
READER = "hf_" + "ReaderDummy" * 2 + "EEEEEEEEEEEE"
USER = "ada"
ROLES = {"team": "write", "lab": "read"}
"""Organisations of the user, and what she may there."""
ASKED = ("auth-check/write", "preupload/main", "commit/main", "tree/main")
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Repository:
    """A repository that was made or is written to: its files are those of its last commit."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Writes:
    """What is written, and how it fails."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """Uploaded large files by their sha256, whether a commit has them yet or not."""
    broken: bool = False
    """Connections break in the middle of a large file."""
    full: bool = False
    """Commits are refused: no space is left on the account."""
    locked: set[str] = field(default_factory=set)
    """Repositories that the hub does not let the user write, whatever her role."""


def answer(request: BaseHTTPRequestHandler, hub: Hub, path: str, token: str) -> bool:
    """Answer a request of the writing side; False where it is none."""
    from fake_hub import refuse, reply

    def say(value: dict[str, Any], status: int = 200) -> bool:
        reply(request, status, json.dumps(value).encode(), {"Content-Type": "application/json"})
        return True

    def no(status: int, code: str | None = None, message: str = "no") -> bool:
        refuse(request, status, code, message)
        return True

    writes = hub.writes
    length = int(request.headers.get("Content-Length") or 0)
    if request.command == "PUT":
        return _large(request, writes, path, length, say)
    body = request.rfile.read(length) if request.command == "POST" else b""
    if path == "/api/whoami-v2":
        role = {WRITER: "write", READER: "read"}.get(token)
        return say(_login(role)) if role else no(401, None, "Invalid credentials in Authorization header")
    if path == "/api/validate-yaml":
        content = json.loads(body)["content"]
        good = content.startswith("---\n") and "\n---\n" in content
        return say({"errors": [] if good else [{"message": "no metadata"}], "warnings": []}, 200 if good else 400)
    if path == "/api/repos/create":
        asked = json.loads(body)
        name = f"{asked['organization'] or USER}/{asked['name']}"
        if name in writes.repositories:
            return no(409, None, "You already created this model repo")
        if not _may(name, token, writes):
            return no(403, None, "You don't have the rights to create a model under this namespace")
        writes.repositories[name] = Repository(asked["visibility"] == "private")
        return say({"url": f"{hub.url}/{name}"})
    match = re.fullmatch(
        r"/api/models/([\w-]+/[\w.-]+)(?:/(auth-check/write|preupload/main|commit/main|tree/main))?", path
    )
    batch = re.fullmatch(r"/([\w-]+/[\w.-]+)\.git/info/lfs/objects/batch", path)
    if match is None and batch is None:
        return False
    name = (match or batch)[1]  # type: ignore[index]
    repository = writes.repositories.get(name)
    if repository is None:
        if request.command == "GET" and not name.startswith(("team/", "meta-llama/")):
            return no(404 if token else 401, "RepoNotFound")
        return False
    what = match[2] if match else "batch"
    if what in ("auth-check/write", "preupload/main", "commit/main", "batch") and not _may(name, token, writes):
        return no(403, None, "write access is needed")
    if what is None:
        siblings = [{"rfilename": file} for file in repository.files]
        return say({"id": name, "sha": COMMIT, "private": repository.private, "siblings": siblings})
    if what == "tree/main":
        entries = [
            {"type": "file", "path": file, "size": len(data), "oid": "0" * 40}
            for file, data in repository.files.items()
        ]
        reply(request, 200, json.dumps(entries).encode())
        return True
    if what == "auth-check/write":
        return say({})
    if what == "preupload/main":
        files = [
            {"path": file["path"], "uploadMode": _mode(file["path"]), "shouldIgnore": False}
            for file in json.loads(body)["files"]
        ]
        return say({"files": files})
    if what == "batch":
        return say({"objects": [_upload(item, hub) for item in json.loads(body)["objects"]]})
    if writes.full:
        return no(403, None, "Storage limit reached")
    _commit(repository, writes, [json.loads(line) for line in body.splitlines()])
    return say({"commitUrl": f"{hub.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})


def _login(role: str) -> dict[str, Any]:
    orgs = [{"type": "org", "name": name, "roleInOrg": given} for name, given in ROLES.items()]
    token = {"displayName": "mine", "role": role}
    return {"type": "user", "name": USER, "orgs": orgs, "auth": {"type": "access_token", "accessToken": token}}


def _may(name: str, token: str, writes: Writes) -> bool:
    space = name.partition("/")[0]
    return token == WRITER and name not in writes.locked and (space == USER or ROLES.get(space) == "write")


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", "tokenizer.json")) else "regular"


def _upload(item: dict[str, Any], hub: Hub) -> dict[str, Any]:
    if item["oid"] in hub.writes.large:
        return {"oid": item["oid"], "size": item["size"]}
    return {**item, "actions": {"upload": {"href": f"{hub.url}/large/{item['oid']}"}}}


def _large(request: BaseHTTPRequestHandler, writes: Writes, path: str, length: int, say: Any) -> bool:
    if writes.broken:
        request.rfile.read(length // 2)
        request.close_connection = True
        return True
    data = request.rfile.read(length)
    oid = path.rpartition("/")[2]
    assert hashlib.sha256(data).hexdigest() == oid
    writes.large[oid] = data
    done: bool = say({})
    return done


def _commit(repository: Repository, writes: Writes, lines: list[dict[str, Any]]) -> None:
    files = dict(repository.files)
    for line in lines:
        value = line["value"]
        if line["key"] == "header":
            repository.commits.append(value["summary"])
        elif line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = writes.large[value["oid"]]
        elif line["key"] == "deletedFile":
            del files[value["path"]]
    repository.files = files
