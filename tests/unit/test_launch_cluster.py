"""Clusters and plans that cannot work are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import system

from bridge.errors import BridgeError, LaunchError, SpecError, UnsupportedError
from bridge.launchers import ssh, xla_flags
from bridge.launchers.cluster import Cluster, describe, is_loopback, jobset_hosts, jobset_name
from bridge.launchers.maxtext import plan_launch
from bridge.launchers.plan import Site
from bridge.run_spec import ClusterSection, parse


def cluster_of(text: str, **arguments: object) -> Cluster:
    section = parse(f"model: {{source: m}}\ncluster: {text}").cluster
    return describe(section, "run", hosts=section.hosts, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{nodes: 2}", "cluster.nodes is 2, and launcher: local is one host"),
        ("{launcher: ssh}", "launcher: ssh needs hosts"),
        ("{launcher: ssh, hosts: [localhost, b]}", "the coordinator is localhost"),
        ("{launcher: ssh, hosts: [a, b], coordinator: 127.0.1.1}", "the coordinator is 127.0.1.1"),
        ("{launcher: ssh, hosts: [a, b], coordinator: '::1'}", "the coordinator is ::1"),
        ("{launcher: ssh, hosts: [a, b], nodes: 3}", "cluster.nodes is 3, and there are 2 hosts: a, b"),
        ("{launcher: ssh, hosts: [a, a]}", "a is named twice"),
        ("{launcher: ssh, hosts: [a, '-oProxyCommand=x']}", "is no host name"),
        ("{launcher: slurm, nodes: 2, coordinator: localhost}", "the coordinator is localhost"),
        ("{launcher: jobset, nodes: 3, jobset: {slices: 2}}", "cannot be divided into 2 slices"),
        ("{launcher: jobset, devices: 3, processes: 2}", "3 devices of a node cannot be shared out"),
    ],
)
def test_impossible_clusters(text: str, says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        cluster_of(text)
    assert says in str(caught.value)


def test_one_host_may_be_loopback() -> None:
    assert cluster_of("{launcher: ssh, hosts: [localhost]}").coordinator == "localhost"


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.0.1.1", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("10.0.0.1", "hostA", "::2", "local")] == [False] * 4


@pytest.mark.parametrize(
    ("text", "hardware", "says"),
    [
        ("{processes: 2}", "gpu", "how many devices has a node for its 2 processes?"),
        ("{processes: 3, devices: 8}", "gpu", "8 devices of a node cannot be shared out among 3 processes"),
        ("{processes: 3, devices: 8}", "cpu", "8 devices of a node cannot be shared out among 3 processes"),
        ("{processes: 2, devices: 8}", "tpu", "one process drives all TPU chips"),
        ("{devices: 2, xla_flags: ['--xla_force_host_platform_device_count=2']}", "cpu", "both say how many devices"),
    ],
)
def test_devices_that_cannot_be_shared_out(text: str, hardware: str, says: str) -> None:
    run = parse(f"model: {{source: m}}\ncluster: {text}")
    with pytest.raises((LaunchError, UnsupportedError)) as caught:
        plan_launch(run, describe(run.cluster, "run", free_port=5000), Site("/r", "python", hardware))
    assert says in str(caught.value)


def test_devices_by_name_are_shared_out() -> None:
    run = parse("model: {source: m}\ncluster: {processes: 2}")
    cluster = describe(run.cluster, "run", free_port=5000, visible=("2", "3", "GPU-ab", "7"))
    plan = plan_launch(run, cluster, Site("/r", "python", "gpu"))
    assert [launch.env["CUDA_VISIBLE_DEVICES"] for launch in plan] == ["2,3", "GPU-ab,7"]


def test_what_the_spec_sets_for_the_processes() -> None:
    limits = "memory_fraction: 0.9, stall_timeout: 60, grace: 5"
    text = f"{{{limits}, xla_flags: ['--xla_b=1'], env: {{NCCL_SOCKET_IFNAME: eth0}}}}"
    run = parse(f"model: {{source: m}}\ncluster: {text}")
    site = Site("/r", "python", "gpu", inherited_flags="--xla_a=1")
    env = plan_launch(run, describe(run.cluster, "run"), site)[0].env
    assert env["XLA_CLIENT_MEM_FRACTION"] == "0.9"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env
    assert env["XLA_FLAGS"] == "--xla_a=1 --xla_b=1"
    assert env["NCCL_SOCKET_IFNAME"] == "eth0"
    assert (env["BRIDGE_STALL_TIMEOUT"], env["BRIDGE_GRACE"]) == ("60", "5")


def test_a_secret_in_the_spec_is_refused() -> None:
    with pytest.raises(SpecError, match="a secret does not belong in a spec"):
        parse("model: {source: m}\ncluster: {env: {HF_TOKEN: abc}}")


def test_both_memory_names_are_refused() -> None:
    xla_flags.check_memory({"XLA_CLIENT_MEM_FRACTION": "0.9"})
    xla_flags.check_memory({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"})
    with pytest.raises(LaunchError, match="are both set"):
        xla_flags.check_memory({"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"})


def test_unknown_xla_flags_are_refused_by_name() -> None:
    """The first is from an older recipe for H200 machines, and unknown to this XLA."""
    with pytest.raises(LaunchError) as caught:
        xla_flags.check_flags("--xla_gpu_graph_level=0 --xla_gpu_enable_triton_gemm=false --xla_no_such=1")
    assert [detail.partition("=")[0] for detail in caught.value.details] == ["--xla_gpu_graph_level", "--xla_no_such"]


def test_known_xla_flags_pass() -> None:
    xla_flags.check_flags("--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false")
    xla_flags.check_flags(" ", python="/no/such/python")  # nothing is started for nothing


def test_a_flag_with_a_value_that_xla_does_not_take() -> None:
    with pytest.raises(BridgeError, match="XLA does not"):
        xla_flags.check_flags("--xla_gpu_enable_triton_gemm=perhaps")


def test_hosts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two machines\nhostA  # the first\n\nada@hostB slots=8\n")
    assert ssh.hosts_of((), file) == ("hostA", "ada@hostB")
    with pytest.raises(LaunchError, match="both name hosts"):
        ssh.hosts_of(("a",), file)
    with pytest.raises(LaunchError, match="cannot be read"):
        ssh.hosts_of((), tmp_path / "none")


def test_jobset_names_are_dns_labels() -> None:
    assert jobset_name("maxtext-sft") == "maxtext-sft"
    assert jobset_name("Run_1.b") == "run-1-b"
    assert jobset_name("8b") == "run-8b"
    hosts = jobset_hosts("r" * 80, nodes=4, slices=2, processes=1)
    assert [host.split("-workers-")[1].split(".")[0] for host in hosts] == ["0-0", "0-1", "1-0", "1-1"]
    assert all(len(label) <= 63 for host in hosts for label in host.split("."))


def test_the_defaults_are_one_process() -> None:
    cluster = describe(ClusterSection(), "run")
    assert (cluster.count, cluster.own, cluster.hosts) == (1, None, ("localhost",))
    env = plan_launch(parse("model: {source: m}"), cluster, Site("/r", "python", "cpu"))[0].env
    assert not [name for name in env if "COORDINATOR" in name]


def test_a_missing_program_skips_a_test_and_fails_it_where_ci_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRIDGE_REQUIRE_SYSTEM", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program"):
        system.require("no-such-program")
    monkeypatch.setenv("BRIDGE_REQUIRE_SYSTEM", "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-program"):
        system.require("sh", "no-such-program")
