"""MaxText on several devices and with accumulated gradients: the losses of one device and of the whole batch."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import yaml
from conftest import Tiny
from sft_folder import Folder

pytestmark = pytest.mark.slow
ROWS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Folder:
    """A tiny model with two key heads, and conversations of the same length, for a mean of means is their mean then."""
    path = tmp_path_factory.mktemp("mesh")
    shutil.copytree(tiny("untied", tokenizer="llama", dtype="float32", vocab=384), path / "model")
    chats = [
        [{"role": "user", "content": "Which bridge?"}, {"role": "assistant", "content": f"Bridge {letter}."}]
        for letter in "ABCDEFGH"
    ]
    (path / "train.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    train = {
        "steps": 3,
        "sequence_length": 32,
        "batch_per_device": ROWS,
        "learning_rate": 3.0e-3,
        "schedule": {"kind": "constant", "warmup": 0.0},
        "eval_every": 0,
        "save_every": 3,
        "dtype": "float32",
    }
    (path / "bridge.yaml").write_text(
        yaml.safe_dump({"model": {"source": "model"}, "data": {"train": "train.jsonl"}, "train": train})
    )
    workspace = Folder(path)
    workspace.bridge("convert", "--to", "maxtext")
    workspace.bridge("launch", "sft", "--engine", "maxtext", "--run", "one")
    return workspace


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tensor", ["cluster.devices=4", "mesh={fsdp: 2, tensor: 2}", "train.batch_per_device=1"]),
        ("accumulated", ["train.gradient_accumulation=2", f"train.batch_per_device={ROWS // 2}"]),
    ],
)
def test_the_losses_are_those_of_one_device(folder: Folder, name: str, options: list[str]) -> None:
    done = folder.bridge("launch", "sft", "--engine", "maxtext", "--run", name, *options)
    if name == "tensor":
        assert "4 device(s)" in done.stdout + done.stderr
        config = next((folder.path / "runs" / name).glob("*.yml")).read_text()
        assert "ici_fsdp_parallelism: 2\nici_tensor_parallelism: 2\n" in config
    whole, found = folder.losses("one"), folder.losses(name)
    assert list(whole) == list(found) == [1, 2, 3]
    assert whole[3] < whole[1] - 0.5
    np.testing.assert_allclose(list(found.values()), list(whole.values()), rtol=3e-3)
