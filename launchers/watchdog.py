"""Ends a run whose steps stop advancing.

A process that hangs but still sends heartbeats is found by nobody else: not JAX, not gloo, not Slurm (measured: 596 s,
then cancelled by hand).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

from bridge.errors import LaunchError
from bridge.launchers import progress

STALLED = 124
"""Exit code of a stalled run, as `timeout` has it."""
MARGIN = 60
"""Seconds later the same is done from C, for a process that hangs while it holds Python's lock."""


class Watchdog:
    """Watches `progress`; the time starts when it is made, so compiling counts as well."""

    def __init__(self, timeout: float, explained: str) -> None:
        """`timeout` in seconds; `explained` is put before the error's text."""
        self._timeout, self._explained = timeout, explained
        self._last, self._step = time.monotonic(), 0
        progress.listen(self._advanced)
        self._arm()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def _advanced(self, step: int | None) -> None:
        self._last = time.monotonic()
        self._step = self._step if step is None else step
        self._arm()

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._timeout + MARGIN, exit=True, file=sys.__stderr__ or sys.stderr)

    def _watch(self) -> None:
        while True:
            left = self._last + self._timeout - time.monotonic()
            if left <= 0:
                self._end()
            time.sleep(max(0.05, min(left, 1.0)))

    def _end(self) -> None:
        where = f"step {self._step} has not ended" if self._step else "no step has begun"
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        error = LaunchError(
            f"the run stood still for {self._timeout:g} s: {where}",
            hint="the log shows where each thread is; cluster.stall_timeout allows more",
        )
        print(f"{self._explained}{error}", file=sys.stderr, flush=True)
        os._exit(STALLED)
