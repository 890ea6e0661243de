"""The shim's own parts: hard exit, watchdog, SIGTERM, its place in a run. Small processes, no engine."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import shim_env

from bridge.errors import LaunchError
from bridge.launchers import stopping as stop
from bridge.launchers.member import Member
from bridge.launchers.shim import unreadable
from bridge.launchers.stopping import Stopping


def run(program: str, *, wait: float = 20) -> tuple[int, str, float]:
    """Run a program text: its exit code, its output, and how long it took in seconds."""
    start = time.monotonic()
    argv = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=wait, env=shim_env(), check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


def test_a_process_that_stands_still_is_ended() -> None:
    program = """
        import time
        from bridge.launchers import progress
        from bridge.launchers.watchdog import Watchdog
        Watchdog(1.0, "bridge: error: ")
        for step in (1, 2, 3):
            progress.advanced(step)
            time.sleep(0.6)
        def hangs_here(): time.sleep(60)
        hangs_here()
    """
    code, text, seconds = run(program)
    assert code == 124
    assert "bridge: error: the run stood still for 1 s: step 3 has not ended" in text
    assert "hangs_here" in text
    assert 2 < seconds < 10


def test_a_process_that_hangs_with_pythons_lock_is_ended() -> None:
    """A regular expression that backtracks for ever lets no Python thread run."""
    program = """
        import re
        from bridge.launchers import watchdog
        watchdog.MARGIN = 1
        watchdog.Watchdog(0.5, "bridge: error: ")
        re.match(r"(a+)+$", "a" * 60 + "b")
    """
    code, text, _ = run(program)
    assert code != 0
    assert "Timeout" in text


def test_a_run_that_goes_on_is_left_alone() -> None:
    program = """
        import time
        from bridge.launchers import progress
        from bridge.launchers.watchdog import Watchdog
        Watchdog(0.8, "bridge: error: ")
        for _ in range(6):
            time.sleep(0.3)
            progress.say("on")
    """
    assert run(program)[0] == 0


def test_sigterm_before_the_first_step_ends_at_once() -> None:
    program = """
        import os, signal, time
        from bridge.launchers.stopping import Stopping
        Stopping(0, 1, 30.0).install()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    """
    code, text, seconds = run(program)
    assert (code, seconds < 10) == (143, True)
    assert "before the first step" in text


def test_sigterm_while_training_stops_after_the_step() -> None:
    program = """
        import os, signal, time
        from bridge.launchers.stopping import Stopping
        stopping = Stopping(0, 1, 30.0)
        stopping.install()
        for step in range(100):
            if stopping.due(step):
                break
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        print("stopped at", stopping.reached)
    """
    code, text, _ = run(program)
    assert (code, text.strip()) == (0, "stopped at 4")


def test_a_step_that_takes_longer_than_the_grace_period() -> None:
    """The main thread waits where no Python handler runs, as in a collective that a dead process never enters."""
    program = """
        import os, signal, threading
        from bridge.launchers.stopping import Stopping
        stopping = Stopping(0, 1, 1.0)
        stopping.install()
        stopping.due(0)
        os.kill(os.getpid(), signal.SIGTERM)
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    """
    code, text, seconds = run(program)
    assert (code, seconds < 10) == (143, True)
    assert "no step ended within the grace period of 1 s" in text


class Store:
    """JAX's key-value store, in one process."""

    def __init__(self) -> None:
        import threading

        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        del allow_overwrite
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000)
            return self.values[key]


def test_processes_at_different_steps_stop_at_the_same() -> None:
    """The signal comes to process 0 only, while process 1 is two steps ahead."""
    store = Store()
    forever = 1e6  # at the end of its grace period a stopping process exits: this one must not
    both = [Stopping(number, 2, forever) for number in range(2)]
    for each in both:
        each.agree_through(store)
    both[0].due(5)
    both[1].due(7)
    both[0]._ask()
    deadline = time.monotonic() + 5
    while any(each._last is None for each in both) and time.monotonic() < deadline:
        time.sleep(0.01)
    reached = []
    for number, first in ((0, 6), (1, 8)):
        step = first
        while not both[number].due(step):
            step += 1
        reached.append(step)
    assert reached == [8, 8]


def test_the_trainer_is_stopped_between_optimizer_steps() -> None:
    """Two micro steps to an optimizer step: the data may not end between them."""
    stopping = Stopping(0, 1, 30.0)
    hooks = stop._StoppingHooks(SimpleNamespace(load_next_train_batch=lambda _: "batch", other=3), stopping)
    config = SimpleNamespace(get_with_default=lambda name, default: 2 if "accumulation" in name else default)

    def batch(micro: int) -> Any:
        return hooks.load_next_train_batch(SimpleNamespace(config=config, iter_steps=micro, train_steps=micro // 2))

    assert [batch(micro) for micro in (0, 1, 2)] == ["batch"] * 3
    stopping._last = 2
    assert [batch(3), batch(4)] == ["batch", None]
    assert (stopping.reached, hooks.other) == (2, 3)


def test_the_shim_ends_at_once_when_the_run_cannot_be_read(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bridge.launchers.shim", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, env=shim_env(), check=False, timeout=20)
    assert done.returncode == 1
    assert done.stderr.startswith("bridge: error: ")
    assert "run.json" in done.stderr


def test_the_first_of_two_alone_is_an_error_within_its_bound(tmp_path: Path) -> None:
    """The whole shim, before JAX is loaded."""
    place = {"BRIDGE_PROCESS_COUNT": "2", "BRIDGE_PROCESS_ID": "0", "BRIDGE_INIT_TIMEOUT": "1"}
    env = {**shim_env(), **place, "BRIDGE_COORDINATOR": "127.0.0.1:0"}
    argv = [sys.executable, "-m", "bridge.launchers.shim", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False, timeout=20)
    assert "need BRIDGE_COORDINATOR" in done.stderr  # port 0 is none
    from bridge.launchers.local import free_port

    env["BRIDGE_COORDINATOR"] = f"127.0.0.1:{free_port()}"
    start = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False, timeout=20)
    assert "1 of 2 joined within 1 s: process 1 missing" in done.stderr
    assert (done.returncode, time.monotonic() - start < 10) == (1, True)


def test_why_a_run_cannot_start_here(tmp_path: Path) -> None:
    assert "run.json: No such file" in unreadable(tmp_path)
    (tmp_path / "run.json").write_text("{")
    assert "is damaged" in unreadable(tmp_path)
    (tmp_path / "run.json").write_text('{"checkpoint": "/no/such/checkpoint"}')
    assert unreadable(tmp_path) == "there is no /no/such/checkpoint"
    (tmp_path / "run.json").write_text(f'{{"checkpoint": "{tmp_path}"}}')
    assert unreadable(tmp_path) == ""


def test_a_place_in_a_run() -> None:
    env = {"BRIDGE_ENGINE": "tunix", "BRIDGE_COORDINATOR": "h:5", "BRIDGE_PROCESS_COUNT": "2", "BRIDGE_PROCESS_ID": "1"}
    member = Member.of(env)
    assert (member.engine, member.process, member.count, member.address) == ("tunix", 1, 2, "h:5")
    for wrong in ({"BRIDGE_PROCESS_ID": "2"}, {"BRIDGE_PROCESS_COUNT": "two"}, {"BRIDGE_COORDINATOR": "h"}):
        with pytest.raises(LaunchError):
            Member.of({**env, **wrong})
