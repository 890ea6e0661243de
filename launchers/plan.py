"""`Launch`: a process to start, as a value; and what all engines' plans have in common."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bridge.errors import LaunchError, UnsupportedError
from bridge.launchers.cluster import Cluster
from bridge.run_spec import ClusterSection

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
SECRETS = ("HF_TOKEN",)
"""Taken from the launcher's environment when a process starts, never part of a plan."""


@dataclass(frozen=True)
class Launch:
    """One process: its arguments, what is added to its environment, where it starts, and on which host."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "."
    host: str = "localhost"
    secrets: tuple[str, ...] = ()
    """Names of environment variables whose values are passed on, where they are set."""

    def as_shell(self) -> str:
        """The same as one line of shell; secrets by name only."""
        env = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        env += [f'{name}="${name}"' for name in self.secrets]
        return " ".join(part for part in (f"cd {shlex.quote(self.cwd)} &&", *env, shlex.join(self.argv)) if part)


@dataclass(frozen=True)
class Site:
    """What a plan takes from the place it is made for: all of it is given, nothing is probed.

    `inherited_flags` are the XLA_FLAGS that the processes would have without a plan; `secrets` the names of those
    that are set; `total_devices` those that the mesh was made for.
    """

    run_dir: str
    python: str
    hardware: str
    inherited_flags: str = ""
    secrets: tuple[str, ...] = ()
    total_devices: int | None = None


def processes(
    section: ClusterSection, cluster: Cluster, site: Site, engine: str, names: Sequence[Mapping[str, str]]
) -> tuple[Launch, ...]:
    """One `Launch` a process, all started through the shim.

    Args:
        section: the settings.
        cluster: where the processes run.
        site: folder, interpreter, hardware.
        engine: maxtext or tunix.
        names: what the engine itself reads in its environment, by process.

    Raises:
        LaunchError, UnsupportedError: devices cannot be shared out among the processes.
    """
    python = site.python if cluster.launcher == "local" else section.python or site.python
    launches = []
    for number in range(cluster.count):
        env = {
            **engine_env(section, cluster, site, number % cluster.processes),
            **bridge_env(section, cluster, site, engine, number),
            **names[number],
            **section.env,
        }
        launches.append(
            Launch(
                argv=(python, "-m", "bridge.launchers.shim", site.run_dir),
                env=env,
                cwd=site.run_dir,
                host=cluster.hosts[number // cluster.processes],
                secrets=site.secrets,
            )
        )
    return tuple(launches)


def bridge_env(section: ClusterSection, cluster: Cluster, site: Site, engine: str, number: int) -> dict[str, str]:
    """What the shim reads (`launchers/member.py`)."""
    env = {
        "BRIDGE_ENGINE": engine,
        "BRIDGE_STALL_TIMEOUT": str(section.stall_timeout),
        "BRIDGE_GRACE": str(section.grace),
    }
    if cluster.count > 1:
        env |= {
            "BRIDGE_COORDINATOR": f"{cluster.coordinator}:{cluster.port}",
            "BRIDGE_PROCESS_COUNT": str(cluster.count),
            "BRIDGE_PROCESS_ID": str(number),
            "BRIDGE_INIT_TIMEOUT": str(section.init_timeout),
            "BRIDGE_HEARTBEAT_TIMEOUT": str(section.heartbeat_timeout),
        }
    if site.total_devices is not None and (cluster.count > 1 or cluster.devices is not None):
        env["BRIDGE_DEVICES"] = str(site.total_devices)
    return env


def engine_env(section: ClusterSection, cluster: Cluster, site: Site, local: int) -> dict[str, str]:
    """What XLA and JAX read, set before the process starts because they read it once.

    `XLA_CLIENT_MEM_FRACTION` is JAX's present name; with the old `XLA_PYTHON_CLIENT_MEM_FRACTION` beside it JAX raises.
    JAX's preemption service would swallow SIGTERM (measured: alive 5 s after it); the shim answers it.
    """
    env = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "JAX_ENABLE_PREEMPTION_SERVICE": "false"}
    flags = [*site.inherited_flags.split(), *section.xla_flags]
    if site.hardware == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
        if cluster.devices is not None:
            if any(flag.startswith(f"{DEVICE_COUNT_FLAG}=") for flag in flags):
                raise LaunchError(
                    f"cluster.devices and {DEVICE_COUNT_FLAG} both say how many devices there are",
                    hint="leave the flag out",
                )
            flags.append(f"{DEVICE_COUNT_FLAG}={_share(cluster)}")
    elif site.hardware == "gpu" and cluster.processes > 1:
        share = _share(cluster)
        ids = cluster.visible or tuple(map(str, range(cluster.devices or 0)))
        env["CUDA_VISIBLE_DEVICES"] = ",".join(ids[local * share : (local + 1) * share])
    elif site.hardware == "gpu" and cluster.visible:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(cluster.visible)
    elif site.hardware == "tpu" and cluster.processes > 1:
        raise UnsupportedError(
            f"{cluster.processes} processes a node on tpu: one process drives all TPU chips of a host",
            hint="cluster.processes: 1, and more nodes",
        )
    if section.memory_fraction is not None:
        env["XLA_CLIENT_MEM_FRACTION"] = f"{section.memory_fraction:g}"
    if flags:
        env["XLA_FLAGS"] = " ".join(flags)
    return env


def _share(cluster: Cluster) -> int:
    if cluster.devices is None:
        raise LaunchError(
            f"how many devices has a node for its {cluster.processes} processes?", hint="cluster.devices: 8"
        )
    if cluster.devices % cluster.processes:
        raise LaunchError(
            f"{cluster.devices} devices of a node cannot be shared out among {cluster.processes} processes",
            hint="cluster.processes must divide cluster.devices",
        )
    return cluster.devices // cluster.processes
