"""`bridge config`."""

from __future__ import annotations

from pathlib import Path

import click

from bridge.commands import common
from bridge.commands.prepared import prepare
from bridge.commands.workspace import Workspace
from bridge.errors import OutputError
from bridge.run_spec import METHODS


@click.command(
    epilog=common.examples("bridge config --engine maxtext", "bridge config --engine maxtext --out config.yml")
)
@common.engine_option
@click.option("--method", type=click.Choice(METHODS), help="Default: train.method of the spec.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Default: stdout.")
@click.option("--run", "run_name", help="Name of the run; default: <engine>-<method>.")
@common.spec_option
def command(engine: str | None, method: str | None, out: Path | None, run_name: str | None, spec: Path | None) -> None:
    """Print the engine's configuration for the spec: MaxText's YAML, or a Tunix program.

    `bridge launch` runs the same text.
    """
    workspace = Workspace.open(spec)
    prepared = prepare(workspace, engine or workspace.run.engine, method, run_name)
    if out is None:
        click.echo(prepared.text, nl=False)
        return
    try:
        out.write_text(prepared.text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    common.say(f"written: {out}")
