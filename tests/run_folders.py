"""Folders of runs as `bridge launch` leaves them, with the metrics that a test wants: no engine is started.

write_run(folder, source, metrics, ...)   run.json, bridge.json and metrics.jsonl
curve(steps, ...)                         metrics of a run that learns
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bridge import sidecar
from bridge.launchers.run_file import RunFile
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

Entries = list[dict[str, Any]]


def write_run(
    folder: Path, source: Path, metrics: Iterable[dict[str, Any]], engine: str = "maxtext", **train: Any
) -> Path:
    """A finished run of the model in `source`; returns its folder."""
    folder.mkdir(parents=True)
    spec = RunSpec.model_validate({"model": {"source": str(source)}, "engine": engine, "train": train})
    model = ModelSpec.from_folder(source)
    RunFile(engine, "config.yml", spec, str(folder), model, (1.0,), str(source), str(folder)).write(folder)
    sidecar.Sidecar(
        engine=engine,
        model=model,
        scanned=True,
        method=spec.train.method,
        source={"origin": str(source), "revision": None},
        versions={engine: "1.2.3"},
    ).write(folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    return folder


def curve(steps: int, start: float = 7.0, rate: float = 2e-5, every: int = 10) -> Entries:
    """Losses that fall, an evaluation now and then, a warm-up, a slow first step."""
    entries: Entries = [{"step": 0, "eval_loss": start, "time": 1000.0}]
    for step in range(1, steps + 1):
        loss = start * math.exp(-step / steps) + 0.2 * math.sin(step)
        seconds = 9.0 if step == 1 else 0.5 + 0.01 * (step % 7)
        warm = rate * min(1, step / (0.1 * steps))
        measured = {"step_time": seconds, "tokens_per_second": 1024 / seconds, "mfu": 0.2 / seconds}
        measured["learning_rate"] = warm
        entries.append({"step": step, "loss": loss, **measured, "time": 1000.0 + 9 + 0.5 * step})
        if step % every == 0:
            entries.append(
                {"step": step, "eval_loss": start * math.exp(-step / steps) + 0.1, "time": 1010 + 0.5 * step}
            )
    return entries
