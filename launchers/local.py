"""Run a plan on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from bridge.launchers.plan import Launch
from bridge.launchers.supervise import Child, Show, supervise


def execute(
    plan: Sequence[Launch],
    logs: Path,
    show: Show,
    verbose: bool = False,
    grace: float = 30.0,
    numbers: Sequence[int] | None = None,
) -> None:
    """Start every process of a plan and wait; arguments as `supervise`.

    Args:
        plan: processes of this host.
        numbers: theirs among all processes of the run; default: from 0.

    Raises:
        LaunchError: a process failed; its last lines are the details.
    """
    chosen = list(numbers) if numbers is not None else list(range(len(plan)))
    start = [_starter(number, launch) for number, launch in zip(chosen, plan, strict=True)]
    supervise(start, logs, show, verbose, grace, numbered=len(plan) > 1 or numbers is not None)


def free_port() -> int:
    """A TCP port that nothing on this host uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _starter(number: int, launch: Launch) -> Callable[[], Child]:
    def start() -> Child:
        popen = subprocess.Popen(
            launch.argv,
            # Standard input stays open as long as this process lives: the shim ends when it closes.
            env={**os.environ, **launch.env, "BRIDGE_LIFELINE": "1"},
            cwd=launch.cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

        def send(signal_number: signal.Signals) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal_number)

        return Child(number, f"process {number}", popen, send)

    return start
