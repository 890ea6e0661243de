"""`RunSpec`: what the user wrote in `bridge.yaml`, validated.

Unknown keys are refused with a suggestion, and all problems are reported at once, each with its path.
Every key has a default except `model.source`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from bridge import spec_yaml
from bridge.errors import SpecError

Engine = Literal["maxtext", "tunix"]
Method = Literal["sft", "lora", "qlora", "dpo", "orpo"]
Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]
ENGINES: tuple[str, ...] = get_args(Engine)
METHODS: tuple[str, ...] = get_args(Method)

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the spec: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class ModelSection(Section):
    """The model to start from."""

    source: str = Field(min_length=1, description="a local Hugging Face folder, or a hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    tokenizer: str | None = Field(None, description="a folder or hub id; default: the model's own")


class WeightedSource(Section):
    """One data set of a mixture."""

    source: str = Field(min_length=1, description=".jsonl or .parquet file, or a hub data set id")
    weight: PositiveFloat = Field(1.0, description="its share of the examples, beside the other weights")


def _form(value: object) -> str:
    """Which of the forms of `data.train` is meant, so that only its own problems are said."""
    if not isinstance(value, list | tuple):
        return "text"
    return "sources" if any(isinstance(item, dict | WeightedSource) for item in value) else "texts"


Sources = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[str], Tag("texts")] | Annotated[list[WeightedSource], Tag("sources")],
    Discriminator(_form),
]
UNION_TAGS = ("text", "texts", "sources", "literal['auto']", "MeshShape")


class DataSection(Section):
    """The examples to train on."""

    train: Sources | None = Field(
        None,
        description=".jsonl or .parquet file(s), or a hub data set id; "
        "or a mixture: a list of {source: FILE, weight: 3}, weights being shares of the examples",
    )
    eval: str | list[str] | None = Field(None, description="the same without weights, for evaluation")
    split: str = Field("train", description="for hub data sets")
    column: str | None = Field(
        "messages", description="the chat column; prompt/completion or chosen/rejected are found"
    )
    loss_on: Literal["completion", "all"] = Field("completion", description="train on the assistant's turns, or on all")
    packing: bool = Field(False, description="several examples a row, kept apart by attention and positions")
    prompts: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, max_length=16, description="asked of the model before and after training, for the report's answers"
    )

    @field_validator("eval", mode="before")
    @classmethod
    def _no_weights(cls, value: Any) -> Any:
        if _form(value) == "sources":
            raise ValueError("weights mean nothing here: every example of the evaluation set counts once")
        return value

    @property
    def train_names(self) -> tuple[str, ...]:
        """The sources of `train`, without their weights."""
        values = [self.train] if isinstance(self.train, str) else self.train or []
        return tuple(value if isinstance(value, str) else value.source for value in values)


class Schedule(Section):
    """The learning rate over the run."""

    kind: Literal["cosine", "constant"] = Field("cosine", description="decay after the warm-up")
    warmup: Fraction = Field(0.1, description="fraction of the steps")
    final: Fraction = Field(0.1, description="last learning rate, as a fraction of the peak")


class TrainSection(Section):
    """How to train."""

    method: Method = "sft"
    steps: Positive | None = Field(100, description="optimizer steps; null with epochs")
    epochs: PositiveFloat | None = Field(
        None, description="in the place of steps: times that the data is gone through, rows after packing"
    )
    sequence_length: Positive = Field(1024, description="tokens a row")
    batch_per_device: Positive = Field(1, description="rows a device and step")
    gradient_accumulation: Positive = 1
    learning_rate: PositiveFloat = 2.0e-5
    schedule: Schedule = Schedule()  # type: ignore[call-arg]
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    eval_every: Count = Field(25, description="steps; 0: never")
    save_every: Positive = Field(50, description="steps")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="compute")
    weight_dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="auto: float32 for full SFT, DPO, ORPO; bfloat16 base for LoRA; NF4 base for QLoRA"
    )
    keep: Positive = Field(2, description="engine checkpoints kept, the best by eval loss beside them")
    seed: Count = 0

    @property
    def total_steps(self) -> int:
        """The steps of a run; a SpecError where it has epochs, and nobody has counted the data yet."""
        if self.steps is None:
            raise SpecError("train.epochs is not turned into steps yet: the data has not been counted")
        return self.steps

    @model_validator(mode="before")
    @classmethod
    def _epochs_alone(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("epochs") is not None and "steps" not in values:
            return {**values, "steps": None}
        return values

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> TrainSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps {self.steps} and epochs {self.epochs:g}: give one, and null for the other")
        if self.steps is None and self.epochs is None:
            raise ValueError("neither steps nor epochs is given")
        return self


class LoraSection(Section):
    """Adapters, for lora and qlora."""

    rank: Positive = 16
    alpha: PositiveFloat = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of the adapters' inputs (tunix alone)")
    targets: Annotated[tuple[Projection, ...], Field(min_length=1)] = ("q", "k", "v", "o", "gate", "up", "down")
    tile_size: Positive = Field(32, description="values that share one NF4 scale (qlora)")


class PreferenceSection(Section):
    """For dpo and orpo."""

    beta: PositiveFloat = 0.1
    lambda_orpo: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0


class MeshShape(Section):
    """Devices along each axis; -1 once: what is left."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


class SlurmSection(Section):
    """For `launcher: slurm`."""

    partition: str | None = None
    account: str | None = None
    time: str | None = Field(None, description="limit of the job, as sbatch takes it: 12:00:00")
    cpus: Positive | None = Field(None, description="CPUs a process; Slurm's own default may be one")
    options: tuple[str, ...] = Field((), description="more options of sbatch: --exclusive, --qos=high")
    setup: tuple[str, ...] = Field((), description="shell lines before the processes start: module load cuda")


class JobSetSection(Section):
    """For `launcher: jobset` (Kubernetes)."""

    image: str | None = Field(None, description="container image with bridge and the engine")
    namespace: str = "default"
    mount: str | None = Field(None, description="where the shared storage lies in the pods, and here; holds workdir")
    claim: str | None = Field(None, description="PersistentVolumeClaim (ReadWriteMany) of the shared storage")
    bucket: str | None = Field(None, description="Cloud Storage bucket in its place, through gcsfuse")
    service_account: str | None = Field(None, description="of the pods; a bucket needs one that may read and write it")
    secret: str | None = Field(None, description="Secret whose key HF_TOKEN is the Hugging Face token")
    accelerator: str | None = Field(None, description="GKE's name: tpu-v6e-slice, nvidia-h100-80gb")
    topology: str | None = Field(None, description="of a TPU slice: 4x4")
    slices: Positive = Field(1, description="TPU slices; they divide cluster.nodes")
    restarts: Count = Field(0, description="times that the whole set is started again")


class ClusterSection(Section):
    """Where the processes run."""

    launcher: Literal["local", "ssh", "slurm", "jobset"] = "local"
    nodes: Positive = 1
    processes: Positive = Field(1, description="engine processes a node")
    devices: Positive | None = Field(None, description="devices a node, shared out among its processes")
    hosts: tuple[str, ...] = Field((), description="for ssh, as ssh takes them; the first is the coordinator")
    hosts_file: str | None = Field(None, description="a host a line, in the place of hosts")
    coordinator: str | None = Field(None, description="name or address of the first host, as the others reach it")
    port: Annotated[int, Field(gt=0, lt=65536)] | None = Field(None, description="of the coordinator")
    init_timeout: Positive = Field(120, description="seconds for all processes to join")
    heartbeat_timeout: Positive = Field(100, description="seconds without a sign of life that end a run")
    stall_timeout: Positive = Field(1800, description="seconds without a finished step that end a run")
    grace: Positive = Field(30, description="seconds to save a checkpoint in, when a run is stopped")
    hardware: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="of the GPU, for XLA")
    xla_flags: tuple[str, ...] = ()
    env: dict[str, str] = Field({}, description="more environment of the processes: NCCL_SOCKET_IFNAME")
    environment: Literal["auto", "none"] = Field("auto", description="heed Slurm, torchrun, SkyPilot, MPI, dstack")
    python: str | None = Field(None, description="interpreter on the other hosts; default: this one's path")
    ssh_options: tuple[str, ...] = Field((), description="more arguments of ssh: -p 2222")
    slurm: SlurmSection = SlurmSection()  # type: ignore[call-arg]
    jobset: JobSetSection = JobSetSection()  # type: ignore[call-arg]

    @field_validator("env")
    @classmethod
    def _no_secret(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ValueError(f"{name!r} is no name of an environment variable")
            if "TOKEN" in name.upper() or "SECRET" in name.upper() or "PASSWORD" in name.upper():
                raise ValueError(f"{name}: a secret does not belong in a spec, set it in the environment")
        return env


class RunSpec(Section):
    """The whole of `bridge.yaml`."""

    model: ModelSection
    engine: Engine = "maxtext"
    workdir: str = "."
    data: DataSection = DataSection()  # type: ignore[call-arg]
    train: TrainSection = TrainSection()  # type: ignore[call-arg]
    lora: LoraSection = LoraSection()  # type: ignore[call-arg]
    preference: PreferenceSection = PreferenceSection()
    mesh: Literal["auto"] | MeshShape = "auto"
    cluster: ClusterSection = ClusterSection()  # type: ignore[call-arg]
    maxtext: dict[str, Any] = Field({}, description="raw engine settings, passed on last")
    tunix: dict[str, Any] = {}

    @field_validator("maxtext", "tunix")
    @classmethod
    def _no_token(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for key in settings:
            if not re.fullmatch(r"\w[\w.-]*", key, re.ASCII):
                raise ValueError(f"{key!r} is no name of a setting")
            if "token" in key.lower() and "access" in key.lower():
                raise ValueError(f"{key}: a token does not belong in a spec, set HF_TOKEN or log in")
        return settings


def load(path: Path, overrides: tuple[str, ...] = ()) -> RunSpec:
    """Read a spec and apply `KEY=VALUE` overrides such as `train.steps=5`.

    Raises:
        SpecError: unreadable, no YAML, or not valid; all problems at once.
    """
    return parse(spec_yaml.read_text(path), overrides, where=str(path))


def parse(text: str, overrides: tuple[str, ...] = (), where: str = "bridge.yaml") -> RunSpec:
    """As `load`, from text."""
    values = spec_yaml.read_values(text, where)
    if not isinstance(values, dict):
        raise SpecError(f"{where} must be a mapping with at least model.source")
    spec_yaml.override(values, overrides)
    try:
        return RunSpec.model_validate(spec_yaml.typed(values))
    except ValidationError as error:
        # Without the original: its text repeats the values, and a secret may be among them.
        problems = spec_yaml.explain(error, _fields, UNION_TAGS)
        raise SpecError(f"{where}: {len(problems)} problem(s)", details=problems) from None


def _fields(location: tuple[int | str, ...]) -> list[str]:
    """The keys of the section at a place of a ValidationError."""
    section: type[Section] = RunSpec
    for part in location:
        inner = section.model_fields[part].annotation if part in section.model_fields else None
        inner = {"MeshShape": MeshShape, "sources": WeightedSource}.get(str(part), inner)
        if isinstance(inner, type) and issubclass(inner, Section):
            section = inner
    return list(section.model_fields)
