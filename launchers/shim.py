"""What every engine process starts through: `python -m bridge.launchers.shim RUN_DIR`.

It meets the other processes, initialises JAX's distribution with explicit values, runs the engine, and ends at once
when that fails: JAX's own exit handlers would otherwise wait up to 300 s for the other processes (measured).
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.launchers.member import Member
from bridge.launchers.stopping import STOPPED, Stopping, end_with_launcher, hook_trainer

if TYPE_CHECKING:
    from bridge.launchers.run_file import RunFile

FAILED = 1
EXPLAINED = "bridge: error: "


def main() -> None:
    """Run the engine of a run folder; never returns to the interpreter's exit handlers."""
    run_dir = Path(sys.argv[1])
    code = 0
    try:
        if os.environ.get("BRIDGE_LIFELINE"):
            end_with_launcher()
        member = Member.of(os.environ)
        stopping = Stopping(member.process, member.count, member.grace)
        stopping.install()
        run(run_dir, member, stopping)
    except BaseException as error:
        code = report(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(run_dir: Path, member: Member, stopping: Stopping) -> None:
    """Train what a run folder describes.

    Raises:
        BridgeError: what went wrong, explained.
    """
    from bridge.errors import BridgeError, LaunchError
    from bridge.launchers.run_file import RunFile
    from bridge.launchers.watchdog import Watchdog

    if member.count > 1:
        meet(run_dir, member)
    run_file = RunFile.read(run_dir)
    Watchdog(member.stall_timeout, EXPLAINED)
    if member.count > 1:
        initialize(member, stopping)
    check_devices(member)
    hook_trainer(stopping)
    try:
        train(run_dir, run_file)
    except (BridgeError, SystemExit):
        if stopping.reached is None:
            raise
    if member.count > 1:
        import jax

        # Process 0 holds the coordination service: it may not go before the others are done.
        jax.distributed.shutdown()
    if stopping.reached is not None:
        error = LaunchError(
            f"stopped by SIGTERM after step {stopping.reached}; its checkpoint is saved",
            hint="--resume goes on from it",
        )
        error.exit_code = STOPPED
        raise error


def train(run_dir: Path, run_file: RunFile) -> None:
    """Run the engine.

    Raises:
        BridgeError: what went wrong, explained.
    """
    from bridge.errors import LaunchError

    if run_file.engine == "maxtext":
        from bridge.launchers import maxtext_runtime

        maxtext_runtime.train(run_dir, run_file)
    elif run_file.engine == "tunix":
        import runpy

        runpy.run_path(str(run_dir / run_file.program), run_name="__main__")
    else:
        raise LaunchError(f"there is no engine {run_file.engine!r}")


def meet(run_dir: Path, member: Member) -> None:
    """Meet the other processes.

    Raises:
        LaunchError: as `rendezvous.join`.
    """
    import socket

    from bridge.launchers import rendezvous
    from bridge.launchers.cluster import is_loopback
    from bridge.launchers.hello import Hello
    from bridge.launchers.progress import say

    name = socket.gethostname()
    try:
        alone = is_loopback(socket.gethostbyname(name))
    except OSError:
        alone = True
    hello = Hello(
        process=member.process,
        count=member.count,
        host=name,
        run_dir=str(run_dir),
        platform=os.environ.get("JAX_PLATFORMS", ""),
        versions=versions(member.engine),
        loopback=alone,
    )
    rendezvous.join(hello, member.host, member.port, member.init_timeout, lambda: unreadable(run_dir), say)


def versions(engine: str) -> dict[str, str]:
    """What must be the same on every host."""
    import importlib.metadata

    import bridge
    from bridge import engine_fixes

    found = {"bridge": bridge.__version__, "python": ".".join(map(str, sys.version_info[:2]))}
    for package in ("jax", "jaxlib", *([engine_fixes.PACKAGES[engine]] if engine in engine_fixes.PACKAGES else [])):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "nothing"
    return found


def unreadable(run_dir: Path) -> str:
    """Why the run cannot start on this host; empty when its file and its checkpoint are there."""
    import json

    from bridge.places import place

    path = run_dir / "run.json"
    try:
        checkpoint = place(json.loads(path.read_text(encoding="utf-8"))["checkpoint"])
    except OSError as error:
        return f"{path}: {error.strerror}"
    except (ValueError, KeyError) as error:
        return f"{path} is damaged: {error}"
    return "" if checkpoint.is_dir() else f"there is no {checkpoint}"


def initialize(member: Member, stopping: Stopping) -> None:
    """JAX's distribution, with every value given and its detection of clusters off.

    Source: jax/_src/distributed.py 0.12.0.1; the timeouts have no other way in than these arguments.
    """
    import jax
    from jax._src import distributed

    bind = member.address if member.host.startswith("127.") else None
    jax.distributed.initialize(
        coordinator_address=member.address,
        num_processes=member.count,
        process_id=member.process,
        cluster_detection_method="deactivate",
        initialization_timeout=member.init_timeout,
        heartbeat_timeout_seconds=member.heartbeat_timeout,
        shutdown_timeout_seconds=member.init_timeout,
        coordinator_bind_address=bind,
    )
    stopping.agree_through(distributed.global_state.client)


def check_devices(member: Member) -> None:
    """Compare the devices of all processes with those that the mesh was made for.

    Raises:
        LaunchError: there are more or fewer.
    """
    import jax

    from bridge.errors import LaunchError

    if member.devices is not None and jax.device_count() != member.devices:
        raise LaunchError(
            f"the mesh is for {member.devices} devices, {member.count} process(es) have {jax.device_count()}",
            details=[f"process {member.process} sees {jax.local_device_count()}"],
            hint="cluster.devices: the number that every node has",
        )


def report(error: BaseException) -> int:
    """Print an error, explained where bridge can, and return the exit code."""
    from bridge.errors import BridgeError

    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED if error.code else 0
    if isinstance(error, BridgeError):
        print(f"{EXPLAINED}{error}", file=sys.stderr)
        return error.exit_code
    traceback.print_exception(error)
    return FAILED


if __name__ == "__main__":
    main()
