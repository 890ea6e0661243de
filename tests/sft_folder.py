"""A workspace for real runs of MaxText, the conversations it trains on, and their loss by PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TOKEN = "hf_" + "dummydummydummy"
CHATS = [
    [
        {"role": "user", "content": f"How many planks has bridge {n}?"},
        {"role": "assistant", "content": f"It has {n * 7} planks."},
        {"role": "user", "content": "And ropes?"},
        {"role": "assistant", "content": f"{n + 2} ropes."},
    ]
    for n in range(7)
]


@dataclass(frozen=True)
class Folder:
    """A workspace with a bridge.yaml."""

    path: Path

    def bridge(self, *argv: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command line as a user would."""
        env = {**os.environ, "HF_TOKEN": TOKEN, "M_STEPS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "bridge", *argv], cwd=self.path, env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done

    def losses(self, run: str) -> dict[int, float]:
        """Training loss by step; a resumed run appends."""
        return {entry["step"]: entry["loss"] for entry in self._metrics(run) if "loss" in entry}

    def eval_losses(self, run: str) -> dict[int, float]:
        """Eval loss by step."""
        return {entry["step"]: entry["eval_loss"] for entry in self._metrics(run) if "eval_loss" in entry}

    def steps(self, run: str) -> list[int]:
        """Checkpoints on the disk."""
        return sorted(int(path.name) for path in (self.path / "runs" / run / "checkpoints").iterdir())

    def _metrics(self, run: str) -> list[dict[str, Any]]:
        text = (self.path / "runs" / run / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


def mean_loss(model: Any, tokenizer_folder: Path, chats: list[list[dict[str, str]]]) -> float:
    """The engine's eval loss by PyTorch: assistant turns and their end tokens only, each predicted once.

    The trainer takes the mean over batches of two conversations, each the mean over its tokens.
    """
    import torch
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    batches: list[list[tuple[float, int]]] = [[] for _ in range(-(-len(chats) // 2))]
    for number, chat in enumerate(chats):
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        learnt = learnt_by_hand(tokenizer, chat)
        assert len(learnt) == len(ids)
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()
        picked = [-scores[i - 1, ids[i]] for i in range(1, len(ids)) if learnt[i]]
        batches[number // 2].append((float(np.sum(picked)), len(picked)))
    means = [sum(total for total, _ in batch) / sum(count for _, count in batch) for batch in batches]
    return float(np.mean(means))


def learnt_by_hand(tokenizer: Any, chat: list[dict[str, str]]) -> list[bool]:
    """Llama 3.1's turns written out: header, two newlines, content, <|eot_id|>."""
    learnt = [False]  # <|begin_of_text|>
    for turn in chat:
        header = tokenizer.encode(f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n", add_special_tokens=False)
        body = tokenizer.encode(f"{turn['content']}<|eot_id|>", add_special_tokens=False)
        learnt += [False] * len(header) + [turn["role"] == "assistant"] * len(body)
    return learnt
