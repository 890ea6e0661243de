"""`bridge export --push`: what is asked before the export, and what is uploaded after it."""

from __future__ import annotations

import filecmp
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import hub, model_card, sidecar
from bridge.commands import common
from bridge.errors import CheckpointError
from bridge.model_spec import read_json

if TYPE_CHECKING:
    from bridge.commands.checkpoint import Checkpoint
    from bridge.converters.adapter_facts import AdapterFacts
    from bridge.converters.plan import Tensor
    from bridge.hub_push import Target


def ready(repo_id: str, public: bool) -> Target:
    """The repository, when this login may write it.

    Raises:
        AccessError: as `hub_push.check`.
    """
    # An upload is long: bars where somebody looks. huggingface_hub reads this when it is imported.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "0" if sys.stderr.isatty() else "1"
    from bridge import hub_push

    target = hub_push.check(repo_id, public)
    if public and target.private:
        common.say(f"{target.repo_id} exists and stays private: its settings on the hub change that")
    return target


def begin(target: Target) -> None:
    """Make the repository, right before the export is written.

    Raises:
        AccessError: the hub refuses.
    """
    from bridge import hub_push

    hub_push.create(target)
    common.say(f"to be pushed to {target.described}")


def push(target: Target, folder: Path, found: Checkpoint, form: str, adapter: AdapterFacts | None) -> None:
    """Upload the export with its model card; prints the commit's address.

    Raises:
        AccessError: as `hub_push.upload`.
    """
    import click

    from bridge import hub_push

    facts = card_facts(target.repo_id, found, form, adapter)
    if form == "peft":
        base = str(read_json(folder / "adapter_config.json").get("base_model_name_or_path"))
        if not hub.is_id(base):
            common.say(f"warning: the adapter names its base as the folder {base}, which others do not have")
    size = common.gigabytes(sum(path.stat().st_size for path in folder.iterdir()))
    common.say(f"pushing {size} to {target.described}")
    message = f"{facts.method or 'converted'}, {found.engine}" + (f", step {facts.step}" if facts.step else "")
    click.echo(hub_push.upload(target, folder, model_card.text(facts), message))


def card_facts(repo_id: str, found: Checkpoint, form: str, adapter: AdapterFacts | None) -> model_card.CardFacts:
    """What the card says, from `bridge.json` and `run.json` beside the checkpoint."""
    from bridge.launchers import run_file

    known, home = found.facts, found.chosen.home
    spec = run_file.RunFile.read(home).spec if (home / run_file.FILE).is_file() else None
    source = known.source if known else {}
    shown = None
    if adapter is not None:
        shown = f"rank {adapter.rank}, alpha {adapter.alpha:g}, on {', '.join(adapter.targets)}"
        shown += f", base held in {adapter.quantization}" if adapter.quantization else ""
    return model_card.CardFacts(
        name=repo_id.partition("/")[2],
        form=form,
        engine=found.engine,
        version=known.versions.get(found.engine) if known else None,
        method=known.method if known else None,
        base=source.get("origin"),
        revision=source.get("revision"),
        adapter=shown,
        run=spec,
        step=found.chosen.step or None,
    )


def require_same(
    found: Checkpoint, folder: Path, make: Callable[[Path, bool], None], tensors: dict[str, Tensor] | None
) -> None:
    """Compare an export that is there with what would be exported, so that nothing else is pushed under its name.

    Args:
        found: the checkpoint.
        folder: the export.
        make: exports into a folder; adapters are exported again beside it, and compared file by file.
        tensors: of full weights, which are compared with the checkpoint where they lie.

    Raises:
        CheckpointError: it is another one.
    """
    common.say(f"{folder} is there: compared with the checkpoint, not exported again")
    if tensors is not None:
        different, count = _full_difference(found, folder, tensors)
    else:
        with tempfile.TemporaryDirectory(prefix=".bridge-push-", dir=folder.absolute().parent) as temporary:
            make(Path(temporary) / "again", False)
            different, count = _file_difference(folder, Path(temporary) / "again")
    if different:
        raise CheckpointError(
            f"{folder} is not the export of {found.chosen.item}: {len(different)} of {count} differ",
            details=different,
            hint="--overwrite exports it again",
        )


def _full_difference(found: Checkpoint, folder: Path, tensors: dict[str, Tensor]) -> tuple[list[str], int]:
    from bridge.commands.verify import exact_difference
    from bridge.converters.hf_store import HfSource

    with HfSource(folder) as export:
        other = [name for name, tensor in tensors.items() if export.headers.get(name) != tensor]
    return (other, len(tensors)) if other else exact_difference(found, folder)


def _file_difference(folder: Path, again: Path) -> tuple[list[str], int]:
    """Names of the files that were exported another way; `bridge.json` has bridge's version, and may differ."""
    names = sorted(path.name for path in again.iterdir() if path.name != sidecar.FILE)
    return [name for name in names if not _same_file(folder / name, again / name)], len(names)


def _same_file(a: Path, b: Path) -> bool:
    """Whether two files hold the same bytes, in bounded memory."""
    return a.is_file() and a.stat().st_size == b.stat().st_size and filecmp.cmp(a, b, shallow=False)
