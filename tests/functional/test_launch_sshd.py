"""A real sshd on a high port with a throw-away key; two host names that both lead to it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sshd
from launch_runs import make_workplace
from processes import is_running, python, shim_env, wait_for

from bridge.errors import LaunchError
from bridge.launchers import ssh, tunix
from bridge.launchers.cluster import describe
from bridge.launchers.local import free_port
from bridge.launchers.plan import Launch, Site
from bridge.run_spec import parse

pytestmark = pytest.mark.system
COLLECTIVE = Path(__file__).resolve().parents[1] / "collective.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, tuple[str, ...]]]:
    """sshd: its process id, and the options with which `ssh hostA` and `ssh hostB` reach it."""
    folder = tmp_path_factory.mktemp("sshd")
    sshd.make_keys(folder)
    port = free_port()
    popen = sshd.start(folder, "127.0.0.1", port)
    yield popen.pid, sshd.options(folder, dict.fromkeys(("hostA", "hostB"), ("127.0.0.1", port)))
    popen.terminate()
    popen.wait()


@pytest.fixture
def options(server: tuple[int, tuple[str, ...]]) -> tuple[str, ...]:
    return server[1]


def plan(folder: Path, mode: str = "") -> list[Launch]:
    """Two hosts; the coordinator by this machine's own name, which both reach."""
    text = f"{{launcher: ssh, hosts: [hostA, hostB], coordinator: {socket.gethostname()}, port: {free_port()}}}"
    run = parse(f"model: {{source: m}}\ncluster: {text}")
    (folder / "run.json").write_text(json.dumps({"checkpoint": str(folder)}))
    place = describe(run.cluster, "collective", hosts=run.cluster.hosts)
    argv = (sys.executable, str(COLLECTIVE), str(folder), *([mode] if mode else []))
    launches = tunix.plan_launch(run, place, Site(str(folder), sys.executable, "cpu", secrets=("HF_TOKEN",)))
    return [dataclasses.replace(launch, argv=argv) for launch in launches]


def test_a_collective_over_two_hosts(options: tuple[str, ...], tmp_path: Path) -> None:
    shown: list[str] = []
    ssh.execute(plan(tmp_path), tmp_path / "logs", shown.append, False, 5.0, options)
    assert shown == ["sum=3 of 2 processes, 2 devices"]


def test_an_exception_on_one_host_ends_both(options: tuple[str, ...], tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match="process 1 on hostB ended with exit code 1") as caught:
        ssh.execute(plan(tmp_path, "raise"), tmp_path / "logs", print, False, 5.0, options)
    assert "process 1 fails on purpose" in str(caught.value)
    assert time.monotonic() - start < 60


def test_a_secret_arrives_and_is_on_no_command_line(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "not-to-be-seen")
    program = """
import os, pathlib
lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
arrived = os.environ["HF_TOKEN"] == "not-to-be-" + "seen"
print("bridge:", arrived, any(b"not-to-be-" + b"seen" in line for line in lines))
"""
    launch = dataclasses.replace(python(program, tmp_path, host="hostA"), secrets=("HF_TOKEN",))
    shown: list[str] = []
    ssh.execute([launch], tmp_path / "logs", shown.append, False, 5.0, options)
    assert shown == ["True False"]


def test_killing_the_launcher_leaves_nothing_on_the_hosts(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = f"import os, pathlib, time; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys; from pathlib import Path\n"
        "from bridge.launchers import ssh; from bridge.launchers.plan import Launch\n"
        f"launch = Launch((sys.executable, '-c', {program!r}), cwd={str(tmp_path)!r}, host='hostB')\n"
        f"ssh.execute([launch], Path({str(tmp_path)!r}) / 'logs', print, False, 2.0, {options!r})\n"
    )
    popen = subprocess.Popen([sys.executable, "-c", code], env=shim_env())
    assert wait_for(lambda: file.exists() and file.read_text().isdigit(), 15)
    pid = int(file.read_text())
    os.kill(popen.pid, signal.SIGKILL)
    popen.wait()
    assert wait_for(lambda: not is_running(pid), 10)


def test_a_host_that_refuses_the_key(options: tuple[str, ...], tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    config = tmp_path / "config"
    config.write_text(Path(options[1]).read_text().replace("IdentityFile ", f"IdentityFile {other}\n  #"))
    with pytest.raises(LaunchError, match="process 0 on hostA: the host cannot be reached") as caught:
        ssh.execute([python("", tmp_path, host="hostA")], tmp_path / "logs", print, False, 2.0, ("-F", str(config)))
    assert "Permission denied" in str(caught.value)


@pytest.mark.parametrize("cut", [signal.SIGKILL, signal.SIGSTOP], ids=["closed", "silent"])
def test_a_connection_that_breaks_names_the_host_and_leaves_nothing(
    server: tuple[int, tuple[str, ...]], tmp_path: Path, cut: signal.Signals
) -> None:
    """hostB's end of the connection is killed, or stands still as behind a dead network, while both are at work."""
    start: list[float] = []

    def show(line: str) -> None:
        if "going on" in line and not start:
            start.append(time.monotonic())
            for session in sshd.session_of(process_of(tmp_path, 1), server[0]):
                os.kill(session, cut)
                frozen.append(session)

    frozen: list[int] = []
    try:
        with pytest.raises(LaunchError, match="process 1 on hostB: the host cannot be reached, or the") as caught:
            ssh.execute(plan(tmp_path, "loop"), tmp_path / "logs", show, False, 5.0, server[1])
        # ssh asks three times in 15 s, and the last answer may be 5 s old; then seconds to end the others.
        assert time.monotonic() - start[0] < (15 if cut == signal.SIGKILL else 40)
        assert frozen
        assert "not responding" in str(caught.value) if cut == signal.SIGSTOP else "closed" in str(caught.value)
        assert caught.value.exit_code == 1
        # The session still stands still: what ran behind it has ended by itself.
        assert wait_for(lambda: not processes_of(tmp_path), 30), processes_of(tmp_path)
    finally:
        for session in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(session, signal.SIGKILL)


@pytest.mark.slow
def test_a_short_training(options: tuple[str, ...], tmp_path: Path) -> None:
    workplace = make_workplace(tmp_path, "maxtext")
    place = ("--launcher", "ssh", "--hosts", "hostA,hostB", f"cluster.ssh_options=[{', '.join(options)}]")
    meeting = (f"cluster.coordinator={socket.gethostname()}", f"cluster.port={free_port()}")
    text = workplace.bridge("launch", "sft", "train.steps=3", "train.save_every=3", *place, *meeting)
    assert "trained 3 steps" in text
    losses = workplace.losses("maxtext-sft")
    assert sorted(losses) == [1, 2, 3]
    assert losses[3] < losses[1]
    logs = workplace.folder / "runs" / "maxtext-sft" / "logs"
    assert all("step 3/3" in (logs / f"process-{number}.log").read_text() for number in range(2))


def processes_of(run_dir: Path) -> list[int]:
    """What runs for a run on either host."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if str(run_dir).encode() in words and str(COLLECTIVE).encode() in words:
                found.append(int(folder.name))
    return found


def process_of(run_dir: Path, number: int) -> int:
    """The process of a number."""
    mark = f"BRIDGE_PROCESS_ID={number}".encode()
    return next(pid for pid in processes_of(run_dir) if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
