"""`bridge verify` of an adapter: the engine with the adapter on against PyTorch on the merged weights."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.commands import adapter as adapters
from bridge.commands import common
from bridge.commands.forward import adapted_pass
from bridge.commands.verify import same_bits, show, write_report
from bridge.commands.workspace import Workspace
from bridge.errors import CheckpointError
from bridge.model_spec import ModelSpec
from bridge.places import scratch

if TYPE_CHECKING:
    from bridge.commands.checkpoint import Checkpoint
    from bridge.converters.adapter_facts import AdapterFacts
    from bridge.converters.parity.profile import Profile

SHARD_BYTES = 5_000_000_000


def run(
    found: Checkpoint,
    facts: AdapterFacts,
    base: Path,
    workspace: Workspace | None,
    reference: Path | None,
    tokens: int,
    tolerance: float | None,
    exact: bool,
    as_json: bool,
    report: Path | None = None,
) -> None:
    """Compare, show the result, and end with exit code 1 when it fails.

    `base` is the Hugging Face folder of the model that was adapted, and `facts` are the adapter's. With `exact`, a
    merged export (`reference`, or `export/hf`) is compared bit by bit with the merge made anew; a `reference` without
    it must be that export, too, before logits are compared.

    Raises:
        CheckpointError: there is no export to compare with, or `reference` is not one of this adapter.
    """
    common.say(f"verifying {found.chosen.item} ({found.chosen.reason}) on its base {base}")
    profile = None
    with tempfile.TemporaryDirectory(prefix=".bridge-verify-", dir=scratch(found.chosen.home)) as temporary:
        merged = Path(temporary) / "merged"
        if exact or reference is not None:
            folder = reference or (workspace.export("hf") if workspace else None)
            if folder is None or not folder.is_dir():
                raise CheckpointError("there is no merged export to compare with", hint="bridge export --to hf")
            result = same_as_merged(found, facts, base, folder, Path(temporary) / "anew")
            if not exact and not result["ok"]:
                raise CheckpointError(
                    f"{folder} is not {found.chosen.item} merged into its base: {len(result['different'])} of "
                    f"{result['tensors']} tensors differ",
                    details=result["different"],
                    hint="bridge export --to hf --overwrite",
                )
        if not exact:
            merge(found, facts, base, merged, "float32")
            tree = base_tree(found, base, workspace, Path(temporary) / "base")
            result, profile = compare(found, facts, merged, tree, tokens, tolerance)
            if reference is not None:
                result["exact"] = True
                common.say(f"weights: {reference} is the merge, bit for bit")
    if report is not None:
        write_report(report, (str(found.chosen.item), f"{base}, with the adapter merged"), result, profile)
    if as_json:
        common.emit(result)
    else:
        show(result)
    if not result["ok"]:
        sys.exit(1)


def same_as_merged(found: Checkpoint, facts: AdapterFacts, base: Path, folder: Path, anew: Path) -> dict[str, Any]:
    """An export against the merge made anew in its dtype, bit by bit."""
    dtype = ModelSpec.from_folder(folder).dtype
    merge(found, facts, base, anew, "source" if dtype == found.model.dtype else dtype)
    result = same_bits(folder, anew)
    shutil.rmtree(anew)
    return result


def merge(found: Checkpoint, facts: AdapterFacts, base: Path, out: Path, dtype: str) -> None:
    """The adapter merged into the base it was trained on."""
    adapters.write_merged(found, facts, base, out, dtype, SHARD_BYTES, "dequantized", False, tell=lambda _: None)


def converted(found: Checkpoint, workspace: Workspace | None) -> Path:
    """The tree of the base checkpoint that the adapter was trained on.

    Raises:
        CheckpointError: it is not at hand.
    """
    places = converted_places(found, workspace)
    for tree in existing_trees(found, places):
        return tree
    raise CheckpointError(
        f"the converted base of {found.chosen.item} is not at hand",
        details=[str(place) for place in places],
        hint=f"bridge convert --to {found.engine}",
    )


def converted_places(found: Checkpoint, workspace: Workspace | None) -> list[Path]:
    """The steps in which the converted base may lie."""
    from bridge.launchers import run_file

    places = []
    if (found.chosen.home / run_file.FILE).is_file():
        places.append(Path(run_file.RunFile.read(found.chosen.home).checkpoint))
    if workspace is not None:
        places.append(workspace.converted(found.engine) / "0")
    return places


def existing_trees(found: Checkpoint, places: list[Path]) -> list[Path]:
    """The trees of the steps that are there."""
    return [place / found.table.item for place in places if (place / found.table.item / "_METADATA").is_file()]


def base_tree(found: Checkpoint, base: Path, workspace: Workspace | None, temporary: Path) -> Path:
    """The converted base where it is at hand, else one made anew from its Hugging Face folder."""
    from bridge.converters import check
    from bridge.converters.hf_store import HfSource
    from bridge.converters.orbax_store import TreeSink
    from bridge.converters.transfer import Budget, import_checkpoint

    for tree in existing_trees(found, converted_places(found, workspace)):
        return tree
    common.say(f"converting {base} for {found.engine}: its converted checkpoint is not at hand ...")
    sink = TreeSink(temporary / "0", found.table.item)
    with HfSource(base) as source:
        check.source(found.plan, source, found.table, found.model)
        import_checkpoint(found.plan, found.model, source, sink, "source", Budget(1 << 30))
    sink.scalars(found.table.extra)
    sink.finish({"scan_layers": found.tree.scanned} if found.engine == "maxtext" else {})
    return sink.folder


def compare(
    found: Checkpoint, facts: AdapterFacts, merged: Path, base: Path, tokens: int, tolerance: float | None
) -> tuple[dict[str, Any], Profile]:
    """PyTorch on the weights merged in float32 against the engine with the adapter on."""
    from bridge.converters.parity import compare as comparing
    from bridge.converters.parity import profile, pytorch

    inputs = comparing.probes(found.model, tokens, found.hf)
    common.say(f"PyTorch f32 and f64 on {sum(len(probe.ids) for probe in inputs)} tokens ...")
    reference, doubled = pytorch.logits(merged, inputs, double=tolerance is None)
    limit = tolerance if tolerance is not None else comparing.tolerance_of(reference, doubled)
    common.say(f"{found.engine} f32 on the same tokens, the adapter on ...")
    with adapted_pass(found, facts, base, max(len(probe.ids) for probe in inputs)) as forward:
        checkpoint = [forward(probe.ids, probe.positions) for probe in inputs]
    values = comparing.compare(inputs, reference, checkpoint, limit).to_json()
    return values, profile.profile(inputs, reference, checkpoint)
