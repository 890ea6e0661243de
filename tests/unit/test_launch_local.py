"""Processes on this host: one failure ends all, its lines are the error, and nothing stays behind."""

from __future__ import annotations

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
from bridge.launchers import local

PID = "import os, pathlib; pathlib.Path({file!r}).write_text(str(os.getpid()))\n"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def test_lines_and_logs(tmp_path: Path) -> None:
    shown: list[str] = []
    program = "print('bridge: step 1/2'); print('chatter')"
    local.execute([python(program, tmp_path), python(program, tmp_path)], tmp_path / "logs", shown.append)
    assert shown == ["step 1/2"]
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == dict.fromkeys(("process-0.log", "process-1.log"), "bridge: step 1/2\nchatter\n")


def test_verbose_shows_all_with_their_numbers(tmp_path: Path) -> None:
    shown: list[str] = []
    plan = [python(f"print('from {number}')", tmp_path) for number in range(2)]
    local.execute(plan, tmp_path / "logs", shown.append, verbose=True)
    assert sorted(shown) == ["[0] from 0", "[1] from 1"]


def test_the_first_failure_ends_all_within_seconds(tmp_path: Path) -> None:
    """The survivor ignores SIGTERM, as a process in a collective would."""
    file = tmp_path / "pid"
    plan = [
        python(STUBBORN + PID.format(file=str(file)) + SLEEPER, tmp_path),
        python("import time, sys; time.sleep(1); print('the cause'); sys.exit(7)", tmp_path),
    ]
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        local.execute(plan, tmp_path / "logs", print)
    assert time.monotonic() - start < 9
    assert caught.value.exit_code == 7
    assert "process 1 ended with exit code 7" in str(caught.value)
    assert "the cause" in str(caught.value)
    assert not is_running(pid_in(file))


def test_an_explained_error_is_shown_as_it_is(tmp_path: Path) -> None:
    program = "import sys; print('bridge: error: no data\\n  line 3\\n  hint: look'); sys.exit(1)"
    with pytest.raises(LaunchError) as caught:
        local.execute([python(program, tmp_path)], tmp_path / "logs", print)
    assert (caught.value.message, caught.value.details, caught.value.hint) == ("no data", ("line 3",), "look")


def test_the_culprit_is_not_the_survivor_that_ends_first(tmp_path: Path) -> None:
    survivor = "import sys; print('Gloo error: Connection reset by peer'); sys.exit(1)"
    culprit = "import time, sys; time.sleep(0.7); print('ValueError: bad row'); sys.exit(1)"
    with pytest.raises(LaunchError) as caught:
        local.execute([python(survivor, tmp_path), python(culprit, tmp_path)], tmp_path / "logs", print)
    assert "process 1 ended" in str(caught.value)
    assert "bad row" in str(caught.value)


def test_death_by_a_signal_is_named(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(LaunchError, match="process 0 ended with signal SIGKILL") as caught:
        local.execute([python(program, tmp_path)], tmp_path / "logs", print)
    assert caught.value.exit_code == 137


def launcher(tmp_path: Path, program: str) -> tuple[subprocess.Popen[str], int]:
    """Start a launcher of one process of its own, and wait until that is up: returns it and the process's id."""
    file = tmp_path / "pid"
    code = f"""
        import sys
        from pathlib import Path
        from bridge.errors import BridgeError
        from bridge.launchers import local
        from bridge.launchers.plan import Launch
        try:
            local.execute([Launch((sys.executable, "-c", {PID.format(file=str(file)) + program!r}),
                           cwd={str(tmp_path)!r})] * 1, Path({str(tmp_path)!r}) / "logs", print, grace=2)
        except BridgeError as error:
            print(error, flush=True)
            sys.exit(error.exit_code)
    """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    popen = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=shim_env(), start_new_session=True)
    return popen, pid_in(file)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_all(tmp_path: Path, number: signal.Signals) -> None:
    popen, pid = launcher(tmp_path, SLEEPER)
    os.kill(popen.pid, number)
    text, _ = popen.communicate(timeout=10)
    assert popen.returncode == 128 + number
    assert f"{number.name}: stopped before a step ended: nothing new was saved" in text
    assert not is_running(pid)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    popen, pid = launcher(tmp_path, STUBBORN + SLEEPER)
    start = time.monotonic()
    os.kill(popen.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(popen.pid, signal.SIGINT)
    popen.communicate(timeout=10)
    assert time.monotonic() - start < 3  # grace 2 + margin 5 otherwise
    assert not is_running(pid)


def test_no_orphan_when_the_launcher_is_killed(tmp_path: Path) -> None:
    """The shim's lifeline: standard input ends when the launcher does."""
    program = "from bridge.launchers.stopping import end_with_launcher; end_with_launcher()\n" + SLEEPER
    popen, pid = launcher(tmp_path, program)
    os.kill(popen.pid, signal.SIGKILL)
    assert wait_for(lambda: not is_running(pid), 5)
    popen.communicate()


def test_without_the_lifeline_it_would_be_left(tmp_path: Path) -> None:
    popen, pid = launcher(tmp_path, SLEEPER)
    os.kill(popen.pid, signal.SIGKILL)
    time.sleep(1)
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)
    popen.communicate()


def test_a_free_port_is_free() -> None:
    import socket

    with socket.create_server(("127.0.0.1", local.free_port())):
        pass
