"""Launch plans, to the letter: both engines, three kinds of hardware, five ways to start processes.

A combination that no cluster has is a golden file as well: its error.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from golden_types import Golden

from bridge.errors import BridgeError
from bridge.launchers import jobset, slurm
from bridge.launchers.cluster import describe
from bridge.launchers.plan import Site
from bridge.run_spec import RunSpec, parse

RUN_DIR = "/shared/llama/runs/maxtext-sft"
PLACES = {
    "local-1": "cluster: {}",
    "local-n": "cluster: {processes: 2, devices: 8}",
    "ssh-2-hosts": "cluster: {launcher: ssh, hosts: [hostA, ada@hostB], devices: 8, processes: 2, port: 61500}",
    "slurm-4-nodes": "cluster: {launcher: slurm, nodes: 4, devices: 8, slurm: {partition: big, time: '12:00:00'}}",
    "jobset-4-nodes": "cluster: {launcher: jobset, nodes: 4, devices: 4, jobset: {image: b:1, mount: /shared, %s}}",
}
STORAGE = {
    "cpu": "claim: work",
    "gpu": "claim: work, secret: hf, accelerator: nvidia-h100-80gb",
    "tpu": "bucket: my-bucket, secret: hf, accelerator: tpu-v6e-slice, topology: 4x4",
}
ENGINES, HARDWARE = ("maxtext", "tunix"), ("cpu", "gpu", "tpu")


def spec(hardware: str, place: str) -> RunSpec:
    text = PLACES[place]
    return parse("model: {source: m}\n" + (text % STORAGE[hardware] if "%s" in text else text))


def plan_text(engine: str, hardware: str, place: str) -> str:
    """What `--dry-run` shows of a plan, or its error."""
    run = spec(hardware, place)
    hosts = run.cluster.hosts
    module: Any = importlib.import_module(f"bridge.launchers.{engine}")
    try:
        cluster = describe(run.cluster, "maxtext-sft", hosts=hosts, free_port=51234)
        total = cluster.devices * len(cluster.hosts) if cluster.devices else None
        site = Site(RUN_DIR, "/venv/bin/python", hardware, secrets=("HF_TOKEN",) if hosts else (), total_devices=total)
        plan = module.plan_launch(run, cluster, site)
        assert len(plan) == cluster.count
        if cluster.launcher == "slurm":
            return slurm.render(plan, cluster, run.cluster, hardware, "maxtext-sft", f"{RUN_DIR}/logs")
        if cluster.launcher == "jobset":
            return jobset.render(plan, cluster, run.cluster, hardware, "maxtext-sft")
        return "".join(f"# process {k} on {launch.host}\n{launch.as_shell()}\n" for k, launch in enumerate(plan))
    except BridgeError as error:
        return f"bridge: error: {error}\n"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("engine", ENGINES)
def test_plan(golden: Golden, engine: str, hardware: str, place: str) -> None:
    golden(f"plans/{engine}-{hardware}-{place}.txt", plan_text(engine, hardware, place))


def test_engines_read_other_names_on_each_hardware() -> None:
    """The names that MaxText's source asks for (maxtext/utils/max_utils.py), and none for Tunix."""
    gpu = {"JAX_COORDINATOR_IP=", "JAX_COORDINATOR_PORT=", "NNODES=", "NODE_RANK="}
    cpu = {"JAX_COORDINATOR_ADDRESS=", "JAX_PROCESS_COUNT=", "JOB_INDEX=", "PROCESSES_IN_JOB=", "JOB_COMPLETION_INDEX="}
    for place in ("local-n", "ssh-2-hosts"):
        text = {(engine, hardware): plan_text(engine, hardware, place) for engine in ENGINES for hardware in HARDWARE}
        for hardware, own, others in (("gpu", gpu, cpu), ("cpu", cpu, gpu)):
            found = {name for name in gpu | cpu if f" {name}" in text["maxtext", hardware]}
            assert found == own, (place, hardware, found & others)
        assert not [name for name in gpu | cpu for hardware in HARDWARE if f" {name}" in text["tunix", hardware]]


def test_a_token_is_shown_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "not-to-be-seen")
    text = plan_text("tunix", "gpu", "ssh-2-hosts")
    assert 'HF_TOKEN="$HF_TOKEN"' in text
    assert "not-to-be-seen" not in text
