"""Writing to the disk while the next bytes are being computed, so that the fsync at the end finds little to do."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

SECONDS = 0.25
"""Between two rounds; outputs that take less are flushed at their end alone."""


@contextlib.contextmanager
def while_written(folder: Path) -> Iterator[None]:
    """Flush the files of a folder again and again, on a thread of its own, while the block writes them.

    Raises:
        OSError: a write failed on its way to the disk; the kernel reports that once, and this thread may be the one.
    """
    ended = threading.Event()
    failed: list[OSError] = []

    def rounds() -> None:
        try:
            while not ended.wait(SECONDS):
                _flush(folder)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=rounds, name="flush", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]


def _flush(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                descriptor = os.open(Path(root, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:  # it was renamed or removed meanwhile, or is a link: the flush at the end sees to it
                continue
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
