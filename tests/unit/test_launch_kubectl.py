"""A JobSet applied and followed, with the `kubectl` of `tests/kubectl.py`, whose pods are processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import kubectl as stand_in
import pytest
from processes import shim_env, wait_for

from bridge.errors import LaunchError
from bridge.launchers import jobset, kubectl, tunix
from bridge.launchers.cluster import describe
from bridge.launchers.kubectl import JobSet
from bridge.launchers.plan import Site
from bridge.run_spec import parse

RUN = JobSet("r", "ns", 2, 2)
RANK = "int(os.environ['BRIDGE_PROCESS_ID'])"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cluster's folder; whatever was applied is gone afterwards."""
    state = stand_in.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(kubectl, "POLL", 0.2)
    yield state
    (state / "down").unlink(missing_ok=True)
    subprocess.run(RUN.kubectl("delete", "jobset", "r"), capture_output=True, check=False)


def manifest(folder: Path, program: str) -> str:
    """What bridge makes of a plan, with a program text in the engine's place."""
    text = f"launcher: jobset, nodes: 2, jobset: {{image: i, claim: w, namespace: ns, mount: {folder}}}"
    run = parse(f"model: {{source: m}}\ncluster: {{{text}}}")
    place = describe(run.cluster, "r")
    plan = tunix.plan_launch(run, place, Site(str(folder), sys.executable, "cpu"))
    values = jobset.manifest(plan, place, run.cluster, "cpu", "r")
    container = values["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    file = folder / f"program-{len(list(folder.glob('program-*')))}.py"  # a pod may be slow to read the one before
    file.write_text(f"import os, sys, time\nrank = {RANK}\n{textwrap.dedent(program)}")
    container["command"][2] = container["command"][2].replace(f"-m bridge.launchers.shim {folder}", str(file))
    assert str(file) in container["command"][2]
    return json.dumps(values)


def follow(folder: Path, program: str, verbose: bool = False) -> list[str]:
    shown: list[str] = []
    kubectl.execute(manifest(folder, program), RUN, folder / "logs", shown.append, verbose)
    return shown


def test_lines_are_shown_while_the_pods_run_and_kept(tmp_path: Path, cluster: Path) -> None:
    """The pods wait for a file that is made when their first line is shown: lines at the end would come too late."""
    (cluster / "pending").touch()
    seen = tmp_path / "seen"
    program = f"""
        print('bridge: step 1/2', flush=True)
        deadline = time.monotonic() + 20
        while not os.path.exists({str(seen)!r}):
            if time.monotonic() > deadline: sys.exit(9)
            time.sleep(0.05)
        print('chatter of', rank)
    """
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if "ImagePullBackOff" in line:
            (cluster / "pending").unlink()
        if line == "step 1/2":
            seen.touch()

    kubectl.execute(manifest(tmp_path, program), RUN, tmp_path / "logs", show, False)
    assert shown[:3] == ["JobSet ns/r applied", "pods 0, 1: pending (ImagePullBackOff)", "pods 0, 1: running"]
    assert shown[-1] == "pods 0, 1: succeeded" or {"pod 0: succeeded", "pod 1: succeeded"} <= set(shown)
    assert shown.count("step 1/2") == 1  # all say the same: process 0 is shown
    for number in range(2):
        text = (tmp_path / "logs" / f"process-{number}.log").read_text()
        assert text == f"bridge: step 1/2\nchatter of {number}\n"


def test_verbose_shows_all_with_their_numbers(tmp_path: Path, cluster: Path) -> None:
    del cluster
    shown = follow(tmp_path, "print('from', rank)", verbose=True)
    assert {line for line in shown if line.startswith("[")} == {"[0] from 0", "[1] from 1"}


def test_a_broken_connection_loses_and_repeats_no_line(tmp_path: Path, cluster: Path) -> None:
    (cluster / "break").touch()
    program = "for n in range(20):\n    print('line', n, flush=True)\n    time.sleep(0.05)"
    follow(tmp_path, program)
    assert not (cluster / "break").exists()
    for number in range(2):
        lines = (tmp_path / "logs" / f"process-{number}.log").read_text().splitlines()
        assert lines == [f"line {n}" for n in range(20)]
    again = [call for call in calls(cluster) if any(word.startswith("--since-time=") for word in call)]
    assert again


def calls(cluster: Path) -> list[list[str]]:
    """The command lines that kubectl was given."""
    return [json.loads(line) for line in (cluster / "calls").read_text().splitlines()]


def test_a_set_that_waits_in_a_queue_says_so(tmp_path: Path, cluster: Path) -> None:
    for name in ("pending", "suspended"):
        (cluster / name).touch()
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if "ImagePullBackOff" in line:
            for name in ("pending", "suspended"):
                (cluster / name).unlink()

    kubectl.execute(manifest(tmp_path, ""), RUN, tmp_path / "logs", show, False)
    assert shown.count("JobSet ns/r waits: jobset is suspended") == 1


def test_the_first_failed_pod_is_the_error(tmp_path: Path, cluster: Path) -> None:
    del cluster
    program = "if rank == 0: time.sleep(60)\nprint('the cause', flush=True)\nsys.exit(3)"
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        follow(tmp_path, program)
    assert time.monotonic() - start < 15
    assert "process 1 (pod r-workers-0-1-x01 on node-a) failed (exit code 3)" in str(caught.value)
    assert list(caught.value.details) == ["the cause"]
    assert caught.value.exit_code == 3
    assert str(tmp_path / "logs") in str(caught.value)


def test_a_survivor_that_fails_first_is_not_the_error(tmp_path: Path, cluster: Path) -> None:
    (cluster / "pending").touch()

    def show(line: str) -> None:
        if "pending" in line:  # the poll that follows finds both at their ends
            (cluster / "pending").unlink()
            assert wait_for(lambda: len(list(cluster.glob("*.end"))) == 2, 10)

    program = "print(['gloo: Connection reset by peer', 'ValueError: the cause'][rank], flush=True)\nsys.exit(1 + rank)"
    with pytest.raises(LaunchError, match="process 1") as caught:
        kubectl.execute(manifest(tmp_path, program), RUN, tmp_path / "logs", show, False)
    assert "the cause" in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_explained_error_is_shown_as_it_is(tmp_path: Path, cluster: Path) -> None:
    del cluster
    program = "print('bridge: error: no data\\n  line 3', flush=True) if rank else time.sleep(60)\nsys.exit(1)"
    with pytest.raises(LaunchError, match=r"^no data\n  line 3") as caught:
        follow(tmp_path, program)
    assert "process 1" in str(caught.value)


def test_ctrl_c_leaves_the_jobset_and_says_how_to_end_it(tmp_path: Path, cluster: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from bridge.errors import BridgeError; from bridge.launchers import kubectl\n"
        "kubectl.POLL, run = 0.2, kubectl.JobSet('r', 'ns', 2, 2)\n"
        "try: kubectl.execute(Path(sys.argv[1]).read_text(), run, Path(sys.argv[2]), print, False)\n"
        "except BridgeError as error: print(error); sys.exit(error.exit_code)\n"
    )
    (tmp_path / "jobset.json").write_text(manifest(tmp_path, "print('up', flush=True)\ntime.sleep(60)"))
    argv = [sys.executable, "-u", "-c", code, str(tmp_path / "jobset.json"), str(tmp_path / "logs")]
    popen = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=shim_env())
    log = tmp_path / "logs" / "process-1.log"
    assert wait_for(lambda: log.exists() and "up" in log.read_text(), 30)
    start = time.monotonic()
    os.kill(popen.pid, signal.SIGINT)
    text, _ = popen.communicate(timeout=20)
    assert popen.returncode == 130, text
    assert time.monotonic() - start < 5
    assert "SIGINT: JobSet ns/r goes on" in text
    assert "kubectl --namespace ns delete jobset r ends it; kubectl --namespace ns logs --follow --selector" in text
    assert len(list(cluster.glob("*.pid"))) == 2
    assert not list(cluster.glob("*.end"))
    assert not [line for line in command_lines() if str(tmp_path) in line and "--follow" in line]


def command_lines() -> list[str]:
    """Of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended meanwhile
            continue
    return found


def test_a_cluster_that_does_not_answer_for_a_while(tmp_path: Path, cluster: Path) -> None:
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if "running" in line:
            (cluster / "down").touch()
        if "trying again" in line:
            (cluster / "down").unlink()

    kubectl.execute(manifest(tmp_path, "time.sleep(2)"), RUN, tmp_path / "logs", show, False)
    assert [line for line in shown if line.startswith("kubectl: Unable to connect to the server")]
    assert "succeeded" in shown[-1]


def test_a_cluster_that_never_answers_again(tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubectl, "PATIENCE", 1.0)

    def show(line: str) -> None:
        if "running" in line:
            (cluster / "down").touch()

    with pytest.raises(LaunchError, match="no answer about JobSet r for 1 s") as caught:
        kubectl.execute(manifest(tmp_path, "time.sleep(60)"), RUN, tmp_path / "logs", show, False)
    assert "i/o timeout" in str(caught.value)
    assert "delete jobset r" in str(caught.value)


def test_a_jobset_that_somebody_deletes(tmp_path: Path, cluster: Path) -> None:
    del cluster

    def show(line: str) -> None:
        if "running" in line:
            subprocess.run(RUN.kubectl("delete", "jobset", "r"), capture_output=True, check=True)

    with pytest.raises(LaunchError, match="JobSet ns/r is gone"):
        kubectl.execute(manifest(tmp_path, "time.sleep(60)"), RUN, tmp_path / "logs", show, False)


def test_an_ended_jobset_makes_room_and_a_running_one_does_not(tmp_path: Path, cluster: Path) -> None:
    del cluster
    follow(tmp_path, "print('once')")
    text = manifest(tmp_path, "time.sleep(60)")
    subprocess.run(RUN.kubectl("delete", "jobset", "r"), capture_output=True, check=True)
    subprocess.run(RUN.kubectl("apply", "--filename", "-"), input=text, text=True, capture_output=True, check=True)
    with pytest.raises(LaunchError, match="JobSet r is still running"):
        follow(tmp_path, "print('twice')")
    subprocess.run(RUN.kubectl("delete", "jobset", "r"), capture_output=True, check=True)
    follow(tmp_path, "print('twice')")
    follow(tmp_path, "print('again')")
    assert (tmp_path / "logs" / "process-0.log").read_text() == "once\ntwice\nagain\n"


def test_kubectl_that_refuses_or_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "kubectl"
    script.write_text("#!/bin/sh\necho 'error: no matches for kind JobSet' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(LaunchError, match="no matches for kind JobSet"):
        kubectl.execute("", RUN, tmp_path / "logs", print, False)
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(LaunchError, match="there is no kubectl on PATH"):
        kubectl.execute("", RUN, tmp_path / "logs", print, False)
