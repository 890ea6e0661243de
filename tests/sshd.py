"""A real sshd of the tests' own: throw-away keys, a high port, a client configuration with names for its hosts.

make_keys(folder)                     a host key and a user's
start(folder, address, port, ...)     sshd, in the foreground; ended by `terminate`
options(folder, hosts)                the arguments with which `ssh NAME` reaches each, once it answers
session_of(pid, sshd)                 the sshd processes between a process and the listening sshd
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import system
from processes import wait_for

CONFIG = """Port {port}
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
HOST = """Host {name}
  HostName {address}
  Port {port}
  User {user}
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
"""


def make_keys(folder: Path) -> None:
    """Skips the test where the programs or root are missing."""
    system.require("sshd", "ssh", "ssh-keygen")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    Path("/run/sshd").mkdir(exist_ok=True)


def start(folder: Path, address: str, port: int, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start sshd; `inside` is a command that brings it elsewhere, as into a network of its own."""
    config = folder / f"sshd-{address}"
    config.write_text(CONFIG.format(port=port, address=address, folder=folder))
    argv = [*inside, system.find("sshd") or "sshd", "-D", "-e", "-f", str(config)]
    return subprocess.Popen(argv, stderr=subprocess.DEVNULL)


def options(folder: Path, hosts: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """Arguments of ssh for hosts, name -> (address, port); waits until all answer."""
    user, key = pwd.getpwuid(os.geteuid()).pw_name, (folder / "host.pub").read_text()
    places = {name: {"name": name, "address": address, "port": port} for name, (address, port) in hosts.items()}
    (folder / "known").write_text("".join(f"[{address}]:{port} {key}" for address, port in set(hosts.values())))
    (folder / "config").write_text("".join(HOST.format(user=user, folder=folder, **each) for each in places.values()))
    chosen = ("-F", str(folder / "config"))
    for name in hosts:
        probe = ["ssh", *chosen, "-o", "BatchMode=yes", name, "true"]
        assert wait_for(lambda: subprocess.run(probe, capture_output=True, check=False).returncode == 0, 15), name  # noqa: B023
    return chosen


def session_of(pid: int, sshd: int) -> list[int]:
    """The sshd processes that serve the connection which a process came through."""
    found = []
    while (pid := parent(pid)) not in (sshd, 0, 1):
        if "sshd" in Path(f"/proc/{pid}/comm").read_text():
            found.append(pid)
    return found


def parent(pid: int) -> int:
    """A process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
