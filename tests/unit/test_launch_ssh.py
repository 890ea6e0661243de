"""The SSH launch with an `ssh` that runs its command on this host: environment, failures, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import SLEEPER, is_running, pid_in, python, shim_env, wait_for

from bridge.errors import LaunchError
from bridge.launchers import ssh, ssh_runner
from bridge.launchers.plan import Launch

PID = "import os, pathlib; pathlib.Path({file!r}).write_text(str(os.getpid()))\n"


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `ssh` first on PATH; it notes its arguments, and runs the last one as the far side's shell would."""
    folder = tmp_path / "bin"
    folder.mkdir()
    notes = tmp_path / "arguments"
    script = folder / "ssh"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {notes}\nfor last; do :; done\nexec sh -c "$last"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return notes


def execute(plan: list[Launch], tmp_path: Path) -> list[str]:
    shown: list[str] = []
    ssh.execute(plan, tmp_path / "logs", shown.append, False, 2.0)
    return shown


def test_secrets_go_through_standard_input(tmp_path: Path, fake_ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "not-to-be-seen")
    quoted = "a b'c\"$HOME"
    program = "import os; print('bridge:', os.environ['HF_TOKEN'][:3], os.environ['ODD'], os.getcwd())"
    launch = Launch((sys.executable, "-c", program), {"ODD": quoted}, str(tmp_path), "hostA", ("HF_TOKEN",))
    assert execute([launch], tmp_path) == [f"not {quoted} {tmp_path}"]
    arguments = fake_ssh.read_text()
    assert "hostA" in arguments
    assert "not-to-be-seen" not in arguments
    assert quoted not in arguments


def test_arguments_of_ssh(tmp_path: Path) -> None:
    command = ssh.command(python("", tmp_path, host="ada@hostB"), ("-p", "2222"))
    assert command[:4] == ("ssh", "-T", "-p", "2222")
    assert command[-3:-1] == ("--", "ada@hostB")
    assert "BatchMode=yes" in command


def test_the_launcher_gives_a_host_up_before_the_host_gives_up_the_launcher(tmp_path: Path) -> None:
    """Else the first failure would be of a process that misses its neighbour: measured, when it was 15 s on both sides.

    ssh asks when nothing has come for an interval, and ends at the question after the last that may stay unanswered.
    """
    words = ssh.command(python("", tmp_path, host="hostB"), ())
    known = dict(word.split("=") for word in words if word.startswith("ServerAlive"))
    seconds = int(known["ServerAliveInterval"]) * (int(known["ServerAliveCountMax"]) + 1)
    assert seconds + ssh.HEARTBEAT <= json.loads(ssh.job(python("", tmp_path), 1, {}).splitlines()[1])["heartbeat"]


def test_one_failure_ends_all(tmp_path: Path, fake_ssh: Path) -> None:
    del fake_ssh
    file = tmp_path / "pid"
    plan = [
        python(PID.format(file=str(file)) + SLEEPER, tmp_path, host="hostA"),
        python("import sys, time; time.sleep(1); print('the cause'); sys.exit(5)", tmp_path, host="hostB"),
    ]
    start = time.monotonic()
    with pytest.raises(LaunchError, match="process 1 on hostB ended with exit code 5") as caught:
        execute(plan, tmp_path)
    assert time.monotonic() - start < 10
    assert "the cause" in str(caught.value)
    assert caught.value.exit_code == 5
    assert not is_running(pid_in(file))


def test_a_missing_folder_names_the_host(tmp_path: Path, fake_ssh: Path) -> None:
    del fake_ssh
    with pytest.raises(LaunchError, match=f"there is no {tmp_path}/none on "):
        execute([python("", tmp_path / "none")], tmp_path)


def test_a_host_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "ssh"
    script.write_text("#!/bin/sh\necho 'ssh: Could not resolve hostname hostA' >&2\nexit 255\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match="process 0 on hostA: the host cannot be reached") as caught:
        execute([python("", tmp_path, host="hostA")], tmp_path)
    assert "Could not resolve hostname" in str(caught.value)


def runner(tmp_path: Path, program: str, heartbeat: float = 30, grace: float = 1) -> tuple[subprocess.Popen[str], int]:
    """Start the far side by itself with a job; returns it and the job's process id."""
    file = tmp_path / "pid"
    argv = [sys.executable, "-c", PID.format(file=str(file)) + program]
    popen = subprocess.Popen(
        [sys.executable, "-u", ssh_runner.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    job = {"argv": argv, "env": {}, "cwd": str(tmp_path), "grace": grace, "heartbeat": heartbeat}
    assert popen.stdin is not None
    popen.stdin.write(json.dumps(job) + "\n")
    popen.stdin.flush()
    return popen, pid_in(file)


STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def test_the_far_side_ends_its_process_when_the_connection_does(tmp_path: Path) -> None:
    popen, pid = runner(tmp_path, STUBBORN + SLEEPER)
    assert popen.stdin is not None
    popen.stdin.close()
    assert wait_for(lambda: not is_running(pid), 5)
    assert popen.wait(5) == 137


def test_the_far_side_ends_its_process_without_signs_of_life(tmp_path: Path) -> None:
    popen, pid = runner(tmp_path, SLEEPER, heartbeat=1)
    assert popen.stdin is not None
    for _ in range(4):
        time.sleep(0.4)
        popen.stdin.write("\n")
        popen.stdin.flush()
    assert is_running(pid)
    assert wait_for(lambda: not is_running(pid), 5)
    assert popen.wait(5) == 143


def test_grandchildren_are_ended_too(tmp_path: Path) -> None:
    file = tmp_path / "grandchild"
    program = f"""
        import subprocess, sys, pathlib
        child = subprocess.Popen(["sleep", "60"])
        pathlib.Path({str(file)!r}).write_text(str(child.pid))
        sys.exit(3)
    """
    popen, _ = runner(tmp_path, textwrap.dedent(program))
    grandchild = pid_in(file)
    assert popen.wait(5) == 3
    assert wait_for(lambda: not is_running(grandchild), 5)


def test_signals_pass(tmp_path: Path) -> None:
    popen, pid = runner(tmp_path, SLEEPER)
    assert popen.stdin is not None
    popen.stdin.write("SIGTERM\n")
    popen.stdin.flush()
    assert popen.wait(5) == 143
    assert not is_running(pid)


def test_killing_the_launcher_leaves_nothing(tmp_path: Path, fake_ssh: Path) -> None:
    del fake_ssh
    file = tmp_path / "pid"
    code = f"""
        from pathlib import Path
        from bridge.launchers import ssh
        from bridge.launchers.plan import Launch
        import sys
        launch = Launch((sys.executable, "-c", {PID.format(file=str(file)) + SLEEPER!r}), cwd={str(tmp_path)!r})
        ssh.execute([launch], Path({str(tmp_path)!r}) / "logs", print, False, 2.0)
    """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    popen = subprocess.Popen(argv, env=shim_env(), stdout=subprocess.DEVNULL)
    pid = pid_in(file)
    os.kill(popen.pid, signal.SIGKILL)
    popen.wait()
    assert wait_for(lambda: not is_running(pid), 8)
