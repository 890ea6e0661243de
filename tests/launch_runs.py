"""Real runs through the command line: a tiny model, converted, with data; and what its processes are doing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from processes import wait_for

import models
from bridge.launchers import metrics

COLOURS = ("red", "green", "blue", "grey", "black", "white", "amber", "violet")
SPEC = """
model: {source: hf}
data: {train: train.jsonl}
train:
  sequence_length: 48
  batch_per_device: 2
  learning_rate: 1.0e-3
  schedule: {kind: constant, warmup: 0.0}
  eval_every: 0
  dtype: float32
lora: {rank: 4, alpha: 8.0}
"""


@dataclass(frozen=True)
class Workplace:
    """A folder with a spec; commands run in it."""

    folder: Path

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Start `bridge` with arguments; its output comes on one pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", "bridge", *arguments],
            cwd=self.folder,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def bridge(self, *arguments: str, code: int = 0, **env: str) -> str:
        """Run `bridge` to its end; its output."""
        popen = self.start(*arguments, **env)
        text, _ = popen.communicate(timeout=600)
        assert popen.returncode == code, text
        return text

    def losses(self, run: str) -> dict[int, float]:
        """Losses by step; those of a resumed run in the place of earlier ones."""
        return {each["step"]: each["loss"] for each in metrics.read(self.folder / "runs" / run) if "loss" in each}

    def steps(self, run: str) -> list[int]:
        """The steps in the order in which they were trained, those trained twice included."""
        return [each["step"] for each in metrics.read(self.folder / "runs" / run) if "loss" in each]

    def wait_for_step(self, run: str, step: int, popen: subprocess.Popen[str]) -> None:
        """Wait until a run has trained a step."""
        assert wait_for(lambda: popen.poll() is not None or max(self.steps(run), default=0) >= step, 300)
        assert popen.poll() is None, popen.communicate()[0]


def make_workplace(folder: Path, engine: str) -> Workplace:
    """A tiny f32 model of Llama 3's kind, converted for an engine, and eight short conversations."""
    models.make_preset(folder / "hf", "llama3", dtype="float32", tokenizer="llama")
    chats = [
        [{"role": "user", "content": f"colour {number}?"}, {"role": "assistant", "content": f"It is {colour}."}]
        for number, colour in enumerate(COLOURS)
    ]
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "bridge.yaml").write_text(f"engine: {engine}{SPEC}", encoding="utf-8")
    workplace = Workplace(folder)
    workplace.bridge("convert", "--to", engine)
    return workplace


def process_of(run_dir: Path, number: int) -> int:
    """The process id of process `number` of a run on this host."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
        if str(run_dir).encode() in command and f"BRIDGE_PROCESS_ID={number}".encode() in environment:
            return int(folder.name)
    raise AssertionError(f"no process {number} of {run_dir}")
