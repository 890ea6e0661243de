"""The store of `gs://`: gcsfs with the credentials that Google's tools share, or an emulator, and what it answers."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

from bridge.errors import AccessError, MissingDependency

EMULATOR, TENSORSTORE_EMULATOR = "STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"
LOGIN = "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS; the account must see the bucket"


@functools.cache
def store() -> Any:
    """The store itself.

    Raises:
        MissingDependency: gcsfs is not installed.
    """
    # Its other class asks for each bucket's kind, with libraries that take two seconds to import.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        from gcsfs.core import GCSFileSystem
    except ImportError as error:
        raise MissingDependency("gcsfs", "gcs") from error
    emulator = os.environ.get(EMULATOR)
    if emulator:
        os.environ.setdefault(TENSORSTORE_EMULATOR, emulator)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # what it says with a traceback is said below in a sentence
    token = "anon" if emulator else None
    return GCSFileSystem(token=token, use_listings_cache=False, skip_instance_cache=True)


@contextlib.contextmanager
def answered(path: object) -> Iterator[None]:
    """Give what the store, its credentials or the network say as an AccessError; an object that is not there stays one.

    Raises:
        AccessError: no credentials, no right, no such bucket, no network.
        FileNotFoundError, FileExistsError: as they are.
    """
    store()
    from aiohttp import ClientError
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except HttpError as error:
        if str(getattr(error, "code", "")) == "412":
            raise FileExistsError(17, "the object exists", str(path)) from error
        raise AccessError(f"{path}: the bucket answered: {error}", hint=LOGIN) from error
    except (OSError, ValueError, ClientError, GoogleAuthError) as error:
        raise AccessError(f"{path} cannot be reached: {error}", hint=LOGIN) from error
