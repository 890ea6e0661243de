"""The far side of an SSH launch: starts one process and never leaves it behind.

Its source is sent through ssh and run by the other host's Python, so it imports the standard library only. Standard
input: one line of JSON (the job; secrets never stand on a command line), then the names of signals, and empty lines as
heartbeats. When standard input ends, or no line has come for a while, the process group is ended: SIGTERM, a grace
period, SIGKILL. `ssh` alone leaves the process running when it is killed (measured).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time


def main() -> int:
    """Run the job of standard input; returns its exit code, 128 + n after signal n."""
    job = json.loads(sys.stdin.readline())
    for path in [job["cwd"], job["argv"][0]]:
        if not os.path.exists(path):
            print("bridge: error: there is no " + path + " on " + os.uname()[1])
            print("  hint: workdir and the interpreter must lie at the same path on all hosts; cluster.python")
            return 1
    child = subprocess.Popen(
        job["argv"],
        env={**os.environ, **job["env"], "BRIDGE_LIFELINE": "1"},
        cwd=job["cwd"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    last = [time.monotonic()]
    ended = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            last[0] = time.monotonic()
            if line.strip():
                send(child.pid, getattr(signal, line.strip()))
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    while child.poll() is None:
        if ended.wait(0.1) or time.monotonic() - last[0] > job["heartbeat"]:
            end(child, job["grace"])
    send(child.pid, signal.SIGKILL)  # what it may have left of its own children
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end(child: "subprocess.Popen[bytes]", grace: float) -> None:
    """End the process group: nobody is there any more who wants it."""
    send(child.pid, signal.SIGTERM)
    try:
        child.wait(grace)
    except subprocess.TimeoutExpired:
        send(child.pid, signal.SIGKILL)
        child.wait()


def send(group: int, number: int) -> None:
    """Signal a process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    for ignored in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    code = main()
    sys.stdout.flush()
    os._exit(code)
