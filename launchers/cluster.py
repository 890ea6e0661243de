"""`Cluster`: which hosts, how many processes on each, and where they meet. Values only."""

from __future__ import annotations

import ipaddress
import zlib
from dataclasses import dataclass

from bridge.errors import LaunchError
from bridge.launchers.environment import Membership
from bridge.run_spec import ClusterSection

FIRST_PORT, PORTS = 61440, 4096
"""Above Linux's range of ephemeral ports (32768-60999); JAX takes the same for Slurm."""

SLURM_HOST, SLURM_PORT = "$BRIDGE_HOST", "$BRIDGE_PORT"
"""The first node and the port of a Slurm job are known to its script only."""


@dataclass(frozen=True)
class Cluster:
    """Hosts in the order of their processes; process 0 runs on the first and is the coordinator.

    `devices` are those of one host, `visible` their CUDA names where not all of a host may be used, `own` the numbers
    of the processes that this invocation starts (None: all).
    """

    launcher: str
    hosts: tuple[str, ...]
    processes: int
    coordinator: str
    port: str
    devices: int | None = None
    visible: tuple[str, ...] = ()
    own: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """Processes on all hosts."""
        return len(self.hosts) * self.processes


def describe(
    section: ClusterSection,
    run_name: str,
    *,
    hosts: tuple[str, ...] = (),
    member: Membership | None = None,
    free_port: int | None = None,
    visible: tuple[str, ...] = (),
) -> Cluster:
    """The cluster that settings and a ready-made environment mean.

    Args:
        section: the settings.
        run_name: names a JobSet, and chooses the port where nothing else does.
        hosts: of `launcher: ssh`, from `cluster.hosts` or the file.
        member: what the environment says of this process, for `launcher: local`.
        free_port: a port that is free on this host, for processes that all run here.
        visible: CUDA names of this host's devices, where they are restricted.

    Raises:
        LaunchError: hosts are missing, contradict `nodes`, or cannot reach the coordinator.
    """
    devices = section.devices if section.devices is not None else len(visible) or None
    port = str(section.port or FIRST_PORT + zlib.crc32(run_name.encode()) % PORTS)
    if section.launcher == "ssh":
        _check_hosts(section, hosts)
        first = section.coordinator or hosts[0].rpartition("@")[2]
        _check_coordinator(first, len(hosts))
        return Cluster("ssh", hosts, section.processes, first, port, section.devices)
    if section.launcher == "slurm":
        names = tuple(f"slurm node {number}" for number in range(section.nodes))
        coordinator, port = section.coordinator or SLURM_HOST, str(section.port or SLURM_PORT)
        _check_coordinator(coordinator, len(names))
        return Cluster("slurm", names, section.processes, coordinator, port, section.devices)
    if section.launcher == "jobset":
        if section.nodes % section.jobset.slices:
            raise LaunchError(
                f"cluster.nodes {section.nodes} cannot be divided into {section.jobset.slices} slices",
                hint="cluster.jobset.slices must divide cluster.nodes",
            )
        if section.devices is not None and section.devices % section.processes:
            raise LaunchError(
                f"{section.devices} devices of a node cannot be shared out among {section.processes} processes",
                hint="cluster.processes must divide cluster.devices",
            )
        names = jobset_hosts(run_name, section.nodes, section.jobset.slices, section.processes)
        devices = section.devices // section.processes if section.devices else None
        return Cluster("jobset", names, 1, names[0], str(section.port or 6002), devices)
    if member is not None:
        _check_coordinator(section.coordinator or member.coordinator, member.nodes)
        return _joined(section, member, port, devices, visible)
    if section.nodes > 1:
        raise LaunchError(
            f"cluster.nodes is {section.nodes}, and launcher: local is one host",
            hint="--launcher ssh, slurm or jobset; or start this under srun, torchrun, SkyPilot, dstack or mpirun",
        )
    port = str(section.port or free_port or port)
    return Cluster("local", ("localhost",), section.processes, "127.0.0.1", port, devices, visible)


def jobset_name(run_name: str) -> str:
    """A DNS label of at most 40 characters, so that the pods' names, which extend it, keep below 63."""
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in run_name.lower())[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def jobset_hosts(run_name: str, nodes: int, slices: int, processes: int) -> tuple[str, ...]:
    """DNS names of the pods: `<jobset>-<replicated job>-<job>-<pod>.<subdomain>`."""
    name, pods = jobset_name(run_name), nodes * processes
    a_slice = pods // slices
    return tuple(f"{name}-workers-{pod // a_slice}-{pod % a_slice}.{name}" for pod in range(pods))


def is_loopback(host: str) -> bool:
    """Whether a name or address means the host it is used on."""
    if host in ("localhost", "ip6-localhost", "localhost.localdomain"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _joined(
    section: ClusterSection, member: Membership, port: str, devices: int | None, visible: tuple[str, ...]
) -> Cluster:
    """Ready-made environments start `bridge launch` once a node, or once a process."""
    processes = member.processes if member.processes is not None else section.processes
    names = member.hosts or tuple(f"node {number}" for number in range(member.nodes))
    if member.process is not None:
        own: tuple[int, ...] = (member.process,)
        if member.kind != "torchrun":  # Slurm and MPI have given this process its devices
            devices = devices * processes if devices is not None else None
            visible = visible * processes
    else:
        own = tuple(range(member.node * processes, (member.node + 1) * processes))
    coordinator = section.coordinator or member.coordinator
    chosen = str(section.port or member.port or port)
    return Cluster("local", names, processes, coordinator, chosen, devices, visible, own)


def _check_hosts(section: ClusterSection, hosts: tuple[str, ...]) -> None:
    if not hosts:
        raise LaunchError("launcher: ssh needs hosts", hint="--hosts hostA,hostB, or cluster.hosts_file")
    if section.nodes not in (1, len(hosts)):
        raise LaunchError(f"cluster.nodes is {section.nodes}, and there are {len(hosts)} hosts: {', '.join(hosts)}")
    repeated = sorted({host for host in hosts if hosts.count(host) > 1})
    if repeated:
        raise LaunchError(f"{repeated[0]} is named twice", hint="cluster.processes starts several processes on a host")
    wrong = [host for host in hosts if not host or host.startswith("-") or any(char.isspace() for char in host)]
    if wrong:
        raise LaunchError(f"{wrong[0]!r} is no host name")


def _check_coordinator(host: str, nodes: int) -> None:
    if nodes > 1 and is_loopback(host):
        raise LaunchError(
            f"the coordinator is {host}, which every one of the {nodes} hosts takes for itself",
            hint="cluster.coordinator: the first host's name or address, as the others reach it",
        )
