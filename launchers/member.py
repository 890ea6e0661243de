"""What the shim is told of its place, as `plan.bridge_env` wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.errors import LaunchError


@dataclass(frozen=True)
class Member:
    """One process of a run. Times in seconds."""

    engine: str
    process: int = 0
    count: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    init_timeout: int = 120
    heartbeat_timeout: int = 100
    stall_timeout: int = 1800
    grace: int = 30
    devices: int | None = None

    @property
    def address(self) -> str:
        """The coordinator, `host:port`."""
        return f"{self.host}:{self.port}"

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Member:
        """Read the environment.

        Raises:
            LaunchError: a value is missing or no number.
        """
        numbers = {
            "process": "BRIDGE_PROCESS_ID",
            "count": "BRIDGE_PROCESS_COUNT",
            "init_timeout": "BRIDGE_INIT_TIMEOUT",
            "heartbeat_timeout": "BRIDGE_HEARTBEAT_TIMEOUT",
            "stall_timeout": "BRIDGE_STALL_TIMEOUT",
            "grace": "BRIDGE_GRACE",
            "devices": "BRIDGE_DEVICES",
        }
        found = {field: _number(name, env[name]) for field, name in numbers.items() if name in env}
        host, _, port = env.get("BRIDGE_COORDINATOR", "127.0.0.1:0").rpartition(":")
        member = cls(env.get("BRIDGE_ENGINE", ""), host=host, port=_number("BRIDGE_COORDINATOR", port), **found)
        if member.count > 1 and not (host and member.port and "BRIDGE_PROCESS_ID" in env):
            raise LaunchError(
                f"{member.count} processes need BRIDGE_COORDINATOR and BRIDGE_PROCESS_ID",
                hint="start with bridge launch",
            )
        if not 0 <= member.process < member.count:
            raise LaunchError(f"process {member.process} of {member.count} does not exist")
        return member


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise LaunchError(f"{name} must be a number, found {text!r}") from error
