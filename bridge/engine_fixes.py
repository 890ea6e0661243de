"""Corrections of engine faults. Each has its reason, its proof and the versions it was tested on.

A correction is applied in the engine's own process, before any model is built, for training, sampling and checks
alike. Where one is needed and cannot be applied, nothing runs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bridge.errors import MissingDependency, UnsupportedError

Frequencies = Sequence[float]

PACKAGES = {"maxtext": "maxtext", "tunix": "google-tunix"}
TESTED = {"maxtext": ("0.2.5",), "tunix": ("0.1.7",)}

Standing = Literal["tested", "untested", "broken"]
"""Tested; a later patch release of a tested one, on which the corrections are tried; or none they were written for."""


@dataclass(frozen=True)
class Fix:
    """One correction.

    `install` takes the model's inverse RoPE frequencies, patches the imported engine, and raises AttributeError or
    UnsupportedError where the engine is not what it was written for.
    """

    name: str
    engine: str
    reason: str
    proof: str
    install: Callable[[Frequencies], None]


def fixes() -> tuple[Fix, ...]:
    """Every correction, of both engines."""
    modules = [importlib.import_module(f"bridge.fixes_{name}") for name in (*PACKAGES, "memory")]
    return tuple(fix for module in modules for fix in module.FIXES)


def engine_version(engine: str) -> str:
    """The installed version of an engine.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        return importlib.metadata.version(PACKAGES[engine])
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependency(PACKAGES[engine], engine) from error


def standing(engine: str, version: str) -> Standing:
    """How well a version of an engine is known.

    Engines at 0.x move their modules from one minor version to the next, and earlier versions lack what the
    corrections replace: both count as broken. A later patch release is untested; `apply` refuses where one of the
    corrections finds nothing to correct.
    """
    if version in TESTED[engine]:
        return "tested"
    found = _numbers(version)
    known = [_numbers(tested) for tested in TESTED[engine]]
    later = any(found[:2] == tested[:2] and found > tested for tested in known if tested)
    return "untested" if found and later else "broken"


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version as numbers; empty for what is no plain release (`0.2.6rc1`, `0.3.dev1+g123`)."""
    plain = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6}){1,3})(?:\.post\d+)?", version)
    return tuple(int(part) for part in plain[1].split(".")) if plain else ()


def require_tested(engine: str) -> str:
    """The installed version, if the corrections fit it as far as anyone knows; an untested one is warned of.

    Raises:
        UnsupportedError: another version; its RoPE could be wrong in silence.
    """
    version = engine_version(engine)
    known, tested = standing(engine, version), " or ".join(TESTED[engine])
    if known == "broken":
        raise UnsupportedError(
            f"{PACKAGES[engine]} {version} is installed; the corrections of its faults are tested with {tested}",
            hint=f"pip install '{PACKAGES[engine]}=={TESTED[engine][-1]}'",
        )
    if known == "untested":
        print(
            f"warning: {PACKAGES[engine]} {version} is untested, {tested} is tested: bridge verify tells whether it is "
            "right",
            file=sys.stderr,
            flush=True,
        )
    return version


def apply(engine: str, frequencies: Frequencies) -> tuple[str, ...]:
    """Install every correction of an engine in this process; returns their names.

    Args:
        engine: `maxtext` or `tunix`.
        frequencies: `head_dim / 2` inverse RoPE frequencies, radians a position, float32 values.

    Raises:
        UnsupportedError: a correction does not fit the installed engine.
    """
    version = require_tested(engine)
    applied = []
    for fix in fixes():
        if fix.engine != engine:
            continue
        try:
            fix.install(frequencies)
        except (AttributeError, ImportError) as error:
            raise UnsupportedError(
                f"the correction {fix.name} does not fit {PACKAGES[engine]} {version}: {error}",
                details=[fix.reason],
            ) from error
        applied.append(fix.name)
    return tuple(applied)
