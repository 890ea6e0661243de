"""Small processes for the launcher's tests, and what is left of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bridge.launchers.plan import Launch

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"


def python(program: str, folder: Path, host: str = "localhost", **env: str) -> Launch:
    """A plan's process that runs a program text."""
    return Launch((sys.executable, "-c", program), env=env, cwd=str(folder), host=host)


def shim_env() -> dict[str, str]:
    """An environment in which the shim's modules are imported from the checkout."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Wait until a condition holds; whether it did in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def pid_in(file: Path, seconds: float = 10) -> int:
    """A process id that a process writes into a file."""
    assert wait_for(lambda: file.exists() and file.read_text().strip().isdigit(), seconds), f"no pid in {file}"
    return int(file.read_text())
