"""All processes of a run meet before JAX does, within a bounded time, and compare what must be equal.

JAX's own initialisation aborts the process when somebody is missing, and says nobody's name (measured). So process 0
first listens on the coordinator's port itself; the others tell it who they are; it answers with one sentence when
somebody is missing, another version runs somewhere, or a host does not see the run's folder. Then the port is JAX's.

One JSON object a line: a process sends its `Hello`; process 0 answers {"marker": name} or {"error": text}; a process
answers {"unseen": reason, or ""}; process 0 answers {"go": true} or {"error": text}.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge.errors import LaunchError
from bridge.launchers.hello import Hello, Line, disagreement

PAUSE = 0.2
SHARED_FOLDER_PATIENCE = 10.0
"""Seconds for a file written on one host to show on another: network file systems keep old listings for some."""
SHARED = "workdir must lie on storage that all hosts share, at the same path"


def join(
    hello: Hello, host: str, port: int, timeout: float, unreadable: Callable[[], str], say: Callable[[str], None]
) -> None:
    """Meet the other processes; returns when all are there and agree.

    Args:
        hello: this process.
        host: the coordinator's name or address.
        port: its port, free until this call and again after it.
        timeout: seconds.
        unreadable: why the run cannot be read on this host, or "": asked when process 0 has written it for certain.
        say: told who is waited for.

    Raises:
        LaunchError: somebody is missing, differs, or the port is taken.
    """
    deadline = time.monotonic() + timeout
    if hello.process == 0:
        _Host(hello, host, port, timeout, deadline, unreadable, say).meet()
    else:
        _Guest(hello, host, port, timeout, deadline, unreadable).meet()


class _Host:
    """Process 0."""

    def __init__(
        self,
        hello: Hello,
        host: str,
        port: int,
        timeout: float,
        deadline: float,
        unreadable: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        self._hello, self._host, self._port = hello, host, port
        self._timeout, self._deadline, self._unreadable, self._say = timeout, deadline, unreadable, say
        self._joined: dict[int, tuple[Hello, Line]] = {}

    def meet(self) -> None:
        listener = self._listen()
        try:
            self._gather(listener)
            everybody = [self._hello, *(hello for hello, _ in self._in_order())]
            problem = disagreement(everybody)
            if problem is None:
                problem = self._shared_folder()
            if problem is not None:
                self._tell({"error": str(problem)})
                raise problem
            self._tell({"go": True})
        finally:
            for _, line in self._joined.values():
                line.socket.close()
            listener.close()

    def _listen(self) -> socket.socket:
        address = self._host if self._host.startswith("127.") else ""
        try:
            if not address and socket.has_dualstack_ipv6():
                return socket.create_server(("::", self._port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server((address, self._port))
        except OSError as error:
            raise LaunchError(
                f"port {self._port} on {self._hello.host} cannot be used: {error.strerror}",
                hint="another run may hold it; cluster.port chooses another one",
            ) from error

    def _gather(self, listener: socket.socket) -> None:
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ)
        told = time.monotonic()
        while len(self._joined) < self._hello.count - 1:
            left = self._deadline - time.monotonic()
            if left <= 0:
                problem = self._missing()
                self._tell({"error": str(problem)})
                raise problem
            for key, _ in selector.select(min(left, 1.0)):
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    selector.register(connection, selectors.EVENT_READ, Line(connection))
                else:
                    self._hear(selector, key.data)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                self._say(f"{self._missing().message} (waiting)")
        selector.close()

    def _hear(self, selector: selectors.BaseSelector, line: Line) -> None:
        """A new process, or one that has gone again; what is neither is a stranger, and hung up on."""
        try:
            value = line.feed()
            hello = None if value is None else Hello.of(value)
        except (OSError, ValueError, TypeError):
            selector.unregister(line.socket)
            line.socket.close()
            self._joined = {number: entry for number, entry in self._joined.items() if entry[1] is not line}
            return
        if hello is None:
            return
        if hello.process in self._joined or not 0 < hello.process < self._hello.count:
            problem = LaunchError(
                f"{hello.name} is one too many of {self._hello.count}",
                hint="another run may use this port: cluster.port",
            )
            line.send({"error": str(problem)})
            self._tell({"error": str(problem)})
            raise problem
        self._joined[hello.process] = (hello, line)

    def _missing(self) -> LaunchError:
        count = self._hello.count
        missing = [str(number) for number in range(1, count) if number not in self._joined]
        plural = "processes" if len(missing) > 1 else "process"
        joined = f"{len(self._joined) + 1} of {count} joined within {self._timeout:g} s"
        return LaunchError(
            f"{joined}: {plural} {', '.join(missing)} missing",
            hint=f"do the other hosts reach {self._host}:{self._port}? cluster.init_timeout waits longer",
        )

    def _shared_folder(self) -> LaunchError | None:
        folder = Path(self._hello.run_dir)
        marker = folder / f".joining-{secrets.token_hex(8)}"
        try:
            marker.touch()
        except OSError as error:
            return LaunchError(f"{folder} cannot be written on {self._hello.host}: {error.strerror}")
        unseen = {self._hello.name: self._unreadable()}
        try:
            self._tell({"marker": marker.name})
            for hello, line in self._in_order():
                try:
                    answer = line.receive(time.monotonic() + SHARED_FOLDER_PATIENCE + 5)
                except (OSError, ValueError) as error:
                    return LaunchError(f"{hello.name} has gone while the processes met: {error}")
                unseen[hello.name] = str(answer.get("unseen"))
        finally:
            marker.unlink(missing_ok=True)
        blind = [f"{name}: {reason}" for name, reason in unseen.items() if reason]
        if not blind:
            return None
        return LaunchError(f"{folder} or its checkpoint is not visible on every host", details=blind, hint=SHARED)

    def _in_order(self) -> list[tuple[Hello, Line]]:
        return [self._joined[number] for number in sorted(self._joined)]

    def _tell(self, value: Mapping[str, Any]) -> None:
        for _, line in self._in_order():
            with contextlib.suppress(OSError):  # who has gone is found out when its answer is missing
                line.send(value)


class _Guest:
    """Every other process."""

    def __init__(
        self, hello: Hello, host: str, port: int, timeout: float, deadline: float, unreadable: Callable[[], str]
    ) -> None:
        self._hello, self._host, self._port = hello, host, port
        self._timeout, self._deadline, self._unreadable = timeout, deadline, unreadable

    def meet(self) -> None:
        reason = "it does not answer"
        # Process 0 gives up at its own deadline and says why: leave it the time to.
        while time.monotonic() < self._deadline + 2:
            try:
                with socket.create_connection((self._host, self._port), timeout=2) as connection:
                    if self._talk(Line(connection)):
                        return
            except TimeoutError:
                reason = "it does not answer"
            except OSError as error:
                reason = error.strerror or str(error)
            except ValueError as error:
                raise LaunchError(
                    f"what answers at {self._host}:{self._port} is no process of this run", hint="cluster.port"
                ) from error
            time.sleep(PAUSE)
        where = f"process 0 at {self._host}:{self._port}"
        raise LaunchError(
            f"{self._hello.name} did not reach {where} within {self._timeout:g} s: {reason}",
            hint="is process 0 running, and its port open to the other hosts?",
        )

    def _talk(self, line: Line) -> bool:
        line.send(asdict(self._hello))
        while True:
            answer = line.receive(self._deadline + 2)
            if "error" in answer:
                raise LaunchError(str(answer["error"]))
            if "go" in answer:
                return True
            line.send({"unseen": self._unseen(str(answer.get("marker")))})

    def _unseen(self, marker: str) -> str:
        path = Path(self._hello.run_dir) / Path(marker).name
        patience = time.monotonic() + SHARED_FOLDER_PATIENCE
        while not path.exists():
            if time.monotonic() > patience:
                return "what process 0 wrote there does not show"
            time.sleep(PAUSE)
        return self._unreadable()
