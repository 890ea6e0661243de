"""Ready-made environments: variables as the schedulers set them, and what is understood of them."""

from __future__ import annotations

import pytest

from bridge.errors import LaunchError
from bridge.launchers.cluster import describe
from bridge.launchers.environment import Membership, detect, expand_nodes
from bridge.launchers.maxtext import plan_launch
from bridge.launchers.plan import Site
from bridge.run_spec import ClusterSection, parse

SLURM = {
    "SLURM_JOB_ID": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
DSTACK = {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "0", "DSTACK_MASTER_NODE_IP": "10.1.0.1"}
TORCHRUN = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "2", "LOCAL_WORLD_SIZE": "2"}
# As Open MPI 4.1.4 set them for `mpirun -n 2`; jax made 192.0.2.2:63104 of its head node's address.
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1325400064.0;tcp://192.0.2.2,10.0.0.9:41313",
}


def test_slurm() -> None:
    # Port: jax's own choice for job 2 was n1:61442.
    expected = Membership("Slurm", "n1", 2, 1, 61442, 2, 3, ("n1", "n2"))
    assert detect(SLURM) == expected


@pytest.mark.parametrize("missing", SLURM)
def test_a_batch_script_without_srun_is_no_cluster(missing: str) -> None:
    assert detect({name: value for name, value in SLURM.items() if name != missing}) is None


def test_skypilot_and_dstack_start_once_a_node() -> None:
    assert detect(SKYPILOT) == Membership("SkyPilot", "10.0.0.1", 2, 1, hosts=("10.0.0.1", "10.0.0.2"))
    assert detect(DSTACK) == Membership("dstack", "10.1.0.1", 2, 0)
    by_list = {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_NODES_IPS": "10.1.0.1\n10.1.0.2"}
    assert detect(by_list) == Membership("dstack", "10.1.0.1", 2, 1, hosts=("10.1.0.1", "10.1.0.2"))


def test_torchrun_starts_every_process() -> None:
    assert detect(TORCHRUN) == Membership("torchrun", "head", 2, 1, 29501, 2, 2)
    kubeflow = {"MASTER_ADDR": "head-0", "WORLD_SIZE": "2", "RANK": "0"}  # PyTorchJob: a process a node
    assert detect(kubeflow) == Membership("torchrun", "head-0", 2, 0, None, 1, 0)


def test_mpi() -> None:
    port = 61440 + 1325400064 // 4096 % 4096
    assert detect(MPI) == Membership("MPI", "192.0.2.2", 1, 0, port, 2, 1)
    assert detect({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}) == Membership(
        "MPI", "127.0.0.1", 1, 0, None, 2, 1
    )


def test_one_process_is_no_cluster() -> None:
    assert detect({}) is None
    assert detect({"MASTER_ADDR": "localhost", "WORLD_SIZE": "1", "RANK": "0"}) is None
    assert detect({"WORLD_SIZE": "8", "RANK": "1"}) is None


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({**TORCHRUN, "RANK": "two"}, "RANK must be a number, found 'two'"),
        ({**TORCHRUN, "RANK": "4"}, "process 4, node 2 of 2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, "uneven"),
        ({**SLURM, "SLURM_NTASKS": "3"}, "uneven"),
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "3"}, "names 2 hosts"),
        ({"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1"}, "DSTACK_MASTER_NODE_IP"),
    ],
)
def test_half_an_environment_is_refused(env: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        detect(env)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-11,20],login", ["gpu08", "gpu09", "gpu10", "gpu11", "gpu20", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    """The expansions are those of `scontrol show hostnames`."""
    assert list(expand_nodes(text)) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]"])
def test_other_node_lists_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="is not understood"):
        expand_nodes(text)


def test_a_node_starts_its_own_processes() -> None:
    """SkyPilot starts one command a node: its processes, of all, in the order of the nodes."""
    run = parse("model: {source: m}\ncluster: {processes: 2, devices: 4}")
    cluster = describe(run.cluster, "r", member=detect(SKYPILOT))
    assert cluster.own == (2, 3)
    plan = plan_launch(run, cluster, Site("/w/r", "python", "gpu"))
    assert [plan[number].env["CUDA_VISIBLE_DEVICES"] for number in cluster.own] == ["0,1", "2,3"]
    assert {launch.env["BRIDGE_COORDINATOR"] for launch in plan} == {f"10.0.0.1:{cluster.port}"}
    assert [launch.env["BRIDGE_PROCESS_ID"] for launch in plan] == ["0", "1", "2", "3"]


def test_a_task_keeps_the_devices_that_slurm_gave_it() -> None:
    run = parse("model: {source: m}")
    cluster = describe(run.cluster, "r", member=detect(SLURM), visible=("6", "7"))
    assert cluster.own == (3,)
    assert plan_launch(run, cluster, Site("/w/r", "python", "gpu"))[3].env["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_a_coordinator_on_loopback_with_two_hosts_is_refused() -> None:
    lost = {**TORCHRUN, "MASTER_ADDR": "localhost"}
    with pytest.raises(LaunchError, match="the coordinator is localhost, which every one of the 2 hosts"):
        describe(ClusterSection(), "r", member=detect(lost))
    named = ClusterSection(coordinator="10.0.0.5")
    assert describe(named, "r", member=detect(lost)).coordinator == "10.0.0.5"
