"""A `kubectl` for machines without a cluster: the commands that bridge uses, as kubectl spells them, and pods that run.

Put a script that runs this file first on PATH and name a folder in KUBE_STATE (`install` does). An applied JobSet's
pods are processes of this machine: the container's own command with the environment that the manifest gives it. What a
cluster would do otherwise is told by files in the folder: `pending` (no pod starts while it exists), `suspended`
(beside it: so says the set), `break` (the next stream of logs breaks off after a line), `down` (no answer).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

STATE = Path(os.environ.get("KUBE_STATE", "."))
JOB, POD = "jobset.sigs.k8s.io/job-index", "batch.kubernetes.io/job-completion-index"


def main() -> int:
    """Run one command; kubectl's exit codes and its words for what goes wrong."""
    if sys.argv[1:2] == ["keep"]:
        keep(sys.argv[2])
        return 0
    with (STATE / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    if (STATE / "down").exists():
        print("Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout", file=sys.stderr)
        return 1
    try:
        return command(parser().parse_args())
    except LookupError as error:
        print(f"Error from server (NotFound): {error.args[0]}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The options that bridge uses, by their full names; kubectl refuses others as well."""
    top = argparse.ArgumentParser(prog="kubectl", allow_abbrev=False)
    top.add_argument("--namespace", required=True)
    verbs = top.add_subparsers(dest="verb", required=True)
    apply = verbs.add_parser("apply", allow_abbrev=False)
    apply.add_argument("--filename", required=True)
    get = verbs.add_parser("get", allow_abbrev=False)
    get.add_argument("kind", choices=["jobset", "pods"])
    get.add_argument("name", nargs="?")
    get.add_argument("--selector")
    get.add_argument("--ignore-not-found", action="store_true")
    get.add_argument("--output", choices=["json"], required=True)
    get.add_argument("--request-timeout")
    logs = verbs.add_parser("logs", allow_abbrev=False)
    logs.add_argument("name")
    logs.add_argument("--container", required=True)
    logs.add_argument("--since-time")
    for flag in ("--follow", "--timestamps"):
        logs.add_argument(flag, action="store_true")
    delete = verbs.add_parser("delete", allow_abbrev=False)
    delete.add_argument("kind", choices=["jobset"])
    delete.add_argument("name")
    return top


def command(options: argparse.Namespace) -> int:
    """Dispatch."""
    if options.verb == "apply":
        create(yaml.safe_load(sys.stdin.read()), options.namespace)
    elif options.verb == "get" and options.kind == "jobset":
        if not (STATE / "jobset.json").exists():
            if options.ignore_not_found:
                return 0
            raise LookupError(f'jobsets.jobset.x-k8s.io "{options.name}" not found')
        print(json.dumps(jobset(options.name)))
    elif options.verb == "get":
        pods = [pod_status(path.stem) for path in sorted(STATE.glob("*.pod"))]
        wanted = options.selector.split("=")
        print(json.dumps({"items": [pod for pod in pods if pod["metadata"]["labels"].get(wanted[0]) == wanted[1]]}))
    elif options.verb == "logs":
        logs(options)
    elif options.verb == "delete":
        jobset(options.name)
        end_all()
        for path in STATE.iterdir():
            if path.name not in ("calls", "keepers.log"):
                path.unlink()
        print(f'jobset.jobset.x-k8s.io "{options.name}" deleted')
    return 0


def create(manifest: dict[str, Any], namespace: str) -> None:
    """What the JobSet controller does: a Job a replica, a pod a completion, all started."""
    name, labels = manifest["metadata"]["name"], {}
    if manifest["metadata"]["namespace"] != namespace:
        raise LookupError(f"the namespace {namespace} does not match")
    (STATE / "jobset.json").write_text(json.dumps(manifest))
    for replicated in manifest["spec"]["replicatedJobs"]:
        template = replicated["template"]["spec"]
        for job in range(replicated["replicas"]):
            for index in range(template["completions"]):
                pod = f"{name}-{replicated['name']}-{job}-{index}-x{job}{index}"
                labels = {"jobset.sigs.k8s.io/jobset-name": name, JOB: str(job)}
                spec = template["template"]["spec"]
                values = {"labels": labels, "annotations": {POD: str(index)}, "spec": spec}
                (STATE / f"{pod}.pod").write_text(json.dumps(values))
                argv = [sys.executable, __file__, "keep", pod]
                with (STATE / "keepers.log").open("a") as log:
                    keeper = subprocess.Popen(
                        argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
                (STATE / f"{pod}.keeper").write_text(str(keeper.pid))
    print(f"jobset.jobset.x-k8s.io/{name} created")


def keep(pod: str) -> None:
    """Run the container of a pod: its output with times in `<pod>.log`, its end in `<pod>.end`."""
    while (STATE / "pending").exists():
        if not (STATE / f"{pod}.pod").exists():
            return
        time.sleep(0.05)
    values = json.loads((STATE / f"{pod}.pod").read_text())
    container = values["spec"]["containers"][0]
    known = {f"metadata.labels['{JOB}']": values["labels"][JOB]}
    known[f"metadata.annotations['{POD}']"] = values["annotations"][POD]
    env = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH") if key in os.environ}
    for each in container["env"]:
        env[each["name"]] = each["value"] if "value" in each else known[each["valueFrom"]["fieldRef"]["fieldPath"]]
    child = subprocess.Popen(
        container["command"],
        env=env,
        cwd=container["workingDir"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (STATE / f"{pod}.pid").write_text(str(child.pid))
    with (STATE / f"{pod}.log").open("a") as log:
        for line in child.stdout or ():
            log.write(f"{now()} {line}")
            log.flush()
    code = child.wait()
    (STATE / f"{pod}.end").write_text(json.dumps({"exitCode": code if code >= 0 else 128 - code, "finishedAt": now()}))


def now() -> str:
    """A time as the kubelet writes it: nanoseconds, which this clock counts in thousands."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


def pod_status(pod: str) -> dict[str, Any]:
    """A pod as the API shows it."""
    values = json.loads((STATE / f"{pod}.pod").read_text())
    status: dict[str, Any] = {"phase": "Pending"}
    if (STATE / f"{pod}.end").exists():
        end = json.loads((STATE / f"{pod}.end").read_text())
        end["finishedAt"] = end["finishedAt"][:19] + "Z"  # the API has seconds
        end["reason"] = {0: "Completed", 137: "OOMKilled"}.get(end["exitCode"], "Error")
        phase = "Failed" if end["exitCode"] else "Succeeded"
        status = {"phase": phase, "containerStatuses": [{"name": "engine", "state": {"terminated": end}}]}
    elif (STATE / f"{pod}.pid").exists():
        status = {"phase": "Running", "containerStatuses": [{"name": "engine", "state": {"running": {}}}]}
    else:
        waiting = {"waiting": {"reason": "ImagePullBackOff"}}
        status["containerStatuses"] = [{"name": "engine", "state": waiting}]
    metadata = {"name": pod, "labels": values["labels"], "annotations": values["annotations"]}
    if (STATE / f"{pod}.deleted").exists():
        metadata["deletionTimestamp"] = now()[:19] + "Z"
    return {"metadata": metadata, "spec": {"nodeName": "node-a"}, "status": status}


def jobset(name: str) -> dict[str, Any]:
    """The set as the API shows it; as its controller, end all pods when one has failed."""
    path = STATE / "jobset.json"
    manifest: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"metadata": {"name": None}}
    if manifest["metadata"]["name"] != name:
        raise LookupError(f'jobsets.jobset.x-k8s.io "{name}" not found')
    phases = [pod_status(each.stem)["status"]["phase"] for each in STATE.glob("*.pod")]
    if (STATE / "suspended").exists():
        condition = {"type": "Suspended", "status": "True", "message": "jobset is suspended"}
    elif "Failed" in phases:
        end_all()
        condition = {"type": "Failed", "status": "True", "message": "jobset failed due to one or more job failures"}
    elif set(phases) == {"Succeeded"}:
        condition = {"type": "Completed", "status": "True", "message": "jobset completed successfully"}
    else:
        return manifest
    return {**manifest, "status": {"conditions": [{"type": "StartupPolicyCompleted", "status": "False"}, condition]}}


def end_all() -> None:
    """End what still runs, and its keepers."""
    for path in STATE.glob("*.pid"):
        if not (STATE / f"{path.stem}.end").exists():
            with contextlib.suppress(ProcessLookupError):
                (STATE / f"{path.stem}.deleted").touch()
                os.kill(int(path.read_text()), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not all((STATE / f"{p.stem}.end").exists() for p in STATE.glob("*.pid")):
        time.sleep(0.02)


def logs(options: argparse.Namespace) -> None:
    """Print a pod's log, and follow it until the pod ends."""
    path = STATE / f"{options.name}.log"
    if not path.exists():
        raise LookupError(f'container "{options.container}" in pod "{options.name}" is waiting to start')
    since = options.since_time[:19] if options.since_time else ""  # the API counts seconds
    broken, sent = STATE / "break", 0
    with path.open() as file:
        while True:
            ended = (STATE / f"{options.name}.end").exists()
            while line := file.readline():
                if line[:19] < since:
                    continue
                sys.stdout.write(line if options.timestamps else line.partition(" ")[2])
                sys.stdout.flush()
                sent += 1
                if broken.exists() and sent:
                    broken.unlink()
                    return
            if ended or not options.follow:
                return
            time.sleep(0.05)


def install(folder: Path) -> Path:
    """Write the script `kubectl` into a folder, for PATH; the folder `state` beside it is the cluster."""
    state = folder / "state"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    script = folder / "kubectl"
    script.write_text(f'#!/bin/sh\nKUBE_STATE={state} exec {sys.executable} {__file__} "$@"\n')
    script.chmod(0o755)
    return state


if __name__ == "__main__":
    sys.exit(main())
