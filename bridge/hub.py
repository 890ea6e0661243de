"""The Hugging Face hub: ids, downloads, and errors that say what to do. Tokens are never read or printed here."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import AccessError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

# What a conversion needs: no `original/`, no pickles.
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
SMALL = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]
PATTERNS = [*WEIGHTS, *SMALL]
IGNORED = ["original/*", "*/*"]
COMMIT = re.compile(r"[0-9a-f]{40}")


def is_id(text: str) -> bool:
    """Whether a text looks like `organisation/name`, as the hub spells them."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}", text)
    return plain is not None and not re.search(r"--|\.\.|\.git$|[.-]$", text)


@dataclass(frozen=True)
class Listing:
    """What a hub model is made of: the commit, and the bytes of every file that a conversion needs."""

    revision: str
    files: dict[str, int]

    @property
    def bytes(self) -> int:
        """All files together."""
        return sum(self.files.values())


def commit_of(folder: Path) -> str | None:
    """The commit of a folder of the hub's cache; None for other folders."""
    return folder.name if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) else None


def resolve(
    model_id: str,
    revision: str | None = None,
    *,
    download: bool = True,
    local_dir: Path | None = None,
    weights: bool = True,
    pinned: bool = False,
) -> Path:
    """The local folder of a hub model, downloaded on demand into huggingface_hub's own cache, or into `local_dir`.

    `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HOME` and the login are respected, since huggingface_hub does the work.

    Args:
        model_id: `organisation/name`.
        revision: branch, tag or commit.
        download: ask the hub; else the cache alone.
        local_dir: in the place of the cache.
        weights: without them: config and tokenizer only.
        pinned: the revision is the lock's, which an error then says.

    Raises:
        AccessError: no login, wrong login, gated, not found, no such revision, or no network; each its own text.
    """
    from huggingface_hub import constants, snapshot_download

    with _explained(model_id, revision, download, pinned):
        folder = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=PATTERNS if weights else SMALL,
            ignore_patterns=IGNORED,
            local_files_only=not download,
            local_dir=local_dir,
        )
    if weights and not any(Path(folder).glob("*.safetensors")):
        if download and not constants.is_offline_mode():
            raise _no_weights(model_id, sorted(path.name for path in Path(folder).iterdir()))
        # The small files alone were fetched, as a tokenizer, or to say what would fit.
        raise _not_cached(None, model_id, revision, download, pinned)
    return Path(folder)


def preflight(model_id: str, revision: str | None = None, *, weights: bool = True, pinned: bool = False) -> Listing:
    """Ask the hub what a download would fetch, and whether this login may: nothing is stored.

    Raises:
        AccessError: as `resolve`, or there are no safetensors.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    with _explained(model_id, revision, True, pinned):
        api = HfApi()
        commit = api.model_info(model_id, revision=revision).sha or revision or "main"
        sizes = {entry.path: getattr(entry, "size", 0) for entry in api.list_repo_tree(model_id, revision=commit)}
        # A gated model is listed to everybody: only its files say whether they are given out.
        asked = "config.json" if "config.json" in sizes else min(sizes, default="config.json")
        get_hf_file_metadata(hf_hub_url(model_id, asked, revision=commit))
    patterns = PATTERNS if weights else SMALL
    files = {name: size for name, size in sizes.items() if matches(name, patterns) and not matches(name, IGNORED)}
    if weights and not any(name.endswith(".safetensors") for name in files):
        raise _no_weights(model_id, sorted(sizes))
    return Listing(commit, files)


def newest(model_id: str, revision: str | None = None) -> str | None:
    """The commit that a branch or tag stands for now, by the hub.

    Raises:
        AccessError: as `resolve`.
    """
    from huggingface_hub import HfApi

    with _explained(model_id, revision, True):
        return HfApi().model_info(model_id, revision=revision).sha


def matches(name: str, patterns: Iterable[str]) -> bool:
    """As huggingface_hub matches: `*` stands for slashes too."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@contextlib.contextmanager
def _explained(model_id: str, revision: str | None, download: bool, pinned: bool = False) -> Iterator[None]:
    """Turn what huggingface_hub raises into an AccessError.

    Nothing of the original is shown: its text holds the request, and with it what the user may not want in a log.
    """
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise AccessError(
            f"{model_id!r} at revision {revision!r} is no name the hub knows", hint="it looks like organisation/name"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise _not_cached(None, model_id, revision, download, pinned) from None
    except errors.LocalEntryNotFoundError as error:
        raise _not_cached(error.__cause__, model_id, revision, download, pinned) from None
    except errors.HfHubHTTPError as error:
        raise _refused(error, model_id, revision, pinned) from None
    except (httpx.HTTPError, OSError) as error:
        raise _broken_off(error, model_id) from None


def _no_weights(model_id: str, files: list[str]) -> AccessError:
    return AccessError(
        f"{model_id} has no safetensors", details=files, hint="take a repository that has the weights so"
    )


def _page(model_id: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT.rstrip('/')}/{model_id}"


def _not_cached(
    cause: BaseException | None, model_id: str, revision: str | None, download: bool, pinned: bool
) -> AccessError:
    """Nothing usable in the cache; `cause` is what the hub's client met when it asked the hub."""
    from huggingface_hub import constants, errors

    if isinstance(cause, errors.HfHubHTTPError):
        return _refused(cause, model_id, revision, pinned)
    if not download:
        return AccessError(f"{model_id} is not in the cache", hint="bridge download fetches it")
    if constants.is_offline_mode():
        return AccessError(
            f"{model_id} is not in the cache, and HF_HUB_OFFLINE is set",
            hint="unset HF_HUB_OFFLINE to download it, or give a local folder",
        )
    return AccessError(
        f"{model_id} is not in the cache, and {constants.ENDPOINT} cannot be reached",
        hint="check the network, the proxy and HF_ENDPOINT, or give a local folder",
    )


def _refused(error: HfHubHTTPError, model_id: str, revision: str | None, pinned: bool = False) -> AccessError:
    """The hub answered, but not with the model."""
    from huggingface_hub import errors, get_token

    status = getattr(error.response, "status_code", None)
    page, known = _page(model_id), get_token() is not None
    if isinstance(error, errors.GatedRepoError):
        if status == 401 or not known:
            return AccessError(
                f"{model_id} is gated and you are not logged in",
                hint=f"request access at {page}, then run: hf auth login",
            )
        return AccessError(f"{model_id} is gated and your account has no access yet", hint=f"request access at {page}")
    if isinstance(error, errors.RevisionNotFoundError) and pinned:
        return AccessError(
            f"{model_id} has no longer the commit {revision}, to which bridge.json is pinned",
            hint="bridge download --update takes the newest",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return AccessError(f"{model_id} has no revision {revision or 'main'!r}", hint=f"see {page}/commits/main")
    if isinstance(error, errors.RepositoryNotFoundError):
        if status == 401 and not known:
            return AccessError(
                f"{model_id} does not exist, or is private and you are not logged in",
                hint="check the name; then run: hf auth login",
            )
        if status == 401:
            return AccessError(
                f"{model_id} does not exist, or your login may not see it",
                hint="check the name; `hf auth whoami` says who you are",
            )
        return AccessError(
            f"{model_id} does not exist on the hub", hint="check the spelling; a local folder needs a path that exists"
        )
    if status == 401:
        return AccessError(
            f"the hub refused your login for {model_id}",
            hint="it is wrong or expired; run: hf auth login (and check HF_TOKEN)",
        )
    if status == 403:
        return AccessError(
            f"your login has no permission to read {model_id}",
            hint="a fine-grained token needs read access to it: see https://huggingface.co/settings/tokens",
        )
    return AccessError(f"the hub answered {status} for {model_id}", hint="try again later")


def _broken_off(error: Exception, model_id: str) -> AccessError:
    """The connection, or the disk, failed within a download."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return AccessError(
            f"{model_id} could not be stored in the cache: {os.strerror(error.errno)}",
            hint="HF_HOME names another place for it",
        )
    return AccessError(
        f"the download of {model_id} broke off ({type(error).__name__})",
        hint="run it again: it goes on where it stopped",
    )
