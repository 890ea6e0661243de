"""`bridge data`: what the model will see, token for token, and what became of the examples."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge.commands import common, epochs, placing
from bridge.commands.prepared import hardware_of
from bridge.commands.workspace import Workspace
from bridge.errors import LaunchError
from bridge.run_spec import RunSpec

if TYPE_CHECKING:
    from rich.text import Text

    from bridge.launchers.data import Encoded, Pairs, Rows

REPORT_EVERY = 10_000


@click.command(epilog=common.examples("bridge data", "bridge data --show 1 --json"))
@common.spec_option
@click.option("--show", type=click.IntRange(min=0), default=2, show_default=True, help="Examples to show of each set.")
@common.json_option
def command(spec: Path | None, show: int, as_json: bool) -> None:
    """Show text, ids and loss mask of the examples, and count those cut and dropped.

    What is learnt stands in ⟦ ⟧, and in green on a terminal. The ids are those of the tokenizer's own chat template.
    """
    from bridge.launchers.data import load_tokenizer, prepare

    workspace = Workspace.open(spec)
    tokenizer = load_tokenizer(workspace.tokenizer_folder())
    devices = _devices(workspace)
    report: dict[str, Any] = {}
    for split in ("train", "eval") if workspace.run.data.eval else ("train",):
        prepared = prepare(workspace.run, workspace.base, tokenizer, split, 1, partial(_progress, split))
        summary = _summary(prepared)
        if split == "train":
            summary |= _length(prepared, workspace.run, devices)
        shown = list(_examples(prepared, show))
        if as_json:
            report[split] = {**summary, "examples": [_as_json(parts, tokenizer) for parts in shown]}
        else:
            _print(split, summary, shown, tokenizer)
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))


def _devices(workspace: Workspace) -> int | None:
    """Devices of all processes; None where this host cannot say."""
    run = workspace.run
    hardware = hardware_of(run)
    try:
        cluster = placing.cluster_of(workspace, run, "data", hardware, os.environ)
        return placing.total_devices(run, cluster, hardware, os.environ)
    except LaunchError:
        return None


def _length(prepared: Rows | Pairs, run: RunSpec, devices: int | None) -> dict[str, Any]:
    """Steps and epochs of the run; of unknown devices, only the rows of its epochs."""
    if devices is not None:
        length = epochs.count(run, prepared, devices)
        found = {"steps": length.steps, "epochs": length.epochs, "rows_in_epochs": length.rows}
        return found | {"rows_a_step": length.rows_a_step, "devices": devices}
    asked = run.train.epochs
    return {} if asked is None else {"epochs": asked, "rows_in_epochs": prepared.rows_of(asked)}


def _progress(split: str, read: int) -> None:
    if read % REPORT_EVERY == 0:
        common.say(f"{split}: {read} examples read")


def _summary(prepared: Rows | Pairs) -> dict[str, Any]:
    from bridge.launchers.data import Rows

    if isinstance(prepared, Rows):
        parts = [prepared.examples]
    else:
        parts = [prepared.prompts, prepared.chosen, prepared.rejected]
    mixture = prepared.mixture
    shares = zip(mixture.shares, mixture.quotas, strict=True) if mixture else ()
    return {
        "counts": asdict(prepared.counts),
        "tokens": sum(len(part.ids) for part in parts),
        "trained_tokens": sum(int(part.loss.sum()) for part in parts),
        "rows": prepared.rows_per_epoch,
        "sequence_length": prepared.sequence_length,
        **({"sources": [asdict(share) | {"in_an_epoch": quota} for share, quota in shares]} if mixture else {}),
    }


def _examples(prepared: Rows | Pairs, show: int) -> Iterator[dict[str, Encoded]]:
    from bridge.launchers.data import Rows

    for index in range(min(show, prepared.counts.kept)):
        if isinstance(prepared, Rows):
            yield {"example": prepared.examples[index]}
        else:
            yield {
                "prompt": prepared.prompts[index],
                "chosen": prepared.chosen[index],
                "rejected": prepared.rejected[index],
            }


def _as_json(parts: dict[str, Encoded], tokenizer: Any) -> dict[str, Any]:
    from bridge.launchers.tokenizer import decode

    shown = {
        name: {"text": decode(tokenizer, part.ids), "ids": part.ids.tolist(), "mask": part.loss.astype(int).tolist()}
        for name, part in parts.items()
    }
    return shown.get("example", shown)


def _print(split: str, summary: dict[str, Any], shown: list[dict[str, Encoded]], tokenizer: Any) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for number, parts in enumerate(shown, 1):
        for name, part in parts.items():
            title = f"{split} {number}" if name == "example" else f"{split} {number} {name}"
            console.print(Text(f"── {title}: {len(part.ids)} tokens, {int(part.loss.sum())} learnt", style="bold"))
            console.print(_marked(part, tokenizer))
            console.print(Text("ids  " + " ".join(map(str, part.ids.tolist())), style="dim"))
            console.print(Text("mask " + " ".join(map(str, part.loss.astype(int).tolist())), style="dim"))
    counts = summary["counts"]
    console.print(
        Text(
            f"{split}: {counts['kept']} of {counts['read']} examples kept ({counts['cut']} cut at a turn), dropped: "
            f"{counts['dropped_long']} too long, {counts['dropped_empty']} with nothing to learn\n"
            f"{split}: {summary['tokens']} tokens, {summary['trained_tokens']} learnt, "
            f"{summary['rows']} rows of {summary['sequence_length']}"
        )
    )
    for line in _run_lines(summary):
        console.print(Text(f"{split}: {line}"))


def _run_lines(summary: dict[str, Any]) -> Iterator[str]:
    """The sources of a mixture, and how long the run is."""
    for source in summary.get("sources", ()):
        times = source["in_an_epoch"] / source["examples"]
        yield (
            f"{source['name']}, weight {source['weight']:g}: {source['in_an_epoch']} examples an epoch, "
            f"each of its {source['examples']} {times:.2f} times"
        )
    if "steps" in summary:
        yield (
            f"{summary['steps']:,} steps of {summary['rows_a_step']} rows on {summary['devices']} device(s) "
            f"are {summary['epochs']:.4g} epochs"
        )
    elif "epochs" in summary:
        yield (
            f"{summary['epochs']:g} epochs are {summary['rows_in_epochs']:,} rows; "
            "how many steps depends on the devices (cluster.devices)"
        )


def _marked(part: Encoded, tokenizer: Any) -> Text:
    """The text with what is learnt in brackets and colour; runs of tokens are decoded whole, letters span tokens."""
    import numpy as np
    from rich.text import Text

    from bridge.launchers.tokenizer import decode

    text = Text()
    edges = [0, *(np.flatnonzero(np.diff(part.loss.astype(np.int8))) + 1).tolist(), len(part.ids)]
    for start, stop in pairwise(edges):
        run = decode(tokenizer, part.ids[start:stop])
        text.append(f"⟦{run}⟧" if part.loss[start] else run, style="green" if part.loss[start] else "dim")
    return text
