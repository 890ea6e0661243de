"""What processes say to each other when they meet, and what must be equal among them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.errors import LaunchError

LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class Hello:
    """What a process says of itself. `loopback`: its host name resolves to itself only."""

    process: int
    count: int
    host: str
    run_dir: str
    platform: str
    versions: Mapping[str, str]
    loopback: bool = False

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Hello:
        """What was received; TypeError when it is something else, as from a stranger at the port."""
        hello = cls(**value)
        kinds = (
            (hello.process, int),
            (hello.count, int),
            (hello.host, str),
            (hello.run_dir, str),
            (hello.versions, dict),
        )
        if not all(isinstance(found, kind) for found, kind in kinds):
            raise TypeError("no process of a run")
        return hello

    @property
    def name(self) -> str:
        """`process 1 on hostB`."""
        return f"process {self.process} on {self.host}"


def disagreement(hellos: list[Hello]) -> LaunchError | None:
    """The first thing that makes a run of these processes impossible, or None."""
    first = hellos[0]
    for other in hellos[1:]:
        if other.run_dir != first.run_dir:
            return LaunchError(f"{other.name} belongs to the run {other.run_dir}, {first.name} to {first.run_dir}")
        if other.count != first.count:
            return LaunchError(f"{other.name} was told of {other.count} processes, {first.name} of {first.count}")
    names = sorted({name for hello in hellos for name in hello.versions})
    differing = [
        ", ".join(f"{hello.name} has {name} {hello.versions.get(name, 'nothing')}" for hello in (other, first))
        for name in names
        for other in hellos[1:]
        if other.versions.get(name) != first.versions.get(name)
    ]
    if differing:
        return LaunchError("the hosts have different versions", details=differing, hint="install the same on each host")
    if len({hello.host for hello in hellos}) > 1 and first.platform == "cpu":
        alone = [f"{hello.name}: {hello.host} resolves to this host itself" for hello in hellos if hello.loopback]
        if alone:
            hint = "/etc/hosts must give the host's name an address that the others reach; CPU collectives bind to it"
            return LaunchError("a host's own name resolves to loopback", details=alone, hint=hint)
    return None


class Line:
    """A connection that speaks lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._pending = b""

    def send(self, value: Mapping[str, Any]) -> None:
        """Send one object."""
        self.socket.sendall(json.dumps(value).encode() + b"\n")

    def feed(self) -> dict[str, Any] | None:
        """What has arrived, once it is a whole line; ConnectionError when the other side has gone."""
        data = self.socket.recv(4096)
        if not data:
            raise ConnectionError("the connection was closed")
        self._pending += data
        if len(self._pending) > LONGEST_LINE:
            raise ValueError("too long a line")
        line, newline, rest = self._pending.partition(b"\n")
        if not newline:
            return None
        self._pending = rest
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
        return value

    def receive(self, deadline: float) -> dict[str, Any]:
        """Wait for a whole line until a time of `time.monotonic`; TimeoutError after it."""
        while True:
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            value = self.feed()
            if value is not None:
                return value
