"""Plans of MaxText runs."""

from __future__ import annotations

from bridge.launchers.cluster import Cluster
from bridge.launchers.plan import Launch, Site, processes
from bridge.run_spec import RunSpec


def plan_launch(run: RunSpec, cluster: Cluster, site: Site) -> tuple[Launch, ...]:
    """The processes of a run, in the order of their numbers.

    Raises:
        LaunchError, UnsupportedError: as `plan.processes`.
    """
    names = [own_names(cluster, site.hardware, number) for number in range(cluster.count)]
    return processes(run.cluster, cluster, site, "maxtext", names)


def own_names(cluster: Cluster, hardware: str, number: int) -> dict[str, str]:
    """What MaxText itself reads of its place in a cluster; other names for each hardware.

    The shim has joined the processes before MaxText looks, which then goes on; the names keep true what its logs and
    tools say. Source: `maybe_initialize_jax_distributed_system` of maxtext/utils/max_utils.py, 0.2.5.
    """
    if cluster.count == 1 or hardware == "tpu":
        return {}
    if hardware == "gpu":
        return {
            "JAX_COORDINATOR_IP": cluster.coordinator,
            "JAX_COORDINATOR_PORT": cluster.port,
            "NNODES": str(cluster.count),
            "NODE_RANK": str(number),
        }
    return {
        "JAX_COORDINATOR_ADDRESS": cluster.coordinator,
        "JAX_PROCESS_COUNT": str(cluster.count),
        "JOB_INDEX": "0",
        "PROCESSES_IN_JOB": str(cluster.count),
        "JOB_COMPLETION_INDEX": str(number),
    }
