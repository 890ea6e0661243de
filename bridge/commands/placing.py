"""Where the processes of a run go: options, settings, and what this host and its environment say, made one value."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.commands.workspace import Workspace
from bridge.errors import LaunchError
from bridge.launchers import cluster as clusters
from bridge.launchers import environment, local, ssh
from bridge.launchers.cluster import Cluster
from bridge.launchers.plan import SECRETS, Site
from bridge.run_spec import RunSpec


@dataclass(frozen=True)
class Placed:
    """The cluster of a run, and what this host adds to it."""

    cluster: Cluster
    site: Site

    @property
    def first(self) -> bool:
        """Whether this invocation starts process 0, and so writes the run's files."""
        return self.cluster.own is None or 0 in self.cluster.own


def overrides(
    launcher: str | None, nodes: int | None, processes: int | None, devices: int | None, hosts: str | None
) -> tuple[str, ...]:
    """The options of `launch` as overrides of the spec: one spelling, checked in one place."""
    values = {"launcher": launcher, "nodes": nodes, "processes": processes, "devices": devices}
    found = [f"cluster.{key}={value}" for key, value in values.items() if value is not None]
    if hosts is not None:
        if Path(hosts).is_file():
            found += [f"cluster.hosts_file={Path(hosts).absolute()}", "cluster.hosts=[]"]
        else:
            found += [f"cluster.hosts=[{hosts}]", "cluster.hosts_file=null"]
    return tuple(found)


def cluster_of(workspace: Workspace, run: RunSpec, run_name: str, hardware: str, env: Mapping[str, str]) -> Cluster:
    """The cluster of a run, as the settings and the environment `env` mean it.

    Raises:
        LaunchError: as `cluster.describe` and `environment.detect`.
    """
    section = run.cluster
    member = None
    hosts: tuple[str, ...] = ()
    if section.launcher == "local" and section.environment == "auto":
        member = environment.detect(env)
    if section.launcher == "ssh":
        file = workspace.path(section.hosts_file) if section.hosts_file else None
        hosts = ssh.hosts_of(section.hosts, file)
    alone = section.launcher == "local" and member is None and section.processes > 1
    return clusters.describe(
        section,
        run_name,
        hosts=hosts,
        member=member,
        free_port=local.free_port() if alone and section.port is None else None,
        visible=visible_gpus(run, hardware, env),
    )


def visible_gpus(run: RunSpec, hardware: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """CUDA's names of the GPUs that processes on this host may use; empty where all may be, or where none matter."""
    if hardware != "gpu" or run.cluster.launcher != "local":
        return ()
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        names = tuple(part.strip() for part in named.split(",") if part.strip())
    else:
        names = tuple(str(number) for number in range(local_gpus())) if run.cluster.processes > 1 else ()
    wanted = run.cluster.devices
    if wanted is not None and names and wanted > len(names):
        usable = f"{len(names)} GPUs to use: {', '.join(names)}"
        raise LaunchError(f"cluster.devices is {wanted}, and this host has {usable}")
    return names[:wanted] if wanted is not None else names


def local_gpus() -> int:
    """GPUs of this host, as its driver lists them."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def total_devices(run: RunSpec, cluster: Cluster, hardware: str, env: Mapping[str, str]) -> int:
    """Devices of all processes, without starting JAX.

    Raises:
        LaunchError: they cannot be counted.
    """
    if cluster.devices is not None:
        return cluster.devices * len(cluster.hosts)
    if hardware == "cpu":
        flags = [*run.cluster.xla_flags, *env.get("XLA_FLAGS", "").split()]
        simulated = [flag.partition("=")[2] for flag in flags if "xla_force_host_platform_device_count=" in flag]
        return (int(simulated[0]) if simulated else 1) * cluster.count
    if hardware == "gpu" and cluster.launcher == "local" and local_gpus():
        return local_gpus() * len(cluster.hosts)
    if not isinstance(run.mesh, str) and -1 not in (run.mesh.data, run.mesh.fsdp, run.mesh.tensor):
        return run.mesh.data * run.mesh.fsdp * run.mesh.tensor
    raise LaunchError(
        f"the {hardware} devices cannot be counted on this host",
        hint="cluster.devices: the number of a node; or give the mesh: {data: 1, fsdp: 8, tensor: 1}",
    )


def site_of(run: RunSpec, cluster: Cluster, run_dir: Path, hardware: str, total: int, env: Mapping[str, str]) -> Site:
    """What a plan takes from this host."""
    here = cluster.launcher == "local"
    return Site(
        run_dir=str(run_dir),
        python=sys.executable,
        hardware=hardware,
        inherited_flags=env.get("XLA_FLAGS", "") if here else "",
        secrets=tuple(name for name in SECRETS if name in env) if run.cluster.launcher == "ssh" else (),
        total_devices=total,
    )
