"""A mixture for so many epochs through the command line: steps, learning rates, processes, resuming, both engines."""

from __future__ import annotations

import json
import math
import re
import shutil
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import Tiny
from sft_folder import CHATS, Folder

PEAK, FINAL, WARMUP, STEPS = 3.0e-3, 0.1, 2, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Folder:
    """Four conversations and two others, half of each epoch from either: six rows, two a step, two epochs."""
    path = tmp_path_factory.mktemp("epochs")
    shutil.copytree(tiny("tied", tokenizer="llama", dtype="float32"), path / "model")
    for name, chats in (("a", CHATS[:4]), ("b", CHATS[4:6])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    spec = {
        "model": {"source": "model"},
        "data": {"train": [{"source": "a.jsonl"}, {"source": "b.jsonl"}]},
        "train": {
            "epochs": 2,
            "sequence_length": 128,
            "batch_per_device": 2,
            "learning_rate": PEAK,
            "schedule": {"kind": "cosine", "warmup": 0.34, "final": FINAL},
            "eval_every": 0,
            "save_every": 3,
            "dtype": "float32",
        },
    }
    (path / "bridge.yaml").write_text(yaml.safe_dump(spec))
    return Folder(path)


@pytest.fixture(scope="module")
def runs(folder: Folder) -> dict[str, str]:
    """What `launch` said, by engine; converts and trains each once."""
    said: dict[str, str] = {}
    for engine in ("maxtext", "tunix"):
        folder.bridge("convert", "--to", engine)
        said[engine] = folder.bridge("launch", "sft", "--engine", engine).stderr
    return said


def entries(folder: Folder, run: str) -> dict[int, dict[str, Any]]:
    return {entry["step"]: entry for entry in folder._metrics(run)}


def rate_by_hand(step: int) -> float:
    """Of step 1, 2, ...: a line from 0 over two steps, then half a cosine whose end is the last step."""
    if step <= WARMUP:
        return PEAK * (step - 1) / WARMUP
    part = (step - 1 - WARMUP) / (STEPS - WARMUP - 1)
    return PEAK * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * part)) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_epochs_are_steps_and_rates_are_the_schedules(folder: Folder, runs: dict[str, str], engine: str) -> None:
    assert "2 epochs of the data are 12 rows: 6 steps of 2" in runs[engine]
    assert f"tensorboard --logdir runs/{engine}-sft/tensorboard" in runs[engine]
    said = re.search(r"disk: up to ([\d.]+) MB for 3 checkpoints", runs[engine])
    written = folder.path / "runs" / f"{engine}-sft" / "checkpoints" / "6"
    size = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    assert said is not None
    assert size == pytest.approx(float(said[1]) * 1e6 / 3, rel=0.1)
    found = entries(folder, f"{engine}-sft")
    assert list(found) == list(range(1, STEPS + 1))
    for step, entry in found.items():
        assert entry["learning_rate"] == pytest.approx(rate_by_hand(step), rel=1e-5, abs=1e-12)
        assert entry["tokens_per_second"] == pytest.approx(256 / entry["step_time"], rel=1e-2)
        assert "mfu" not in entry  # nobody knows the peak of a CPU
    run_file = json.loads((folder.path / "runs" / f"{engine}-sft" / "run.json").read_text())
    assert (run_file["epochs"], run_file["spec"]["train"]["steps"]) == (2.0, STEPS)


@pytest.mark.slow
def test_both_engines_are_given_the_same(folder: Folder, runs: dict[str, str]) -> None:
    """The rate of the first step is 0, so two batches meet the same weights. Later ones do not: MaxText's Adam works on
    queries that are divided by sqrt(head_dim)."""
    assert runs.keys() == {"maxtext", "tunix"}
    losses = [list(folder.losses(f"{engine}-sft").values()) for engine in runs]
    np.testing.assert_allclose(losses[0][:2], losses[1][:2], rtol=1e-5)
    assert losses[0][0] != pytest.approx(losses[0][1], rel=1e-3)
    assert max(losses[0][-1], losses[1][-1]) < 0.5 * losses[0][0]


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(folder: Folder, runs: dict[str, str]) -> None:
    assert runs["tunix"]
    options = ("--engine", "tunix", "--processes", "2", "--run", "two")
    done = folder.bridge("launch", "sft", "train.batch_per_device=1", *options)
    assert "2 epochs of the data are 12 rows: 6 steps of 2" in done.stderr
    one, two = folder.losses("tunix-sft"), folder.losses("two")
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_a_resumed_run_goes_on_in_the_middle_of_an_epoch(folder: Folder, runs: dict[str, str], engine: str) -> None:
    assert runs[engine]
    whole, half = folder.path / "runs" / f"{engine}-sft", folder.path / "runs" / f"{engine}-half"
    shutil.copytree(whole, half)
    shutil.rmtree(half / "checkpoints" / "6")
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text("".join(lines[:3]))
    more = folder.path / "a.jsonl"
    before = more.read_text()
    more.write_text(before + json.dumps({"messages": CHATS[6]}) + "\n")
    resume = ("launch", "sft", "--engine", engine, "--run", half.name, "--resume")
    try:
        refused = folder.bridge(*resume, ok=False)
    finally:
        more.write_text(before)
    assert "train.epochs 2 was 6 steps when the run began, and is 7 now" in refused.stderr
    folder.bridge(*resume)
    assert list(folder.losses(half.name)) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(
        list(folder.losses(half.name).values()), list(folder.losses(whole.name).values()), rtol=1e-5
    )


def test_data_says_how_long_the_run_is(folder: Folder) -> None:
    text = folder.bridge("data", "--show", "0").stdout
    assert "train: a.jsonl, weight 1: 3 examples an epoch, each of its 4 0.75 times\n" in text
    assert "train: b.jsonl, weight 1: 3 examples an epoch, each of its 2 1.50 times\n" in text
    assert "train: 6 steps of 2 rows on 1 device(s) are 2 epochs\n" in text
    found = json.loads(folder.bridge("data", "--show", "0", "--json").stdout)["train"]
    assert (found["steps"], found["epochs"], found["rows_a_step"], found["devices"]) == (6, 2.0, 2, 1)
    assert [source["in_an_epoch"] for source in found["sources"]] == [3, 3]
    spec = yaml.safe_load((folder.path / "bridge.yaml").read_text())
    spec["train"] |= {"steps": 9, "epochs": None}
    spec["cluster"] = {"hardware": "tpu"}
    (folder.path / "other.yaml").write_text(yaml.safe_dump(spec))
    found = json.loads(folder.bridge("data", "--spec", "other.yaml", "--show", "0", "--json").stdout)["train"]
    assert "steps" not in found  # no one here can count the devices of a TPU host
    text = folder.bridge("config", "--engine", "maxtext").stdout
    assert "\nsteps: 6\n" in text
