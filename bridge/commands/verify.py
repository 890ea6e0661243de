"""`bridge verify`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge import places
from bridge.commands import adapter as adapters
from bridge.commands import checkpoint as checkpoints
from bridge.commands import common
from bridge.commands.forward import forward_pass
from bridge.commands.workspace import Workspace
from bridge.errors import CheckpointError
from bridge.model_spec import ModelSpec

if TYPE_CHECKING:
    from bridge.commands.checkpoint import Checkpoint
    from bridge.converters.parity.compare import Logits, Probe, Report
    from bridge.converters.parity.profile import Profile


@click.command(
    epilog=common.examples(
        "bridge verify", "bridge verify checkpoints/maxtext --reference ~/models/Llama-3.2-1B --json"
    )
)
@click.argument("checkpoint", required=False, type=common.place_type)
@click.option("--reference", type=common.folder_type, help="HF folder to compare with.")
@click.option("--base", type=common.folder_type, help="HF folder of the base, for a checkpoint without bridge.json.")
@click.option("--engine", type=click.Choice(["maxtext", "tunix", "hf"]), help="Whose checkpoint; default: found out.")
@click.option("--exact", is_flag=True, help="Compare weights bit by bit instead of logits.")
@click.option("--tokens", type=click.IntRange(min=2), default=512, show_default=True)
@click.option("--tolerance", type=float, help="Of max |Δlogit|; default: max(1e-4, 8 |PyTorch f32 - f64|).")
@click.option("--step", type=int, help="Default: the best by eval loss, else the newest.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page with pictures.")
@adapters.options
@common.spec_option
@common.json_option
def command(
    checkpoint: Path | None,
    reference: Path | None,
    base: Path | None,
    engine: str | None,
    exact: bool,
    tokens: int,
    tolerance: float | None,
    step: int | None,
    report: Path | None,
    spec: Path | None,
    as_json: bool,
    about: adapters.Options,
) -> None:
    """Prove a checkpoint: the engine's f32 logits against PyTorch's. Exit code 1 when it fails.

    The reference of a converted checkpoint is its source; of a trained one its own export, whose weights must first
    equal the checkpoint rounded once, bit for bit. An adapter is compared, switched on in the engine, with PyTorch on
    the merged weights.
    """
    common.on_cpu()
    workspace = common.maybe_workspace(spec)
    profile = None
    if engine == "hf" or (checkpoint is not None and (checkpoint / "config.json").is_file()):
        ok, result, profile = verify_folders(checkpoint, reference, tokens, tolerance, exact)
        names = (str(checkpoint), str(reference))
    else:
        found = checkpoints.find(workspace, checkpoint, base, step, engine)
        if found.tree.adapters:
            from bridge.commands import verify_adapter

            facts = about.facts(found)
            folder = adapters.base_folder(found, facts, base, workspace)
            verify_adapter.run(found, facts, folder, workspace, reference, tokens, tolerance, exact, as_json, report)
            return
        folder = reference or default_reference(found, workspace)
        names = (str(found.chosen.item), str(folder))
        common.say(f"verifying {found.chosen.item} ({found.chosen.reason}) against {folder}")
        different, count = exact_difference(found, folder)
        if exact:
            ok, result = not different, {"ok": not different, "tensors": count, "different": different}
        elif found.trained and different:
            raise CheckpointError(
                f"{folder} is not the export of {found.chosen.item}: {len(different)} of {count} tensors differ",
                details=different,
                hint="bridge export --to hf --overwrite",
            )
        else:
            compared, profile = compare_logits(found, folder, tokens, tolerance)
            ok, result = compared.ok, compared.to_json()
            if found.trained:
                result["exact"] = True
                common.say(f"weights: all {count} tensors equal the checkpoint rounded once, bit for bit")
    if report is not None:
        write_report(report, names, result, profile)
    if as_json:
        common.emit(result)
    else:
        show(result)
    if not ok:
        # click's own ctx.exit is a return value to a caller of cli.main, and was lost on the way to the shell.
        sys.exit(1)


def write_report(out: Path, names: tuple[str, str], result: dict[str, Any], profile: Profile | None) -> None:
    """The page of a verification: the two names, the numbers, and the pictures where logits were compared."""
    from bridge import report
    from bridge.commands.report import write_page

    pictures = (profile.difference, profile.kl) if profile else ((), ())
    write_page(out, report.verify_page(report.Verified(*names, result, *pictures)))
    common.say(f"report: {out}")


def default_reference(found: Checkpoint, workspace: Workspace | None) -> Path:
    """The source of a converted checkpoint; the export of a trained one, never the base.

    Raises:
        CheckpointError: it is not there.
    """
    if found.trained:
        folder = workspace.export("hf") if workspace else None
        if folder is None or not folder.is_dir():
            raise CheckpointError(
                f"{found.chosen.item} was trained, and has no export to compare with",
                hint="bridge export --to hf; or name the export with --reference DIR",
            )
        return folder
    origin = str(found.facts.source.get("origin")) if found.facts else None
    if origin is not None and places.place(origin).is_dir():
        return places.place(origin)
    if workspace is not None:
        return workspace.model_folder(download=False)
    raise CheckpointError("the source is not at hand", hint="--reference DIR names the Hugging Face folder")


def exact_difference(found: Checkpoint, folder: Path) -> tuple[list[str], int]:
    """Names of the tensors of `folder` that differ from the checkpoint's, and how many were compared."""
    from bridge.converters import check
    from bridge.converters.hf_store import HfSource

    with HfSource(folder) as hf:
        model = ModelSpec.from_folder(folder)
        if (model.tied, model.vocab, model.layers) != (found.model.tied, found.model.vocab, found.model.layers):
            raise CheckpointError(f"{folder} is another model than {found.chosen.item}")
        plan = found.plan
        check.source(plan, hf, found.table, found.model)
        total = sum(hf.headers[name].bytes for move in plan for name in move.hf)
        with common.progress("compare weights", total) as progress:
            different = check.against_export(plan, found.model, found.open(), hf, progress=progress)
    return different, sum(len(move.hf) for move in plan)


def compare_logits(found: Checkpoint, folder: Path, tokens: int, tolerance: float | None) -> tuple[Report, Profile]:
    """PyTorch on `folder` against the engine on the checkpoint, or on the export's rounded weights."""
    from bridge.converters.parity import compare, profile, pytorch

    # The engine's model follows the checkpoint's own facts, PyTorch follows the reference's config.json.
    inputs = compare.probes(found.model, tokens, found.hf)
    common.say(f"PyTorch f32 and f64 on {sum(len(probe.ids) for probe in inputs)} tokens ...")
    reference, exact = pytorch.logits(folder, inputs, double=tolerance is None)
    limit = tolerance if tolerance is not None else compare.tolerance_of(reference, exact)
    common.say(f"{found.engine} f32 on the same tokens ...")
    if found.trained:
        with tempfile.TemporaryDirectory(prefix=".bridge-verify-", dir=places.scratch(found.chosen.home)) as temporary:
            logits = engine_logits(found, rounded(found, folder, Path(temporary)), inputs)
    else:
        logits = engine_logits(found, found.chosen.item, inputs)
    return compare.compare(inputs, reference, logits, limit), profile.profile(inputs, reference, logits)


def rounded(found: Checkpoint, folder: Path, temporary: Path) -> Path:
    """The export as a checkpoint of the engine: the trained weights, rounded as they were exported."""
    from bridge.converters.hf_store import HfSource
    from bridge.converters.orbax_store import TreeSink
    from bridge.converters.transfer import import_checkpoint

    sink = TreeSink(temporary / "0", found.table.item)
    with HfSource(folder) as hf:
        import_checkpoint(found.plan, found.model, hf, sink)
    sink.scalars(found.table.extra)
    sink.finish({})
    return temporary / "0" / found.table.item


def engine_logits(found: Checkpoint, item: Path, inputs: tuple[Probe, ...]) -> list[Logits]:
    """The engine's logits on the tree in `item`."""
    with forward_pass(found, item, max(len(probe.ids) for probe in inputs)) as forward:
        return [forward(probe.ids, probe.positions) for probe in inputs]


def same_bits(checkpoint: Path, reference: Path) -> dict[str, Any]:
    """Whether two Hugging Face folders have the same tensors, bit by bit, as `--exact` says it."""
    from bridge.converters.hf_store import HfSource

    with HfSource(checkpoint) as a, HfSource(reference) as b:
        names = sorted(a.headers.keys() | b.headers.keys())
        different = [name for name in names if a.headers.get(name) != b.headers.get(name) or not a.equals(b, name)]
    return {"ok": not different, "tensors": len(names), "different": different}


def verify_folders(
    checkpoint: Path | None, reference: Path | None, tokens: int, tolerance: float | None, exact: bool
) -> tuple[bool, dict[str, Any], Profile | None]:
    """Two Hugging Face folders, by PyTorch or bit by bit."""
    from bridge.converters.parity import compare, profile, pytorch

    if checkpoint is None or reference is None:
        raise CheckpointError("two folders are needed", hint="bridge verify FOLDER --engine hf --reference OTHER")
    if exact:
        same = same_bits(checkpoint, reference)
        return same["ok"], same, None
    inputs = compare.probes(ModelSpec.from_folder(reference), tokens, reference)
    first, exact_logits = pytorch.logits(reference, inputs, double=tolerance is None)
    second, _ = pytorch.logits(checkpoint, inputs, double=False)
    limit = tolerance if tolerance is not None else compare.tolerance_of(first, exact_logits)
    report = compare.compare(inputs, first, second, limit)
    return report.ok, report.to_json(), profile.profile(inputs, first, second)


def show(result: dict[str, Any]) -> None:
    """For people."""
    if "different" in result:
        for name in result["different"]:
            click.echo(f"different  {name}")
        click.echo(
            f"{'ok' if result['ok'] else 'FAILED'}: {len(result['different'])} of {result['tensors']} tensors differ"
        )
        return
    shown = {key: value if value is not None else float("nan") for key, value in result.items()}
    click.echo(f"max |Δlogit|     {shown['max_abs']:.3g}   (tolerance {shown['tolerance']:.3g})")
    click.echo(f"KL               {shown['kl']:.3g} nats a token")
    click.echo(f"top-1 agreement  {100 * shown['top1']:.2f} %")
    click.echo(f"NLL              {shown['nll_reference']:.6f} PyTorch, {shown['nll_checkpoint']:.6f} checkpoint")
    click.echo(f"tokens           {result['tokens']}, positions {result['positions']}")
    click.echo("ok" if result["ok"] else "FAILED")
