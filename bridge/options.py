"""What fits on some devices: every way to train, its mesh and memory, how long a row may be, and which one to take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bridge import mesh
from bridge.errors import BridgeError, SpecError, UnsupportedError
from bridge.memory import Memory, estimate
from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

METHODS = (
    ("maxtext", "sft"),
    ("tunix", "sft"),
    ("tunix", "lora"),
    ("maxtext", "lora"),
    ("tunix", "qlora"),
    ("maxtext", "qlora"),
    ("tunix", "dpo"),
)
LENGTH_STEP, MOST_DEVICES = 128, 1024
# JAX takes 75 % of a GPU unless cluster.memory_fraction says otherwise; 92 % leaves CUDA, cuDNN and NCCL their part.
JAX_FRACTION, MOST_FRACTION = 0.75, 0.92
REASONS = {
    "sft": "changes all weights: for new knowledge, languages and deep changes",
    "dpo": "all weights, from pairs of better and worse answers, with a frozen copy as the reference",
    "lora": "adapters on a frozen base: most of what full SFT reaches, at a fraction of the memory",
    "qlora": "adapters on a base in NF4, unpacked layer by layer: for style, format and narrow domains",
}
MAXTEXT_ADAPTERS = "; MaxText's loop over layers copies the frozen ones within a step"


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
    usable = _usable(run, devices)
    longest = _longest(model, run, engine, method, shape, usable)
    fits = memory.total <= usable
    note = MAXTEXT_ADAPTERS if engine == "maxtext" and method in ("lora", "qlora") else ""
    reason = REASONS[method] + note if fits else _short(model, run, devices, engine, method, memory, longest)
    if fits and run.cluster.memory_fraction is None and memory.total > JAX_FRACTION * devices.bytes:
        reason += f"; set cluster.memory_fraction: {MOST_FRACTION} (JAX alone takes {JAX_FRACTION:.0%})"
    return Option(engine, method, fits, shape, memory, longest, reason)


def _mesh(model: ModelSpec, run: RunSpec, devices: Devices, engine: str, method: str) -> Mesh:
    """The mesh, if the engine can divide the model so.

    Raises:
        SpecError, UnsupportedError: it cannot; the rules are those of `mesh.check` and of Tunix's shardings.
    """
    shape = mesh.for_run(
        run.model_copy(update={"train": run.train.model_copy(update={"method": method})}), model, devices.count
    )
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


def _short(
    model: ModelSpec, run: RunSpec, devices: Devices, engine: str, method: str, memory: Memory, longest: int
) -> str:
    """What is missing, and what would have to change."""
    usable = _usable(run, devices)
    missing = f"{memory.total / 1e9:.1f} GB are needed, {usable / 1e9:.1f} GB are to be had"
    if memory.arguments + memory.reference > usable:
        missing += f": the weights and their state alone take {(memory.arguments + memory.reference) / 1e9:.1f} GB"
    ways = [f"rows of {longest} tokens fit"] if longest else []
    count = _enough(model, run, devices, engine, method)
    ways += [f"{count} such devices would do" if count else "larger devices are needed"]
    return f"{missing}; {', or '.join(ways)}"


def _enough(model: ModelSpec, run: RunSpec, devices: Devices, engine: str, method: str) -> int | None:
    """The least power of two, up to `MOST_DEVICES`, of such devices on which the spec's rows fit with `mesh: auto`."""
    free = run.model_copy(update={"mesh": "auto"})
    length = min(run.train.sequence_length, model.context)
    count = 1
    while count < MOST_DEVICES:
        count *= 2
        if count <= devices.count:
            continue
        try:
            shape = _mesh(model, free, Devices(1, count, devices.bytes), engine, method)
        except (SpecError, UnsupportedError):
            continue
        if estimate(model, run, engine, method, shape, length).total <= _usable(run, devices):
            return count
    return None


def _usable(run: RunSpec, devices: Devices) -> int:
    return int(devices.bytes * (run.cluster.memory_fraction or MOST_FRACTION))


def recommend(found: Sequence[Option], devices: Devices) -> Option | None:
    """Full SFT where it fits on eight devices or more, else LoRA, else QLoRA, else what fits; None: nothing does."""
    full = [option for option in found if option.method == "sft" and devices.count >= 8]
    order = [*full, *(option for option in found if option.method in ("lora", "qlora")), *found]
    return next((option for option in order if option.fits and option.method != "dpo"), None)
