"""`bridge launch`."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bridge import engine_fixes, sidecar
from bridge.commands import common
from bridge.commands.prepared import Prepared, prepare, require_converted
from bridge.commands.workspace import Workspace, finished_steps
from bridge.errors import LaunchError, OutputError, SpecError
from bridge.run_spec import METHODS

if TYPE_CHECKING:
    from bridge.launchers.plan import Launch

# Adam's two moments beside the weights, all in float32 for full training.
FULL_STATE_COPIES = 3
LOGS = "logs"


@click.command(
    epilog=common.examples(
        "bridge launch sft --engine maxtext", "bridge launch sft train.steps=20 --run short --dry-run"
    )
)
@click.argument("method", type=click.Choice(METHODS))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@common.engine_option
@click.option("--run", "run_name", help="Name of the run; default: <engine>-<method>.")
@click.option("--resume", is_flag=True, help="Go on with a run from its newest checkpoint.")
@click.option("--verbose", is_flag=True, help="Show the engine's own output too.")
@common.spec_option
@common.dry_run_option
def command(
    method: str,
    overrides: tuple[str, ...],
    engine: str | None,
    run_name: str | None,
    resume: bool,
    verbose: bool,
    spec: Path | None,
    dry_run: bool,
) -> None:
    """Train with METHOD, from the converted checkpoint. KEY=VALUE overrides the spec (train.steps=5)."""
    workspace = Workspace.open(spec, overrides)
    prepared = prepare(workspace, engine or workspace.run.engine, method, run_name)
    if not prepared.run.data.train:
        raise SpecError("data.train names no data", hint="a .jsonl or .parquet file, or a hub data set id")
    plan = plan_launch(prepared)
    if dry_run:
        show(prepared, plan)
        return
    facts = require_converted(prepared)
    engine_fixes.require_tested(prepared.engine)
    check_disk(prepared)
    begin(prepared, facts, resume)
    follow(prepared, plan, verbose)


def plan_launch(prepared: Prepared) -> tuple[Launch, ...]:
    """The processes of a run."""
    import importlib

    engine = importlib.import_module(f"bridge.launchers.{prepared.engine}")
    plan: tuple[Launch, ...] = engine.plan_launch(
        prepared.run, str(prepared.run_dir), prepared.hardware, sys.executable
    )
    return plan


def show(prepared: Prepared, plan: tuple[Launch, ...]) -> None:
    """argv, environment and files, for `--dry-run`."""
    for number, launch in enumerate(plan):
        click.echo(f"# process {number} on {launch.host}")
        click.echo(launch.as_shell())
    click.echo(f"# {prepared.run_dir / prepared.program}")
    click.echo(prepared.text, nl=False)


def check_disk(prepared: Prepared) -> None:
    """Compare the free space with what the checkpoints of the run need.

    Raises:
        OutputError: the disk is too small.
    """
    train = prepared.run.train
    # One more than is kept: the new one is written before an old one goes; and the best stays beside them.
    kept = min(train.keep + 2, -(-train.steps // train.save_every) + 1)
    needed = prepared.model.parameters * 4 * FULL_STATE_COPIES * kept if train.method == "sft" else 0
    parent = prepared.run_dir.parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise OutputError(
            f"the run's {kept} checkpoints need {common.gigabytes(needed)}, {parent} has {common.gigabytes(free)} free",
            hint="lower train.keep, raise train.save_every, or set workdir to a larger disk",
        )
    if needed:
        common.say(f"disk: up to {common.gigabytes(needed)} for {kept} checkpoints, {common.gigabytes(free)} free")


def begin(prepared: Prepared, facts: sidecar.Sidecar, resume: bool) -> None:
    """Write what the run is, before it starts.

    Raises:
        LaunchError: the run exists and is not resumed, or the reverse, or is running.
    """
    from bridge.launchers.run_file import RunFile

    run_dir = prepared.run_dir
    exists = (run_dir / sidecar.FILE).exists() or finished_steps(run_dir / "checkpoints")
    if exists and not resume:
        raise LaunchError(f"the run {run_dir.name} exists", hint="--resume goes on with it, --run NAME starts another")
    if resume and not exists:
        raise LaunchError(f"there is no run {run_dir.name} to resume in {run_dir.parent}")
    if resume:
        done = finished_steps(run_dir / "checkpoints")
        common.say(f"resuming {run_dir.name} at step {done[-1] if done else 0} of {prepared.run.train.steps}")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / prepared.program).write_text(prepared.text, encoding="utf-8")
    tokenizer = (
        prepared.workspace.tokenizer_folder() if prepared.run.model.tokenizer else prepared.converted / sidecar.HF
    )
    RunFile(
        engine=prepared.engine,
        program=prepared.program,
        spec=prepared.run,
        base=str(prepared.workspace.base),
        model=prepared.model,
        frequencies=prepared.frequencies,
        tokenizer=str(tokenizer),
        checkpoint=str(prepared.converted / "0"),
    ).write(run_dir)
    sidecar.copy_side_files(prepared.converted / sidecar.HF, run_dir / sidecar.HF)
    sidecar.Sidecar(
        engine=prepared.engine,
        model=facts.model,
        scanned=facts.scanned,
        method=prepared.run.train.method,
        source=facts.source,
        dtypes=facts.dtypes,
        layout=facts.layout,
        versions={prepared.engine: engine_fixes.engine_version(prepared.engine)},
    ).write(run_dir)


def follow(prepared: Prepared, plan: tuple[Launch, ...], verbose: bool) -> None:
    """Run the processes, show their progress, and say where the results lie."""
    from bridge.launchers import local

    run_dir = prepared.run_dir
    common.say(f"{prepared.engine} {prepared.run.train.method}: log in {os.path.relpath(run_dir / LOGS)}")
    start = time.monotonic()
    local.execute(plan, run_dir / LOGS, StepLines(prepared.run.train.steps, verbose).show, verbose)
    steps = finished_steps(run_dir / "checkpoints")
    if prepared.run.train.steps not in steps:
        raise LaunchError(
            f"the run ended without a checkpoint of step {prepared.run.train.steps}", details=[f"steps: {steps}"]
        )
    common.say(f"trained {prepared.run.train.steps} steps in {time.monotonic() - start:.0f} s; checkpoints: {steps}")
    common.say(f"curves: tensorboard --logdir {os.path.relpath(run_dir / 'tensorboard')}")


class StepLines:
    """Shows each line on a terminal in place; elsewhere about twenty step lines a run, and every other line."""

    def __init__(self, steps: int, verbose: bool) -> None:
        self._every = 1 if verbose else max(1, steps // 20)
        self._terminal = sys.stderr.isatty() and not verbose
        self._open = False

    def show(self, line: str) -> None:
        """Show a line of the engine's process."""
        text = line.partition("] ")[2] if line.startswith("[") else line
        counted = text.startswith("step ") and "/" in text.split()[1]
        if self._terminal:
            click.echo(("\r\033[K" if self._open else "") + line, err=True, nl=not counted)
            self._open = counted
            return
        if counted:
            step, total = text.split()[1].split("/")
            if int(step) % self._every and step not in ("1", total):
                return
        common.say(line)
