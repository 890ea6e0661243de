"""`bridge launch --launcher jobset` to the end: what the manifest says is run, by the `kubectl` of `tests/kubectl.py`.

The pods are processes of this machine. Their headless service is two names in /etc/hosts while the test lasts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import kubectl as stand_in
import pytest
import system
from launch_runs import Workplace, make_workplace
from processes import is_running, wait_for

from bridge.launchers.cluster import jobset_hosts

pytestmark = [pytest.mark.system, pytest.mark.slow]
HOSTS = Path("/etc/hosts")
RUN = "pods"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """A tiny model, converted; `kubectl` on PATH; the pods' names known."""
    system.require()
    stand_in.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    before = HOSTS.read_text()
    names = jobset_hosts(RUN, nodes=2, slices=1, processes=1)
    with contextlib.ExitStack() as stack:
        HOSTS.write_text(before + "".join(f"127.0.0.1 {name}\n" for name in names))
        stack.callback(HOSTS.write_text, before)
        stack.callback(subprocess.run, ["kubectl", "--namespace", "default", "delete", "jobset", RUN], check=False)
        yield make_workplace(tmp_path / "work", "maxtext")


def arguments(workplace: Workplace, *more: str) -> tuple[str, ...]:
    jobset = f"cluster.jobset={{image: i, claim: w, mount: {workplace.folder}}}"
    return ("launch", "sft", *more, jobset, "--launcher", "jobset", "--nodes", "2", "--run", RUN)


def test_a_short_training_then_a_failure_and_a_resume(workplace: Workplace) -> None:
    steps = ("train.save_every=2",)
    text = workplace.bridge(*arguments(workplace, "train.steps=2", *steps))
    assert "pods 0, 1: running" in text
    assert "step 2/2" in text
    assert "trained 2 steps" in text
    assert sorted(workplace.losses(RUN)) == [1, 2]

    # Gone on with for long: one of the two pods is killed, as where memory runs out.
    long = arguments(workplace, "train.steps=2000", *steps)
    popen = workplace.start(*long, "--resume")
    workplace.wait_for_step(RUN, 5, popen)
    state = workplace.folder.parent / "bin" / "state"
    victim = next(state.glob("*-0-1-*.pid"))
    os.kill(int(victim.read_text()), signal.SIGKILL)
    text, _ = popen.communicate(timeout=120)
    assert popen.returncode == 137, text
    assert f"process 1 (pod {victim.stem} on node-a) failed (exit code 137, OOMKilled)" in text
    pids = [int(path.read_text()) for path in state.glob("*.pid")]
    assert len(pids) == 2
    assert wait_for(lambda: not any(map(is_running, pids)), 10)
    logs = workplace.folder / "runs" / RUN / "logs"
    assert all("bridge: step" in (logs / f"process-{number}.log").read_text() for number in range(2))
    kinds = {json.loads(line)[2] for line in (state / "calls").read_text().splitlines()}
    assert kinds == {"apply", "get", "logs", "delete"}  # the ended set of that name made room
