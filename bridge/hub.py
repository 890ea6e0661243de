"""The Hugging Face hub: ids, downloads, and errors that say what to do. Tokens are never read or printed here."""

from __future__ import annotations

import re
from pathlib import Path

from bridge.errors import AccessError

# What a conversion needs: no `original/`, no pickles.
PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]
IGNORED = ["original/*", "*/*"]


def is_id(text: str) -> bool:
    """Whether a text looks like `organisation/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is not None


def resolve(model_id: str, revision: str | None = None, *, download: bool = True) -> Path:
    """The local folder of a hub model, downloaded on demand into huggingface_hub's own cache.

    `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HOME` and the login are respected, since huggingface_hub does the work.

    Raises:
        AccessError: no login, wrong login, gated, not found, no such revision, or no network; each its own text.
    """
    import httpx
    from huggingface_hub import errors, snapshot_download

    page = f"https://huggingface.co/{model_id}"
    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=PATTERNS,
            ignore_patterns=IGNORED,
            local_files_only=not download,
        )
    except errors.GatedRepoError as error:
        status = getattr(error.response, "status_code", None)
        if status == 401:
            raise AccessError(
                f"{model_id} is gated and you are not logged in",
                hint=f"request access at {page}, then run: hf auth login",
            ) from None
        raise AccessError(
            f"{model_id} is gated and your account has no access yet", hint=f"request access at {page}"
        ) from None
    except errors.RevisionNotFoundError:
        raise AccessError(f"{model_id} has no revision {revision!r}", hint=f"see {page}/commits/main") from None
    except errors.RepositoryNotFoundError as error:
        status = getattr(error.response, "status_code", None)
        if status == 401:
            raise AccessError(
                f"{model_id} does not exist, or is private and your login is missing or not valid",
                hint="check the name; then run: hf auth login",
            ) from None
        raise AccessError(
            f"{model_id} does not exist on the hub", hint="check the spelling; a local folder needs a path that exists"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise AccessError(
            f"{model_id} is not in the cache and the hub cannot be reached",
            hint="check the network and HF_HUB_OFFLINE, or give a local folder",
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status == 401:
            raise AccessError(
                f"the hub refused your login for {model_id}", hint="it is wrong or expired; run: hf auth login"
            ) from None
        raise AccessError(f"the hub answered {status} for {model_id}", hint="try again later") from None
    except (httpx.HTTPError, OSError) as error:
        raise AccessError(
            f"{model_id} could not be downloaded: {type(error).__name__}",
            hint="run it again: it goes on where it stopped",
        ) from None
    return Path(folder)
