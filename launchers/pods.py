"""What Kubernetes says of a JobSet and of its pods: `kubectl get -o json`, read. Nothing is run here.

Source: the Pod API (v1: PodStatus, ContainerStateTerminated), JobSet v1alpha2 (its labels and conditions).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONTAINER = "engine"
OF_JOBSET, JOB = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/job-index"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
POD = "batch.kubernetes.io/job-completion-index"
UNEVENTFUL = ("", "ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class Pod:
    """One pod: the process it runs, and how far it is.

    `ended` is a time as Kubernetes writes it, or empty; `deleted`: it was taken away, as all are once one has failed.
    """

    name: str
    number: int
    phase: str
    node: str = ""
    reason: str = ""
    exit_code: int | None = None
    ended: str = ""
    attempt: int = 0
    deleted: bool = False

    @property
    def finished(self) -> bool:
        """Whether nothing will be added to its log."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def failed(self) -> bool:
        """Whether its process ended badly, or it was taken away."""
        return self.phase == "Failed" or self.exit_code not in (None, 0)

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended its process, as when memory ran out."""
        return self.exit_code == 128 + signal.SIGKILL

    @property
    def state(self) -> str:
        """`pending (ImagePullBackOff)`, `running`, `failed (exit code 137, OOMKilled)`."""
        more = [f"exit code {self.exit_code}"] if self.exit_code else []
        if self.reason not in (*UNEVENTFUL, "Error", "Completed"):
            more.append(self.reason)
        return f"{self.phase.lower()} ({', '.join(more)})" if more else self.phase.lower()


@dataclass(frozen=True)
class End:
    """How a JobSet ended: `Completed` or `Failed`, and what its controller says of it."""

    kind: str
    message: str


def read_pods(text: str, pods_per_job: int) -> tuple[Pod, ...]:
    """The pods of `kubectl get pods -o json`, in the order of their processes; `pods_per_job` of each slice."""
    return tuple(sorted((_pod(item, pods_per_job) for item in json.loads(text)["items"]), key=lambda pod: pod.number))


def _pod(item: Mapping[str, Any], pods_per_job: int) -> Pod:
    metadata, status = item["metadata"], item.get("status", {})
    known = {**metadata.get("labels", {}), **metadata.get("annotations", {})}
    containers = {each["name"]: each.get("state", {}) for each in status.get("containerStatuses", [])}
    state = containers.get(CONTAINER, {})
    done = state.get("terminated", {})
    reason = done.get("reason") or state.get("waiting", {}).get("reason") or status.get("reason") or ""
    return Pod(
        name=metadata["name"],
        number=int(known.get(JOB, 0)) * pods_per_job + int(known.get(POD, 0)),
        phase=status.get("phase", "Pending"),
        node=item.get("spec", {}).get("nodeName", ""),
        reason=reason or _unscheduled(status.get("conditions", [])),
        exit_code=done.get("exitCode"),
        ended=done.get("finishedAt") or "",
        attempt=int(known.get(ATTEMPT, 0)),
        deleted="deletionTimestamp" in metadata,
    )


def _unscheduled(conditions: Sequence[Mapping[str, Any]]) -> str:
    for each in conditions:
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return ": ".join(part for part in (each.get("reason"), each.get("message")) if part)
    return ""


def read_end(text: str) -> End | None:
    """How the JobSet of `kubectl get jobset -o json` ended; None while it goes on."""
    for each in json.loads(text).get("status", {}).get("conditions", []):
        if each.get("status") == "True" and each.get("type") in ("Completed", "Failed"):
            return End(each["type"], each.get("message") or "")
    return None


def read_suspension(text: str) -> str | None:
    """Why the JobSet of `kubectl get jobset -o json` is held back, as by a queue; None where it is not."""
    for each in json.loads(text).get("status", {}).get("conditions", []):
        if each.get("status") == "True" and each.get("type") == "Suspended":
            return each.get("message") or "suspended"
    return None


def changes(before: Sequence[Pod], after: Sequence[Pod]) -> list[str]:
    """What to tell of the difference: `pod 2: running`, those of one new state together."""
    known = {pod.name: pod.state for pod in before}
    numbers: dict[str, list[int]] = {}
    for pod in after:
        if known.get(pod.name) != pod.state:
            numbers.setdefault(pod.state, []).append(pod.number)
    return [f"{'pods' if len(those) > 1 else 'pod'} {_listed(those)}: {state}" for state, those in numbers.items()]


def _listed(numbers: Sequence[int]) -> str:
    """`0, 1, 5`, or `0-63` where all between are in it."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
