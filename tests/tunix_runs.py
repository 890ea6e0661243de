"""Tiny Tunix runs: a model, its checkpoint, data, and the generated program, run as a user would run it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_checkpoints import convert

import models
from bridge.configs.tunix import render
from bridge.launchers import metrics
from bridge.model_spec import ModelSpec
from bridge.rope import inverse_frequencies
from bridge.run_spec import RunSpec, parse

SHAPE = {"embed": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "mlp": 96, "layers": 1, "vocab": 384}
COLOURS = ("red", "green", "blue", "grey", "black", "white", "amber", "violet")


@dataclass(frozen=True)
class Workplace:
    """What all runs of a module share."""

    folder: Path
    hf: Path
    item: Path
    model: ModelSpec

    def spec(self, method: str, **changes: Any) -> RunSpec:
        """A spec of a short run; `changes` are values of `train`, other sections are given as mappings."""
        pairs = method in ("dpo", "orpo")
        train = {
            "method": method,
            "steps": 20,
            "sequence_length": 48,
            "batch_per_device": 8,
            "learning_rate": 3e-3,
            "schedule": {"warmup": 0.0, "kind": "constant"},
            "weight_decay": 0.0,
            "eval_every": 10,
            "save_every": 10,
            "dtype": "float32",
        }
        values: dict[str, Any] = {
            "model": {"source": str(self.hf)},
            "engine": "tunix",
            "data": {
                "train": f"{'pairs' if pairs else 'train'}.jsonl",
                "eval": f"{'pairs' if pairs else 'eval'}.jsonl",
            },
            "lora": {"rank": 8, "alpha": 16.0},
        }
        for key, value in changes.items():
            if isinstance(value, dict) or key == "mesh":
                values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
            else:
                train[key] = value
        return parse(json.dumps({**values, "train": train}))

    def program(self, run: RunSpec, name: str) -> Path:
        """Write the generated program into the folder of the run."""
        run_dir = self.folder / "runs" / name
        run_dir.mkdir(parents=True, exist_ok=True)
        paths = (str(self.item), str(run_dir), str(self.hf), str(self.folder))
        text = render(run, self.model, inverse_frequencies(self.model), *paths)
        (run_dir / "train.py").write_text(text, encoding="utf-8")
        return run_dir / "train.py"


def make_workplace(folder: Path) -> Workplace:
    """A tiny f32 model with a chat tokenizer, its Tunix checkpoint, conversations and preference pairs."""
    hf = models.make_llama(folder / "hf", dtype="float32", tokenizer="llama", scaling=models.scaling(), **SHAPE)
    chats = [
        [{"role": "user", "content": f"colour {number}?"}, {"role": "assistant", "content": f"It is {colour}."}]
        for number, colour in enumerate(COLOURS)
    ]
    pairs = [
        {"prompt": f"colour {number}?", "chosen": f"It is {colour}.", "rejected": f"{colour} or not"}
        for number, colour in enumerate(COLOURS)
    ]
    write_lines(folder / "train.jsonl", [{"messages": chat} for chat in chats])
    write_lines(folder / "eval.jsonl", [{"messages": chat} for chat in chats[:5]])
    write_lines(folder / "pairs.jsonl", pairs)
    return Workplace(folder, hf, convert(hf, folder / "converted"), ModelSpec.from_folder(hf))


def write_lines(path: Path, values: list[dict[str, Any]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def environment(devices: int) -> dict[str, str]:
    """Of a process with so many simulated devices."""
    return {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}


def losses(program: Path) -> list[float]:
    """Training losses by step, those of a resumed run in the place of earlier ones."""
    found = {entry["step"]: entry["loss"] for entry in metrics.read(program.parent) if "loss" in entry}
    return [found[step] for step in sorted(found)]


def eval_losses(program: Path) -> list[float]:
    """Eval losses in the order in which they were taken."""
    return [entry["eval_loss"] for entry in metrics.read(program.parent) if "eval_loss" in entry]
