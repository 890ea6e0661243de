"""Carry a plan out: on this host, through ssh, as a Slurm job, or as a JobSet."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.commands.prepared import Prepared
from bridge.launchers import jobset, kubectl, local, slurm, ssh
from bridge.launchers.cluster import jobset_name
from bridge.launchers.plan import Launch
from bridge.launchers.supervise import Show

LOGS = "logs"


def rendered(prepared: Prepared, plan: Sequence[Launch]) -> tuple[str, str] | None:
    """The file that a scheduler is given: its name in the run's folder and its text; None where there is none.

    Raises:
        LaunchError: the settings make no JobSet.
    """
    cluster, section = prepared.placed.cluster, prepared.run.cluster
    name, hardware = prepared.run_dir.name, prepared.hardware
    if cluster.launcher == "slurm":
        return slurm.SCRIPT, slurm.render(plan, cluster, section, hardware, name, str(prepared.run_dir / LOGS))
    if cluster.launcher == "jobset":
        return jobset.FILE, jobset.render(plan, cluster, section, hardware, name)
    return None


def execute(prepared: Prepared, plan: Sequence[Launch], show: Show, verbose: bool) -> None:
    """Start the processes that are this invocation's, and wait for their end.

    Raises:
        LaunchError: one failed, or the launcher's own tool is missing or refuses.
    """
    cluster, section = prepared.placed.cluster, prepared.run.cluster
    logs = prepared.run_dir / LOGS
    file = rendered(prepared, plan)
    if file is not None:
        path = prepared.run_dir / file[0]
        path.write_text(file[1], encoding="utf-8")
    if cluster.launcher == "slurm":
        slurm.execute(prepared.run_dir / slurm.SCRIPT, len(plan), logs, show, verbose)
    elif cluster.launcher == "jobset":
        settings, name = section.jobset, jobset_name(prepared.run_dir.name)
        pods = kubectl.JobSet(name, settings.namespace, len(plan), len(plan) // settings.slices)
        kubectl.execute(file[1] if file else "", pods, logs, show, verbose)
    elif cluster.launcher == "ssh":
        ssh.execute(plan, logs, show, verbose, section.grace, section.ssh_options)
    elif cluster.own is not None:
        own = [plan[number] for number in cluster.own]
        local.execute(own, logs, show, verbose, section.grace, cluster.own)
    else:
        local.execute(plan, logs, show, verbose, section.grace)
