"""What `bridge doctor` says of a machine: a pure function from what was seen to findings, each with its way out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bridge.engine_fixes import PACKAGES, TESTED, standing

Level = Literal["ok", "warning", "error"]

PYTHON_LEAST, PYTHON_TESTED = (3, 12), ((3, 12),)
# https://docs.jax.dev/en/latest/installation.html, NVIDIA GPU: the least driver of each CUDA release.
LEAST_DRIVER = {"13": 580, "12": 525}
FEW_BYTES = 8 * 10**9
"""Below this much memory or disk not even a model of one billion parameters gets through."""

FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
HARMLESS = re.compile(
    r"JAX_(COMPILATION_CACHE_DIR|PERSISTENT_CACHE_\w+|TRACEBACK_FILTERING|LOGGING_LEVEL|LOG_COMPILES)"
    r"|XLA_PYTHON_CLIENT_PREALLOCATE|XLA_CLIENT_PREALLOCATE"
)
ADDRESS = {
    "gated": ("is gated, and this login has no access", "request access at {page}, then: hf auth login"),
    "not found": ("does not exist, or this login may not see it", "check model.source; hf auth whoami"),
    "no revision": ("has no such revision", "check model.revision; see {page}/commits/main"),
    "refused": ("is refused to this login", "hf auth login"),
}


@dataclass(frozen=True)
class Requirement:
    """A package that an extra of bridge needs: what is asked for and what is installed (None: nothing)."""

    extra: str
    name: str
    wanted: str
    installed: str | None
    satisfied: bool


@dataclass(frozen=True)
class Jax:
    """What JAX said in a process of its own: its devices, or why there are none."""

    platform: str | None = None
    devices: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Nvidia:
    """What nvidia-smi said."""

    driver: str = ""
    devices: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Model:
    """The spec's model: where it is, and whether it can be had."""

    source: str
    place: Literal["folder", "cache", "hub"]
    state: Literal["ok", "gated", "not found", "no revision", "refused", "unreachable", "offline", "damaged"]
    detail: str = ""
    page: str = ""
    parameters: int | None = None


@dataclass(frozen=True)
class Environment:
    """All that was seen. Sizes are in bytes; `variables` are the XLA_*, JAX_* and M_* ones."""

    python: tuple[int, int, int]
    packages: Mapping[str, str | None]
    requirements: Sequence[Requirement]
    jax: Jax
    nvidia: Nvidia | None
    memory: int
    folder: str
    disk: int
    logged_in: bool
    host: str
    addresses: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    unknown_flags: tuple[str, ...] = ()
    engine: str | None = None
    spec_error: str | None = None
    model: Model | None = None


@dataclass(frozen=True)
class Finding:
    """One line: how it is, and the command or step that mends it."""

    level: Level
    name: str
    text: str
    fix: str | None = None


def examine(seen: Environment) -> tuple[Finding, ...]:
    """Every finding, in the order in which things build on each other."""
    parts = (_python, _engines, _extras, _devices, _driver, _space, _spec, _hub, _variables, _network)
    return tuple(finding for part in parts for finding in part(seen))


def _python(seen: Environment) -> Iterator[Finding]:
    text = ".".join(map(str, seen.python))
    tested = " or ".join(".".join(map(str, version)) for version in PYTHON_TESTED)
    if seen.python[:2] < PYTHON_LEAST:
        yield Finding("error", "python", f"{text}; {tested} is needed", f"uv venv --python {tested}")
    elif seen.python[:2] not in PYTHON_TESTED:
        yield Finding("warning", "python", f"{text}; tested with {tested}", f"uv venv --python {tested}")
    else:
        yield Finding("ok", "python", text)


def _engines(seen: Environment) -> Iterator[Finding]:
    for engine, package in PACKAGES.items():
        version, tested = seen.packages.get(package), " or ".join(TESTED[engine])
        install = f"pip install 'bridge-llama[{engine}]'"
        if version is None:
            level: Level = "error" if engine == seen.engine else "warning"
            yield Finding(level, engine, f"{package} is not installed", install)
        elif version not in TESTED[engine]:
            pin = f"pip install '{package}=={TESTED[engine][-1]}'"
            worst: Level = "warning" if standing(engine, version) == "untested" else "error"
            yield Finding(worst, engine, f"{package} {version}; its corrections are tested with {tested}", pin)
        else:
            yield Finding("ok", engine, f"{package} {version}")


def _extras(seen: Environment) -> Iterator[Finding]:
    by_extra: dict[str, list[Requirement]] = {}
    for requirement in seen.requirements:
        by_extra.setdefault(requirement.extra, []).append(requirement)
    for extra, requirements in by_extra.items():
        wrong = [
            f"{r.name} {r.installed}, {r.wanted} is needed" if r.installed else f"{r.name} is not installed"
            for r in requirements
            if not r.satisfied
        ]
        name = f"extra {extra}" if extra else "packages"
        if wrong:
            level: Level = "error" if extra in ("", seen.engine) else "warning"
            install = f"pip install 'bridge-llama[{extra}]'" if extra else "pip install bridge-llama"
            yield Finding(level, name, "; ".join(wrong), install)
        else:
            yield Finding("ok", name, f"all {len(requirements)} packages")


def _devices(seen: Environment) -> Iterator[Finding]:
    if seen.jax.error is not None:
        chosen = seen.variables.get("JAX_PLATFORMS")
        fix = "unset JAX_PLATFORMS" if chosen else "pip install 'bridge-llama[cuda]'" if seen.nvidia else None
        text = f"JAX finds no devices: {seen.jax.error}"
        yield Finding("error", "jax", text, fix or "pip install --force-reinstall jax jaxlib")
        return
    kinds = sorted(set(seen.jax.devices))
    counts = ", ".join(f"{seen.jax.devices.count(kind)} x {kind}" for kind in kinds)
    yield Finding("ok", "jax", f"{seen.packages.get('jax')} on {seen.jax.platform}: {counts}")


def _driver(seen: Environment) -> Iterator[Finding]:
    if seen.nvidia is None:
        return
    if seen.nvidia.error is not None:
        yield Finding("error", "driver", f"nvidia-smi fails: {seen.nvidia.error}", "nvidia-smi")
        return
    names = ", ".join(seen.nvidia.devices)
    plugins = {cuda: seen.packages.get(f"jax-cuda{cuda}-plugin") for cuda in LEAST_DRIVER}
    installed = {cuda: version for cuda, version in plugins.items() if version is not None}
    if not installed:
        text = f"{names}: JAX has no CUDA here, so it computes on the CPU"
        yield Finding("error", "driver", text, "pip install 'bridge-llama[cuda]'")
        return
    cuda, version = next(iter(installed.items()))
    jaxlib = seen.packages.get("jaxlib")
    if _number(seen.nvidia.driver) < LEAST_DRIVER[cuda]:
        text = f"driver {seen.nvidia.driver} is too old for CUDA {cuda}, which needs {LEAST_DRIVER[cuda]} or newer"
        older = [name for name, least in LEAST_DRIVER.items() if least <= _number(seen.nvidia.driver)]
        fix = f"update the driver, or: pip install 'jax[cuda{older[0]}]'" if older else "update the driver"
        yield Finding("error", "driver", text, fix)
    elif len(installed) > 1:
        yield Finding(
            "error", "driver", "plugins of CUDA 12 and 13 are both installed", "pip uninstall jax-cuda12-plugin"
        )
    elif jaxlib is not None and version != jaxlib:
        text = f"jax-cuda{cuda}-plugin {version} beside jaxlib {jaxlib}: JAX will not load it"
        yield Finding("error", "driver", text, f"pip install 'jax[cuda{cuda}]=={seen.packages.get('jax')}'")
    elif seen.jax.error is None and seen.jax.platform == "cpu" and "JAX_PLATFORMS" not in seen.variables:
        text = f"{names} with driver {seen.nvidia.driver}, but JAX sees only the CPU"
        yield Finding("error", "driver", text, "python -c 'import jax; print(jax.devices(\"gpu\"))'")
    else:
        yield Finding("ok", "driver", f"{seen.nvidia.driver} for CUDA {cuda}: {names}")


def _number(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


def _space(seen: Environment) -> Iterator[Finding]:
    gigabytes = {"memory": seen.memory, "disk": seen.disk}
    fixes = {"memory": "close other programs: ps aux --sort=-%mem | head", "disk": "set workdir to a larger disk"}
    for name, size in gigabytes.items():
        where = f" in {seen.folder}" if name == "disk" else ""
        text = f"{size / 1e9:.1f} GB free{where}"
        needed = FEW_BYTES
        if name == "disk" and seen.model is not None and seen.model.parameters is not None:
            # A converted checkpoint and an export in bfloat16, with a query in float32.
            needed = 5 * seen.model.parameters
            text += f"; the model takes {2 * seen.model.parameters / 1e9:.1f} GB a copy in bfloat16"
        short = size < needed
        yield Finding("warning" if short else "ok", name, text, fixes[name] if short else None)


def _spec(seen: Environment) -> Iterator[Finding]:
    if seen.spec_error is not None:
        yield Finding("error", "spec", seen.spec_error, "bridge init --schema shows every key")


def _hub(seen: Environment) -> Iterator[Finding]:
    if seen.logged_in:
        yield Finding("ok", "login", "a Hugging Face token is set")
    else:
        yield Finding("warning", "login", "no Hugging Face login: gated models cannot be downloaded", "hf auth login")
    model = seen.model
    if model is None:
        return
    if model.state == "ok":
        where = {"folder": "a local folder", "cache": "in the hub cache", "hub": "the hub gives access"}[model.place]
        yield Finding("ok", "model", f"{model.source}: {where}")
    elif model.state in ADDRESS:
        text, fix = ADDRESS[model.state]
        yield Finding("error", "model", f"{model.source} {text}", fix.format(page=model.page))
    elif model.state == "offline":
        text = f"{model.source} is not in the cache, and HF_HUB_OFFLINE is set"
        yield Finding("error", "model", text, "unset HF_HUB_OFFLINE; bridge download")
    elif model.state == "unreachable":
        text = f"{model.source} is not in the cache, and the hub cannot be reached"
        yield Finding("warning", "model", text, "check the network, the proxy and HF_ENDPOINT")
    else:
        yield Finding("error", "model", f"{model.source}: {model.detail}", "bridge inspect names what is wrong")


def _variables(seen: Environment) -> Iterator[Finding]:
    if all(name in seen.variables for name in FRACTIONS):
        text = f"{FRACTIONS[0]} and its old name {FRACTIONS[1]} are both set: JAX refuses to start"
        yield Finding("error", "variables", text, f"unset {FRACTIONS[1]}")
    if seen.unknown_flags:
        text = f"XLA_FLAGS: {' '.join(seen.unknown_flags)}: XLA does not accept this and aborts at start"
        yield Finding("error", "variables", text, "unset XLA_FLAGS")
    strays = [name for name in sorted(seen.variables) if not HARMLESS.fullmatch(name) and name not in FRACTIONS[1:]]
    for name in strays:
        if name == "XLA_FLAGS" and seen.unknown_flags:
            continue
        meaning = f"MaxText takes it as its setting {name[2:].lower()}" if name.startswith("M_") else "it changes runs"
        yield Finding("warning", "variables", f"{name}={seen.variables[name]}: {meaning}", f"unset {name}")
    if not strays and not seen.unknown_flags:
        yield Finding("ok", "variables", "no XLA_*, JAX_* or M_* that changes a run")


def _network(seen: Environment) -> Iterator[Finding]:
    fix = "set cluster.coordinator to this host's address, or mend its line in /etc/hosts"
    if not seen.addresses:
        yield Finding("warning", "host", f"{seen.host} has no address: other hosts cannot join a run here", fix)
    elif all(address.startswith("127.") or address == "::1" for address in seen.addresses):
        text = f"{seen.host} is {seen.addresses[0]}, itself: other hosts cannot join a run here"
        yield Finding("warning", "host", text, fix)
    else:
        yield Finding("ok", "host", f"{seen.host} is {seen.addresses[0]}")
