"""`bridge doctor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bridge.commands import common
from bridge.commands.workspace import Workspace
from bridge.doctor import Finding, examine
from bridge.errors import SpecError


@click.command(epilog=common.examples("bridge doctor", "bridge doctor --spec bridge.yaml --json"))
@common.spec_option
@common.json_option
def command(spec: Path | None, as_json: bool) -> None:
    """Look at this machine: engines, devices, driver, space, login, variables. Exit code 1 when an error is found.

    Each line is ok, a warning, or an error with the command that mends it. With a bridge.yaml here the spec's engine
    and model are looked at too. Nothing is changed, and no token is shown.
    """
    from bridge.commands.probing import probe

    workspace, wrong = None, None
    try:
        workspace = common.maybe_workspace(spec)
    except SpecError as error:
        wrong = "; ".join([error.message, *error.details])
    findings = examine(probe(workspace, wrong, place_of(workspace)))
    if as_json:
        common.emit(as_values(findings))
    else:
        for line in lines(findings):
            click.echo(line)
    if any(finding.level == "error" for finding in findings):
        sys.exit(1)


def place_of(workspace: Workspace | None) -> Path:
    """The folder whose disk counts: workdir, or the part of it that exists."""
    folder = workspace.control if workspace else Path.cwd()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def as_values(findings: Sequence[Finding]) -> dict[str, Any]:
    """The JSON object."""
    ok = all(finding.level != "error" for finding in findings)
    return {"ok": ok, "checks": [asdict(finding) for finding in findings]}


def lines(findings: Sequence[Finding]) -> list[str]:
    """For people: a line each, the way out under it, the count last."""
    shown = []
    for finding in findings:
        shown.append(f"{finding.level:8} {finding.name:14} {finding.text}")
        if finding.fix is not None:
            shown.append(f"{'':23} -> {finding.fix}")
    errors, warnings = (sum(f.level == level for f in findings) for level in ("error", "warning"))
    return [*shown, f"{errors} errors, {warnings} warnings"]
