"""What Kubernetes says of pods and sets, read; and which of the pods that failed is the error."""

from __future__ import annotations

import json
from pathlib import Path

import kubernetes_validate

from bridge.launchers import kubectl
from bridge.launchers.follow import Followed
from bridge.launchers.kubectl import JobSet
from bridge.launchers.pods import End, Pod, changes, read_end, read_pods

RUN = JobSet("r", "ns", 2, 2)


def item(name: str, job: int, index: int, **status: object) -> dict[str, object]:
    """A Pod as the API shows it, judged by Kubernetes' own schema."""
    labels = {"jobset.sigs.k8s.io/jobset-name": "r", "jobset.sigs.k8s.io/job-index": str(job)}
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    spec = {"containers": [{"name": "engine", "image": "i"}], "nodeName": "node-1"}
    metadata = {"name": name, "labels": labels, "annotations": annotations}
    found = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}
    kubernetes_validate.validate(found, "1.30", strict=True)
    return found


def engine(**state: object) -> list[dict[str, object]]:
    common = {"ready": False, "restartCount": 0, "image": "i", "imageID": ""}
    return [
        {"name": "gke-gcsfuse-sidecar", "state": {"terminated": {"exitCode": 1}}, **common},
        {"name": "engine", "state": state, **common},
    ]


def test_states_of_pods() -> None:
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes"}
    killed = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:00Z"}
    items = [
        item("d", 1, 1, phase="Failed", reason="Evicted"),
        item("c", 1, 0, phase="Failed", containerStatuses=engine(terminated=killed)),
        item("b", 0, 1, phase="Running", containerStatuses=engine(running={"startedAt": "2026-01-01T00:00:00Z"})),
        item("a", 0, 0, phase="Pending", conditions=[unschedulable]),
        item("e", 2, 0, phase="Pending", containerStatuses=engine(waiting={"reason": "ContainerCreating"})),
    ]
    pods = read_pods(json.dumps({"items": items}), 2)
    assert [(pod.number, pod.name, pod.state) for pod in pods] == [
        (0, "a", "pending (Unschedulable: 0/4 nodes)"),
        (1, "b", "running"),
        (2, "c", "failed (exit code 137, OOMKilled)"),
        (3, "d", "failed (Evicted)"),
        (4, "e", "pending"),
    ]
    assert [pod.failed for pod in pods] == [False, False, True, True, False]
    assert (pods[2].killed, pods[2].ended, pods[2].node) == (True, "2026-01-01T00:00:00Z", "node-1")


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    """A set that is started again leaves its earlier pods' failures behind."""
    followed = Followed({number: tmp_path / str(number) for number in range(2)}, print)
    old = Pod("old", 0, "Failed", exit_code=1, ended="2026-01-01T00:00:00Z")
    new = Pod("new", 1, "Failed", node="n", exit_code=2, ended="2026-01-01T01:00:00Z", attempt=1)
    error = kubectl.failure(RUN, End("Failed", "why"), [old, new], followed)
    assert "process 1 (pod new on n) failed (exit code 2)" in str(error)
    taken = Pod("taken", 0, "Failed", reason="Evicted", attempt=1)
    assert "process 0 (pod taken) failed (Evicted)" in str(kubectl.failure(RUN, End("Failed", ""), [taken], followed))
    assert str(kubectl.failure(RUN, End("Failed", "why"), [], followed)) == "JobSet r failed: why"
    labels = {"jobset.sigs.k8s.io/restart-attempt": "3", "batch.kubernetes.io/job-completion-index": "1"}
    pod = {"metadata": {"name": "p", "labels": labels}, "status": {"phase": "Running"}}
    assert [(p.attempt, p.number) for p in read_pods(json.dumps({"items": [pod]}), 2)] == [(3, 1)]


def test_changes_are_told_together() -> None:
    pods = [Pod(f"p{n}", n, "Running") for n in range(5)]
    assert changes([], pods) == ["pods 0-4: running"]
    later = [*pods[:2], *(Pod(f"p{n}", n, "Succeeded") for n in (2, 4)), pods[3]]
    assert changes(pods, later) == ["pods 2, 4: succeeded"]
    assert changes(later, later) == []


def test_ends_of_jobsets() -> None:
    def end(kind: str, status: str) -> object:
        condition = {"type": kind, "status": status, "message": "why"}
        return read_end(json.dumps({"status": {"conditions": [condition]}}))

    assert read_end(json.dumps({"metadata": {}})) is None
    assert end("Suspended", "True") is None
    assert end("Failed", "False") is None
    assert getattr(end("Failed", "True"), "message", None) == "why"
    assert getattr(end("Completed", "True"), "kind", None) == "Completed"
