"""A real Slurm, a controller and two nodes on this machine, runs the generated scripts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import system
from hf_configs import changed
from launch_runs import make_workplace
from processes import shim_env, wait_for

from bridge.errors import LaunchError
from bridge.launchers import slurm, tunix
from bridge.launchers.cluster import describe
from bridge.launchers.local import free_port
from bridge.launchers.plan import Site
from bridge.run_spec import parse

pytestmark = pytest.mark.system
COLLECTIVE = Path(__file__).resolve().parents[1] / "collective.py"
HOSTS = Path("/etc/hosts")
NODES = ("bridge-n1", "bridge-n2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start slurmctld and two slurmd; the names of the nodes are in /etc/hosts for as long as this lasts."""
    system.require("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
    folder = tmp_path_factory.mktemp("slurm")
    conf = folder / "slurm.conf"
    ports = [free_port() for _ in NODES]
    host = socket.gethostname().partition(".")[0]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
        for name, port in zip(NODES, ports, strict=True)
    ]
    conf.write_text(
        "\n".join(
            [
                f"ClusterName=bridge\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={free_port()}",
                "SlurmUser=root\nSlurmdUser=root\nAuthType=auth/none\nCredType=cred/none",
                "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2",
                "SelectType=select/cons_tres\nJobAcctGatherType=jobacct_gather/none\nKillWait=5\nSchedulerType=sched/builtin",
                f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/%n",
                f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/%n.pid",
                f"SlurmctldLogFile={folder}/ctld.log\nSlurmdLogFile={folder}/%n.log",
                *nodes,
                f"PartitionName=all Nodes={','.join(NODES)} Default=YES State=UP",
            ]
        )
        + "\n"
    )
    (folder / "state").mkdir()
    before = HOSTS.read_text()
    daemons = [["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-c", "-N", name] for name in NODES)]
    with contextlib.ExitStack() as stack:
        HOSTS.write_text(before + "".join(f"127.0.0.1 {name}\n" for name in NODES))
        stack.callback(HOSTS.write_text, before)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SLURM_CONF", str(conf))
        for command in daemons:
            log = stack.enter_context((folder / "daemons.log").open("a"))
            argv = [system.find(command[0]) or command[0], *command[1:], "-f", str(conf)]
            popen = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
            stack.callback(popen.wait)
            stack.callback(popen.terminate)
        assert wait_for(idle, 30), (folder / "daemons.log").read_text()
        yield


def idle() -> bool:
    done = subprocess.run(["sinfo", "-h", "-o", "%D %t"], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "2 idle"


def job(folder: Path, mode: str = "", text: str = "cluster: {launcher: slurm, nodes: 2}") -> Path:
    """The script that bridge generates, with the program of `collective.py` in the place of the shim's."""
    run = parse(f"model: {{source: m}}\n{text}")
    (folder / "run.json").write_text(json.dumps({"checkpoint": str(folder)}))
    place = describe(run.cluster, "collective")
    site = Site(str(folder), sys.executable, "cpu", total_devices=None)
    argv = (sys.executable, str(COLLECTIVE), str(folder), *([mode] if mode else []))
    plan = [dataclasses.replace(launch, argv=argv) for launch in tunix.plan_launch(run, place, site)]
    script = folder / slurm.SCRIPT
    script.write_text(slurm.render(plan, place, run.cluster, "cpu", "collective", str(folder / "logs")))
    return script


def test_a_collective_over_two_nodes(cluster: None, tmp_path: Path) -> None:
    del cluster
    shown: list[str] = []
    slurm.execute(job(tmp_path), 2, tmp_path / "logs", shown.append, False)
    assert "sum=3 of 2 processes, 2 devices" in shown
    assert "sum=3 of 2 processes" in (tmp_path / "logs" / "process-1.log").read_text()


def test_a_task_that_fails_ends_the_job(cluster: None, tmp_path: Path) -> None:
    """Without the hard exit this took 300 s: JAX waits for the others in its exit handler."""
    del cluster
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        slurm.execute(job(tmp_path, "raise"), 2, tmp_path / "logs", print, False)
    assert "process 1 fails on purpose" in str(caught.value)
    assert time.monotonic() - start < 60


def test_a_refused_job_is_explained(cluster: None, tmp_path: Path) -> None:
    del cluster
    script = job(tmp_path, text="cluster: {launcher: slurm, nodes: 2, slurm: {partition: none}}")
    with pytest.raises(LaunchError, match="sbatch refused the job") as caught:
        slurm.execute(script, 2, tmp_path / "logs", print, False)
    assert "invalid partition" in str(caught.value)


def test_ctrl_c_cancels_the_job(cluster: None, tmp_path: Path) -> None:
    del cluster
    code = (
        "import sys; from pathlib import Path\n"
        "from bridge.errors import BridgeError; from bridge.launchers import slurm\n"
        "try: slurm.execute(Path(sys.argv[1]), 2, Path(sys.argv[2]), print, False)\n"
        "except BridgeError as error: print(error); sys.exit(error.exit_code)\n"
    )
    argv = [sys.executable, "-u", "-c", code, str(job(tmp_path, "wait")), str(tmp_path / "logs")]
    popen = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "logs" / "process-1.log"
    assert wait_for(lambda: log.exists() and "sum=3" in log.read_text(), 60)
    os.kill(popen.pid, 2)
    text, _ = popen.communicate(timeout=30)
    assert popen.returncode == 130, text
    assert "SIGINT: slurm job" in text
    assert wait_for(idle, 20)


def test_bridge_launch_inside_of_a_step(cluster: None, tmp_path: Path) -> None:
    """`srun bridge launch`: the variables that Slurm really sets are understood, in each task."""
    del cluster
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(changed()))
    (tmp_path / "bridge.yaml").write_text("model: {source: hf}\ndata: {train: train.jsonl}\n")
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--label", f"--chdir={tmp_path}"]
    argv = [*srun, sys.executable, "-m", "bridge", "launch", "sft", "--dry-run", "--devices", "1"]
    env = {**shim_env(), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    for task in range(2):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"{task}: ") and "shim" in line]
        assert len(lines) == 2
        ports = {re.search(rf"BRIDGE_COORDINATOR={NODES[0]}:(\d+) ", line)[1] for line in lines}  # type: ignore[index]
        assert len(ports) == 1
        assert 61440 < int(ports.pop()) < 65536
        assert [f"BRIDGE_PROCESS_ID={number} " in lines[number] for number in range(2)] == [True, True]


@pytest.mark.slow
def test_a_short_training(cluster: None, tmp_path: Path) -> None:
    del cluster
    workplace = make_workplace(tmp_path, "maxtext")
    arguments = ("launch", "sft", "train.steps=3", "train.save_every=3", "--launcher", "slurm", "--nodes", "2")
    text = workplace.bridge(*arguments)
    assert "trained 3 steps" in text
    losses = workplace.losses("maxtext-sft")
    assert sorted(losses) == [1, 2, 3]
    assert losses[3] < losses[1]
