"""JobSet manifests, checked by models and schemas that are not ours: kubeflow's and Kubernetes' own."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models as kubeflow
from pydantic import ValidationError

from bridge.errors import LaunchError
from bridge.launchers import jobset, maxtext
from bridge.launchers.cluster import describe
from bridge.launchers.plan import Site
from bridge.run_spec import parse

GPU = "image: r.io/b:1, mount: /shared, claim: work, secret: hf, service_account: trainer"
TPU = "image: r.io/b:1, mount: /shared, bucket: b, accelerator: tpu-v6e-slice, topology: 4x4"
KINDS = {"gpu": GPU, "tpu": TPU, "tpu-slices": TPU + ", slices: 2", "cpu": "image: i, mount: /shared, claim: w"}


def manifest(kind: str, extra: str = "", run_dir: str = "/shared/w/runs/r") -> dict[str, Any]:
    settings = f"launcher: jobset, nodes: 4, devices: 8{extra}, jobset: {{{KINDS[kind]}}}"
    text = f"model: {{source: m}}\ncluster: {{{settings}}}"
    run, hardware = parse(text), kind.partition("-")[0]
    cluster = describe(run.cluster, "my_run")
    plan = maxtext.plan_launch(run, cluster, Site(run_dir, "/venv/bin/python", hardware))
    text = jobset.render(plan, cluster, run.cluster, hardware, "my_run")
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def job_of(values: dict[str, Any]) -> dict[str, Any]:
    """The Job that a JobSet makes, as Kubernetes sees it."""
    replicated = values["spec"]["replicatedJobs"][0]
    name = f"{values['metadata']['name']}-{replicated['name']}-0"
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **replicated["template"]}


def validate(values: dict[str, Any]) -> None:
    """Both judges: kubeflow's pydantic models of JobSet v1alpha2, Kubernetes' own schema of the Job inside."""
    known = kubeflow.JobsetV1alpha2JobSet.from_dict(values)
    assert known is not None
    # What the models do not know they drop: nothing may be lost on the way through them.
    assert lost(values, json.loads(known.to_json())) == []
    kubernetes_validate.validate(job_of(values), "1.30", strict=True)


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """Paths of a value that are not in another one."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [found for key, value in given.items() for found in lost(value, kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [found for n, (a, b) in enumerate(zip(given, kept, strict=True)) for found in lost(a, b, f"{path}[{n}]")]
    return [] if given == kept or str(given) == str(kept) else [path]


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_is_valid(kind: str) -> None:
    validate(manifest(kind))


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["replicatedJobs"][0].update(replica=2),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(parallelism="many"),
        lambda spec: pod(spec)["containers"][0]["volumeMounts"][0].pop("mountPath"),
        lambda spec: pod(spec).update(restartPolice="Never"),
    ],
)
def test_a_wrong_manifest_is_found(change: Any) -> None:
    values = copy.deepcopy(manifest("gpu"))
    change(values["spec"])
    with pytest.raises((AssertionError, ValidationError, kubernetes_validate.ValidationError)):
        validate(values)


def pod(spec: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return inner


def test_the_coordinator_is_the_first_pod_of_the_headless_service() -> None:
    """`<jobset>-<replicated job>-<job>-<pod>.<subdomain>`, as the JobSet controller names pods."""
    spec = manifest("gpu")["spec"]
    env = {each["name"]: each for each in pod(spec)["containers"][0]["env"]}
    assert env["BRIDGE_COORDINATOR"]["value"] == "my-run-workers-0-0.my-run:6002"
    assert spec["network"]["subdomain"] == "my-run"
    assert env["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "HF_TOKEN"}}}


def test_processes_are_counted_over_slices() -> None:
    """Run the pods' own shell line with the numbers that each pod of two slices is given."""
    import subprocess

    container = pod(manifest("tpu-slices")["spec"])["containers"][0]
    line = container["command"][2].partition("exec ")[0] + "echo $BRIDGE_PROCESS_ID"
    found = []
    for job in range(2):
        for number in range(2):
            env = {**os.environ, "BRIDGE_JOB": str(job), "BRIDGE_POD": str(number)}
            done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, check=True)
            found.append(int(done.stdout))
    assert found == [0, 1, 2, 3]


def test_several_processes_a_node_are_several_pods() -> None:
    spec = manifest("gpu", ", processes: 2")["spec"]
    assert spec["replicatedJobs"][0]["template"]["spec"]["completions"] == 8
    assert pod(spec)["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4}


def test_what_is_missing_is_said_at_once() -> None:
    run = parse("model: {source: m}\ncluster: {launcher: jobset}")
    cluster = describe(run.cluster, "r")
    plan = maxtext.plan_launch(run, cluster, Site("/home/ada/r", "python", "tpu"))
    with pytest.raises(LaunchError) as caught:
        jobset.manifest(plan, cluster, run.cluster, "tpu", "r")
    assert [detail.split(":")[0] for detail in caught.value.details] == [
        "cluster.jobset.image",
        "cluster.jobset.claim or .bucket, one of the two",
        "cluster.jobset.mount",
        "cluster.devices",
        "cluster.jobset.accelerator and .topology",
    ]


def test_a_run_outside_the_shared_storage_is_refused() -> None:
    with pytest.raises(LaunchError, match="the settings do not make a JobSet") as caught:
        manifest("gpu", run_dir="/home/ada/runs/r")
    assert "is not under cluster.jobset.mount /shared" in str(caught.value)
