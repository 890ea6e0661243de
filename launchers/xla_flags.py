"""XLA flags and memory settings, checked before anything starts: XLA aborts on an unknown flag, in a wall of text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping

from bridge.errors import LaunchError

NEW_MEMORY, OLD_MEMORY = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
# Makes the client, which is when XLA reads its flags; the CPU build knows the flags of GPUs as well.
PROBE = """
try:
    from jaxlib._jax import get_tfrt_cpu_client as make
except ImportError:  # another jaxlib: slower, through the front door
    from jax import devices as make
make()
"""
SECONDS = 60


def check_memory(env: Mapping[str, str]) -> None:
    """Refuse the present and the old name of the memory fraction together, on which JAX raises.

    Args:
        env: the whole environment of a process to start.

    Raises:
        LaunchError: both are set.
    """
    if NEW_MEMORY in env and OLD_MEMORY in env:
        raise LaunchError(
            f"{NEW_MEMORY}={env[NEW_MEMORY]} and its old name {OLD_MEMORY}={env[OLD_MEMORY]} are both set",
            hint=f"unset {OLD_MEMORY}; cluster.memory_fraction is the setting",
        )


def check_flags(flags: str, python: str = sys.executable) -> None:
    """Let XLA read the flags in a short process of its own; takes about a second, and nothing where there are none.

    Raises:
        LaunchError: a flag is unknown or its value is not understood; all unknown ones are listed.
    """
    if not flags.strip():
        return
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            [python, "-c", PROBE], env=env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"XLA did not read the flags {flags!r} within {SECONDS} s") from error
    if done.returncode == 0:
        return
    unknown = sorted(set(re.findall(r"--?xla\S+", _after(done.stderr, "Unknown flag"))))
    if unknown:
        raise LaunchError("XLA does not know these flags", details=unknown, hint="cluster.xla_flags, or XLA_FLAGS")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    raise LaunchError(f"XLA does not accept the flags {flags!r}", details=lines[-4:], hint="cluster.xla_flags")


def _after(text: str, mark: str) -> str:
    return next((line.partition(mark)[2] for line in text.splitlines() if mark in line), "")
