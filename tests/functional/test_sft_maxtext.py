"""Real MaxText SFT through the command line: loss, data, checkpoints kept, resume, and what must not leak."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import Tiny

TOKEN = "hf_" + "dummydummydummy"
STEPS, HALF = 6, 3

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Folder:
    """A workspace with a tiny Llama 3.2 kind of model (tied, factor 32), converted, and seven conversations."""
    path = tmp_path_factory.mktemp("sft")
    shutil.copytree(tiny("tied", tokenizer="llama", dtype="float32"), path / "model")
    for name, chats in (("train", CHATS), ("eval", CHATS[:3])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    spec = {
        "model": {"source": "model"},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
        "train": {
            "steps": STEPS,
            "sequence_length": 128,
            "batch_per_device": 2,
            "learning_rate": 3.0e-3,
            "schedule": {"kind": "constant", "warmup": 0.0},
            "eval_every": HALF,
            "save_every": 2,
            "keep": 1,
            "dtype": "float32",
        },
    }
    (path / "bridge.yaml").write_text(yaml.safe_dump(spec))
    workspace = Folder(path)
    workspace.bridge("convert", "--to", "maxtext")
    return workspace


@pytest.fixture(scope="module")
def trained(folder: Folder) -> Folder:
    """The same, trained to the end as the run `maxtext-sft`."""
    folder.bridge("launch", "sft", "--engine", "maxtext")
    return folder


@pytest.mark.slow
def test_loss_falls(trained: Folder) -> None:
    losses, evaluated = trained.losses("maxtext-sft"), trained.eval_losses("maxtext-sft")
    assert list(losses) == list(range(1, STEPS + 1))
    assert list(evaluated) == [0, HALF, STEPS]
    assert evaluated[STEPS] < evaluated[HALF] < evaluated[0] - 0.5


@pytest.mark.slow
def test_first_loss_is_pytorch_on_the_learnt_tokens(trained: Folder) -> None:
    """The eval loss before training, by PyTorch: assistant turns and their end tokens only, each predicted once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(trained.path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(trained.path / "model", dtype=torch.float32)
    batches: list[list[tuple[float, int]]] = [[], []]
    for number, chat in enumerate(CHATS[:3]):
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        learnt = learnt_by_hand(tokenizer, chat)
        assert len(learnt) == len(ids)
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()
        picked = [-scores[i - 1, ids[i]] for i in range(1, len(ids)) if learnt[i]]
        batches[number // 2].append((float(np.sum(picked)), len(picked)))
    # The trainer takes the mean over batches, each the mean over its tokens; two rows a batch.
    means = [sum(total for total, _ in batch) / sum(count for _, count in batch) for batch in batches]
    assert trained.eval_losses("maxtext-sft")[0] == pytest.approx(np.mean(means), abs=2e-4)


def learnt_by_hand(tokenizer: Any, chat: list[dict[str, str]]) -> list[bool]:
    """Llama 3.1's turns written out: header, two newlines, content, <|eot_id|>."""
    learnt = [False]  # <|begin_of_text|>
    for turn in chat:
        header = tokenizer.encode(f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n", add_special_tokens=False)
        body = tokenizer.encode(f"{turn['content']}<|eot_id|>", add_special_tokens=False)
        learnt += [False] * len(header) + [turn["role"] == "assistant"] * len(body)
    return learnt


@pytest.mark.slow
def test_keeps_the_last_and_the_best(trained: Folder) -> None:
    """`train.keep` is 1; saves at 2, 4, 6 and evals at 3, 6: the last is the best here."""
    assert trained.steps("maxtext-sft") == [6]


@pytest.mark.slow
def test_run_is_described_and_nothing_leaks(trained: Folder) -> None:
    run = trained.path / "runs" / "maxtext-sft"
    facts = json.loads((run / "bridge.json").read_text())
    assert facts["method"] == "sft"
    assert facts["versions"] == {"maxtext": "0.2.5"}
    assert list(run.glob("tensorboard/events*"))
    for path in (path for path in trained.path.rglob("*") if path.is_file()):
        assert TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_existing_run_is_refused(trained: Folder) -> None:
    done = trained.bridge("launch", "sft", ok=False)
    assert done.returncode == 1
    assert "the run maxtext-sft exists" in done.stderr
    assert "--resume" in done.stderr


@pytest.mark.slow
def test_resume_goes_on_at_the_right_example(trained: Folder) -> None:
    """Half a run, resumed, has the losses of the whole one: same data, same optimizer state."""
    trained.bridge("launch", "sft", f"train.steps={HALF}", "--run", "half")
    assert list(trained.losses("half")) == list(range(1, HALF + 1))
    done = trained.bridge("launch", "sft", "--run", "half", "--resume")
    assert f"resuming half at step {HALF} of {STEPS}" in done.stderr
    whole, resumed = trained.losses("maxtext-sft"), trained.losses("half")
    assert list(resumed) == list(whole)
    np.testing.assert_allclose(list(resumed.values()), list(whole.values()), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_export_and_verify_the_trained_model(trained: Folder) -> None:
    trained.bridge("export", "--to", "hf", str(trained.path / "runs" / "maxtext-sft"), "--overwrite")
    done = trained.bridge("verify", "runs/maxtext-sft", "--tokens", "64", "--json")
    result = json.loads(done.stdout)
    assert result["ok"] is True
    assert result["exact"] is True
    assert result["max_abs"] <= result["tolerance"]
    # An export with one value changed is no longer the checkpoint's.
    weights = trained.path / "export" / "hf" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 0x40
    weights.write_bytes(data)
    done = trained.bridge("verify", "runs/maxtext-sft", "--tokens", "64", ok=False)
    assert "is not the export of" in done.stderr


def test_bad_data_fails_the_run_with_its_reason(folder: Folder) -> None:
    (folder.path / "bad.jsonl").write_text('{"messages": [}\n')
    done = folder.bridge("launch", "sft", "data.train=bad.jsonl", "--run", "bad", ok=False)
    assert done.returncode == 1
    assert "bad.jsonl" in done.stderr
    assert "line 1" in done.stderr


def test_dry_run_starts_nothing(folder: Folder) -> None:
    done = folder.bridge("launch", "sft", "--run", "dry", "--dry-run")
    assert "-m bridge.launchers.shim" in done.stdout
    assert "rope_type" in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    assert not (folder.path / "runs" / "dry").exists()
