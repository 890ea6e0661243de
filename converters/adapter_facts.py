"""`AdapterFacts`: what must be known of an adapter beside its arrays, and where it may come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from bridge.converters.orbax_store import STEP
from bridge.errors import CheckpointError, UnsupportedError
from bridge.model_spec import FLOAT_DTYPES, read_json

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
MAXTEXT_SETTINGS = {
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "quantization": "lora_weight_qtype",
    "tile_size": "lora_tile_size",
}


@dataclass(frozen=True)
class AdapterFacts:
    """The adapter adds (B A) alpha / rank to each target's weight.

    Nothing in an engine's checkpoint says alpha, the quantization or the base; `bridge.json` does.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Some of `TARGETS`, in that order."""
    quantization: Literal["nf4"] | None = None
    """How the base was held while the adapter was trained."""
    tile_size: int | None = None
    """Inputs that share an NF4 scale."""
    base: str | None = None
    """The base model: a folder or a hub id."""
    base_dtype: str | None = None
    """Dtype in which the engine quantized the base, which NF4 scales have, too; None: as in the base's files."""
    quantized: tuple[str, ...] | None = None
    """The projections that were held in NF4, some of `TARGETS`; None: the targets."""

    def __post_init__(self) -> None:
        problems = []
        if type(self.rank) is not int or self.rank < 1:
            problems.append(f"rank: {self.rank!r} is not a positive integer")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not abs(self.alpha) < 1e300:
            problems.append(f"alpha: {self.alpha!r} is not a number")
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets or list(self.targets) != sort_targets(self.targets):
            problems.append(f"targets: {list(self.targets)!r} is not some of {', '.join(TARGETS)}, each once, in order")
        if self.quantization not in (None, "nf4"):
            problems.append(f"quantization: {self.quantization!r} (supported: 'nf4')")
        if (self.quantization is None) != (self.tile_size is None):
            problems.append(f"tile_size: {self.tile_size!r}, with quantization {self.quantization!r}")
        elif self.tile_size is not None and (type(self.tile_size) is not int or self.tile_size < 1):
            problems.append(f"tile_size: {self.tile_size!r} is not a positive integer")
        held = self.quantized
        if held is not None and (self.quantization is None or list(held) != [name for name in TARGETS if name in held]):
            problems.append(
                f"quantized: {held!r} is not some of {', '.join(TARGETS)}, each once, in order, of a NF4 base"
            )
        if self.base_dtype not in (None, *FLOAT_DTYPES):
            problems.append(f"base_dtype: {self.base_dtype!r} (supported: {', '.join(FLOAT_DTYPES)})")
        if problems:
            raise CheckpointError("the facts of the adapter are not usable", details=problems)

    @property
    def held_in_nf4(self) -> tuple[str, ...]:
        """The projections that the engine quantized."""
        if self.quantization is None:
            return ()
        return self.targets if self.quantized is None else self.quantized

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / self.rank

    def to_json(self) -> dict[str, Any]:
        """JSON values for `bridge.json`, under `adapter`; `from_json` reads them back."""
        quantized = list(self.quantized) if self.quantized is not None else None
        return {**asdict(self), "targets": list(self.targets), "quantized": quantized}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AdapterFacts:
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: a fact is missing, unknown or of the wrong kind.
        """
        known = {field.name for field in fields(cls)}
        missing = [name for name in ("rank", "alpha", "targets") if name not in values]
        if missing or not isinstance(values["targets"], list) or set(values) - known:
            unknown = sorted(set(values) - known)
            raise CheckpointError(
                "the adapter's facts in bridge.json are damaged",
                details=[f"missing: {name}" for name in missing] + [f"unknown: {name}" for name in unknown],
            )
        quantized = values.get("quantized")
        return cls(
            **{
                **values,
                "targets": tuple(values["targets"]),
                "quantized": tuple(quantized) if isinstance(quantized, list) else quantized,
            }
        )


def sort_targets(targets: Sequence[str]) -> list[str]:
    """Targets in the order of `TARGETS`, each once; unknown ones last."""
    return sorted(set(targets), key=lambda name: (TARGETS.index(name) if name in TARGETS else len(TARGETS), name))


def facts_from_options(
    rank: int | None,
    alpha: float | None,
    targets: Sequence[str] | None,
    *,
    recorded: AdapterFacts | None = None,
    measured: tuple[int, tuple[str, ...]] | None = None,
    engine: Mapping[str, Any] | None = None,
    quantization: Literal["nf4"] | None = None,
    tile_size: int | None = None,
    base: str | None = None,
    base_dtype: str | None = None,
    quantized: Sequence[str] | None = None,
) -> AdapterFacts:
    """Facts from what was recorded, what the arrays show, and what the user typed; they may not disagree.

    Args:
        rank, alpha, targets: the options `--rank`, `--alpha`, `--targets`; None where not given.
        recorded: the facts of `bridge.json`, None for a foreign checkpoint.
        measured: rank and targets as the arrays show them (`adapters.measure_checkpoint`).
        engine: what the engine recorded (`adapters.recorded_by_engine`).
        quantization, tile_size, base, base_dtype, quantized: as in `AdapterFacts`, for a foreign checkpoint.

    Raises:
        CheckpointError: two sources disagree, or alpha is nowhere.
        UnsupportedError: a target is unknown.
    """
    unknown = [name for name in targets or () if name not in TARGETS]
    if unknown:
        raise UnsupportedError(f"--targets: {', '.join(unknown)} unknown", hint=f"supported: {', '.join(TARGETS)}")
    wanted = tuple(sort_targets(targets)) if targets else None
    options = {"rank": rank, "alpha": alpha, "targets": wanted, "quantization": quantization, "tile_size": tile_size}
    held = tuple(sort_targets(quantized)) if quantized else None
    sources = [("the option", {**options, "base_dtype": base_dtype, "quantized": held})]
    if recorded is not None:
        record = {name: getattr(recorded, name) for name in sources[0][1]}
        # A plain LoRA is a fact, too: --quantization nf4 on it is a contradiction.
        sources.append(("bridge.json", {**record, "quantization": recorded.quantization or "none"}))
    if engine:
        sources.append(("the checkpoint's own metadata", dict(engine)))
    if measured is not None:
        sources.append(("the checkpoint's arrays", {"rank": measured[0], "targets": measured[1]}))
    agreed: dict[str, Any] = {}
    for name in sources[0][1]:
        said = [(where, values[name]) for where, values in sources if values.get(name) is not None]
        differing = [f"{where}: {_show(value)}" for where, value in said]
        if any(value != said[0][1] for _, value in said):
            raise CheckpointError(
                f"{name} of the adapter is told in two ways: {', '.join(differing)}",
                hint="leave the option out: what is recorded is what was trained"
                if said[0][0] == "the option"
                else None,
            )
        agreed[name] = said[0][1] if said else None
    missing = [f"--{name}" for name in ("rank", "alpha", "targets") if agreed[name] is None]
    if agreed["quantization"] == "nf4" and agreed["tile_size"] is None:
        missing.append("--tile-size")
    if missing:
        raise CheckpointError(
            f"the checkpoint has no bridge.json that says {', '.join(name[2:] for name in missing)} of its adapter",
            hint=f"say it: {' '.join(f'{name} {name[2:].upper().replace("-", "_")}' for name in missing)}",
        )
    if agreed["quantization"] == "none":
        agreed["quantization"] = None
    facts = AdapterFacts(**agreed)
    origin = base or (recorded.base if recorded is not None else None)
    return replace(facts, base=origin)


def recorded_by_engine(checkpoint_item: Path) -> dict[str, Any]:
    """What the engine itself recorded beside an adapter, as options of `facts_from_options`; empty where nothing.

    MaxText's own training loop (not its post-training trainers, nor Tunix) writes its `lora` settings into the step's
    metadata (maxtext/common/checkpointing.py, `save_checkpoint`).

    Raises:
        CheckpointError: the step's metadata is damaged.
    """
    path = checkpoint_item.parent / STEP
    metadata = read_json(path) if path.is_file() else {}
    custom = metadata.get("custom_metadata")
    lora = custom.get("lora") if isinstance(custom, dict) else None
    if not isinstance(lora, dict):
        return {}
    return {name: lora[key] for name, key in MAXTEXT_SETTINGS.items() if lora.get(key) is not None}


def _show(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
