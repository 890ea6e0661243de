"""`bridge export`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge import places, sidecar
from bridge.commands import adapter as adapters
from bridge.commands import checkpoint as checkpoints
from bridge.commands import common, pushing
from bridge.commands.convert import warn_if_endless
from bridge.errors import BridgeError, CheckpointError, UnsupportedError
from bridge.model_spec import read_json

if TYPE_CHECKING:
    from bridge.commands.checkpoint import Checkpoint
    from bridge.converters.adapter_facts import AdapterFacts
    from bridge.converters.plan import Tensor


@click.command(
    epilog=common.examples("bridge export --to hf", "bridge export --to hf runs/maxtext-sft --step 50 --out final")
)
@click.argument("checkpoint", required=False, type=common.place_type)
@click.option("--to", "form", type=click.Choice(["hf", "peft"]), default="hf", show_default=True)
@click.option("--out", type=common.place_type, help="Default: export/<form> in the workdir.")
@click.option(
    "--base",
    type=common.folder_type,
    help="HF folder of the model: for a checkpoint without bridge.json, and to merge an adapter into.",
)
@click.option(
    "--merge-base",
    type=click.Choice(["dequantized", "original"]),
    default="dequantized",
    show_default=True,
    help="Of a QLoRA adapter: the base it was trained on, or the one before its quantization (another model).",
)
@click.option(
    "--dtype",
    type=click.Choice(["source", "bfloat16", "float16", "float32"]),
    default="source",
    show_default=True,
    help="`source`: as the model had it before. Every value is rounded once.",
)
@click.option("--max-shard-size", default="5GB", show_default=True)
@click.option("--memory", default="1GiB", show_default=True, help="Resident memory to stay below.")
@click.option("--step", type=int, help="Default: the best by eval loss, else the newest.")
@click.option("--push", metavar="REPO_ID", help="Upload the export to this repository of the hub; private when new.")
@click.option("--public", is_flag=True, help="With --push: for everybody to see.")
@adapters.options
@common.spec_option
@common.overwrite_option
@common.dry_run_option
def command(
    checkpoint: Path | None,
    form: str,
    out: Path | None,
    base: Path | None,
    merge_base: str,
    dtype: str,
    max_shard_size: str,
    memory: str,
    step: int | None,
    push: str | None,
    public: bool,
    spec: Path | None,
    overwrite: bool,
    dry_run: bool,
    about: adapters.Options,
) -> None:
    """Turn a checkpoint back into a complete Hugging Face folder, or an adapter into a PEFT folder.

    An adapter is merged into its base with --to hf.

    CHECKPOINT is a run, a step or a checkpoint folder; default: the newest run of the spec.

    --push asks the hub first whether your login may write, and uploads at the end, in one commit, with a model card. An
    export that is there already is compared with the checkpoint and pushed as it is.
    """
    if public and push is None:
        raise click.UsageError("--public goes with --push REPO_ID.")
    target = pushing.ready(push, public) if push is not None else None
    if target is not None and dry_run:
        common.say(f"would be pushed to {target.described}")
    common.on_cpu()
    workspace = common.maybe_workspace(spec)
    found = checkpoints.find(workspace, checkpoint, base, step)
    common.say(f"exporting {found.chosen.item} ({found.chosen.reason})")
    if out is None and workspace is None:
        raise BridgeError("where to?", hint="--out DIR, or a bridge.yaml in this folder")
    final = places.place(out if out is not None else workspace.export(form))  # type: ignore[union-attr]
    if target is not None and isinstance(final, places.BucketPath):
        raise UnsupportedError(f"{final} is in a bucket, --push takes a folder of this host", hint="--out DIR")
    shard_bytes, budget = common.parse_size(max_shard_size), common.memory_for(memory, found.chosen.item)
    facts = None
    make: Callable[[Path, bool], None]
    if found.tree.adapters:
        facts = about.facts(found)
        folder = adapters.base_folder(found, facts, base, workspace) if form == "hf" else None
        if dry_run:
            click.echo(f"adapter of rank {facts.rank}, alpha {facts.alpha:g} on {', '.join(facts.targets)}: {final}")
            return
        if folder is None:
            make = partial(adapters.write_peft, found, facts)
        else:
            make = partial(_merged, found, facts, folder, dtype, shard_bytes, merge_base)
    else:
        if form == "peft":
            raise UnsupportedError(f"{found.chosen.item} holds full weights, no adapter", hint="bridge export --to hf")
        tensors = target_tensors(found, dtype)
        if dry_run:
            show(found, tensors, final)
            return
        make = partial(_full, found, tensors, shard_bytes, budget)
    if target is None:
        make(final, overwrite)
        return
    pushing.begin(target)
    if not overwrite and final.is_dir() and any(final.iterdir()):
        pushing.require_same(found, final, make, None if found.tree.adapters else tensors)
    else:
        make(final, overwrite)
    pushing.push(target, final, found, form, facts)


def _full(
    found: Checkpoint, tensors: dict[str, Tensor], shard_bytes: int, memory: int, final: Path, overwrite: bool
) -> None:
    write(found, tensors, final, shard_bytes, memory, overwrite)


def _merged(
    found: Checkpoint,
    facts: AdapterFacts,
    base: Path,
    dtype: str,
    shard_bytes: int,
    merge_base: str,
    final: Path,
    overwrite: bool,
) -> None:
    adapters.write_merged(found, facts, base, final, dtype, shard_bytes, merge_base, overwrite)


def target_tensors(found: Checkpoint, dtype: str) -> dict[str, Tensor]:
    """The tensors of the export, in the order of the layers."""
    from bridge.converters.plan import Tensor

    def kind(name: str) -> str:
        if dtype != "source":
            return dtype
        return found.facts.hf_dtype(name) if found.facts else found.model.dtype

    tensors = {name: Tensor(move.hf_shape, kind(name)) for move in found.plan for name in move.hf}
    return dict(
        sorted(
            tensors.items(),
            key=lambda item: (
                [int(part) if part.isdigit() else part for part in item[0].split(".")]
                if item[0].startswith("model.layers.")
                else [item[0]]
            ),
        )
    )


def show(found: Checkpoint, tensors: dict[str, Tensor], final: Path) -> None:
    """The plan, for `--dry-run`."""
    found.open()
    for name, tensor in tensors.items():
        click.echo(f"{name}  {tensor.dtype}{list(tensor.shape)}")
    total = sum(tensor.bytes for tensor in tensors.values())
    click.echo(f"{len(tensors)} tensors, {common.gigabytes(total)} into {final.absolute()}")


def write(
    found: Checkpoint, tensors: dict[str, Tensor], final: Path, shard_bytes: int, memory: int, overwrite: bool
) -> None:
    """Write weights, config.json and the small files; all or nothing."""
    from bridge.converters.hf_store import HfSink
    from bridge.converters.transfer import Budget, export_checkpoint
    from bridge.outputs import new_folder

    source = found.open(memory=memory)
    if not (found.hf / "config.json").is_file():
        raise CheckpointError(f"{found.hf} has no config.json", hint="--base DIR names the Hugging Face folder")
    warn_if_endless(found.hf)
    if source.scratch_bytes:
        common.say(
            f"stored in chunks too large for {common.gigabytes(memory)} of memory (--memory): unpacked first, up to "
            f"{common.gigabytes(source.scratch_bytes)} on the disk at a time"
        )
    total = sum(tensor.bytes for tensor in tensors.values())
    reads = [found.chosen.item, found.hf]
    needed = total + source.scratch_bytes
    with new_folder(final, overwrite=overwrite, needs_bytes=needed, reads=reads) as folder:
        source.scratch = folder.parent  # on this host, wherever the output goes
        with HfSink(folder, tensors, shard_bytes) as sink, common.progress("export to hf", total) as progress:
            export_checkpoint(found.plan, found.model, source, sink, Budget(memory), progress)
        names = sidecar.copy_side_files(found.hf, folder)
        dtypes = {tensor.dtype for tensor in tensors.values()}
        config = hf_config(
            read_json(found.hf / "config.json"), found, dtypes.pop() if len(dtypes) == 1 else found.model.dtype
        )
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if found.tree.left_out:
        common.say(f"left out, no weights: {', '.join(_roots(found.tree.left_out))}")
    common.say(f"{len(tensors)} tensors and {', '.join(names)} in {final.absolute()}")


def hf_config(config: dict[str, Any], found: Checkpoint, dtype: str) -> dict[str, Any]:
    """The source's config.json with RoPE and dtype in both spellings, so that transformers 4 and 5 read the same.

    transformers 4 knows `rope_scaling` and `torch_dtype` only, and falls back to theta 10000 in silence.
    """
    config = {key: value for key, value in config.items() if key != "_name_or_path"}
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    rope = found.model.rope_config()
    return {**config, "architectures": architectures, **rope, "dtype": dtype, "torch_dtype": dtype}


def _roots(names: tuple[str, ...]) -> list[str]:
    return sorted({name.split(".rngs")[0] + ".rngs" if ".rngs" in name else name.split(".")[0] for name in names})
