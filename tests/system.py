"""Tests that need programs of the system and root: left out with a reason, or a failure where CI asks for them."""

from __future__ import annotations

import os
import shutil

import pytest

PATHS = "/usr/sbin:/sbin"


def require(*programs: str) -> None:
    """Skip the test where a program or root is missing; fail with BRIDGE_REQUIRE_SYSTEM=1, as CI sets it."""
    missing = [name for name in programs if find(name) is None]
    if os.geteuid() != 0:
        missing.append("root")
    if not missing:
        return
    reason = f"needs {', '.join(missing)} (Debian: slurm-wlm, munge, openssh-server)"
    if os.environ.get("BRIDGE_REQUIRE_SYSTEM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def find(name: str) -> str | None:
    """A program's path, also where ordinary users do not look."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{PATHS}")
