"""A real network with two hosts, an address and a name each, that is cut while both train: Linux's network namespaces.

Each host is a namespace with its own network, its own name and its own sshd; a virtual switch connects both with each
other and with the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import sshd
import system
from processes import wait_for

from bridge.errors import LaunchError
from bridge.launchers import ssh, tunix
from bridge.launchers.cluster import describe
from bridge.launchers.local import free_port
from bridge.launchers.plan import Launch, Site
from bridge.run_spec import parse

pytestmark = pytest.mark.system
COLLECTIVE = Path(__file__).resolve().parents[1] / "collective.py"
SWITCH, LAUNCHER = "bridge-switch", "10.97.13.254"
HOSTS = {"hostA": ("bridge-a", "10.97.13.1"), "hostB": ("bridge-b", "10.97.13.2")}
"""By ssh's name for it: the host's own name, which the namespace and its cable have too, and its address."""


@dataclass(frozen=True)
class Network:
    """The options with which ssh reaches both hosts, and the process of each one's sshd."""

    options: tuple[str, ...]
    sshd: Mapping[str, int]

    def plug(self, state: str) -> None:
        """`down` cuts hostB off, `up` connects it again."""
        ip("link", "set", HOSTS["hostB"][0], state)

    @contextlib.contextmanager
    def hidden(self, folder: Path) -> Iterator[None]:
        """hostB sees nothing in a folder, as where storage is not shared."""
        inside = ["nsenter", "--target", str(self.sshd["hostB"]), "--mount"]
        subprocess.run([*inside, "mount", "-t", "tmpfs", "none", str(folder)], check=True)
        try:
            yield
        finally:
            subprocess.run([*inside, "umount", "--lazy", str(folder)], check=True)


def ip(*arguments: str, space: str | None = None) -> None:
    """iproute2's `ip`, here or in a namespace."""
    inside = ["-netns", space] if space else []
    subprocess.run(["ip", *inside, *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No other run of these tests beside this one, as both would use the same names; nothing of a killed one left."""
    with Path(tempfile.gettempdir(), "bridge-test-network.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, _ in HOSTS.values():
            if Path("/var/run/netns", name).exists():
                end_all(name)
                ip("netns", "del", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
        present = {each["ifname"] for each in json.loads(subprocess.check_output(["ip", "-json", "link"]))}
        for name in present & {SWITCH, *(name for name, _ in HOSTS.values())}:
            ip("link", "del", name)
        yield


def end_all(space: str) -> None:
    """End what is left in a namespace: sshd waits long for the other end of a connection that was cut."""
    done = subprocess.run(["ip", "netns", "pids", space], check=True, capture_output=True, text=True)
    for pid in map(int, done.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not subprocess.check_output(["ip", "netns", "pids", space]).split(), 5)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Both hosts, up; all is taken down afterwards."""
    folder = tmp_path_factory.mktemp("network")
    sshd.make_keys(folder)
    if system.find("ip") is None or system.find("unshare") is None:
        pytest.skip("needs iproute2 and unshare")
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone())
        try:
            ip("link", "add", SWITCH, "type", "bridge")
            stack.callback(ip, "link", "del", SWITCH)
            for name, _ in HOSTS.values():
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
                stack.callback(end_all, name)
                ip("link", "add", name, "type", "veth", "peer", "name", "card", "netns", name)
                stack.callback(ip, "link", "del", name)
        except subprocess.CalledProcessError as error:
            if not any(word in error.stderr for word in ("not permitted", "not supported", "Unknown device type")):
                raise
            pytest.skip(f"this machine allows no networks of one's own: {error.stderr.strip()}")
        ip("addr", "add", f"{LAUNCHER}/24", "dev", SWITCH)
        ip("link", "set", SWITCH, "up")
        places, pids = {}, {}
        for host, (name, address) in HOSTS.items():
            ip("link", "set", name, "master", SWITCH, "up")
            ip("addr", "add", f"{address}/24", "dev", "card", space=name)
            for card in ("card", "lo"):
                ip("link", "set", card, "up", space=name)
            # `ip netns exec` puts these files into the place of /etc/hosts: names lead where gloo is to listen.
            own = Path("/etc/netns") / name
            own.mkdir(parents=True)
            stack.callback(shutil.rmtree, own)
            (own / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in HOSTS.values()))
            named = ("unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh")
            places[host] = address, free_port()
            popen = sshd.start(folder, *places[host], ("ip", "netns", "exec", name, *named))
            pids[host] = popen.pid
            stack.callback(popen.wait)
            stack.callback(popen.terminate)
        yield Network(sshd.options(folder, places), pids)


def plan(folder: Path, mode: str = "") -> list[Launch]:
    """A process on each host."""
    text = f"{{launcher: ssh, hosts: [hostA, hostB], coordinator: {HOSTS['hostA'][1]}, port: {free_port()}}}"
    run = parse(f"model: {{source: m}}\ncluster: {text}")
    checkpoint = folder / "storage" / "0"
    checkpoint.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"checkpoint": str(checkpoint)}))
    place = describe(run.cluster, "collective", hosts=run.cluster.hosts)
    argv = (sys.executable, str(COLLECTIVE), str(folder), *([mode] if mode else []))
    return [
        replace(each, argv=argv) for each in tunix.plan_launch(run, place, Site(str(folder), sys.executable, "cpu"))
    ]


def left(run_dir: Path) -> list[str]:
    """What runs for a run on either host: they share their process table."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = path.read_bytes().split(b"\0")
            if str(COLLECTIVE).encode() in words and str(run_dir).encode() in words:
                found.append(path.parent.name)
    return found


def test_a_collective_over_the_network(network: Network, tmp_path: Path) -> None:
    """The two hosts have different names: the check of names that lead to loopback is at work, too."""
    shown: list[str] = []
    ssh.execute(plan(tmp_path), tmp_path / "logs", shown.append, False, 5.0, network.options)
    assert shown == ["sum=3 of 2 processes, 2 devices"]


def test_a_cut_names_the_host_and_leaves_nothing_on_either_side(network: Network, tmp_path: Path) -> None:
    begun: list[float] = []

    def show(line: str) -> None:
        if "going on" in line and not begun:
            begun.append(time.monotonic())
            network.plug("down")

    try:
        with pytest.raises(LaunchError, match="process 1 on hostB: the host cannot be reached, or the") as caught:
            ssh.execute(plan(tmp_path, "loop"), tmp_path / "logs", show, False, 5.0, network.options)
        assert time.monotonic() - begun[0] < 45
        assert "hostB" in str(caught.value)
        # hostB still has no network: it ends its process by itself.
        assert wait_for(lambda: not left(tmp_path), 40), left(tmp_path)
    finally:
        network.plug("up")


def test_a_host_that_is_gone_before_the_start(network: Network, tmp_path: Path) -> None:
    network.plug("down")
    try:
        start = time.monotonic()
        with pytest.raises(LaunchError, match="process 1 on hostB: the host cannot be reached, or the"):
            ssh.execute(plan(tmp_path), tmp_path / "logs", print, False, 5.0, network.options)
        assert time.monotonic() - start < 60
        assert wait_for(lambda: not left(tmp_path), 10), left(tmp_path)
    finally:
        network.plug("up")


@pytest.mark.parametrize(
    ("name", "says"),
    [("storage", "there is no {folder}/storage/0"), ("", "what process 0 wrote there does not show")],
)
def test_a_folder_that_one_host_does_not_see(network: Network, tmp_path: Path, name: str, says: str) -> None:
    launches = plan(tmp_path)
    with network.hidden(tmp_path / name), pytest.raises(LaunchError, match="is not visible on every host") as caught:
        ssh.execute(launches, tmp_path / "logs", print, False, 5.0, network.options)
    assert f"process 1 on {HOSTS['hostB'][0]}: {says.format(folder=tmp_path)}" in str(caught.value)
    assert "process 0 on" not in str(caught.value)
