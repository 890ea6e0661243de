"""`workdir: gs://...`: what is rendered for the engines, and real runs that start from and save to a bucket."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import checkpoints
import fake_bucket
import pytest
import yaml
from checkpoints import ITEMS, folders_differ
from conftest import Tiny
from fake_bucket import Bucket

from bridge.bucket_outputs import COMMIT
from bridge.errors import CheckpointError, SpecError

WORK = f"gs://{fake_bucket.NAME}/work"
BRIDGE = Path(sys.executable).with_name("bridge")


@pytest.fixture
def folder(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace whose outputs go into the bucket, and eight conversations."""
    chats = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}] for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    spec = {
        "model": {"source": str(tiny("tied", tokenizer="llama", dtype="float32", layers=1))},
        "workdir": WORK,
        "data": {"train": "train.jsonl"},
        "train": {
            "steps": 2,
            "sequence_length": 48,
            "batch_per_device": 2,
            "save_every": 1,
            "keep": 1,
            "eval_every": 0,
            "dtype": "float32",
        },
    }
    (tmp_path / "bridge.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bridge(bucket: Bucket, cwd: Path, *args: object) -> subprocess.CompletedProcess[str]:
    argv = [str(BRIDGE), *map(str, args)]
    done = subprocess.run(argv, cwd=cwd, env=bucket.env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_engines_are_given_the_bucket(bucket: Bucket, folder: Path) -> None:
    for engine in ("maxtext", "tunix"):
        checkpoints.run("convert", "--to", engine)
        assert f"work/checkpoints/{engine}/bridge.json" in bucket.names()
    config = yaml.safe_load(checkpoints.run("config", "--engine", "maxtext").stdout)
    assert config["base_output_directory"] == f"{WORK}/runs"
    assert config["load_parameters_path"] == f"{WORK}/checkpoints/maxtext/0/items"
    assert config["tokenizer_path"] == str(folder / "runs" / "maxtext-sft" / "hf")  # opened by its name: on this host
    program = checkpoints.run("config", "--engine", "tunix").stdout
    assert f'CHECKPOINT = "{WORK}/checkpoints/tunix/0/model_params"' in program
    assert f'RUN_DIR = "{WORK}/runs/tunix-sft"' in program
    shown = checkpoints.run("launch", "sft", "--engine", "tunix", "--dry-run").stdout
    assert f"cd {folder / 'runs' / 'tunix-sft'} && " in shown
    assert sorted(path.name for path in folder.iterdir()) == ["bridge.yaml", "train.jsonl"]
    bucket.delete("work/checkpoints/maxtext/bridge.json")
    with pytest.raises(CheckpointError, match=f"{WORK}/checkpoints/maxtext does not exist, or has no bridge.json"):
        checkpoints.run("launch", "sft", "--engine", "maxtext")
    assert sorted(path.name for path in folder.iterdir()) == ["bridge.yaml", "train.jsonl"]


def test_what_must_lie_on_this_host_is_said_all_at_once(folder: Path) -> None:
    spec = yaml.safe_load((folder / "bridge.yaml").read_text())
    spec["data"] |= {"train": f"{WORK}/train.jsonl", "eval": f"{WORK}/eval.jsonl"}
    spec["model"]["tokenizer"] = f"{WORK}/tokenizer"
    (folder / "bridge.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(SpecError, match="read from folders of this host, not from a bucket") as found:
        checkpoints.run("convert", "--to", "maxtext")
    assert found.value.details == (
        f"data.train: {WORK}/train.jsonl",
        f"data.eval: {WORK}/eval.jsonl",
        f"model.tokenizer: {WORK}/tokenizer",
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_a_run_in_a_bucket(engine: str, bucket: Bucket, folder: Path) -> None:
    checkpoints.run("convert", "--to", engine)
    name = f"{engine}-sft"
    done = bridge(bucket, folder, "launch", "sft", "--engine", engine)
    assert f"log in runs/{name}/logs" in done.stderr
    done = bridge(bucket, folder, "launch", "sft", "train.steps=3", "--engine", engine, "--resume")
    assert f"resuming {name} at step 2 of 3" in done.stderr

    own = folder / "runs" / name
    assert {"bridge.json", "hf", "logs", "metrics.jsonl", "run.json"} < {path.name for path in own.iterdir()}
    assert not (own / "checkpoints").exists()
    losses = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in losses] == [1, 2, 3]
    assert bucket.read(f"work/runs/{name}/metrics.jsonl") == (own / "metrics.jsonl").read_bytes()
    steps = {path.split("/")[4] for path in bucket.names(f"work/runs/{name}/checkpoints/")}
    assert steps == {"3"}  # keep: 1, though Orbax has no folder to remove there

    facts = json.loads(checkpoints.run("inspect", "--json").stdout)
    assert (facts["format"], facts["step"]) == (engine, 3)
    assert facts["path"] == f"{WORK}/runs/{name}/checkpoints/3/{ITEMS['tunix']}"
    checkpoints.run("export", "--out", "spec")
    (folder / "bridge.yaml").unlink()
    checkpoints.run("export", f"{WORK}/runs/{name}", "--out", "elsewhere")  # as on another host
    assert folders_differ(folder / "spec", folder / "elsewhere") == []
    source = Path(json.loads((own / "bridge.json").read_text())["source"]["origin"])
    assert len(folders_differ(folder / "spec", source)) == 11  # it was trained
    bucket.delete(f"work/runs/{name}/checkpoints/3/{COMMIT}")
    with pytest.raises(CheckpointError, match="has no finished checkpoint"):
        checkpoints.run("export", f"{WORK}/runs/{name}", "--out", "no")
