"""`bridge diff`."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge import sidecar
from bridge.commands import checkpoint as checkpoints
from bridge.commands import common
from bridge.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from bridge.converters.difference import Difference, Side
    from bridge.converters.hf_store import HfSource

SHOWN = 20
"""Lines of each kind for people; `--json` has all."""


@dataclass(frozen=True)
class Opened:
    """One of the two sides, open for reading."""

    format: str
    side: Side


@click.command(
    epilog=common.examples(
        "bridge diff checkpoints/maxtext export/hf", "bridge diff runs/maxtext-sft runs/tunix-sft --json"
    )
)
@click.argument("a", type=common.place_type)
@click.argument("b", type=common.place_type)
@click.option("--base", type=common.folder_type, help="HF folder of a bare engine checkpoint.")
@common.spec_option
@common.json_option
def command(a: Path, b: Path, base: Path | None, spec: Path | None, as_json: bool) -> None:
    """Compare two folders of weights across formats. Exit code 1 when they differ.

    A and B are Hugging Face, MaxText or Tunix folders; every side is read as the Hugging Face tensors it stands for.
    Dtypes are always listed, but make two folders different only when both have the same format: the engines choose
    their own.
    """
    from bridge.converters.difference import compare

    common.on_cpu()
    folder = base or next((path for path in (a, b) if is_hf(path)), None)
    with open_side(a, folder, spec) as ours, open_side(b, folder, spec) as theirs:
        names = ours.side.tensors.keys() & theirs.side.tensors.keys()
        total = sum(4 * math.prod(ours.side.tensors[name].shape) for name in names)
        with common.progress("compare", total) as progress:
            found = compare(ours.side, theirs.side, progress=progress)
    result = as_values(found, same_format=ours.format == theirs.format)
    if as_json:
        common.emit(result)
    else:
        show(result, found.compared)
    if not result["equal"]:
        sys.exit(1)


def is_hf(path: Path) -> bool:
    """Whether a path is a Hugging Face folder rather than a checkpoint of an engine."""
    return (path / "config.json").is_file() and not (path / sidecar.FILE).is_file()


@contextlib.contextmanager
def open_side(path: Path, base: Path | None, spec: Path | None) -> Iterator[Opened]:
    """Open a folder of any format.

    Args:
        path: what the user named.
        base: the Hugging Face folder that says what model a checkpoint without `bridge.json` is.
        spec: the spec that says so where `base` is None.

    Raises:
        CheckpointError: it does not exist, or is not understood.
        UnsupportedError: it holds adapters, no whole weights.
    """
    from bridge.converters import difference
    from bridge.converters.hf_store import HfSource

    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if (path / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"{path} is an adapter: diff compares whole weights", hint="merge it first: bridge export"
        )
    if is_hf(path):
        with HfSource(path) as source:
            yield Opened("hf", difference.FolderSide(source, redundant(source)))
        return
    found = checkpoints.find(common.maybe_workspace(spec) if base is None else None, path, base, None)
    if found.tree.adapters:
        raise UnsupportedError(
            f"{found.chosen.item} holds adapters: diff compares whole weights",
            hint="bridge export --to hf merges them; compare that folder",
        )
    common.say(f"{path}: {found.chosen.reason}")
    # Half of what is to be held, as the other side's chunks are held beside these.
    tree = found.open(difference.CACHE_BYTES, memory=1 << 29)
    yield Opened(found.engine, difference.EngineSide(tree, found.plan, found.model))


def redundant(source: HfSource) -> frozenset[str]:
    """Tensors that carry nothing of their own: old RoPE buffers, and a tied head that equals the embedding."""
    import re

    from bridge.converters.check import EMBEDDING, HEAD
    from bridge.converters.plan import tables
    from bridge.model_spec import ModelSpec

    patterns = {pattern for table in tables().values() for pattern in table.ignored}
    names = {name for name in source.headers if any(re.fullmatch(pattern, name) for pattern in patterns)}
    tied = ModelSpec.from_folder(source.folder).tied and {HEAD, EMBEDDING} <= source.headers.keys()
    if tied and source.headers[HEAD] == source.headers[EMBEDDING] and source.equals(source, HEAD, EMBEDDING):
        names.add(HEAD)
    return frozenset(names)


def as_values(found: Difference, *, same_format: bool) -> dict[str, Any]:
    """The JSON object; a value that is NaN or Inf on one side only becomes null."""
    lists = bool(found.only_in_a or found.only_in_b or found.shape or found.value)
    return {
        "equal": not lists and not (same_format and found.dtype),
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "shape": {name: [list(part) for part in pair] for name, pair in found.shape.items()},
        "dtype": {name: list(pair) for name, pair in found.dtype.items()},
        "value": {name: None if math.isnan(value) else value for name, value in found.value.items()},
    }


def show(result: dict[str, Any], compared: int) -> None:
    """For people: one line a difference, the largest values first, then the count."""
    kinds = {
        "only in A": result["only_in_a"],
        "only in B": result["only_in_b"],
        "shape": [f"{name}  {tuple(a)} {tuple(b)}" for name, (a, b) in result["shape"].items()],
        "dtype": folded(result["dtype"]),
        "value": [f"{name}  max |Δ| {text(value)}" for name, value in largest_first(result["value"])],
    }
    for kind, lines in kinds.items():
        for line in lines[:SHOWN]:
            click.echo(f"{kind:9}  {line}")
        if len(lines) > SHOWN:
            click.echo(f"{kind:9}  ... and {len(lines) - SHOWN} more (--json lists all)")
    if result["value"]:
        most = text(largest_first(result["value"])[0][1])
        click.echo(f"{len(result['value'])} of {compared} tensors differ in value, max |Δ| {most}")
    else:
        click.echo(f"the values of all {compared} common tensors are equal")
    click.echo("equal" if result["equal"] else "different")


def folded(kinds: dict[str, list[str]]) -> list[str]:
    """One line for each pair of dtypes, however many tensors it has."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, (a, b) in kinds.items():
        names.setdefault((a, b), []).append(name)
    return [f"{a} {b}  {len(found)} tensors ({found[0]} ...)" for (a, b), found in names.items()]


def largest_first(values: dict[str, float | None]) -> list[tuple[str, float | None]]:
    """By size, what is not finite before all."""
    return sorted(values.items(), key=lambda item: -math.inf if item[1] is None else -item[1])


def text(value: float | None) -> str:
    """A difference for people."""
    return "not finite on one side" if value is None else f"{value:.3g}"
