"""`bridge launch`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import click

from bridge import engine_fixes, places, sidecar
from bridge.commands import adapter as adapters
from bridge.commands import common, epochs, placing, running
from bridge.commands.prepared import Prepared, prepare, require_converted
from bridge.commands.report import write_run_report
from bridge.commands.step_lines import StepLines
from bridge.commands.workspace import Workspace, finished_steps
from bridge.errors import BridgeError, LaunchError, OutputError, SpecError
from bridge.launchers import metrics
from bridge.launchers.plan import DEVICE_COUNT_FLAG, Launch
from bridge.run_spec import METHODS

LAUNCHERS = ("local", "ssh", "slurm", "jobset")


@click.command(
    epilog=common.examples(
        "bridge launch sft --engine maxtext", "bridge launch sft train.steps=20 --processes 2 --run short --dry-run"
    )
)
@click.argument("method", type=click.Choice(METHODS))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@common.engine_option
@click.option("--run", "run_name", help="Name of the run; default: <engine>-<method>.")
@click.option("--resume", is_flag=True, help="Go on with a run from its newest checkpoint.")
@click.option("--launcher", type=click.Choice(LAUNCHERS), help="Where the processes run; default: the spec's.")
@click.option("--nodes", type=int, help="Hosts.")
@click.option("--processes", type=int, help="Engine processes a host.")
@click.option("--devices", type=int, help="Devices a host, shared out among its processes.")
@click.option("--hosts", help="For ssh: names with commas, or a file with one a line; the first coordinates.")
@click.option("--verbose", is_flag=True, help="Show the engine's own output too.")
@common.spec_option
@common.dry_run_option
def command(
    method: str,
    overrides: tuple[str, ...],
    engine: str | None,
    run_name: str | None,
    resume: bool,
    launcher: str | None,
    nodes: int | None,
    processes: int | None,
    devices: int | None,
    hosts: str | None,
    verbose: bool,
    spec: Path | None,
    dry_run: bool,
) -> None:
    """Train with METHOD, from the converted checkpoint. KEY=VALUE overrides the spec (train.steps=5)."""
    options = placing.overrides(launcher, nodes, processes, devices, hosts)
    workspace = Workspace.open(spec, (*overrides, *options))
    prepared = prepare(workspace, engine or workspace.run.engine, method, run_name)
    if not prepared.run.data.train:
        raise SpecError("data.train names no data", hint="a .jsonl or .parquet file, or a hub data set id")
    plan = plan_launch(prepared)
    if dry_run:
        show(prepared, plan)
        return
    facts = require_converted(prepared)
    engine_fixes.require_tested(prepared.engine)
    check_settings(prepared, plan)
    if prepared.placed.first:
        check_disk(prepared)
        begin(prepared, facts, resume)
    follow(prepared, plan, verbose)


def plan_launch(prepared: Prepared) -> tuple[Launch, ...]:
    """The processes of a run, those of other hosts included."""
    import importlib

    engine = importlib.import_module(f"bridge.launchers.{prepared.engine}")
    placed = prepared.placed
    plan: tuple[Launch, ...] = engine.plan_launch(prepared.run, placed.cluster, placed.site)
    return plan


def check_settings(prepared: Prepared, plan: Sequence[Launch]) -> None:
    """Check what XLA would end the processes for, before any is started.

    Raises:
        LaunchError: memory settings that exclude each other, or flags that XLA does not know.
    """
    from bridge.launchers import xla_flags

    here = os.environ if prepared.placed.cluster.launcher == "local" else {}
    xla_flags.check_memory({**here, **plan[0].env})
    flags = plan[0].env.get("XLA_FLAGS", "").split()
    xla_flags.check_flags(" ".join(flag for flag in flags if not flag.startswith(f"{DEVICE_COUNT_FLAG}=")))


def show(prepared: Prepared, plan: tuple[Launch, ...]) -> None:
    """argv, environment and files, for `--dry-run`."""
    rendered = running.rendered(prepared, plan)
    if rendered is not None:
        click.echo(f"# {prepared.run_dir / rendered[0]}")
        click.echo(rendered[1], nl=False)
    else:
        for number, launch in enumerate(plan):
            click.echo(f"# process {number} on {launch.host}")
            click.echo(launch.as_shell())
    click.echo(f"# {prepared.run_dir / prepared.program}")
    click.echo(prepared.text, nl=False)


def check_disk(prepared: Prepared) -> None:
    """Compare the free space with what the checkpoints of the run need, and say both.

    Raises:
        OutputError: the disk is too small.
    """
    train = prepared.run.train
    # One more than is kept: the new one is written before an old one goes; and the best stays beside them.
    kept = min(train.keep + 2, -(-train.total_steps // train.save_every) + 1)
    needed = checkpoint_bytes(prepared) * kept
    if places.in_bucket(prepared.stored):
        common.say(f"{prepared.stored}: up to {common.gigabytes(needed)} for {kept} checkpoints")
        return
    parent = prepared.run_dir.parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise OutputError(
            f"the run's {kept} checkpoints need {common.gigabytes(needed)}, {parent} has {common.gigabytes(free)} free",
            hint="lower train.keep, raise train.save_every, or set workdir to a larger disk",
        )
    common.say(f"disk: up to {common.gigabytes(needed)} for {kept} checkpoints, {common.gigabytes(free)} free")


def checkpoint_bytes(prepared: Prepared) -> int:
    """Bytes of one training checkpoint: what is trained, and Adam's two moments of it."""
    from bridge import memory
    from bridge.configs import tunix

    run = prepared.run
    if run.train.method in ("lora", "qlora") or (prepared.engine == "tunix" and tunix.uses_adapters(run)):
        return 3 * 4 * memory.adapter_parameters(prepared.model, run)
    return 3 * (2 if run.train.weight_dtype == "bfloat16" else 4) * prepared.model.parameters


def begin(prepared: Prepared, facts: sidecar.Sidecar, resume: bool) -> None:
    """Write what the run is, before it starts.

    Raises:
        LaunchError: the run exists and is not resumed, or the reverse, or is running.
    """
    from bridge.launchers.run_file import RunFile

    run_dir = prepared.run_dir
    exists = (run_dir / sidecar.FILE).exists() or finished_steps(prepared.stored / "checkpoints")
    if exists and not resume:
        raise LaunchError(f"the run {run_dir.name} exists", hint="--resume goes on with it, --run NAME starts another")
    if resume and not exists:
        raise LaunchError(f"there is no run {run_dir.name} to resume in {run_dir.parent}")
    if resume:
        epochs.check_resumed(run_dir, prepared.length)
        done = finished_steps(prepared.stored / "checkpoints")
        common.say(f"resuming {run_dir.name} at step {done[-1] if done else 0} of {prepared.run.train.steps}")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / prepared.program).write_text(prepared.text, encoding="utf-8")
    small = run_dir if places.in_bucket(prepared.converted) else prepared.converted
    tokenizer = prepared.workspace.tokenizer_folder() if prepared.run.model.tokenizer else small / sidecar.HF
    RunFile(
        engine=prepared.engine,
        program=prepared.program,
        spec=prepared.run,
        base=str(prepared.workspace.base),
        model=prepared.model,
        frequencies=prepared.frequencies,
        tokenizer=str(tokenizer),
        checkpoint=str(prepared.converted / "0"),
        epochs=prepared.length.epochs if prepared.length else None,
    ).write(run_dir)
    sidecar.copy_side_files(prepared.converted / sidecar.HF, run_dir / sidecar.HF)
    if prepared.run.model.tokenizer:
        sidecar.replace_tokenizer(Path(tokenizer), run_dir / sidecar.HF)
    remembered = sidecar.Sidecar(
        engine=prepared.engine,
        model=facts.model,
        scanned=facts.scanned,
        method=prepared.run.train.method,
        source=facts.source,
        dtypes=facts.dtypes,
        layout=facts.layout,
        adapter=adapters.of_run(prepared.run, prepared.engine, str(facts.source.get("origin"))),
        versions={prepared.engine: engine_fixes.engine_version(prepared.engine)},
    )
    if places.in_bucket(prepared.stored):  # so that the checkpoints there can be exported from any host
        sidecar.copy_side_files(run_dir / sidecar.HF, prepared.stored / sidecar.HF)
        remembered.write(prepared.stored)
    remembered.write(run_dir)


def follow(prepared: Prepared, plan: tuple[Launch, ...], verbose: bool) -> None:
    """Run the processes, show their progress, and say where the results lie."""
    run_dir, total = prepared.run_dir, prepared.run.train.total_steps
    if prepared.length is not None:
        common.say(str(prepared.length))
    common.say(f"{prepared.engine} {prepared.run.train.method}: log in {os.path.relpath(run_dir / running.LOGS)}")
    common.say(f"while it runs: tensorboard --logdir {os.path.relpath(run_dir / 'tensorboard')}")
    start = time.monotonic()
    running.execute(prepared, plan, StepLines(total, verbose).show, verbose)
    if not prepared.placed.first:
        return
    steps = finished_steps(prepared.stored / "checkpoints")
    if places.in_bucket(prepared.stored):
        (prepared.stored / metrics.FILE).write_bytes((run_dir / metrics.FILE).read_bytes())
    if total not in steps:
        raise LaunchError(f"the run ended without a checkpoint of step {total}", details=[f"steps: {steps}"])
    common.say(f"trained {total} steps in {time.monotonic() - start:.0f} s; checkpoints: {steps}")
    ask(prepared)
    page = write_run_report(run_dir)
    common.say(f"curves: {os.path.relpath(page)}, or tensorboard --logdir {os.path.relpath(run_dir / 'tensorboard')}")


def ask(prepared: Prepared) -> None:
    """Before and after answers, where the spec asks for them: they cost a forward pass a token on the CPU.

    A run that is trained is not lost for want of an answer: what goes wrong is said.
    """
    again = f"bridge report {os.path.relpath(prepared.run_dir)} --answers"
    if not prepared.run.data.prompts:
        common.say(f"before and after answers: {again}")
        return
    from bridge.commands.answers import write_answers

    try:
        write_answers(prepared.run_dir, prepared.stored)
    except BridgeError as error:
        common.say(f"no answers: {error}\n  later: {again}")
