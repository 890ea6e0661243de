"""Plans of Tunix runs."""

from __future__ import annotations

from bridge.launchers.cluster import Cluster
from bridge.launchers.plan import Launch, Site, processes
from bridge.run_spec import RunSpec


def plan_launch(run: RunSpec, cluster: Cluster, site: Site) -> tuple[Launch, ...]:
    """The processes of a run, started through the shim, which runs the generated program.

    Tunix reads nothing of its place in a cluster and never initialises JAX's distribution: the shim does.

    Raises:
        LaunchError, UnsupportedError: as `plan.processes`.
    """
    return processes(run.cluster, cluster, site, "tunix", [{}] * cluster.count)
