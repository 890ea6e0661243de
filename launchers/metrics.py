"""`metrics.jsonl` of a run: one JSON object a step, appended, by process 0."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends what is measured; also knows the eval losses so far, those of earlier sessions included."""

    def __init__(self, run_dir: Path, writes: bool = True) -> None:
        self.path = run_dir / FILE
        self.writes = writes
        self.eval_losses = {entry["step"]: entry["eval_loss"] for entry in read(run_dir) if "eval_loss" in entry}

    @property
    def last_eval(self) -> float | None:
        """The newest eval loss."""
        return self.eval_losses[max(self.eval_losses)] if self.eval_losses else None

    def train(self, step: int, loss: float, **measured: float) -> None:
        """Record a finished step: its number from 1 on, its loss, and what else was measured."""
        self._append({"step": step, "loss": loss, **measured})

    def eval(self, step: int, loss: float) -> None:
        """Record the mean eval loss after `step` steps."""
        self.eval_losses[step] = loss
        self._append({"step": step, "eval_loss": loss})

    def _append(self, entry: dict[str, Any]) -> None:
        if not self.writes:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "time": round(time.time(), 3)}) + "\n")


def read(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The entries of a run, in order; a line cut short by a crash is passed over."""
    path = run_dir / FILE
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            yield entry


def best_step(eval_losses: dict[int, float], steps: list[int]) -> int | None:
    """The step of lowest finite eval loss among `steps`; None when none of them was evaluated."""
    known = [step for step in steps if math.isfinite(eval_losses.get(step, math.inf))]
    return min(known, key=lambda step: (eval_losses[step], step)) if known else None
