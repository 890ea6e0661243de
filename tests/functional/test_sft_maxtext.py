"""Real MaxText SFT through the command line: loss, data, checkpoints kept, resume, and what must not leak."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import yaml
from checkpoints import restore, stored_chunk
from conftest import Tiny
from sft_folder import CHATS, TOKEN, Folder, mean_loss

STEPS, HALF = 6, 3


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
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trained.path / "model", dtype=torch.float32)
    expected = mean_loss(model, trained.path / "model", CHATS[:3])
    assert trained.eval_losses("maxtext-sft")[0] == pytest.approx(expected, abs=2e-5)


@pytest.mark.slow
def test_keeps_the_last_and_the_best(trained: Folder) -> None:
    """`train.keep` is 1; saves at 2, 4, 6 and evals at 3, 6: the last is the best here."""
    assert trained.steps("maxtext-sft") == [6]


@pytest.mark.slow
def test_the_checkpoint_is_stored_layer_by_layer(trained: Folder) -> None:
    """As MaxText has Orbax store it, one layer could not be exported without decoding all."""
    step = trained.path / "runs" / "maxtext-sft" / "checkpoints" / "6"
    for item in ("model_params", "optimizer_state"):
        names = [name for name in restore(step / item) if ".layers." in name and ".kernel" in name]
        assert len(names) >= 7, item
        for name in names:
            assert stored_chunk(step / item, name)[1] == 1, name


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
