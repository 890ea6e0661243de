"""MaxText's LoRA, QLoRA, DPO and ORPO through the same spec and verbs, judged by PyTorch on what they export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Tiny
from sft_folder import CHATS, Folder, mean_loss

PAIRS = [
    {"prompt": f"How many planks has bridge {n}?", "chosen": f"It has {n * 7} planks.", "rejected": "I do not know."}
    for n in range(6)
]
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Folder:
    """A converted tiny model whose heads fit NF4 tiles of 32, with conversations and preference pairs."""
    path = tmp_path_factory.mktemp("methods")
    shutil.copytree(tiny("tied", tokenizer="llama", dtype="float32"), path / "model")
    lines = {"train": [{"messages": chat} for chat in CHATS], "eval": [{"messages": chat} for chat in CHATS[:4]]}
    for name, rows in (*lines.items(), ("pairs", PAIRS)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {
        "steps": STEPS,
        "sequence_length": 128,
        "batch_per_device": 2,
        "learning_rate": 3.0e-3,
        "schedule": {"kind": "constant", "warmup": 0.0},
        "eval_every": 2,
        "save_every": STEPS,
        "dtype": "float32",
    }
    spec = {
        "model": {"source": "model"},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
        "train": train,
        "lora": {"rank": 4, "alpha": 16.0, "targets": ["q", "k", "v", "o", "down"]},
    }
    (path / "bridge.yaml").write_text(yaml.safe_dump(spec))
    workspace = Folder(path)
    workspace.bridge("convert", "--to", "maxtext")
    return workspace


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_train_and_export(folder: Folder, method: str, tmp_path: Path) -> None:
    """PyTorch on the merged folder, and PEFT on the adapter, have the engine's last eval loss."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder.bridge("launch", method)
    run = f"maxtext-{method}"
    evaluated = folder.eval_losses(run)
    assert evaluated[STEPS] < evaluated[2] < evaluated[0] - 0.5
    facts = json.loads((folder.path / "runs" / run / "bridge.json").read_text())["adapter"]
    assert (facts["rank"], facts["alpha"], facts["targets"]) == (4, 16.0, ["q", "k", "v", "o", "down"])
    assert facts["quantization"] == ("nf4" if method == "qlora" else None)
    folder.bridge("export", "--to", "hf", f"runs/{run}", "--out", str(tmp_path / "merged"))
    folder.bridge("export", "--to", "peft", f"runs/{run}", "--out", str(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert mean_loss(merged, tmp_path / "merged", CHATS[:4]) == pytest.approx(evaluated[STEPS], abs=5e-4)
    # The engine with the adapter on is PyTorch on the merged weights; the export is the merge, bit for bit.
    done = folder.bridge("verify", f"runs/{run}", "--tokens", "64", "--json")
    assert json.loads(done.stdout)["max_abs"] <= 1e-4
    merged_folder = ("--reference", str(tmp_path / "merged"))
    done = folder.bridge("verify", f"runs/{run}", "--exact", *merged_folder, "--json")
    assert json.loads(done.stdout) == {"ok": True, "tensors": 29, "different": []}
    # The adapter alone, on the base before quantization: the same model for lora, another one for qlora.
    base: Any = AutoModelForCausalLM.from_pretrained(folder.path / "model", dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter")
    loss = mean_loss(with_adapter, folder.path / "model", CHATS[:4])
    if method == "lora":
        assert loss == pytest.approx(evaluated[STEPS], abs=5e-4)
    else:
        assert abs(loss - evaluated[STEPS]) > 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_preference_methods_train_and_export(folder: Folder, method: str, tmp_path: Path) -> None:
    options = ("data.train=pairs.jsonl", "data.eval=pairs.jsonl", "data.column=null")
    folder.bridge("launch", method, *options)
    evaluated = folder.eval_losses(f"maxtext-{method}")
    if method == "dpo":
        assert evaluated[0] == pytest.approx(0.693147, abs=1e-5)  # log 2: model and reference are the same
    assert evaluated[STEPS] < 0.7 * evaluated[0]
    folder.bridge("export", "--to", "hf", f"runs/maxtext-{method}", "--out", str(tmp_path / "out"))
    done = folder.bridge("verify", f"runs/maxtext-{method}", "--reference", str(tmp_path / "out"), "--exact", "--json")
    assert json.loads(done.stdout)["ok"] is True
