"""Pushing an export to the Hugging Face hub: asked before anything is exported, one commit, nothing of a token shown.

Source of what the hub says of a login: huggingface_hub/hf_api.py, 1.33 (`whoami`, `auth_check`, `create_commit`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import hub
from bridge.errors import AccessError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

CARD = "README.md"
STALE = ("*.safetensors", "*.safetensors.index.json")
TOKENS = "https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class Target:
    """A repository of the hub that may be written."""

    repo_id: str
    private: bool
    exists: bool

    @property
    def described(self) -> str:
        """In a few words."""
        return f"{self.repo_id} ({'private' if self.private else 'public'}{'' if self.exists else ', new'})"


def check(repo_id: str, public: bool) -> Target:
    """Ask the hub whether this login may write a repository; nothing is made there.

    Args:
        repo_id: `organisation/name`, or `user/name`.
        public: whether what is pushed may be seen by everybody.

    Raises:
        AccessError: no login, one that may only read, another's repository, a public one without `public`, no network.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    if not hub.is_id(repo_id):
        raise AccessError(f"{repo_id!r} is no name of a repository", hint="for example your-name/llama-3.1-8b-mine")
    if constants.is_offline_mode():
        raise AccessError("HF_HUB_OFFLINE is set: nothing can be pushed", hint="unset HF_HUB_OFFLINE")
    if get_token() is None:
        raise AccessError(f"pushing to {repo_id} needs a login, and there is none", hint="run: hf auth login")
    api = HfApi()
    with _explained(repo_id):
        login = api.whoami()
    _require_writing(login, repo_id)
    with _explained(repo_id):
        try:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            _require_member(login, repo_id)
            return Target(repo_id, not public, exists=False)
        _may_write(repo_id)
    if not info.private and not public:
        raise AccessError(
            f"{repo_id} exists and is public: what is pushed there is published",
            hint="--public says that this is meant; or push to another name",
        )
    return Target(repo_id, bool(info.private), exists=True)


def create(target: Target) -> None:
    """Make the repository where it is new: the proof that it may be written, before an export is made.

    Raises:
        AccessError: the hub refuses.
    """
    from huggingface_hub import HfApi

    if not target.exists:
        with _explained(target.repo_id):
            HfApi().create_repo(target.repo_id, private=target.private, exist_ok=True)


def upload(target: Target, folder: Path, card: str, message: str) -> str:
    """Upload the files of a folder in one commit, which replaces weights of an earlier one; returns its address.

    A README.md that the repository has already is kept: it may be somebody's work. One in the folder is left out, since
    PEFT's names the folder of the base.

    Raises:
        AccessError: the hub refuses, or the connection breaks; the repository is then as it was.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    with _explained(target.repo_id, folder):
        there = set(api.list_repo_files(target.repo_id))
        new: list[CommitOperationAdd] = [
            CommitOperationAdd(path.relative_to(folder).as_posix(), path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != CARD
        ]
        names = {operation.path_in_repo for operation in new}
        if CARD not in there:
            new.append(CommitOperationAdd(CARD, card.encode()))
        return str(api.create_commit(target.repo_id, [*new, *_stale(there - names)], commit_message=message).commit_url)


def _stale(names: set[str]) -> list[CommitOperationDelete]:
    """Deletions of weights of an earlier push: with other shards beside them, a loader would mix two models."""
    from huggingface_hub import CommitOperationDelete

    return [CommitOperationDelete(name) for name in sorted(names) if hub.matches(name, STALE) and "/" not in name]


def _require_writing(login: dict[str, Any], repo_id: str) -> None:
    """A token of the hub reads, writes, or has a list of what it may; the list is left to the hub."""
    token = (login.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise AccessError(
            f"your login may only read, pushing to {repo_id} must write",
            hint=f"make a token with write access at {TOKENS}, then run: hf auth login",
        )


def _require_member(login: dict[str, Any], repo_id: str) -> None:
    space = repo_id.partition("/")[0]
    roles = {str(org.get("name")).lower(): org.get("roleInOrg") for org in login.get("orgs") or []}
    if space.lower() == str(login.get("name")).lower() or roles.get(space.lower(), "read") != "read":
        return
    may = [str(login.get("name")), *(name for name, role in roles.items() if role != "read")]
    raise AccessError(
        f"your login, {login.get('name')}, may not make a repository under {space}",
        hint=f"it may under {', '.join(may)}",
    )


def _may_write(repo_id: str) -> None:
    """The hub's own answer. `HfApi.auth_check(write=True)` asks the same, in newer versions only."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    address = f"{constants.ENDPOINT.rstrip('/')}/api/models/{repo_id}/auth-check/write"
    hf_raise_for_status(get_session().get(address, headers=build_hf_headers()))


@contextlib.contextmanager
def _explained(repo_id: str, folder: Path | None = None) -> Iterator[None]:
    """Turn what huggingface_hub raises into an AccessError; with `folder`, one that says what to do with the export."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.HfHubHTTPError as error:
        text, hint = _refused(error, repo_id)
    except (httpx.HTTPError, OSError) as error:
        text, hint = f"the connection to the hub broke off ({type(error).__name__})", "check the network"
    except (RuntimeError, ValueError) as error:
        # What the upload of large files raises for whatever happened to it, with addresses that hold signatures.
        if folder is None:
            raise
        text, hint = f"the upload to {repo_id} broke off ({type(error).__name__})", "check the network"
    else:
        return
    if folder is None:
        raise AccessError(text, hint=hint) from None
    raise AccessError(
        text,
        details=[f"the export is whole: {folder.absolute()}", f"{repo_id} is as it was"],
        hint=f"{hint}; then the same command again pushes the export that is there",
    ) from None


def _refused(error: Any, repo_id: str) -> tuple[str, str]:
    status = getattr(error.response, "status_code", None)
    if status == 401:
        return f"the hub refused your login for {repo_id}", "it is wrong or expired; run: hf auth login"
    if status in (403, 404):
        return f"your login may not write {repo_id}", f"a token needs write access to it: see {TOKENS}"
    return f"the hub answered {status} for {repo_id}", "try again later"
