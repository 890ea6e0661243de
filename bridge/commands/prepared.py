"""A run made ready: what `config` prints and `launch` starts."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from bridge import mesh, places, rope, sidecar
from bridge.commands import common, epochs, placing
from bridge.commands.placing import Placed
from bridge.commands.workspace import Workspace
from bridge.errors import CheckpointError, SpecError
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

PROGRAMS = {"maxtext": "config.yml", "tunix": "train.py"}


@dataclass(frozen=True)
class Prepared:
    """A run, resolved: the model's facts, where all lies, and the generated text."""

    workspace: Workspace
    run: RunSpec
    run_dir: Path
    engine: str
    model: ModelSpec
    converted: Path
    facts: sidecar.Sidecar | None
    hardware: str
    text: str
    frequencies: tuple[float, ...]
    placed: Placed
    length: epochs.Length | None = None
    """How the run's steps follow from its epochs, where the spec has epochs."""

    @property
    def stored(self) -> Path:
        """Where the checkpoints of the run go: its folder, or the place of its name in a bucket."""
        return self.workspace.stored(self.run_dir)

    @property
    def program(self) -> str:
        """The file name of the generated text in the run's folder."""
        return PROGRAMS[self.engine]


def prepare(workspace: Workspace, engine: str, method: str | None, name: str | None) -> Prepared:
    """Resolve a run from the spec; nothing is written.

    Raises:
        SpecError, UnsupportedError: the spec does not fit the engine or the devices; of epochs, the data is not sound.
        LaunchError: the settings and this host's environment make no cluster.
        AccessError: of epochs, the data to count is not to be had.
    """
    run = workspace.run
    if method is not None and method != run.train.method:
        run = run.model_copy(update={"train": run.train.model_copy(update={"method": method})})
    run_dir = workspace.run_dir(name or f"{engine}-{run.train.method}")
    converted = workspace.converted(engine)
    facts = sidecar.read(converted)
    model = facts.model if facts else ModelSpec.from_folder(workspace.model_folder(download=False))
    run = keeping_the_base(run, engine, facts.dtypes.get("all", model.dtype) if facts else model.dtype)
    if run.train.sequence_length > model.context:
        raise SpecError(
            f"train.sequence_length {run.train.sequence_length} exceeds the model's {model.context} positions"
        )
    hardware = hardware_of(run)
    frequencies = rope.inverse_frequencies(model)
    cluster = placing.cluster_of(workspace, run, run_dir.name, hardware, os.environ)
    total = placing.total_devices(run, cluster, hardware, os.environ)
    placed = Placed(cluster, placing.site_of(run, cluster, run_dir, hardware, total, os.environ))
    shape = mesh.for_run(run, model, total)
    run, length = epochs.resolve(workspace, run, total, converted, common.say)
    small = run_dir if places.in_bucket(converted) else converted  # where `begin` puts them
    tokenizer = str(workspace.tokenizer_folder()) if run.model.tokenizer else str(small / sidecar.HF)
    text = render(engine, run, model, shape, hardware, frequencies, run_dir, converted, tokenizer, facts, workspace)
    return Prepared(
        workspace, run, run_dir, engine, model, converted, facts, hardware, text, frequencies, placed, length
    )


def keeping_the_base(run: RunSpec, engine: str, source: str) -> RunSpec:
    """Adapters on a base that bfloat16 would round are trained on it in float32: it is what they are exported with.

    MaxText's scanned LoRA needs the compute dtype to be the same.
    """
    train = run.train
    if train.method not in ("lora", "qlora") or train.weight_dtype != "auto" or source == "bfloat16":
        return run
    changes = {"weight_dtype": "float32"} | ({"dtype": "float32"} if engine == "maxtext" else {})
    return run.model_copy(update={"train": train.model_copy(update=changes)})


def render(
    engine: str,
    run: RunSpec,
    model: ModelSpec,
    shape: mesh.Mesh,
    hardware: str,
    frequencies: tuple[float, ...],
    run_dir: Path,
    converted: Path,
    tokenizer: str,
    facts: sidecar.Sidecar | None,
    workspace: Workspace,
) -> str:
    """The engine's config or program."""
    if engine == "maxtext":
        from bridge.configs import maxtext

        place = maxtext.Place(
            run_name=run_dir.name,
            runs_dir=str(workspace.stored(run_dir).parent),
            checkpoint=str(converted / "0" / "items"),
            tokenizer=tokenizer,
            scanned=facts.scanned if facts else True,
            hardware=hardware,
            train_files=workspace.data_files(list(run.data.train_names)),
        )
        return maxtext.render(run, model, shape, place)
    from bridge.configs import tunix

    checkpoint = str(converted / "0" / "model_params")
    stored = str(workspace.stored(run_dir))
    return tunix.render(run, model, frequencies, checkpoint, stored, tokenizer, str(workspace.base))


def hardware_of(run: RunSpec) -> str:
    """cpu, gpu or tpu: the spec's, else what this host has."""
    if run.cluster.hardware != "auto":
        return run.cluster.hardware
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu"
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        return "gpu"
    if Path("/dev/accel0").exists() or any(Path("/dev/vfio").glob("[0-9]*")):
        return "tpu"
    return "cpu"


def require_converted(prepared: Prepared) -> sidecar.Sidecar:
    """The converted checkpoint's facts, compared with the spec's model where that is at hand.

    Raises:
        CheckpointError: there is no converted checkpoint, or it was made from another config.json.
    """
    if prepared.facts is None:
        raise CheckpointError(
            f"{prepared.converted} does not exist, or has no {sidecar.FILE}",
            hint=f"bridge convert --to {prepared.engine}",
        )
    local = prepared.workspace.path(prepared.run.model.source)
    if local.is_dir() and prepared.facts.source.get("config") != sidecar.sha256((local / "config.json").read_bytes()):
        raise CheckpointError(
            f"{prepared.converted} was converted from another config.json than {local}'s",
            hint=f"bridge convert --to {prepared.engine} --overwrite",
        )
    return prepared.facts
