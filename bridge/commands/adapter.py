"""Adapters as `export` and `convert` see them: facts from `bridge.json` or options, PEFT folders, merged folders."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from bridge import places, sidecar
from bridge.commands import common
from bridge.errors import CheckpointError
from bridge.model_spec import FLOAT_DTYPES, ModelSpec, read_json

if TYPE_CHECKING:
    from bridge.commands.checkpoint import Checkpoint
    from bridge.commands.workspace import Workspace
    from bridge.converters.adapter_facts import AdapterFacts
    from bridge.run_spec import RunSpec


@dataclass(frozen=True)
class Options:
    """What the user may say of an adapter; for one with a `bridge.json` it must agree with that."""

    rank: int | None = None
    alpha: float | None = None
    targets: str | None = None
    quantization: Literal["nf4"] | None = None
    tile_size: int | None = None
    base_dtype: str | None = None

    def facts(self, found: Checkpoint) -> AdapterFacts:
        """The adapter's facts.

        Raises:
            CheckpointError: alpha is nowhere, or two sources disagree.
        """
        from bridge.converters.adapter_facts import AdapterFacts, facts_from_options, recorded_by_engine
        from bridge.converters.adapters import measure_checkpoint

        recorded = found.facts.adapter if found.facts else None
        own = recorded_by_engine(found.chosen.item)
        if recorded is None and self.quantization is None and "quantization" not in own:
            common.say(
                f"{found.chosen.item} has no {sidecar.FILE}: taken as trained on a base that was not quantized "
                "(else say --quantization nf4 --tile-size N)"
            )
        return facts_from_options(
            self.rank,
            self.alpha,
            [part.strip() for part in self.targets.split(",")] if self.targets else None,
            recorded=AdapterFacts.from_json(recorded) if recorded else None,
            measured=measure_checkpoint(found.chosen.item, found.model, found.engine, found.tree.scanned),
            engine=own,
            quantization=self.quantization,
            tile_size=self.tile_size,
            base_dtype=self.base_dtype,
        )


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Click options that say what an adapter without `bridge.json` is; the command gets them as `about`: `Options`."""

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        about = Options(**{field.name: values.pop(field.name) for field in fields(Options)})
        command(**values, about=about)

    without = "Of an adapter without bridge.json."
    for option in (
        click.option("--base-dtype", type=click.Choice(FLOAT_DTYPES), help="The same: dtype of the quantized weights."),
        click.option("--tile-size", type=int, help="The same: inputs that share an NF4 scale."),
        click.option("--quantization", type=click.Choice(["nf4"]), help="The same: how its base was held in training."),
        click.option("--targets", help=f"{without[:-1]}: q,k,v,o,gate,up,down."),
        click.option("--alpha", type=float, help=without),
        click.option("--rank", type=int, help=without),
    ):
        with_options = option(with_options)
    return with_options


def base_folder(found: Checkpoint, facts: AdapterFacts, base: Path | None, workspace: Workspace | None) -> Path:
    """The Hugging Face folder of the base model.

    Raises:
        CheckpointError: it is not at hand, or not the one that the adapter was trained on.
    """
    origin = facts.base or (str(found.facts.source.get("origin")) if found.facts else "")
    if base is not None:
        folder = base
    elif workspace is not None and workspace.run.model.source == origin:
        # A relative path starts at the spec's folder, not at the current one.
        folder = workspace.model_folder()
    elif origin and places.place(origin).is_dir():
        folder = places.place(origin)
    elif workspace is not None:
        folder = workspace.model_folder()
    else:
        raise CheckpointError(f"the base model {origin or ''} is not at hand", hint="--base DIR names its folder")
    recorded = found.facts.source.get("config") if found.facts else None
    config = folder / "config.json"
    if recorded and config.is_file() and sidecar.sha256(config.read_bytes()) != recorded:
        raise CheckpointError(
            f"{folder} has another config.json than the base that the adapter was trained on",
            hint="--base DIR names the folder that was converted",
        )
    return folder


def write_peft(found: Checkpoint, facts: AdapterFacts, final: Path, overwrite: bool) -> None:
    """A PEFT adapter folder, with the tokenizer and a `bridge.json` that notes the quantization."""
    from bridge.converters.adapters import export_peft
    from bridge.outputs import new_folder

    with new_folder(final, overwrite=overwrite, reads=[found.chosen.item, found.hf]) as folder:
        export_peft(found.chosen.item, facts, found.model, found.engine, found.tree.scanned, folder)
        names = [name for name in sidecar.copy_side_files(found.hf, folder) if name != "config.json"]
        (folder / "config.json").unlink(missing_ok=True)
        described(found, facts).write(folder)
    common.say(f"adapter of rank {facts.rank}, alpha {facts.alpha:g} and {', '.join(names)} in {final.absolute()}")


def described(found: Checkpoint, facts: AdapterFacts) -> sidecar.Sidecar:
    """The sidecar of an exported adapter."""
    known = found.facts or sidecar.Sidecar(engine=found.engine, model=found.model, scanned=found.tree.scanned)
    return replace(known, adapter=facts.to_json())


def write_merged(
    found: Checkpoint,
    facts: AdapterFacts,
    base: Path,
    final: Path,
    dtype: str,
    shard_bytes: int,
    merge_base: str,
    overwrite: bool,
    tell: Callable[[str], None] = common.say,
) -> None:
    """A Hugging Face folder with the adapter merged into its base, summed in float32 and rounded once."""
    from bridge.commands.export import hf_config
    from bridge.converters.hf_store import read_headers
    from bridge.converters.merge import export_merged
    from bridge.outputs import new_folder

    if ModelSpec.from_folder(base) != found.model:
        raise CheckpointError(f"{base} is another model than the adapter's base", details=[f"{found.chosen.item}"])
    total = sum(stored.tensor.bytes for stored in read_headers(base).values())
    reads = [found.chosen.item, found.hf, base]
    with new_folder(final, overwrite=overwrite, needs_bytes=total, reads=reads) as folder:
        report = export_merged(
            found.chosen.item,
            base,
            facts,
            found.model,
            found.engine,
            found.tree.scanned,
            folder,
            dtype,
            shard_bytes,
            merge_base,  # type: ignore[arg-type]
        )
        names = sidecar.copy_side_files(base, folder)
        for name in sidecar.copy_side_files(found.hf, folder):
            names = [*names, *([] if name in names else [name])]
        kept = found.model.dtype if dtype == "source" else dtype
        config = hf_config(read_json(base / "config.json"), found, kept)
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tell(f"{report.merged} tensors merged, {report.copied} copied; {', '.join(names)} in {final.absolute()}")
    if report.base is not None and report.differences:
        other = "original" if report.base == "dequantized" else "dequantized"
        tell(
            f"merged into the {report.base} base; the {other} one differs by up to {report.max_difference:.3g} a weight"
        )


def convert_adapter(adapter: Path, base: Path, engine: str, scanned: bool, final: Path, overwrite: bool) -> None:
    """A PEFT adapter folder as an engine's adapter checkpoint."""
    from bridge.converters.adapters import import_peft
    from bridge.outputs import new_folder

    model = ModelSpec.from_folder(base)
    with new_folder(final, overwrite=overwrite, reads=[adapter, base]) as folder:
        facts = import_peft(adapter, model, engine, scanned, folder / "0")
        sidecar.Sidecar(
            engine=engine,
            model=model,
            scanned=scanned,
            method="lora" if facts.quantization is None else "qlora",
            source={
                "origin": str(base.absolute()),
                "adapter": str(adapter.absolute()),
                "config": sidecar.sha256((base / "config.json").read_bytes()),
            },
            adapter={**facts.to_json(), "base": str(base.absolute())},
        ).write(folder)
        sidecar.copy_side_files(base, folder / sidecar.HF)
    common.say(f"adapter of rank {facts.rank}, alpha {facts.alpha:g} in {final.absolute()}")


def show_adapter(adapter: Path, base: Path, engine: str, scanned: bool, final: Path) -> None:
    """What `convert_adapter` would write, for `--dry-run`; the adapter is checked in the same way."""
    from bridge.converters.adapters import plan_peft

    facts, tensors = plan_peft(adapter, ModelSpec.from_folder(base), engine, scanned)
    for name, tensor in tensors.items():
        click.echo(f"{name}  {tensor.dtype}{list(tensor.shape)}  {common.gigabytes(tensor.bytes)}")
    total = sum(tensor.bytes for tensor in tensors.values())
    click.echo(
        f"adapter of rank {facts.rank}, alpha {facts.alpha:g} on {', '.join(facts.targets)}: {len(tensors)} arrays, "
        f"{common.gigabytes(total)} into {final.absolute()}"
    )


def of_run(run: RunSpec, engine: str, base: str) -> dict[str, Any] | None:
    """What `bridge.json` says of the adapter that a run trains; None for full training.

    Tunix's QLoRA holds all seven projections in NF4, whatever the targets, and quantizes in the weights' dtype; MaxText
    holds the targets, and quantizes in the compute dtype.
    """
    from bridge.converters.adapter_facts import TARGETS, AdapterFacts, sort_targets

    method = run.train.method
    if method not in ("lora", "qlora") and not (engine == "tunix" and run.tunix.get("lora")):
        return None
    quantized = method == "qlora"
    dtype = run.train.dtype
    if engine == "tunix":
        dtype = "bfloat16" if run.train.weight_dtype == "auto" else run.train.weight_dtype
    return AdapterFacts(
        rank=run.lora.rank,
        alpha=run.lora.alpha,
        targets=tuple(sort_targets(run.lora.targets)),
        quantization="nf4" if quantized else None,
        tile_size=run.lora.tile_size if quantized else None,
        base=base,
        base_dtype=dtype,
        quantized=TARGETS if quantized and engine == "tunix" else None,
    ).to_json()
