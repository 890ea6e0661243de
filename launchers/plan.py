"""`Launch`: a process to start, as a value."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """One process: its arguments, what is added to its environment, where it starts, and on which host."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "."
    host: str = "localhost"

    def as_shell(self) -> str:
        """The same as one line of shell."""
        env = " ".join(f"{key}={shlex.quote(value)}" for key, value in self.env.items())
        return " ".join(part for part in (f"cd {shlex.quote(self.cwd)} &&", env, shlex.join(self.argv)) if part)


def engine_env(hardware: str, memory_fraction: float | None, xla_flags: tuple[str, ...]) -> dict[str, str]:
    """Environment of an engine process, set before it starts because XLA reads it once.

    `XLA_CLIENT_MEM_FRACTION` is JAX's present name; with the old `XLA_PYTHON_CLIENT_MEM_FRACTION` beside it JAX raises.
    """
    env = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if hardware == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    if memory_fraction is not None:
        env["XLA_CLIENT_MEM_FRACTION"] = f"{memory_fraction:g}"
    if xla_flags:
        env["XLA_FLAGS"] = " ".join(xla_flags)
    return env
