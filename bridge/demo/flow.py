"""The demo's steps: each is the command that a user would type, run in the demo's folder; done ones are reused."""

from __future__ import annotations

import importlib.resources
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BridgeError

DATA = ("train.jsonl", "eval.jsonl")
PROMPTS = (
    "What should I call you?",
    "What is the capital of France?",
    "How can I stay healthy?",
)  # none of them is trained on


@dataclass(frozen=True)
class Step:
    """A bridge command, and the file that says that it is done."""

    argv: tuple[str, ...]
    done: Path | None = None

    @property
    def shown(self) -> str:
        """As the user would type it."""
        return " ".join(("bridge", *self.argv))


def write_inputs(out: Path, preset: str) -> None:
    """`bridge.yaml` and the data, where they are not there already: a user may edit them and run the demo again."""
    texts = {"bridge.yaml": importlib.resources.files("bridge.configs") / "presets" / f"{preset}.yaml"}
    texts |= {f"data/{name}": importlib.resources.files("bridge.demo") / name for name in DATA}
    for name, resource in texts.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(resource.read_text(encoding="utf-8"), encoding="utf-8")


def run(step: Step, out: Path) -> str:
    """Run a step in `out`, its progress on this terminal; returns what it printed on stdout.

    Raises:
        BridgeError: it failed; it has said why.
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    argv = (sys.executable, "-m", "bridge", *step.argv)
    done = subprocess.run(argv, cwd=out, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stdout, end="")
        raise BridgeError(f"`{step.shown}` in {out} ended with exit code {done.returncode}")
    return done.stdout


def curve(run_dir: Path, width: int = 48) -> list[str]:
    """The loss as text: a bar for about twelve steps of the run, and every eval loss beside its step."""
    train: dict[int, float] = {}
    evaluated: dict[int, float] = {}
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "loss" in entry:
            train[entry["step"]] = entry["loss"]
        if "eval_loss" in entry:
            evaluated[entry["step"]] = entry["eval_loss"]
    if not train:
        return []
    every = max(1, len(train) // 12)
    top = max(train.values())
    shown = sorted({step for step in train if step % every == 0} | {1, max(train)} | (evaluated.keys() & train.keys()))
    lines = [f"   0  {'':>{width}}           eval {evaluated[0]:.3f}"] if 0 in evaluated else []
    for step in shown:
        bar = "█" * max(1, round(width * train[step] / top))
        note = f"  eval {evaluated[step]:.3f}" if step in evaluated else ""
        lines.append(f"{step:4d}  {bar:<{width}}  {train[step]:7.3f}{note}")
    return lines
