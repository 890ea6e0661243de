"""A bounded pool of threads for jobs that are made as they are needed, and how they say that they are done."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Iterator

WAITING = 4
"""Jobs a worker has ahead of it: a model of 400 GB is cut into 200,000 of them, which are made as they are needed."""

Progress = Callable[[int], None]
"""Called with the number of bytes that were just finished, from any thread."""


def no_progress(_: int) -> None:
    """Say nothing."""


class Room:
    """Lets jobs in while the bytes that they hold stay below a limit; one that needs more has it for itself."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait for `size` bytes, and have them in the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._held == 0 or self._held + size <= self._limit)
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()


M_ARENA_MAX = -8
"""Of mallopt (man 3 mallopt)."""


@functools.cache
def share_freed_memory() -> None:
    """Have glibc allocate from two arenas, not from eight a core: what one thread freed, the others then use again.

    Checking a conversion of Llama 3.1 8B peaked at 586 MB, before at 1085; it took no longer.
    """
    with contextlib.suppress(AttributeError, OSError):  # other C libraries
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def run_bounded(jobs: Iterable[Callable[[], None]], workers: int) -> None:
    """Run jobs on a bounded pool, a few ahead; the first failure stops what has not begun and is raised."""
    share_freed_memory()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        waiting: set[concurrent.futures.Future[None]] = set()
        try:
            for job in jobs:
                waiting.add(pool.submit(job))
                if len(waiting) >= workers * WAITING:
                    waiting = _collect(waiting, concurrent.futures.FIRST_COMPLETED)
            _collect(waiting, concurrent.futures.FIRST_EXCEPTION)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _collect(waiting: set[concurrent.futures.Future[None]], until: str) -> set[concurrent.futures.Future[None]]:
    done, left = concurrent.futures.wait(waiting, return_when=until)
    for future in done:
        future.result()
    return left
