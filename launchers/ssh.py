"""Run a plan on several hosts with the system's `ssh`, so that the user's ssh_config, keys and agents count."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bridge.errors import LaunchError
from bridge.launchers import ssh_runner
from bridge.launchers.plan import Launch
from bridge.launchers.supervise import FAILURE_GRACE, Child, Show, supervise

HEARTBEAT = 5.0
"""Seconds between signs of life to the far side."""
FAR_PATIENCE = 30.0
"""Seconds without any after which the far side ends its process: later than ssh gives up here, which is after 15 to 20
(three unanswered questions), so that the error names the host that was lost and not those that missed it."""
BOOTSTRAP = "import json,sys;exec(compile(json.loads(sys.stdin.readline()),'ssh_runner','exec'))"
"""Reads the runner's source from the first line of standard input."""


def hosts_of(hosts: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """The hosts that settings name: a list, or a file with one a line, `#` begins a comment.

    Raises:
        LaunchError: both, or the file cannot be read.
    """
    if file is None:
        return tuple(hosts)
    if hosts:
        raise LaunchError("cluster.hosts and cluster.hosts_file both name hosts", hint="leave one out")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cluster.hosts_file: {file} cannot be read: {error}") from error
    return tuple(words[0] for line in lines if (words := line.partition("#")[0].split()))


def command(launch: Launch, options: Sequence[str]) -> tuple[str, ...]:
    """`ssh` with what it runs on the far side; neither environment nor arguments of the engine are in it."""
    python = shlex.quote(launch.argv[0])
    remote = f"exec {python} -u -c {shlex.quote(BOOTSTRAP)}"
    quiet = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
    return ("ssh", "-T", *options, *quiet, "--", launch.host, remote)


def job(launch: Launch, grace: float, environment: Mapping[str, str]) -> str:
    """What goes through standard input: the runner's source, then the job, a line each.

    `environment` is the launcher's own, where the values of secrets are.
    """
    secrets = {name: environment[name] for name in launch.secrets if name in environment}
    values = {
        "argv": list(launch.argv),
        "env": {**launch.env, **secrets},
        "cwd": launch.cwd,
        "grace": grace,
        "heartbeat": FAR_PATIENCE,
    }
    source = Path(ssh_runner.__file__).read_text(encoding="utf-8")
    return json.dumps(source) + "\n" + json.dumps(values) + "\n"


def execute(
    plan: Sequence[Launch], logs: Path, show: Show, verbose: bool, grace: float, options: Sequence[str] = ()
) -> None:
    """Start every process on its host and wait; arguments as `supervise`, and `options` of ssh.

    Raises:
        LaunchError: there is no ssh, a host cannot be reached, or a process failed.
    """
    if shutil.which("ssh") is None:
        raise LaunchError("there is no ssh on PATH", hint="Debian: apt install openssh-client")
    start = [_starter(number, launch, options) for number, launch in enumerate(plan)]
    supervise(start, logs, show, verbose, grace, numbered=True)


def _starter(number: int, launch: Launch, options: Sequence[str]) -> Callable[[], Child]:
    def start() -> Child:
        popen = subprocess.Popen(
            command(launch, options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        lock = threading.Lock()

        def write(text: str) -> None:
            with lock, contextlib.suppress(OSError, ValueError):
                if popen.stdin is not None:
                    popen.stdin.write(text)
                    popen.stdin.flush()

        def send(signal_number: signal.Signals) -> None:
            write(f"{signal_number.name}\n")

        def beat() -> None:
            while popen.poll() is None:
                write("\n")
                stop.wait(HEARTBEAT)

        stop = threading.Event()
        write(job(launch, FAILURE_GRACE, os.environ))
        threading.Thread(target=beat, daemon=True, name=f"heartbeat-{number}").start()
        return Child(number, f"process {number} on {launch.host}", popen, send, far=launch.host)

    return start
