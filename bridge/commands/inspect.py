"""`bridge inspect`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bridge import sidecar
from bridge.commands import common
from bridge.commands.workspace import find_checkpoint
from bridge.errors import BridgeError, CheckpointError
from bridge.model_spec import ModelSpec, read_json


@click.command(epilog=common.examples("bridge inspect checkpoints/maxtext", "bridge inspect --table llama_maxtext"))
@click.argument("path", required=False, type=common.place_type)
@click.option("--table", "table_name", metavar="FAMILY_ENGINE", help="Print a mapping table instead.")
@common.spec_option
@common.json_option
def command(path: Path | None, table_name: str | None, spec: Path | None, as_json: bool) -> None:
    """Say what a folder holds: format, model, parameters, tensors. Only headers are read.

    PATH is a Hugging Face, PEFT, MaxText or Tunix folder; default: the checkpoint that the spec means.
    """
    if table_name is not None:
        print_table(table_name, as_json)
        return
    if path is None:
        path = find_checkpoint(common.maybe_workspace(spec), None, None, None).item
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if (path / "adapter_config.json").is_file():
        facts = peft_facts(path)
    elif (path / "config.json").is_file() and not (path / sidecar.FILE).is_file():
        facts = hf_facts(path)
    else:
        facts = engine_facts(path)
    if as_json:
        common.emit(facts)
    else:
        show(facts)


def hf_facts(folder: Path) -> dict[str, Any]:
    """A Hugging Face folder."""
    from bridge.converters.hf_store import read_headers

    stored = read_headers(folder)
    model = ModelSpec.from_folder(folder)
    tensors = {name: (entry.tensor.shape, entry.tensor.dtype) for name, entry in stored.items()}
    return _facts("hf", model, tensors, None)


def peft_facts(folder: Path) -> dict[str, Any]:
    """A PEFT adapter folder."""
    from bridge.converters.hf_store import read_header

    file = folder / "adapter_model.safetensors"
    stored = read_header(file) if file.is_file() else None
    if stored is None:
        raise CheckpointError(f"{folder} has an adapter_config.json but no {file.name}")
    tensors = {name: (entry.tensor.shape, entry.tensor.dtype) for name, entry in stored.items()}
    return {**_facts("peft", None, tensors, None), "adapter": read_json(folder / "adapter_config.json")}


def engine_facts(path: Path) -> dict[str, Any]:
    """An engine checkpoint."""
    from bridge.converters.engine_tree import recognise
    from bridge.converters.orbax_source import TreeSource

    common.on_cpu()
    chosen = find_checkpoint(None, path, None, None)
    tree = recognise(chosen.item)
    only = frozenset([*tree.weights.values(), *tree.adapters.values()])
    leaves = TreeSource(chosen.item, only=only).headers
    tensors = {".".join(name): (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    facts = sidecar.read(chosen.home)
    found = _facts(tree.engine, facts.model if facts else None, tensors, facts)
    rope = None
    if facts:
        rope = "llama3" if facts.model.rope_scaling else "default"
    return {
        **found,
        "path": str(chosen.item),
        "step": chosen.step,
        "scanned": tree.scanned,
        "rope": rope,
        "left_out": list(tree.left_out),
    }


def _facts(
    form: str, model: ModelSpec | None, tensors: dict[str, Any], facts: sidecar.Sidecar | None
) -> dict[str, Any]:
    import math

    from bridge.converters.plan import Tensor

    return {
        "format": form,
        "model": model.to_json() if model else None,
        "parameters": sum(math.prod(shape) for shape, _ in tensors.values()),
        "bytes": sum(Tensor(shape, dtype).bytes for shape, dtype in tensors.values()),
        "tensors": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in tensors.items()},
        "sidecar": asdict(facts) if facts else None,
    }


def show(facts: dict[str, Any]) -> None:
    """For people: the facts, then the tensors as a tree with equal layers folded."""
    click.echo(f"{facts['format']}: {facts['parameters']:,} parameters, {common.gigabytes(facts['bytes'])}")
    for key in ("path", "step", "scanned", "rope", "adapter"):
        if facts.get(key) is not None:
            click.echo(f"  {key}: {facts[key]}")
    for key, value in (facts["model"] or {}).items():
        click.echo(f"  {key}: {value}")
    for line in tree_lines(facts["tensors"]):
        click.echo(line)
    if facts.get("left_out"):
        click.echo(f"  no weights: {len(facts['left_out'])} arrays ({facts['left_out'][0]} ...)")


def tree_lines(tensors: dict[str, Any]) -> list[str]:
    """One line a kind of tensor: numbers in names are folded into `*`, with how many there are."""
    kinds: dict[tuple[str, str], int] = {}
    for name, tensor in tensors.items():
        folded = ".".join("*" if part.isdigit() else part for part in name.split("."))
        key = (folded, f"{tensor['dtype']}{tensor['shape']}")
        kinds[key] = kinds.get(key, 0) + 1
    return [f"  {name}  {what}" + (f"  x {count}" if count > 1 else "") for (name, what), count in kinds.items()]


def print_table(name: str, as_json: bool) -> None:
    """A mapping table: which tensor goes where, and how."""
    from bridge.converters.plan import tables

    known = {f"{family}_{engine}": table for (family, engine), table in tables().items()}
    if name not in known:
        raise BridgeError(f"there is no table {name!r}", details=[f"tables: {', '.join(known)}"])
    table = known[name]
    if as_json:
        common.emit({"requires": table.requires, "rules": [asdict(rule) for rule in table.rules]})
        return
    for rule in table.rules:
        notes = [note for note in (rule.scale, rule.when if rule.when != "always" else None) if note]
        click.echo(f"{rule.hf}\n  {rule.engine}\n  {rule.pattern}{'  [' + ', '.join(notes) + ']' if notes else ''}")
    for key, value in table.requires.items():
        click.echo(f"requires {key}: {value}")
