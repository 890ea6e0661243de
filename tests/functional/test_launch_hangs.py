"""Two real processes of a JAX cluster, one of which hangs, differs or cannot read: an end within a bound, explained."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import pytest

from bridge.errors import LaunchError
from bridge.launchers import local, tunix
from bridge.launchers.cluster import describe
from bridge.launchers.local import free_port
from bridge.launchers.plan import Launch, Site
from bridge.run_spec import parse

COLLECTIVE = Path(__file__).resolve().parents[1] / "collective.py"
STALL = 6


def plan(folder: Path, *mode: str) -> list[Launch]:
    """Two processes of this host."""
    run = parse(f"model: {{source: m}}\ncluster: {{processes: 2, devices: 2, stall_timeout: {STALL}}}")
    (folder / "run.json").write_text(json.dumps({"checkpoint": str(folder)}))
    cluster = describe(run.cluster, "r", free_port=free_port())
    argv = (sys.executable, str(COLLECTIVE), str(folder), *mode)
    return [dataclasses.replace(each, argv=argv) for each in tunix.plan_launch(run, cluster, site(folder))]


def site(folder: Path) -> Site:
    return Site(str(folder), sys.executable, "cpu")


def fails(launches: list[Launch], folder: Path) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        local.execute(launches, folder / "logs", print)
    return caught.value


def test_a_process_that_hangs_while_its_heartbeats_go_on(tmp_path: Path) -> None:
    """Neither JAX nor gloo nor Slurm ends this (measured: 596 s, then by hand)."""
    start = time.monotonic()
    error = fails(plan(tmp_path, "hang"), tmp_path)
    assert time.monotonic() - start < STALL + 50  # JAX starts first
    assert f"the run stood still for {STALL} s" in str(error)
    assert error.exit_code == 124
    log = (tmp_path / "logs" / "process-1.log").read_text()
    assert "collective.py" in log  # where each of its threads was


# Found by Python at its start: a host that has another JAX.
OTHER_JAX = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.0.1" if name == "jax" else version(name)
"""


def test_another_version_on_one_of_the_hosts(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(OTHER_JAX)
    first, second = plan(tmp_path)
    second = dataclasses.replace(second, env={**second.env, "PYTHONPATH": str(other)})
    error = fails([first, second], tmp_path)
    assert "the hosts have different versions" in str(error)
    assert "has jax 0.0.1, process 0 on" in str(error)
    assert "sum=" not in (tmp_path / "logs" / "process-0.log").read_text()


def test_fewer_devices_than_the_mesh_is_for(tmp_path: Path) -> None:
    """The shim itself, which compares before it loads the engine."""
    run = parse("model: {source: m}\ncluster: {devices: 2}")
    launch = tunix.plan_launch(run, describe(run.cluster, "r"), dataclasses.replace(site(tmp_path), total_devices=3))[0]
    program = "from bridge.launchers import member, shim; import os; shim.check_devices(member.Member.of(os.environ))"
    error = fails([dataclasses.replace(launch, argv=(sys.executable, "-c", program))], tmp_path)
    assert "the mesh is for 3 devices, 1 process(es) have 2" in str(error)
