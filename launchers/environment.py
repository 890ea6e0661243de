"""Ready-made environments: what Slurm, MPI, SkyPilot, dstack and torchrun tell a process about its cluster.

A pure function from the environment. Sources: jax/_src/clusters (Slurm, Open MPI), SkyPilot 0.14.1, dstack's runner,
torchrun's documented variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bridge.errors import LaunchError

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


@dataclass(frozen=True)
class Membership:
    """This process's place in a cluster that somebody else started.

    `process` is its number when the environment starts every process (Slurm, MPI, torchrun), None when it starts one
    command a node (SkyPilot, dstack); then `node` is the node's, and `processes` None: the settings say how many.
    """

    kind: str
    coordinator: str
    nodes: int
    node: int
    port: int | None = None
    processes: int | None = None
    process: int | None = None
    hosts: tuple[str, ...] = ()


def detect(env: Mapping[str, str]) -> Membership | None:
    """What the environment says; None where it says nothing, or there is one process only.

    Raises:
        LaunchError: it says half of it, or what makes no sense.
    """
    for understand in (_slurm, _mpi, _skypilot, _dstack, _torchrun):
        member = understand(env)
        if member is not None:
            total = member.nodes * (member.processes or 1)
            if not (0 <= member.node < member.nodes and 0 <= (member.process or 0) < total):
                place = f"process {member.process}, node {member.node} of {member.nodes}"
                raise LaunchError(f"{member.kind} says that this is {place}")
            return member if total > 1 else None
    return None


def _slurm(env: Mapping[str, str]) -> Membership | None:
    """Under srun. In a batch script or an salloc shell there is no step yet, and nothing to join."""
    if any(name not in env for name in SLURM):
        return None
    hosts = expand_nodes(env["SLURM_STEP_NODELIST"])
    tasks, process = _number(env, "SLURM_NTASKS"), _number(env, "SLURM_PROCID")
    processes = _even("Slurm", tasks, len(hosts))
    return Membership(
        "Slurm",
        coordinator=hosts[0],
        nodes=len(hosts),
        node=process // processes,
        port=61440 + _number(env, "SLURM_JOB_ID") % 4096,
        processes=processes,
        process=process,
        hosts=hosts,
    )


def _mpi(env: Mapping[str, str]) -> Membership | None:
    """Open MPI before 5 tells the address of its head node; other MPIs need `cluster.coordinator`."""
    if "OMPI_COMM_WORLD_SIZE" in env:
        size, process = _number(env, "OMPI_COMM_WORLD_SIZE"), _number(env, "OMPI_COMM_WORLD_RANK")
        local = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
        found = re.match(r"(\d+)\.\d+;tcp://([^:]+):", env.get("OMPI_MCA_orte_hnp_uri", ""))
        coordinator = found[2].split(",")[0] if found else "127.0.0.1"
        # The same spread as jax: the job number is unique on the head node.
        port = 61440 + int(found[1]) // 4096 % 4096 if found else None
    elif "PMI_SIZE" in env and "PMI_RANK" in env:
        size, process = _number(env, "PMI_SIZE"), _number(env, "PMI_RANK")
        local = _number(env, "MPI_LOCALNRANKS") if "MPI_LOCALNRANKS" in env else 1
        coordinator, port = "127.0.0.1", None
    else:
        return None
    nodes = _even("MPI", size, local)
    return Membership("MPI", coordinator, nodes, process // local, port, local, process)


def _skypilot(env: Mapping[str, str]) -> Membership | None:
    if "SKYPILOT_NODE_IPS" not in env or "SKYPILOT_NODE_RANK" not in env:
        return None
    hosts = tuple(env["SKYPILOT_NODE_IPS"].split())
    if not hosts or len(hosts) != _number(env, "SKYPILOT_NUM_NODES", len(hosts)):
        raise LaunchError(f"SKYPILOT_NODE_IPS names {len(hosts)} hosts, SKYPILOT_NUM_NODES is another number")
    return Membership("SkyPilot", hosts[0], len(hosts), _number(env, "SKYPILOT_NODE_RANK"), hosts=hosts)


def _dstack(env: Mapping[str, str]) -> Membership | None:
    if "DSTACK_NODES_NUM" not in env or "DSTACK_NODE_RANK" not in env:
        return None
    hosts = tuple(env.get("DSTACK_NODES_IPS", "").split())
    first = env.get("DSTACK_MASTER_NODE_IP") or (hosts[0] if hosts else None)
    if first is None:
        raise LaunchError("dstack tells neither DSTACK_MASTER_NODE_IP nor DSTACK_NODES_IPS")
    nodes = _number(env, "DSTACK_NODES_NUM")
    return Membership(
        "dstack", first, nodes, _number(env, "DSTACK_NODE_RANK"), hosts=hosts if len(hosts) == nodes else ()
    )


def _torchrun(env: Mapping[str, str]) -> Membership | None:
    if any(name not in env for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK")):
        return None
    world, process = _number(env, "WORLD_SIZE"), _number(env, "RANK")
    local = _number(env, "LOCAL_WORLD_SIZE", 1)
    nodes = _even("torchrun", world, local)
    # torchrun's own store listens on MASTER_PORT: the next one is ours.
    port = _number(env, "MASTER_PORT") + 1 if "MASTER_PORT" in env else None
    return Membership("torchrun", env["MASTER_ADDR"], nodes, process // local, port, local, process)


def expand_nodes(text: str) -> tuple[str, ...]:
    """Slurm's short form of a node list: `a[01-03,7],b` is a01 a02 a03 a7 b.

    Raises:
        LaunchError: another form.
    """
    items = re.findall(r"[^,\[\]]+(?:\[[^\[\]]*\][^,\[\]]*)*", text)
    if not items or ",".join(items) != text:
        raise LaunchError(f"the node list {text!r} is not understood")
    return tuple(host for item in items for host in _expand(item))


def _expand(item: str) -> list[str]:
    found = re.match(r"([^\[]*)\[([^\]]*)\](.*)$", item)
    if not found:
        return [item]
    names = []
    for part in found[2].split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise LaunchError(f"the node list {item!r} is not understood")
        numbers = range(int(first), int(last) + 1) if dash else (int(first),)
        names += [f"{found[1]}{number:0{len(first)}d}" for number in numbers]
    return [name + rest for name in names for rest in _expand(found[3])] if found[3] else names


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise LaunchError(f"the environment variable {name} must be a number, found {text!r}") from error


def _even(kind: str, total: int, parts: int) -> int:
    if parts < 1 or total % parts:
        raise LaunchError(
            f"{kind} has {total} processes in uneven groups ({parts})", hint="as many processes on every node"
        )
    return total // parts
