"""Memory of a training step, from shapes alone: what a method holds on each device, and how long a row may be.

An estimate to plan with, in bytes a device. What the arguments of the step take follows from shapes. What it holds
meanwhile follows what XLA says of Tunix's SFT, LoRA and QLoRA steps compiled for a CPU (tests/unit/test_memory.py);
MaxText trains through the same trainer. DPO, several devices and GPUs are not measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bridge import mesh
from bridge.errors import BridgeError, SpecError, UnsupportedError
from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

METHODS = (("maxtext", "sft"), ("tunix", "sft"), ("tunix", "lora"), ("tunix", "qlora"), ("tunix", "dpo"))
LENGTH_STEP = 128
# JAX takes 75 % of a GPU unless cluster.memory_fraction says otherwise; 92 % leaves CUDA, cuDNN and NCCL their part.
JAX_FRACTION, MOST_FRACTION = 0.75, 0.92
# Bytes a token of a batch: ids, positions, segments (int32 each) and the loss mask (one byte).
BATCH_BYTES = 13
# Bytes an attention score and a logit: three float32 arrays; two, and the logits in the compute dtype.
SCORE_BYTES, LOGIT_BYTES = 12, 8
SCALARS = 12
"""The optimizer's count and learning rate, with the count of its schedule."""
REASONS = {
    "sft": "changes all weights: for new knowledge, languages and deep changes",
    "dpo": "all weights, from pairs of better and worse answers, with a frozen copy as the reference",
    "lora": "adapters on a frozen base: most of what full SFT reaches, at a fraction of the memory",
    "qlora": "adapters on a base in NF4: for style, format and narrow domains; counted with the whole base unpacked "
    "within a step, as XLA does on a CPU (not measured on a GPU)",
}


@dataclass(frozen=True)
class Devices:
    """Equal accelerators: how many on each host, and the bytes of each."""

    hosts: int
    per_host: int
    bytes: int

    @property
    def count(self) -> int:
        """All of them."""
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. `parameters`, `optimizer` and `batch` are the step's arguments, the rest comes and goes."""

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    """In the compute dtype; as the backward pass goes they take the place of the weights' copies in that dtype."""
    updated: int
    """New values of the trained weights: Tunix's trainer does not give the old ones up before it has the new."""
    compute: int
    """Weights gathered from other devices, or unpacked from NF4, for the layer at work."""
    activations: int

    @property
    def arguments(self) -> int:
        """What is held between steps too."""
        return self.parameters + self.optimizer + self.batch

    @property
    def total(self) -> int:
        """All at once: an upper bound."""
        return self.arguments + self.gradients + self.updated + self.compute + self.activations


@dataclass(frozen=True)
class Option:
    """A way to train: whether it fits, on which mesh, and why it is or is not to be had."""

    engine: str
    method: str
    fits: bool
    mesh: Mesh | None
    memory: Memory | None
    longest: int
    """The largest sequence length that fits, a multiple of 128; 0 when none does."""
    reason: str


def parse_devices(text: str) -> Devices:
    """`1x24GB`, `8x80GB`, `2x8x80GB` (hosts x devices x memory); GB are 10^9 bytes, GiB 2^30.

    Raises:
        BridgeError: something else.
    """
    found = re.fullmatch(r"(?:(\d{1,5})x)?(\d{1,5})x(\d{1,4}(?:\.\d+)?)(GB|GiB)", text.strip())
    if found is None or not int(found[1] or 1) or not int(found[2]) or not float(found[3]):
        raise BridgeError(f"{text!r} does not say which devices", hint="for example 1x24GB, 8x80GB, 2x8x80GB or auto")
    unit = 10**9 if found[4] == "GB" else 1 << 30
    return Devices(int(found[1] or 1), int(found[2]), int(float(found[3]) * unit))


def adapter_parameters(model: ModelSpec, run: RunSpec) -> int:
    """Weights of the adapters: rank x (inputs + outputs) of every target in every layer."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sizes = {
        "q": model.embed + queries,
        "k": model.embed + keys,
        "v": model.embed + keys,
        "o": queries + model.embed,
        "gate": model.embed + model.mlp,
        "up": model.embed + model.mlp,
        "down": model.mlp + model.embed,
    }
    return model.layers * run.lora.rank * sum(sizes[target] for target in run.lora.targets)


def projections(model: ModelSpec) -> int:
    """Weights of the seven projections of all layers: what NF4 holds; the rest is embedding, head and norms."""
    attention = model.embed * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    return model.layers * (attention + 3 * model.embed * model.mlp)


def estimate(model: ModelSpec, run: RunSpec, engine: str, method: str, shape: Mesh, length: int) -> Memory:
    """The memory of one step.

    Args:
        model: the facts.
        run: batch, dtypes, adapters and accumulation; its own method and length do not count.
        engine, method: a pair of `METHODS`.
        shape: the mesh; weights are cut along fsdp and tensor, rows along data and fsdp.
        length: tokens a row.
    """
    del engine  # both train through the same trainer
    total, shards = model.parameters, shape.fsdp * shape.tensor
    wide = 4 if run.train.dtype == "float32" else 2
    adapters = method in ("lora", "qlora")
    trained = adapter_parameters(model, run) if adapters else total
    held = _weight_bytes(model, run, method)
    rows = run.train.batch_per_device * shape.tensor * (2 if method == "dpo" else 1)
    accumulator = 4 * trained if run.train.gradient_accumulation > 1 else 0
    trained_width = 4 if adapters or run.train.weight_dtype != "bfloat16" else 2
    layer = projections(model) // model.layers
    # With several devices, two layers are on the way and the embedding or the head is whole.
    gathered = wide * (2 * layer + model.vocab * model.embed) if shards > 1 else 0
    # XLA for the CPU unpacks every layer at once, whatever is computed again; whether a GPU's does is not measured.
    unpacked = wide * projections(model) // shards if method == "qlora" else 0
    row = 0 if adapters else trained_width * model.embed // shards
    return Memory(
        parameters=held // shards,
        optimizer=(2 * trained_width * trained + accumulator) // shards + SCALARS,
        batch=BATCH_BYTES * rows * length,
        gradients=(4 if adapters else wide) * trained // shards,
        updated=trained_width * trained // shards,
        compute=gathered // shape.tensor + unpacked,
        activations=_activations(model, rows, length, wide, shape.tensor, row),
    )


def _weight_bytes(model: ModelSpec, run: RunSpec, method: str) -> int:
    """All weights that lie on the devices between steps: policy, adapters, reference."""
    total = model.parameters
    chosen = {"float32": 4, "bfloat16": 2}.get(run.train.weight_dtype)
    if method == "sft":
        return (chosen or 4) * total
    if method == "dpo":
        return ((chosen or 4) + (4 if run.train.dtype == "float32" else 2)) * total
    adapters, base = 4 * adapter_parameters(model, run), chosen or 2
    if method == "lora":
        return base * total + adapters
    packed, tile = projections(model), run.lora.tile_size
    # The output projection is cut along head_dim, and all heads share its scales.
    output = model.layers * model.heads * model.head_dim * model.embed
    scales = (packed - output + output // model.heads) // tile
    return packed // 2 + base * scales + base * (total - packed) + adapters


def _activations(model: ModelSpec, rows: int, length: int, wide: int, tensor: int, row: int) -> int:
    """Inputs of all layers are kept; one layer is computed again, and the logits, but not at the same time.

    XLA lets an array lie where new weights will be written, if it is no larger: two arrays of logits or of scores find
    room in a new embedding and head, those of a layer in its new projections.

    Args:
        rows, length: of the batch on one device.
        wide: bytes of a value in the compute dtype.
        tensor: devices that share heads, mlp and vocabulary.
        row: bytes of one new row of the embedding on a device; 0 where no weights are new.
    """
    tokens = rows * length
    queries = (model.heads + 2 * model.kv_heads) * model.head_dim
    layer = tokens * wide * (4 * model.embed + (2 * queries + 3 * model.mlp) // tensor)
    kept = model.layers * tokens * model.embed * wide
    if tokens * wide <= row:
        layer, kept = 0, 0
    scores, logits = rows * model.heads * length * length // tensor, tokens * model.vocab // tensor
    layer += SCORE_BYTES * scores - _places(model, 4 * scores, row)
    head = (LOGIT_BYTES + wide) * logits - _places(model, 4 * logits, row)
    return kept + max(layer, head)


def _places(model: ModelSpec, size: int, row: int) -> int:
    """Bytes of up to two arrays of a size that lie in the new embedding and in a new head."""
    return size * (1 if model.tied else 2) if size <= row * model.vocab else 0


def options(model: ModelSpec, run: RunSpec, devices: Devices) -> tuple[Option, ...]:
    """Every method of `METHODS` on some devices, at the spec's batch and length."""
    return tuple(_option(model, run, devices, engine, method) for engine, method in METHODS)


def _option(model: ModelSpec, run: RunSpec, devices: Devices, engine: str, method: str) -> Option:
    try:
        shape = _mesh(model, run, devices, engine, method)
    except (SpecError, UnsupportedError) as error:
        text = "; ".join([error.message, *error.details])
        return Option(engine, method, False, None, None, 0, _with_hint(text, error.hint or _change(model, devices)))
    length = min(run.train.sequence_length, model.context)
    memory = estimate(model, run, engine, method, shape, length)
    fraction = run.cluster.memory_fraction or MOST_FRACTION
    usable = int(devices.bytes * fraction)
    longest = _longest(model, run, engine, method, shape, usable)
    fits = memory.total <= usable
    reason = REASONS[method] if fits else _short(memory, usable, longest)
    if fits and run.cluster.memory_fraction is None and memory.total > JAX_FRACTION * devices.bytes:
        reason += f"; set cluster.memory_fraction: {MOST_FRACTION} (JAX alone takes {JAX_FRACTION:.0%})"
    return Option(engine, method, fits, shape, memory, longest, reason)


def _mesh(model: ModelSpec, run: RunSpec, devices: Devices, engine: str, method: str) -> Mesh:
    """The mesh, if the engine can divide the model so.

    Raises:
        SpecError, UnsupportedError: it cannot; the rules are those of `mesh.check` and of Tunix's shardings.
    """
    shape = mesh.resolve(run.mesh, devices.count)
    mesh.check(shape, model)
    if engine == "tunix" and shape.data != 1:
        raise UnsupportedError(f"mesh.data {shape.data}: Tunix's Llama has no data axis", hint="use mesh.fsdp instead")
    if engine == "tunix" and model.embed % shape.tensor:
        raise SpecError(f"tensor {shape.tensor} does not divide embed {model.embed}")
    if method == "qlora":
        tile = run.lora.tile_size
        sizes = {"head_dim": model.head_dim, "embed": model.embed, "mlp": model.mlp}
        wrong = [
            f"{name} {size} is no multiple of lora.tile_size {tile}" for name, size in sizes.items() if size % tile
        ]
        if wrong:
            raise UnsupportedError("NF4 tiles do not fit", details=wrong, hint="lower lora.tile_size")
        if model.embed // tile % shape.fsdp:
            raise SpecError(f"fsdp {shape.fsdp} does not divide the {model.embed // tile} NF4 tiles of embed")
    return shape


def _change(model: ModelSpec, devices: Devices) -> str:
    fitting = max(count for count in range(1, devices.count + 1) if model.embed % count == 0)
    return f"{fitting} of the {devices.count} devices can share embed {model.embed} evenly"


def _with_hint(text: str, hint: str) -> str:
    return f"{text}; {hint}"


def _longest(model: ModelSpec, run: RunSpec, engine: str, method: str, shape: Mesh, usable: int) -> int:
    """By bisection: memory rises with the length."""
    low, high = 0, model.context // LENGTH_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if estimate(model, run, engine, method, shape, middle * LENGTH_STEP).total <= usable:
            low = middle
        else:
            high = middle - 1
    return low * LENGTH_STEP


def _short(memory: Memory, usable: int, longest: int) -> str:
    missing = f"{memory.total / 1e9:.1f} GB are needed, {usable / 1e9:.1f} GB are to be had"
    if longest:
        return f"{missing}; rows of {longest} tokens fit"
    if memory.arguments > usable:
        return f"{missing}: the weights and their state alone take {memory.arguments / 1e9:.1f} GB; more devices"
    return f"{missing}, even with rows of {LENGTH_STEP} tokens; more devices"


def recommend(found: Sequence[Option], devices: Devices) -> Option | None:
    """Full SFT where it fits on eight devices or more, else LoRA, else QLoRA, else what fits; None: nothing does."""
    full = [option for option in found if option.method == "sft" and devices.count >= 8]
    order = [*full, *(option for option in found if option.method in ("lora", "qlora")), *found]
    return next((option for option in order if option.fits and option.method != "dpo"), None)
