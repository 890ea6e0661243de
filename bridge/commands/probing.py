"""What `bridge doctor` looks at: every look that could hang runs in a process or thread of its own, with a limit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

from bridge.commands.workspace import Workspace
from bridge.doctor import Environment, Jax, Model, Nvidia, Requirement
from bridge.errors import BridgeError, LaunchError, printable
from bridge.model_spec import ModelSpec

SECONDS = 60
NETWORK_SECONDS = 15
PACKAGES = ("jax", "jaxlib", "maxtext", "google-tunix", "jax-cuda12-plugin", "jax-cuda13-plugin")
SKIPPED_EXTRAS = ("dev", "all", "cuda")

JAX_PROBE = """
import json, jax
devices = jax.devices()
print(json.dumps([devices[0].platform, [device.device_kind for device in devices]]))
"""
# Only the kind of an answer is printed: the text of an error may hold what belongs in no log.
HUB_PROBE = """
import sys
import httpx
from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url
try:
    get_hf_file_metadata(hf_hub_url(sys.argv[1], "config.json", revision=sys.argv[2] or None), timeout=10)
    print("ok")
except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
    print(type(error).__name__, getattr(getattr(error, "response", None), "status_code", None))
"""
STATES = {
    "ok": "ok",
    "GatedRepoError": "gated",
    "RepositoryNotFoundError": "not found",
    "RevisionNotFoundError": "no revision",
}


def probe(workspace: Workspace | None, spec_error: str | None, folder: Path) -> Environment:
    """Look at this machine; takes some seconds, two minutes at most."""
    variables = {k: printable(v) for k, v in os.environ.items() if k.startswith(("XLA_", "JAX_", "M_"))}
    return Environment(
        python=sys.version_info[:3],
        packages={name: installed(name) for name in PACKAGES},
        requirements=requirements(),
        jax=jax_devices(),
        nvidia=nvidia(),
        memory=free_memory(Path("/proc/meminfo")),
        folder=str(folder),
        disk=shutil.disk_usage(folder).free,
        logged_in=logged_in(),
        host=socket.gethostname(),
        addresses=addresses(socket.gethostname()),
        variables=variables,
        unknown_flags=unknown_flags(os.environ.get("XLA_FLAGS", "")),
        engine=workspace.run.engine if workspace else None,
        spec_error=spec_error,
        model=model_of(workspace) if workspace else None,
    )


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(distribution: str = "bridge-llama") -> tuple[Requirement, ...]:
    """What each extra of bridge asks for; nothing where bridge runs from a checkout without being installed."""
    from packaging.requirements import Requirement as Parsed

    try:
        lines = importlib.metadata.requires(distribution) or []
        extras = importlib.metadata.metadata(distribution).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    found = []
    for line in lines:
        parsed = Parsed(line)
        if parsed.name == distribution:
            continue
        wants = [extra for extra in extras if parsed.marker and parsed.marker.evaluate({"extra": extra})]
        for extra in [""] if not parsed.marker or parsed.marker.evaluate({"extra": ""}) else wants:
            if extra in SKIPPED_EXTRAS:
                continue
            version = installed(parsed.name)
            satisfied = version is not None and parsed.specifier.contains(version, prereleases=True)
            found.append(Requirement(extra, parsed.name, str(parsed.specifier), version, satisfied))
    return tuple(found)


def jax_devices(python: str = sys.executable) -> Jax:
    """The devices that JAX finds. A broken driver can hang it or end its process: it gets one of its own."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [python, "-c", JAX_PROBE], env=env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Jax(error=f"it did not answer within {SECONDS} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode != 0 or not lines:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return Jax(error=printable(said[-1]) if said else f"its process ended with code {done.returncode}")
    platform, kinds = json.loads(lines[-1])
    return Jax(platform=platform, devices=tuple(kinds))


def nvidia(program: str = "nvidia-smi") -> Nvidia | None:
    """Driver and GPUs; None where there is no nvidia-smi."""
    if shutil.which(program) is None:
        return None
    query = [program, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Nvidia(error=f"it did not answer within {SECONDS} s")
    except OSError as error:
        return Nvidia(error=str(error))
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    if done.returncode != 0 or not rows:
        said = (done.stdout + done.stderr).strip().splitlines()
        return Nvidia(error=printable(said[-1]) if said else f"code {done.returncode}")
    return Nvidia(driver=rows[0][0], devices=tuple(f"{name} {memory}" for _, name, memory in rows))


def free_memory(meminfo: Path) -> int:
    """Bytes that programs can still get: MemAvailable of Linux, else all the memory there is."""
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def logged_in() -> bool:
    """Whether huggingface_hub finds a token, in the environment or in its file."""
    from huggingface_hub import get_token

    return get_token() is not None


def addresses(host: str, seconds: float = 5) -> tuple[str, ...]:
    """What a name resolves to; a broken resolver is not waited for."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.extend(dict.fromkeys(str(answer[4][0]) for answer in socket.getaddrinfo(host, None)))
        except OSError:
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return tuple(found)


def unknown_flags(flags: str) -> tuple[str, ...]:
    """The flags that XLA does not accept."""
    from bridge.launchers import xla_flags

    try:
        xla_flags.check_flags(flags)
    except LaunchError as error:
        return error.details or (error.message,)
    return ()


def model_of(workspace: Workspace) -> Model:
    """The spec's model: a folder, in the hub's cache, or on the hub."""
    from bridge import hub

    source, revision = workspace.run.model.source, workspace.run.model.revision
    local = workspace.path(source)
    if local.is_dir():
        return in_folder(source, "folder", local)
    if not hub.is_id(source):
        return Model(source, "folder", "damaged", f"there is no folder {local}")
    try:
        return in_folder(source, "cache", hub.resolve(source, revision, download=False))
    except BridgeError:
        # Not in the cache: that is what the question to the hub is for.
        return on_hub(source, revision)


def in_folder(source: str, place: Literal["folder", "cache"], folder: Path) -> Model:
    """A folder that should hold a model; headers are read."""
    from bridge.converters.hf_store import read_headers

    try:
        model = ModelSpec.from_folder(folder)
        read_headers(folder)
    except BridgeError as error:
        return Model(source, place, "damaged", error.message)
    return Model(source, place, "ok", parameters=model.parameters)


def on_hub(source: str, revision: str | None, python: str = sys.executable) -> Model:
    """Ask the hub for the model's config.json, its first lines only."""
    from huggingface_hub import constants

    page = f"{constants.ENDPOINT.rstrip('/')}/{source}"
    if constants.is_offline_mode():
        return Model(source, "hub", "offline", page=page)
    try:
        done = subprocess.run(
            [python, "-c", HUB_PROBE, source, revision or ""],
            capture_output=True,
            text=True,
            timeout=NETWORK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Model(source, "hub", "unreachable", page=page)
    kind, _, status = done.stdout.strip().partition(" ")
    if kind in STATES:
        return Model(source, "hub", STATES[kind], page=page)  # type: ignore[arg-type]
    return Model(source, "hub", "refused" if status in ("401", "403") else "unreachable", page=page)
