"""The model card of a pushed export: what it was made from, how, and with what. Pure text from facts on the disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

import bridge
from bridge import hub

if TYPE_CHECKING:
    from bridge.run_spec import RunSpec

TITLES = {
    "sft": "full fine-tuning",
    "lora": "LoRA",
    "qlora": "QLoRA (NF4 base)",
    "dpo": "direct preference optimization (DPO)",
    "orpo": "odds-ratio preference optimization (ORPO)",
}


@dataclass(frozen=True)
class CardFacts:
    """What a card says; None where nobody knows."""

    name: str
    form: str
    """hf or peft."""
    engine: str
    version: str | None
    method: str | None
    """None: converted, never trained."""
    base: str | None
    """A hub id or a path; of a path only the last name is shown."""
    revision: str | None
    adapter: str | None
    """Rank, alpha, targets and quantization, in a few words."""
    run: RunSpec | None
    step: int | None


def text(facts: CardFacts) -> str:
    """The card, with the metadata that the hub reads."""
    base = facts.base if facts.base and hub.is_id(facts.base) else None
    names = data_names(facts.run)
    metadata = {
        "library_name": "peft" if facts.form == "peft" else "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base else {}),
        **({"base_model_relation": "adapter" if facts.form == "peft" else "finetune"} if base and facts.method else {}),
        **({"datasets": sets} if (sets := [name for name in names if hub.is_id(name)]) else {}),
        "tags": ["llama", facts.engine, *([facts.method] if facts.method else []), "bridge-llama"],
    }
    # JSON is YAML, and quotes what a name may hold.
    head = "\n".join(f"{key}: {json.dumps(value)}" for key, value in metadata.items())
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in _rows(facts, names) if value)
    made = "Fine-tuned" if facts.method else "Converted"
    return (
        f"---\n{head}\n---\n\n# {facts.name}\n\n"
        f"{made} with {_engine(facts)} through bridge {bridge.__version__}. The licence of the base model applies.\n\n"
        f"| | |\n| --- | --- |\n{rows}\n"
    )


def data_names(run: RunSpec | None) -> list[str]:
    """What a run was trained on: hub ids without their split, and the names of files without their folders."""
    if run is None:
        return []
    plain = [name.partition(":")[0] for name in run.data.train_names]
    return list(dict.fromkeys(name if hub.is_id(name) and not PurePath(name).suffix else _last(name) for name in plain))


def _rows(facts: CardFacts, names: list[str]) -> list[tuple[str, str | None]]:
    base = facts.base if facts.base and hub.is_id(facts.base) else _last(facts.base or "")
    at = f", commit {facts.revision[:12]}" if facts.revision and base else ""
    train = facts.run.train if facts.run else None
    rows = f"{train.batch_per_device} x {train.sequence_length} tokens a device and step" if train else None
    return [
        ("base", f"{base}{at}" if base else None),
        ("method", TITLES.get(facts.method, facts.method) if facts.method else None),
        ("adapter", facts.adapter),
        ("data", ", ".join(names)),
        ("steps", str(facts.step) if facts.step else None),
        ("batch", rows),
        ("learning rate", f"{train.learning_rate:g}" if train else None),
        ("engine", _engine(facts)),
    ]


def _engine(facts: CardFacts) -> str:
    return " ".join(part for part in (facts.engine, facts.version) if part)


def _last(name: str) -> str:
    return PurePath(name).name


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
