"""Processes meet, or end with one clear sentence within a bounded time; on a real port, in threads."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.errors import LaunchError
from bridge.launchers.hello import Hello, disagreement
from bridge.launchers.local import free_port
from bridge.launchers.rendezvous import join

VERSIONS = {"bridge": "1", "maxtext": "0.2.5", "jax": "0.12"}


def hello(process: int, folder: Path, **changes: object) -> Hello:
    made = Hello(process, 2, f"host{process}", str(folder), "gpu", VERSIONS)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def meet(
    hellos: list[Hello], timeout: float = 10, unreadable: Callable[[], str] = lambda: "", port: int | None = None
) -> list[str]:
    """Let processes meet; returns what each ended with, an empty text when it may go on."""
    ends = ["did not end"] * len(hellos)
    heard: list[str] = []
    chosen = port or free_port()

    def run(place: int) -> None:
        try:
            join(hellos[place], "127.0.0.1", chosen, timeout, unreadable, heard.append)
            ends[place] = ""
        except LaunchError as error:
            ends[place] = str(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(hellos))]
    for thread in reversed(threads):  # process 0 comes last: the others wait for it
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(30)
    return ends


def test_all_meet_and_the_port_is_free_again(tmp_path: Path) -> None:
    port = free_port()
    people = [hello(number, tmp_path, count=3) for number in range(3)]
    assert meet(people, port=port) == ["", "", ""]
    assert list(tmp_path.iterdir()) == []
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_one_of_two_starts(tmp_path: Path) -> None:
    start = time.monotonic()
    ends = meet([hello(0, tmp_path)], timeout=1)
    assert "1 of 2 joined within 1 s: process 1 missing" in ends[0]
    assert time.monotonic() - start < 3


def test_all_are_told_who_is_missing(tmp_path: Path) -> None:
    ends = meet([hello(0, tmp_path, count=4), hello(2, tmp_path, count=4)], timeout=1)
    assert ["2 of 4 joined within 1 s: processes 1, 3 missing" in end for end in ends] == [True, True]


def test_the_coordinator_does_not_start(tmp_path: Path) -> None:
    start = time.monotonic()
    ends = meet([hello(1, tmp_path)], timeout=0.5)
    assert "process 1 on host1 did not reach process 0 at 127.0.0.1:" in ends[0]
    assert "Connection refused" in ends[0]
    assert time.monotonic() - start < 5


def test_a_busy_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ends = meet([hello(0, tmp_path)], port=port)
    assert f"port {port} on host0 cannot be used: Address already in use" in ends[0]


def test_a_stranger_at_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        threading.Thread(target=answer, daemon=True).start()
        ends = meet([hello(1, tmp_path)], timeout=5, port=stranger.getsockname()[1])
    assert "is no process of this run" in ends[0]


@pytest.mark.parametrize("line", [b"GET / HTTP/1.0\r\n\r\n", b"{}\n", b"[1]\n"])
def test_a_stranger_calls(tmp_path: Path, line: bytes) -> None:
    """A port scanner must not end a run."""
    port = free_port()

    def scan() -> None:
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(line)
                    return
            except OSError:
                time.sleep(0.02)

    scanner = threading.Thread(target=scan)
    scanner.start()
    assert meet([hello(0, tmp_path), hello(1, tmp_path)], port=port) == ["", ""]
    scanner.join()


def test_a_greeting_of_another_kind_is_none(tmp_path: Path) -> None:
    good = dataclasses.asdict(hello(1, tmp_path))
    assert Hello.of(good) == hello(1, tmp_path)
    for wrong in ({"process": "1"}, {"versions": "jax"}, {"more": 1}):
        with pytest.raises(TypeError):
            Hello.of({**good, **wrong})


def test_other_versions(tmp_path: Path) -> None:
    other = hello(1, tmp_path, versions={**VERSIONS, "jax": "0.11"})
    for end in meet([hello(0, tmp_path), other]):
        assert "the hosts have different versions" in end
        assert "process 1 on host1 has jax 0.11, process 0 on host0 has jax 0.12" in end
        assert "maxtext" not in end


def test_another_run(tmp_path: Path) -> None:
    for end in meet([hello(0, tmp_path), hello(1, tmp_path / "other")]):
        assert f"process 1 on host1 belongs to the run {tmp_path / 'other'}" in end


def test_two_with_one_number(tmp_path: Path) -> None:
    people = [hello(number, tmp_path, count=3) for number in (0, 1)] + [hello(1, tmp_path, count=3, host="hostX")]
    ends = meet(people, timeout=3)
    assert sum("is one too many of 3" in end for end in ends) == 3


def test_a_checkpoint_that_one_host_does_not_see(tmp_path: Path) -> None:
    answers = iter(["", "there is no /data/checkpoint"])
    for end in meet([hello(0, tmp_path), hello(1, tmp_path)], unreadable=lambda: next(answers)):
        assert "is not visible on every host" in end
        assert "there is no /data/checkpoint" in end


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hosts have a folder of that name, and what one writes the other does not see."""
    monkeypatch.setattr("bridge.launchers.rendezvous.SHARED_FOLDER_PATIENCE", 0.3)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: ".joining-" not in path.name and exists(path))
    for end in meet([hello(0, tmp_path), hello(1, tmp_path)]):
        assert "process 1 on host1: what process 0 wrote there does not show" in end


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    ends = meet([hello(0, tmp_path / "none"), hello(1, tmp_path / "none")])
    assert all("cannot be written on host0" in end for end in ends)


def test_a_host_name_on_loopback_matters_on_cpu_with_two_hosts(tmp_path: Path) -> None:
    first, other = hello(0, tmp_path, platform="cpu"), hello(1, tmp_path, platform="cpu", loopback=True)
    found = disagreement([first, other])
    assert found is not None
    assert "process 1 on host1: host1 resolves to this host itself" in str(found)
    assert disagreement([dataclasses.replace(each, platform="gpu") for each in (first, other)]) is None
    assert disagreement([first, dataclasses.replace(other, host=first.host)]) is None
