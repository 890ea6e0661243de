"""`bridge convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge import outputs, places, sidecar
from bridge.commands import adapter as adapters
from bridge.commands import common
from bridge.commands.workspace import Workspace
from bridge.errors import BridgeError, CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from bridge.converters.plan import Move


@click.command(
    epilog=common.examples(
        "bridge convert --to maxtext", "bridge convert --to tunix ~/models/Llama-3.1-8B --out ckpt --check"
    )
)
@click.argument("model", required=False)
@click.option("--base", type=common.folder_type, help="HF folder of the model, for a PEFT adapter.")
@click.option("--to", "engine", type=click.Choice(["maxtext", "tunix"]), help="Default: the spec's engine.")
@click.option("--out", type=common.place_type, help="Default: checkpoints/<engine> in the workdir.")
@click.option(
    "--dtype",
    type=click.Choice(["source", "bfloat16", "float32"]),
    default="source",
    show_default=True,
    help="Stored dtype. `source` keeps every bit: MaxText's query kernel, into which 1/sqrt(head_dim) is folded, is "
    "then stored in float32. `bfloat16` rounds it: at head_dim 128, 14.7 % of its values come back changed.",
)
@click.option("--unscanned", is_flag=True, help="MaxText: one array a layer (scan_layers: false).")
@click.option(
    "--check", is_flag=True, help="Read the result back through stock Orbax, compare every value; refuse NaN and Inf."
)
@click.option("--compression", type=click.Choice(["none", "zstd:1", "zstd:3"]), default="none", show_default=True)
@click.option(
    "--memory",
    default="1GiB",
    show_default=True,
    help="Resident memory to stay below. Compressed output is faster with more; uncompressed needs about 300 MiB.",
)
@common.spec_option
@common.overwrite_option
@common.dry_run_option
def command(
    model: str | None,
    base: Path | None,
    engine: str | None,
    out: Path | None,
    dtype: str,
    unscanned: bool,
    check: bool,
    compression: str,
    memory: str,
    spec: Path | None,
    overwrite: bool,
    dry_run: bool,
) -> None:
    """Convert a Hugging Face folder into an engine's checkpoint, on the CPU, in bounded memory.

    MODEL is a folder, here or in a bucket (gs://), or a hub id; default: model.source of the spec. Values are kept bit
    for bit. A PEFT adapter folder, with its --base, becomes the engine's adapter checkpoint.
    """
    common.on_cpu()
    workspace = common.maybe_workspace(spec)
    engine = engine or (workspace.run.engine if workspace else None)
    if engine is None:
        raise BridgeError("to which engine?", hint="--to maxtext or --to tunix, or a spec")
    if model is not None and (places.place(model) / "adapter_config.json").is_file():
        if out is None:
            raise BridgeError("where to?", hint="--out DIR names the adapter's checkpoint")
        folder = base or (workspace.model_folder() if workspace else None)
        if folder is None:
            raise BridgeError("which base model has the adapter?", hint="--base DIR names its Hugging Face folder")
        refuse_of_adapters(dtype=dtype, compression=compression, check=check)
        if dry_run:
            adapters.show_adapter(places.place(model), folder, engine, not unscanned, out)
        else:
            adapters.convert_adapter(places.place(model), folder, engine, not unscanned, out, overwrite)
        return
    folder, origin, revision = _source(model, workspace)
    if out is None and workspace is None:
        raise BridgeError("where to?", hint="--out DIR, or a bridge.yaml in this folder")
    final = places.place(out if out is not None else workspace.converted(engine))  # type: ignore[union-attr]
    scanned = not unscanned
    job = _Job(folder, engine, scanned, dtype, common.memory_for(memory, folder, final))
    if dry_run:
        job.show(final)
        return
    job.run(final, origin, revision, compression, overwrite, check)
    if model is None and workspace is not None:
        _pin(workspace, revision)


def _source(model: str | None, workspace: Workspace | None) -> tuple[Path, str, str | None]:
    """The folder, what the user called it, and the revision."""
    if model is not None:
        folder = places.place(model).expanduser().absolute()
        if outputs.is_unfinished(folder):
            raise CheckpointError(f"{model} was never finished: what wrote it was stopped, or is still at work")
        if folder.is_dir():
            return folder, str(folder), None
        if isinstance(folder, places.BucketPath):
            raise CheckpointError(f"there is nothing at {folder}")
        from bridge import hub

        if not hub.is_id(model):
            raise BridgeError(f"{model} is neither a folder nor a hub id")
        found = hub.resolve(model)
        return found, model, hub.commit_of(found)
    if workspace is None:
        raise BridgeError("convert what?", hint="name a folder or a hub id, or run this beside a bridge.yaml")
    source, asked = workspace.run.model.source, workspace.run.model.revision
    folder = workspace.model_folder()
    from bridge import hub, hub_lock

    commit = hub.commit_of(folder)
    if commit is not None:
        pinned = hub_lock.commit(workspace.base, source, asked) is not None
        since = f", as {sidecar.FILE} has it; bridge download --update moves it" if pinned else ""
        common.say(f"{source}: commit {commit[:12]}{since}")
    return folder, source, commit or asked


def _pin(workspace: Workspace, commit: str | None) -> None:
    """Note the commit of a hub id in the spec's lock: what was converted once is what is taken again."""
    from bridge import hub, hub_lock

    model = workspace.run.model
    if commit is None or workspace.path(model.source).is_dir() or not hub.is_id(model.source):
        return
    if hub_lock.commit(workspace.base, model.source, model.revision) != commit:
        hub_lock.write(workspace.base, model.source, model.revision, commit)


class _Job:
    """One conversion, planned and checked against the headers before a byte moves."""

    def __init__(self, folder: Path, engine: str, scanned: bool, dtype: str, memory: int) -> None:
        from bridge.converters import check, plan, tokenizer_file
        from bridge.converters.hf_store import HfSource
        from bridge.converters.transfer import Budget
        from bridge.model_spec import ModelSpec

        self.folder, self.engine, self.scanned, self.dtype = folder, engine, scanned, dtype
        self.model = ModelSpec.from_folder(folder)
        self.table = plan.table_for(self.model, engine)
        self.moves: tuple[Move, ...] = plan.make_plan(self.table, self.model, scanned)
        self.source = HfSource(folder)
        self.left_out = check.source(self.moves, self.source, self.table, self.model)
        tokenizer_file.check(folder, self.model.vocab)
        warn_if_endless(folder)
        self.budget = Budget(memory)

    @property
    def target_bytes(self) -> int:
        """Bytes of the engine's arrays, uncompressed."""
        return sum(width for _, _, width in self.arrays())

    def arrays(self) -> list[tuple[Move, str, int]]:
        """Every array with its dtype and bytes."""
        import math

        from bridge.converters.plan import ITEM_BYTES
        from bridge.converters.transfer import engine_dtype

        found = []
        for move in self.moves:
            dtype = engine_dtype(move, [self.source.headers[name].dtype for name in move.hf], self.dtype)
            found.append((move, dtype, math.prod(move.engine_shape) * ITEM_BYTES[dtype]))
        return found

    def show(self, final: Path) -> None:
        """The plan, for `--dry-run`."""
        for move, dtype, size in self.arrays():
            click.echo(f"{move.name}  {dtype}{list(move.engine_shape)}  {common.gigabytes(size)}  <- {_names(move)}")
        arrays, total = len(self.moves), common.gigabytes(self.target_bytes)
        click.echo(f"{self.model.parameters:,} parameters, {arrays} arrays, {total} into {final.absolute()}")
        memory, slab = common.gigabytes(self.budget.memory), common.gigabytes(self.budget.slab_bytes)
        click.echo(f"memory: at most {memory}, slabs of {slab}")

    def run(
        self, final: Path, origin: str, revision: str | None, compression: str, overwrite: bool, check: bool
    ) -> None:
        """Write the checkpoint, its sidecar and the small files."""
        from bridge.converters import check as checks
        from bridge.converters.orbax_store import TreeSink
        from bridge.converters.transfer import import_checkpoint
        from bridge.outputs import new_folder

        total = sum(move_bytes(move, self.source.headers) for move in self.moves)
        needed = self.target_bytes
        with new_folder(final, overwrite=overwrite, needs_bytes=needed, reads=[self.folder], straight=True) as folder:
            sink = TreeSink(folder / "0", self.table.item, compression)  # type: ignore[arg-type]
            with self.source, common.progress(f"convert to {self.engine}", total) as progress:
                import_checkpoint(self.moves, self.model, self.source, sink, self.dtype, self.budget, progress)
            sink.scalars(self.table.extra)
            sink.finish({"scan_layers": self.scanned} if self.engine == "maxtext" else {})
            sidecar.copy_side_files(self.folder, folder / sidecar.HF)
            if check:
                with self.source, common.progress("check", total) as progress:
                    checks.against_source(
                        self.moves, self.model, self.source, folder / "0" / self.table.item, self.budget, progress
                    )
            self._sidecar(origin, revision).write(folder)
        common.say(f"{self.model.parameters:,} parameters, {len(self.moves)} arrays in {final.absolute()}")
        if check:
            common.say("checked: every value read back through Orbax equals the source")

    def _sidecar(self, origin: str, revision: str | None) -> Any:
        kinds = {name: self.source.headers[name].dtype for move in self.moves for name in move.hf}
        common_dtype = max(set(kinds.values()), key=list(kinds.values()).count)
        files = sorted({stored.file for stored in self.source.stored.values()})
        return sidecar.Sidecar(
            engine=self.engine,
            model=self.model,
            scanned=self.scanned,
            source=sidecar.source_facts(self.folder, files, origin, revision),
            dtypes={"all": common_dtype, **{k: v for k, v in kinds.items() if v != common_dtype}},
            layout={
                "requires": self.table.requires,
                "scaled": {rule.engine: rule.scale for rule in self.table.rules if rule.scale},
                "left_out": self.left_out,
            },
        )


def refuse_of_adapters(dtype: str, compression: str, check: bool) -> None:
    """Options that mean nothing for an adapter, which is small and keeps its dtype.

    Raises:
        UnsupportedError: one was given.
    """
    given = {"--dtype": dtype != "source", "--compression": compression != "none", "--check": check}
    named = ", ".join(option for option, told in given.items() if told)
    if named:
        raise UnsupportedError(
            f"{named} of an adapter: its factors are kept as they are, uncompressed",
            hint="bridge verify compares a converted adapter, switched on in the engine, with PyTorch",
        )


def warn_if_endless(folder: Path) -> None:
    """Say it when answers of this model would not end, as its small files are."""
    from bridge.converters import tokenizer_file

    reason = tokenizer_file.never_stops(folder)
    if reason:
        common.say(f"warning: {reason}: answers will not end there; add it to eos_token_id")


def move_bytes(move: Move, headers: dict[str, Any]) -> int:
    """Source bytes of one array."""
    return sum(headers[name].bytes for name in move.hf)


def _names(move: Move) -> str:
    return move.hf[0] if len(move.hf) == 1 else f"{move.hf[0]} ... {move.hf[-1]}"
