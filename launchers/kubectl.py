"""Apply a JobSet with `kubectl`, follow the state and the logs of its pods, and tell how it ended.

Its commands are few and of every version's: apply, get, logs, delete.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import LaunchError
from bridge.launchers.follow import Followed
from bridge.launchers.pod_log import PodLog
from bridge.launchers.pods import OF_JOBSET, End, Pod, changes, read_end, read_pods, read_suspension
from bridge.launchers.supervise import Show, innocence, interrupted

POLL = 5.0
PATIENCE = 120.0
"""Seconds that the cluster may leave kubectl without an answer: the run goes on meanwhile."""
DRAIN = 30.0
"""Seconds for the last lines of the pods to arrive, once the set has ended."""
TIMEOUT = "--request-timeout=20s"


@dataclass(frozen=True)
class JobSet:
    """A set's name and namespace, its pods in all, and those of one slice."""

    name: str
    namespace: str
    count: int
    pods_per_job: int

    def kubectl(self, *arguments: str) -> list[str]:
        """A command line in the set's namespace."""
        return ["kubectl", "--namespace", self.namespace, *arguments]

    def get(self, kind: str, *arguments: str) -> list[str]:
        """A command line that asks for something, as JSON, within a bounded time."""
        return self.kubectl("get", kind, *arguments, "--output", "json", TIMEOUT)

    @property
    def selector(self) -> str:
        """What its pods have in common."""
        return f"{OF_JOBSET}={self.name}"

    @property
    def deletion(self) -> str:
        """How the user ends it."""
        return " ".join(self.kubectl("delete", "jobset", self.name))

    @property
    def sight(self) -> str:
        """How the user sees its logs again."""
        return " ".join(self.kubectl("logs", "--follow", "--selector", self.selector))


def execute(text: str, jobset: JobSet, logs: Path, show: Show, verbose: bool) -> None:
    """Apply a manifest and follow the JobSet to its end; the lines of process n go to `logs/process-<n>.log` as well.

    Raises:
        LaunchError: no kubectl, it refuses or gets no answer, or the set failed: the last lines of the pod that failed
            first are the details. StoppedByUser: Ctrl-C or SIGTERM; the set goes on, and the error says how to end it.
    """
    if shutil.which("kubectl") is None:
        raise LaunchError("there is no kubectl on PATH", hint="--dry-run prints the manifest to apply elsewhere")
    clear(jobset)
    _run(jobset.kubectl("apply", "--filename", "-"), f"kubectl did not apply the JobSet {jobset.name}", text)
    show(f"JobSet {jobset.namespace}/{jobset.name} applied")
    logs.mkdir(parents=True, exist_ok=True)
    files = {number: logs / f"process-{number}.log" for number in range(jobset.count)}
    followed = Followed(files, show, verbose)
    watch = _Watch(jobset, followed)
    try:
        with interrupted() as received:
            end = None
            while end is None and not received:
                end = watch.look()
                _pause(POLL if end is None else 0, received)
            if end is not None:
                watch.drain(received)
    finally:
        watch.close()
    if end is None:
        hint = f"{jobset.deletion} ends it; {jobset.sight} shows it again"
        raise followed.stopped(received[0], f"JobSet {jobset.namespace}/{jobset.name} goes on", hint=hint)
    if end.kind != "Completed":
        raise failure(jobset, end, watch.pods, followed)


def clear(jobset: JobSet) -> None:
    """A JobSet cannot be changed: one of the same name that has ended makes room, as a resumed run has its name.

    Raises:
        LaunchError: it is still running, or kubectl cannot say.
    """
    text = _run(
        jobset.get("jobset", jobset.name, "--ignore-not-found"), f"kubectl cannot look for a JobSet {jobset.name}"
    )
    if not text.strip():
        return
    if read_end(text) is None:
        raise LaunchError(f"JobSet {jobset.name} is still running", hint=f"{jobset.deletion}, or --run NAME")
    _run(jobset.kubectl("delete", "jobset", jobset.name), f"kubectl did not delete the ended JobSet {jobset.name}")


def failure(jobset: JobSet, end: End, pods: Sequence[Pod], followed: Followed) -> LaunchError:
    """The error of a set that failed: of the pod that did so first, and on its own rather than after another one."""
    newest = max((pod.attempt for pod in pods), default=0)
    failed = [pod for pod in pods if pod.failed and pod.attempt == newest]
    if not failed:
        return followed.failure(f"JobSet {jobset.name} failed: {end.message}".rstrip(": "), 1, None)

    def rank(pod: Pod) -> tuple[bool, int, str, int]:
        return pod.deleted, innocence(followed.tails[pod.number], pod.killed), pod.ended, pod.number

    first = min(failed, key=rank)
    where = f" on {first.node}" if first.node else ""
    what = f"JobSet {jobset.name} failed: process {first.number} (pod {first.name}{where}) {first.state}"
    return followed.failure(what, first.exit_code or 1, followed.files[first.number], first.number)


class _Watch:
    """What is known of a set while it runs, and the logs of its pods."""

    def __init__(self, jobset: JobSet, followed: Followed) -> None:
        self._jobset, self._followed = jobset, followed
        self._pods: dict[str, Pod] = {}
        self._logs: dict[str, PodLog] = {}
        self._answered = time.monotonic()
        self._waiting = False
        self._suspended: str | None = None

    @property
    def pods(self) -> tuple[Pod, ...]:
        """All pods that were ever seen, as they were seen last."""
        return tuple(self._pods.values())

    def look(self) -> End | None:
        """Ask once for the set and its pods, show what has changed, and see to the logs; how the set ended, or None.

        Raises:
            LaunchError: somebody has deleted it, or there has been no answer for too long.
        """
        jobset = self._jobset
        state = self._ask(jobset.get("jobset", jobset.name, "--ignore-not-found"))
        listed = self._ask(jobset.get("pods", "--selector", jobset.selector))
        if state is None or listed is None:
            return None
        if not state.strip():
            raise LaunchError(f"JobSet {jobset.namespace}/{jobset.name} is gone: somebody has deleted it")
        suspended, self._suspended = self._suspended, read_suspension(state)
        if self._suspended not in (None, suspended):
            self._followed.show(f"JobSet {jobset.namespace}/{jobset.name} waits: {self._suspended}")
        now = [pod for pod in read_pods(listed, jobset.pods_per_job) if pod.number < jobset.count]
        for line in changes(self.pods, now):
            self._followed.show(line)
        self._pods |= {pod.name: pod for pod in now}
        for pod in now:
            if pod.phase not in ("Pending", "Unknown"):
                self._log_of(pod).tend(pod.finished)
        return read_end(state)

    def drain(self, received: Sequence[object]) -> None:
        """Wait until the logs of the pods that have finished are complete."""
        deadline = time.monotonic() + DRAIN
        while time.monotonic() < deadline and not received:
            self.look()
            finished = [self._logs[pod.name] for pod in self.pods if pod.finished and pod.name in self._logs]
            if all(log.complete for log in finished):
                return
            _pause(0.2, received)

    def close(self) -> None:
        """Leave no kubectl running."""
        for log in self._logs.values():
            log.close()

    def _log_of(self, pod: Pod) -> PodLog:
        if pod.name not in self._logs:
            number, followed = pod.number, self._followed
            self._logs[pod.name] = PodLog(
                self._jobset.kubectl("logs", pod.name),
                followed.files[number],
                lambda text: followed.line(number, text),
            )
        return self._logs[pod.name]

    def _ask(self, argv: Sequence[str]) -> str | None:
        """What kubectl answers; None where it does not, which is told once."""
        done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            self._answered, self._waiting = time.monotonic(), False
            return done.stdout
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        if time.monotonic() - self._answered > PATIENCE:
            raise LaunchError(
                f"kubectl has had no answer about JobSet {self._jobset.name} for {PATIENCE:g} s",
                details=lines,
                hint=f"it may go on; {self._jobset.deletion} ends it",
            )
        if not self._waiting:
            self._waiting = True
            self._followed.show(f"kubectl: {lines[-1]}; trying again")
        return None


def _pause(seconds: float, received: Sequence[object]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not received:
        time.sleep(0.1)


def _run(argv: Sequence[str], problem: str, text: str | None = None) -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(problem, details=[line for line in done.stderr.splitlines() if line.strip()])
    return done.stdout
