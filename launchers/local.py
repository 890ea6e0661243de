"""Run a plan on this host: logs in files, progress shown, the first failure ends all, nothing is left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from bridge.errors import LaunchError
from bridge.launchers.plan import Launch
from bridge.launchers.progress import MARK
from bridge.launchers.shim import EXPLAINED

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL."""
TAIL = 25

Show = Callable[[str], None]


def execute(plan: Sequence[Launch], logs: Path, show: Show, verbose: bool = False) -> int:
    """Start every process of a plan and wait.

    Args:
        plan: processes of this host.
        logs: folder for `process-<n>.log`, appended to.
        show: called with each line meant for the user, from any thread.
        verbose: show the engine's own lines too.

    Returns:
        The exit code of the first process that failed, else 0.

    Raises:
        LaunchError: a process failed; its last lines are the details.
    """
    logs.mkdir(parents=True, exist_ok=True)
    tails: list[list[str]] = [[] for _ in plan]
    children: list[subprocess.Popen[str]] = []
    pumps: list[threading.Thread] = []
    with contextlib.ExitStack() as stack, _forwarding(children):
        try:
            for number, launch in enumerate(plan):
                log = stack.enter_context(
                    (logs / f"process-{number}.log").open("a", encoding="utf-8", errors="replace")
                )
                child = subprocess.Popen(
                    launch.argv,
                    env={**os.environ, **launch.env},
                    cwd=launch.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
                children.append(child)
                prefix = f"[{number}] " if len(plan) > 1 else ""
                pump = threading.Thread(target=_pump, args=(child.stdout, log, tails[number], prefix, show, verbose))
                pump.start()
                pumps.append(pump)
            failed = _wait(children)
        finally:
            _stop(children)
            for pump in pumps:
                pump.join()
    if failed is None:
        return 0
    code = children[failed].returncode
    raise _failure(failed, code, tails[failed], logs / f"process-{failed}.log")


def _failure(number: int, code: int, tail: list[str], log: Path) -> LaunchError:
    explained = next((i for i in range(len(tail) - 1, -1, -1) if tail[i].startswith(EXPLAINED)), None)
    if explained is not None:
        first, *rest = tail[explained:]
        error = LaunchError(first.removeprefix(EXPLAINED), details=[line.strip() for line in rest if line.strip()])
    else:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        error = LaunchError(f"process {number} ended with {how}", details=tail[-12:], hint=f"the whole log: {log}")
    error.exit_code = code if code > 0 else 128 - code
    return error


def _pump(stream: IO[str] | None, log: IO[str], tail: list[str], prefix: str, show: Show, verbose: bool) -> None:
    for line in stream or ():
        log.write(line)
        log.flush()
        text = line.rstrip("\n")
        tail.append(text)
        del tail[:-TAIL]
        if text.startswith(MARK) and not text.startswith(EXPLAINED):
            show(prefix + text.removeprefix(MARK))
        elif verbose:
            show(prefix + text)


def _wait(children: list[subprocess.Popen[str]]) -> int | None:
    """The number of the first process that fails, or None when all ended well."""
    while True:
        codes = [child.poll() for child in children]
        failed = [number for number, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            return failed[0]
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)


def _stop(children: list[subprocess.Popen[str]]) -> None:
    """End what still runs: SIGTERM, a grace period, SIGKILL, each to the whole process group."""
    for number, deadline in (
        (signal.SIGTERM, time.monotonic() + GRACE),
        (signal.SIGKILL, time.monotonic() + GRACE + 5),
    ):
        for child in children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)


@contextlib.contextmanager
def _forwarding(children: list[subprocess.Popen[str]]) -> Any:
    """SIGTERM and SIGINT end the children and then this process's wait."""

    def stop(number: int, frame: Any) -> None:
        del frame
        print(f"bridge: {signal.Signals(number).name}: stopping {len(children)} process(es)", file=sys.stderr)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
