"""Watch the processes of a plan: logs in files, progress shown, the first failure ends all, nothing is left running."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bridge.errors import LaunchError
from bridge.launchers.progress import MARK
from bridge.launchers.shim import EXPLAINED

FAILURE_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL for the others when one has failed: they cannot save without it."""
GRACE_MARGIN = 5.0
"""What the shim is left, beyond its own grace period, when the user stops a run."""
KILL_PATIENCE = 5.0
"""Seconds for SIGKILL to be carried out, on a host that ssh leads to."""
CULPRIT_PATIENCE = 1.5
"""Seconds after the first failure in which others may show that they were the cause."""
TAIL, SHOWN = 40, 12
NO_CONNECTION = 255
"""The exit code of ssh when it does not reach a host, or loses it."""

# What survivors say when another process has gone: seldom the cause.
ECHOES = (
    "gloo",
    "connection reset",
    "connection closed",
    "coordination",
    "heartbeat",
    "nccl",
    "preempted",
    "unavailable",
)

Show = Callable[[str], None]


@dataclass
class Child:
    """A started process: `send` brings a signal to it and all its own children, wherever it runs.

    `far` is the host that it runs on, where ssh leads there: exit code 255 is then the connection's, not the process's.
    `silent`: the host did not answer when the process was to be killed.
    """

    number: int
    name: str
    popen: subprocess.Popen[str]
    send: Callable[[signal.Signals], None]
    tail: list[str] = field(default_factory=list)
    far: str | None = None
    silent: bool = False

    @property
    def lost(self) -> bool:
        """Whether its host could not be reached, or not any more."""
        return self.silent or (self.far is not None and self.popen.returncode == NO_CONNECTION)


class StoppedByUser(LaunchError):
    """Ctrl-C or SIGTERM ended the run."""


def supervise(
    start: Sequence[Callable[[], Child]], logs: Path, show: Show, verbose: bool, grace: float, numbered: bool
) -> None:
    """Start the processes and wait for them.

    Args:
        start: starts one process each.
        logs: folder for `process-<n>.log`, appended to.
        show: called with each line meant for the user, from any thread; all processes say the same, so those of the
            first are shown.
        verbose: show the engine's own lines too, of all processes.
        grace: seconds that a stopped run may take to save a checkpoint.
        numbered: put the process's number before its lines.

    Raises:
        LaunchError: a process failed; its last lines are the details, its exit code the error's.
        StoppedByUser: SIGINT or SIGTERM; a second one ends all at once.
    """
    logs.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    pumps: list[threading.Thread] = []
    with contextlib.ExitStack() as stack, interrupted() as received:
        try:
            for begin in start:
                child = begin()
                children.append(child)
                path = logs / f"process-{child.number}.log"
                log = stack.enter_context(path.open("a", encoding="utf-8", errors="replace"))
                prefix = f"[{child.number}] " if numbered and verbose else ""
                shown = show if verbose or len(children) == 1 else _nothing
                pump = threading.Thread(target=_pump, args=(child, log, prefix, shown, verbose), daemon=True)
                pump.start()
                pumps.append(pump)
            failed = _wait(children, received)
            stopped = bool(received)
            if stopped:
                show(f"{received[0].name}: stopping; a checkpoint is saved if a step ends within {grace:g} s")
                _stop(children, grace + GRACE_MARGIN, received)
            elif failed:
                failed += _later_failures(children, failed)
        finally:
            _stop(children, FAILURE_GRACE, received)
            for pump in pumps:
                pump.join(timeout=5)
    if stopped:
        raise _stopped(received[0], children)
    if failed:
        # What fails first when a network breaks is a process on this side of it.
        failed += [number for number, child in enumerate(children) if child.lost and number not in failed]
        raise failure(children, failed, logs)


def failure(children: Sequence[Child], order: Sequence[int], logs: Path) -> LaunchError:
    """The error of a failed run. `order`: positions of the processes in the order of their ends."""
    position = min(order, key=lambda index: (_innocence(children[index]), order.index(index)))
    child = children[position]
    code = child.popen.returncode
    explained = next((i for i in range(len(child.tail) - 1, -1, -1) if child.tail[i].startswith(EXPLAINED)), None)
    if explained is not None:
        first, *rest = child.tail[explained:]
        hint = next((line.strip().removeprefix("hint: ") for line in rest if line.strip().startswith("hint: ")), None)
        details = [line.strip() for line in rest if line.startswith("  ") and not line.strip().startswith("hint: ")]
        error = LaunchError(first.removeprefix(EXPLAINED), details=details, hint=hint)
    elif child.lost:
        return LaunchError(
            f"{child.name}: the host cannot be reached, or the connection to it broke",
            details=child.tail[-3:],
            hint=f"does `ssh {child.far} true` work? without a connection the host ends what runs there by itself",
        )
    else:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = f"the whole log: {logs / f'process-{child.number}.log'}"
        error = LaunchError(f"{child.name} ended with {how}", details=child.tail[-SHOWN:], hint=hint)
    error.exit_code = code if code > 0 else 128 - code
    return error


def _innocence(child: Child) -> int:
    return 0 if child.lost else innocence(child.tail, child.popen.returncode == -signal.SIGKILL)


def innocence(tail: Sequence[str], killed: bool) -> int:
    """How unlikely a process is the cause of a failed run, from its last lines.

    0: bridge explains its end; 1: killed by SIGKILL, or failed on its own; 2: failed because another one had.
    """
    text = "\n".join(tail).lower()
    if EXPLAINED in text:
        return 0
    return 2 if not killed and any(echo in text for echo in ECHOES) else 1


def _stopped(number: signal.Signals, children: Sequence[Child]) -> StoppedByUser:
    lines = [line for child in children for line in child.tail if line.startswith(EXPLAINED)]
    saved = lines[0].removeprefix(EXPLAINED) if lines else "stopped before a step ended: nothing new was saved"
    error = StoppedByUser(f"{number.name}: {saved}", hint="--resume goes on from the newest checkpoint")
    error.exit_code = 128 + number
    return error


def _pump(child: Child, log: IO[str], prefix: str, show: Show, verbose: bool) -> None:
    for line in child.popen.stdout or ():
        log.write(line)
        log.flush()
        text = line.rstrip("\n")
        child.tail.append(text)
        del child.tail[:-TAIL]
        if text.startswith(MARK) and not text.startswith(EXPLAINED):
            show(prefix + text.removeprefix(MARK))
        elif verbose:
            show(prefix + text)


def _nothing(line: str) -> None:
    del line


def _wait(children: Sequence[Child], received: list[signal.Signals]) -> list[int]:
    """Positions of the processes that have failed; empty when all ended well, or a signal came."""
    while not received:
        codes = [child.popen.poll() for child in children]
        failed = [number for number, code in enumerate(codes) if code not in (None, 0)]
        if failed or all(code == 0 for code in codes):
            return failed
        time.sleep(0.05)
    return []


def _later_failures(children: Sequence[Child], failed: Sequence[int]) -> list[int]:
    """The first to exit is often a survivor: its neighbour's traceback may still be on the way."""
    patience = time.monotonic() + CULPRIT_PATIENCE
    while time.monotonic() < patience and any(child.popen.poll() is None for child in children):
        time.sleep(0.05)
    return [number for number, child in enumerate(children) if child.popen.poll() and number not in failed]


def _stop(children: Sequence[Child], grace: float, received: list[signal.Signals]) -> None:
    """End what still runs: SIGTERM, a grace period that a second signal cuts short, SIGKILL."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_PATIENCE)):
        running = [child for child in children if child.popen.poll() is None]
        for child in running:
            child.send(number)
        deadline = time.monotonic() + seconds
        while any(child.popen.poll() is None for child in running) and time.monotonic() < deadline:
            if len(received) > 1 and number == signal.SIGTERM:
                break
            time.sleep(0.05)
    for child in children:
        if child.popen.poll() is None:  # the ssh to a host that does not answer; its far side ends by itself
            child.silent = child.far is not None
            child.popen.kill()
            child.popen.wait()


@contextlib.contextmanager
def interrupted() -> Iterator[list[signal.Signals]]:
    """Collects SIGTERM and SIGINT instead of dying of them."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: Any) -> None:
        del frame
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
