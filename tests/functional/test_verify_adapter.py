"""`bridge verify` of adapters that Tunix trained: with the adapter on, against PyTorch; and what it must refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import Tiny
from sft_folder import CHATS, Folder

TENSORS = 29


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Folder:
    """A workspace with a QLoRA run of Tunix on a bf16 model of the Llama 3.2 kind, exported merged."""
    path = tmp_path_factory.mktemp("verify_adapter")
    shutil.copytree(tiny("tied", tokenizer="llama"), path / "model")
    (path / "train.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    train = {"method": "qlora", "steps": 3, "sequence_length": 128, "learning_rate": 3.0e-3, "dtype": "float32"}
    spec = {"model": {"source": "model"}, "engine": "tunix", "data": {"train": "train.jsonl"}, "train": train}
    (path / "bridge.yaml").write_text(yaml.safe_dump(spec))
    workspace = Folder(path)
    workspace.bridge("convert")
    workspace.bridge("launch", "qlora")
    workspace.bridge("export", "--to", "hf")
    return workspace


@pytest.mark.slow
def test_adapter_on_is_pytorch_on_the_merged_weights(folder: Folder) -> None:
    result = json.loads(folder.bridge("verify", "--tokens", "64", "--json").stdout)
    assert result["ok"] is True
    assert result["max_abs"] <= result["tolerance"] < 1e-3


@pytest.mark.slow
def test_export_is_the_merge_bit_for_bit(folder: Folder, tmp_path: Path) -> None:
    result = json.loads(folder.bridge("verify", "--exact", "--json").stdout)
    assert result == {"ok": True, "tensors": TENSORS, "different": []}
    # The other merge is another model, and one flipped bit is found.
    folder.bridge("export", "--to", "hf", "--merge-base", "original", "--out", str(tmp_path / "original"))
    done = folder.bridge("verify", "--exact", "--json", "--reference", str(tmp_path / "original"), ok=False)
    assert len(json.loads(done.stdout)["different"]) == 21
    weights = shutil.copytree(folder.path / "export" / "hf", tmp_path / "flipped") / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = folder.bridge("verify", "--exact", "--json", "--reference", str(tmp_path / "flipped"), ok=False)
    assert len(json.loads(done.stdout)["different"]) == 1


@pytest.mark.slow
def test_a_wrong_alpha_fails(folder: Folder) -> None:
    """Alpha is in `bridge.json` alone; the engine's forward pass and the merge would both follow a wrong one, so the
    check is that a typed one that disagrees is refused."""
    done = folder.bridge("export", "--to", "peft", "--alpha", "7", "--out", "x", ok=False)
    assert "alpha" in done.stderr
    assert "7" in done.stderr
    assert "32" in done.stderr
