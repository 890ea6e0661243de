"""The command line: exit codes, what goes to stdout and to stderr, and which checkpoint a verb means by itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import convert, export, folders_differ, run
from conftest import Tiny
from engine_trees import mark_of, marked, trained_run

import oracles
from bridge.errors import BridgeError, CheckpointError, OutputError, SpecError

BRIDGE = Path(sys.executable).with_name("bridge")


def bridge(cwd: Path, *args: object) -> subprocess.CompletedProcess[str]:
    argv = [str(BRIDGE), *map(str, args)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_help_answers_without_an_engine(tmp_path: Path) -> None:
    done = bridge(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for verb in ("init", "convert", "config", "launch", "export", "verify", "inspect", "data", "demo"):
        assert f"  {verb} " in done.stdout
    assert bridge(tmp_path, "--version").stdout.startswith("bridge, version ")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("konvert",), 2, "Did you mean 'convert'?"),
        (("convert", "--to", "megatron"), 2, "'megatron' is not one of"),
        (("export", "--nope"), 2, "No such option"),
        (("convert",), 1, "bridge: error: to which engine?"),
        (("convert", "--to", "maxtext"), 1, "bridge: error: convert what?"),
        (("export",), 1, "bridge: error: which checkpoint?"),
        (("inspect", "nowhere"), 1, "bridge: error: nowhere does not exist"),
        (("inspect", "--table", "qwen_maxtext"), 1, "there is no table 'qwen_maxtext'"),
    ],
)
def test_what_goes_wrong_is_said_on_stderr(args: tuple[str, ...], code: int, words: str, tmp_path: Path) -> None:
    done = bridge(tmp_path, *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_verbs_as_processes(tiny: Tiny, tmp_path: Path) -> None:
    """One conversion there and back: JSON alone on stdout, words on stderr, a failed check is exit code 1."""
    source = tiny("mha")
    done = bridge(tmp_path, "convert", source, "--to", "maxtext", "--out", "ckpt")
    assert (done.returncode, done.stdout) == (0, "")
    assert f"arrays in {tmp_path / 'ckpt'}" in done.stderr
    again = bridge(tmp_path, "convert", source, "--to", "maxtext", "--out", "ckpt")
    assert (again.returncode, again.stdout) == (1, "")
    assert f"bridge: error: {tmp_path / 'ckpt'} exists" in again.stderr

    facts = json.loads(bridge(tmp_path, "inspect", "ckpt", "--json").stdout)
    assert (facts["format"], facts["model"]["heads"], facts["sidecar"]["scanned"]) == ("maxtext", 4, True)
    sizes = {"family", "layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab"}
    assert facts["model"].keys() >= sizes | {"tied", "rope_theta", "rope_scaling"}
    assert facts.keys() >= {"format", "model", "parameters", "bytes", "tensors", "sidecar"}

    done = bridge(tmp_path, "export", "ckpt", "--out", "hf")
    assert (done.returncode, done.stdout) == (0, "")
    assert folders_differ(source, tmp_path / "hf") == []

    done = bridge(tmp_path, "verify", "ckpt", "--exact", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"ok": True, "tensors": 21, "different": []}
    name = "model.layers.1.mlp.up_proj.weight"
    flip_bit(tmp_path / "hf", name)
    done = bridge(tmp_path, "verify", "ckpt", "--reference", "hf", "--exact", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"ok": False, "tensors": 21, "different": [name]}
    done = bridge(tmp_path, "verify", "hf", "--engine", "hf", "--reference", source, "--exact")
    assert done.returncode == 1
    assert f"different  {name}\nFAILED: 1 of 21 tensors differ\n" in done.stdout


def flip_bit(folder: Path, name: str) -> None:
    """Change one bit of a tensor, in the file."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]] ^= 1
    path.write_bytes(data)


def test_overwrite_replaces_what_is_there(tiny: Tiny, tmp_path: Path) -> None:
    convert(tiny("mha"), tmp_path / "ckpt")
    (tmp_path / "ckpt" / "note").touch()
    with pytest.raises(OutputError, match="exists"):
        convert(tiny("mha"), tmp_path / "ckpt")
    convert(tiny("mha"), tmp_path / "ckpt", "--overwrite")
    assert not (tmp_path / "ckpt" / "note").exists()
    export(tmp_path / "ckpt", tmp_path / "hf")
    with pytest.raises(OutputError, match="exists"):
        export(tmp_path / "ckpt", tmp_path / "hf")
    export(tmp_path / "ckpt", tmp_path / "hf", "--overwrite")
    assert folders_differ(tiny("mha"), tmp_path / "hf") == []


@pytest.fixture
def project(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a bridge.yaml, the current one."""
    shutil.copytree(tiny("mqa"), tmp_path / "model")
    (tmp_path / "bridge.yaml").write_text("model: {source: model}\nengine: maxtext\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_spec_names_everything(project: Path) -> None:
    run("convert")
    assert (project / "checkpoints" / "maxtext" / "0" / "items").is_dir()
    run("convert", "--to", "tunix")
    result = run("export")
    assert "the converted checkpoint (there is no run yet)" in result.stderr
    assert folders_differ(project / "model", project / "export" / "hf") == []
    assert run("verify", "--exact").code == 0
    assert json.loads(run("inspect", "--json").stdout)["path"] == str(project / "checkpoints/maxtext/0/items")


def test_without_a_run_or_a_conversion_there_is_a_hint(project: Path) -> None:
    for verb in ("export", "verify", "inspect"):
        with pytest.raises(CheckpointError, match="there is no run and no") as found:
            run(verb)
        assert "bridge convert --to maxtext" in str(found.value)
    assert not (project / "export").exists()


def test_the_newest_run_is_taken_and_named(project: Path) -> None:
    run("convert")
    model = project / "model"
    old = trained_run(project / "runs" / "b-first", model, {4: marked(model, 1)})
    new = trained_run(project / "runs" / "a-second", model, {2: marked(model, 2)})
    past = time.time() - 100
    os.utime(old / "bridge.json", (past, past))
    result = run("export")
    assert mark_of(project / "export" / "hf") == 2
    assert "the newest run, a-second: step 2, the newest" in result.stderr
    os.utime(old / "bridge.json")
    os.utime(new / "bridge.json", (past, past))
    result = run("export", "--overwrite")
    assert mark_of(project / "export" / "hf") == 1
    assert "the newest run, b-first" in result.stderr
    # A run that is named wins.
    run("export", "runs/a-second", "--overwrite")
    assert mark_of(project / "export" / "hf") == 2


def test_a_newest_run_without_a_finished_checkpoint_is_an_error(project: Path) -> None:
    run("convert")
    model = project / "model"
    old = trained_run(project / "runs" / "first", model, {4: marked(model, 1)})
    past = time.time() - 100
    os.utime(old / "bridge.json", (past, past))
    new = trained_run(project / "runs" / "second", model, {3: marked(model, 2)})
    (new / "checkpoints" / "3").rename(new / "checkpoints" / "3.orbax-checkpoint-tmp-9")
    for verb in ("export", "verify"):
        with pytest.raises(CheckpointError, match="the newest run, second, has no finished checkpoint"):
            run(verb)
    assert not (project / "export").exists()
    with pytest.raises(CheckpointError, match="no finished checkpoint") as found:
        run("export", "runs/second")
    assert "never finished" in str(found.value)


def test_the_best_by_eval_loss_is_taken(project: Path) -> None:
    model = project / "model"
    steps = {step: marked(model, step) for step in (10, 20, 30)}
    trained_run(project / "runs" / "r", model, steps, {0: 0.1, 10: 2.0, 20: 1.5, 25: 0.5, 30: float("nan")})
    result = run("export")
    assert mark_of(project / "export" / "hf") == 20
    assert "step 20, the best by eval loss" in result.stderr
    run("export", "--step", 10, "--overwrite")
    assert mark_of(project / "export" / "hf") == 10
    with pytest.raises(CheckpointError, match="no checkpoint of step 25") as found:
        run("export", "--step", 25, "--overwrite")
    assert "[10, 20, 30]" in str(found.value)
    assert mark_of(project / "export" / "hf") == 10, "a refused export replaces nothing"


def test_a_trained_checkpoint_is_compared_with_its_export_and_never_with_the_base(project: Path) -> None:
    run("convert")
    model = project / "model"
    trained_run(project / "runs" / "r", model, {5: marked(model, 1.5)})
    with pytest.raises(CheckpointError, match="was trained, and has no export"):
        run("verify", "--exact")
    run("export")
    assert run("verify", "--exact").code == 0
    result = run("verify", "--exact", "--json", "--reference", "model")
    assert result.code == 1
    assert json.loads(result.stdout)["different"] == ["model.norm.weight"]
    with pytest.raises(CheckpointError, match="is not the export of"):
        run("verify", "--reference", "model")


def test_a_spec_that_is_named_but_absent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no"):
        run("export", "--spec", tmp_path / "no.yaml")


def test_a_model_that_is_not_there_is_an_error(project: Path) -> None:
    (project / "bridge.yaml").write_text("model: {source: ./elsewhere}\n")
    with pytest.raises(BridgeError, match=r"model\.source: there is no folder"):
        run("convert")


def test_inspect_reads_a_hugging_face_folder(tiny: Tiny) -> None:
    facts = json.loads(run("inspect", tiny("tied"), "--json").stdout)
    tensors, _ = oracles.read_hf(tiny("tied"))
    assert (facts["format"], facts["model"]["tied"], facts["sidecar"]) == ("hf", True, None)
    assert facts["parameters"] == sum(tensor.size for tensor in tensors.values())
    assert facts["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert facts["tensors"] == {
        name: {"shape": list(tensor.shape), "dtype": "bfloat16"} for name, tensor in tensors.items()
    }
    table = json.loads(run("inspect", "--table", "llama_maxtext", "--json").stdout)
    assert table["requires"]["rope_type"] == "llama3.1"
    assert len(table["rules"]) == 12
