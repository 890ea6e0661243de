"""Corrections of engine faults. Each has its reason, its proof and the versions it was tested on.

A correction is applied in the engine's own process, before any model is built, for training, sampling and checks
alike. Where one is needed and cannot be applied, nothing runs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge.errors import MissingDependency, UnsupportedError

Frequencies = Sequence[float]

PACKAGES = {"maxtext": "maxtext", "tunix": "google-tunix"}
TESTED = {"maxtext": ("0.2.5",), "tunix": ("0.1.7",)}


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
    modules = [importlib.import_module(f"bridge.fixes_{engine}") for engine in PACKAGES]
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


def require_tested(engine: str) -> str:
    """The installed version, if the corrections were written for it.

    Raises:
        UnsupportedError: another version; its RoPE could be wrong in silence.
    """
    version = engine_version(engine)
    if version not in TESTED[engine]:
        tested = " or ".join(TESTED[engine])
        raise UnsupportedError(
            f"{PACKAGES[engine]} {version} is installed; the corrections of its faults are tested with {tested}",
            hint=f"pip install '{PACKAGES[engine]}=={TESTED[engine][-1]}'",
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
