"""Public bug reports of this kind of tool, as kinds of fault: checkpoints, exports, memory, and small files.

The numbers are those of the list of cases. Cases 28 and 29 (killed, disk full) are test_kill.py and
test_output_faults.py, 47 is test_hub.py, 57 is test_engine_versions.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import fault_models
import numpy as np
import pytest
import yaml

import oracles
from bridge.errors import CheckpointError

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|eot_id|>{% endfor %}"
TREES = {
    "params/params": "params.params.{}",
    "params": "params.{}",
    "bare": "{}",
    "bare, value": "{}.value",
    "base, value": "base.{}.value",
}
# Peak resident memory of a conversion and an export of a model with forty tensors of 8 MB, beyond that of a tiny one.
MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import checkpoints
import jax, jax.numpy as jnp
jax.jit(jnp.transpose)(jnp.zeros((64, 64))).block_until_ready()
folder, engine = Path(sys.argv[2]), sys.argv[3]
peaks = []
for name in ("small", "large"):
    step = checkpoints.convert(folder / name, folder / engine / name, "--memory", "300MiB", engine=engine)
    checkpoints.export(step, folder / engine / (name + "_back"), "--memory", "300MiB")
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
print(peaks[1] - peaks[0])
"""


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return fault_models.write_model(tmp_path / "hf")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory where there is one, which no process's resident memory counts."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def tree_of(hf: Path) -> dict[str, Any]:
    """What MaxText holds of a model: paths within it, and arrays."""
    tree = oracles.maxtext_tree(*oracles.read_hf(hf), True)
    return {name.removeprefix("params.params."): array for name, array in tree.items()}


@pytest.mark.parametrize("change", ["dropped", "renamed", "another shape", "another dtype"])
@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_case_19_a_leaf_that_is_missing_is_named(engine: str, change: str, hf: Path, tmp_path: Path) -> None:
    item = checkpoints.ITEMS[engine]
    step = checkpoints.convert(hf, tmp_path / "ck", engine=engine)
    tree = checkpoints.restore(step / item)
    name = next(name for name in sorted(tree) if "mlp" in name)
    array = tree.pop(name)
    changed = {
        "dropped": {},
        "renamed": {name.replace("mlp", "mlq"): array},
        "another shape": {name: array[:-1]},
        "another dtype": {name: array.astype(np.int8)},
    }[change]
    shutil.rmtree(step)
    checkpoints.save(step, item, {**tree, **changed})
    with pytest.raises(CheckpointError, match="does not match the model: ") as found:
        checkpoints.export(step, tmp_path / "back")
    word = {"dropped": "missing", "renamed": "missing", "another shape": "shape", "another dtype": "dtype"}[change]
    assert f"{word:12} {name}  " in str(found.value)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("form", TREES)
def test_case_22_every_tree_that_the_engine_writes(form: str, hf: Path, tmp_path: Path) -> None:
    tree = {TREES[form].format(name): array for name, array in tree_of(hf).items()}
    extra = {"step": np.int32(7), "decoder.dropout.rngs.count.value": np.zeros((), np.uint32)}
    if "bare" not in form:
        del extra["decoder.dropout.rngs.count.value"]
    item = "model_params" if form.startswith("base") else "items"
    checkpoints.save(tmp_path / "ck" / "7", item, {**tree, **extra})
    back = checkpoints.export(tmp_path / "ck", tmp_path / "back", "--base", hf)
    assert checkpoints.folders_differ(hf, back) == []


def test_engine_collections_that_are_no_weights_are_listed_and_left_out(hf: Path, tmp_path: Path) -> None:
    tree = {f"params.params.{name}": array for name, array in tree_of(hf).items()}
    extra = {"params.aqt.decoder.scale": np.ones(3, np.float32), "opt_state.mu.decoder.w": np.ones(3, np.float32)}
    checkpoints.save(tmp_path / "ck" / "0", "items", {**tree, **extra})
    result = checkpoints.run("export", tmp_path / "ck", "--out", tmp_path / "back", "--base", hf)
    assert "left out, no weights: opt_state, params" in result.stderr
    assert checkpoints.folders_differ(hf, tmp_path / "back") == []
    seen = json.loads(checkpoints.run("inspect", tmp_path / "ck", "--json").stdout)
    assert sorted(seen["left_out"]) == sorted(extra)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_case_24_and_25_memory_does_not_grow_with_the_model(engine: str, in_memory: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    fault_models.write_model(in_memory / "small", head_dim=128, num_hidden_layers=1, **sizes)
    large = fault_models.write_model(in_memory / "large", head_dim=128, num_hidden_layers=10, **sizes)
    size = (large / "model.safetensors").stat().st_size >> 20
    tests = str(Path(checkpoints.__file__).parent)
    command = [sys.executable, "-c", MEMORY, tests, str(in_memory), engine]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert size > 380
    assert int(done.stdout.split()[-1]) < 100, "three slabs of 4 MB, four times each, and what the allocator keeps"


@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_case_26_bfloat16_stays_two_bytes_and_few_write_at_once(engine: str, tmp_path: Path) -> None:
    from bridge.converters import transfer

    hf = fault_models.write_model(tmp_path / "hf", dtype="bfloat16")
    step = checkpoints.convert(hf, tmp_path / "ck", engine=engine)
    stored = json.loads(checkpoints.run("inspect", step, "--json").stdout)["tensors"]
    wide = [name for name, tensor in stored.items() if tensor["dtype"] != "bfloat16"]
    assert wide == [name for name in stored if engine == "maxtext" and "query" in name], "the folded scale needs more"
    assert transfer.Budget().workers <= 4
    assert checkpoints.folders_differ(hf, checkpoints.export(step, tmp_path / "back")) == []


def test_case_30_shards_that_an_interruption_left(tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf", shards=3)
    second = hf / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    for left, says in (
        (whole[:-4], "is truncated"),
        (whole[:300], "truncated"),
        (b"", "truncated"),
        (whole + b"x", "too many"),
    ):
        second.write_bytes(left)
        with pytest.raises(CheckpointError, match=says) as found:
            checkpoints.convert(hf, tmp_path / "ck")
        assert second.name in str(found.value)
    second.unlink()
    with pytest.raises(CheckpointError, match="incomplete: 1 of 3 files") as found:
        checkpoints.convert(hf, tmp_path / "ck")
    assert f"{second.name} is missing" in str(found.value)
    second.write_bytes(whole)
    checkpoints.convert(hf, tmp_path / "ck")


def test_case_31_a_sharded_export_has_its_index(hf: Path, tmp_path: Path) -> None:
    step = checkpoints.convert(hf, tmp_path / "ck")
    size = sum(array.nbytes for array in fault_models.arrays_of(hf).values())
    back = checkpoints.export(step, tmp_path / "back", "--max-shard-size", str(size // 3 + 40_000))
    files = sorted(path.name for path in back.glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    placed = {name: file for file in files for name in fault_models.read_safetensors(back / file)[0] if name[0] != "_"}
    assert index["weight_map"] == placed
    assert checkpoints.folders_differ(hf, back) == []


def small_files(hf: Path) -> dict[str, str]:
    """Give a model the small files of an Instruct release; returns their digests."""
    fault_models.write_json(hf / "tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": "<|eot_id|>"})
    (hf / "chat_template.jinja").write_text(TEMPLATE + "\n{# été #}", encoding="utf-8")
    fault_models.write_json(hf / "special_tokens_map.json", {"eos_token": "<|eot_id|>"})
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in hf.iterdir()
        if path.suffix in (".json", ".jinja") and path.name != "config.json"
    }


def digests(folder: Path, names: dict[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_case_34_44_and_64_small_files_with_and_without_a_base(engine: str, hf: Path, tmp_path: Path) -> None:
    """34 and 44: the tokenizer, the template in both of its places and generation_config come back byte for byte,
    without the base. 64: a checkpoint without bridge.json needs --base, and then gives the same."""
    names = small_files(hf)
    kept = shutil.copytree(hf, tmp_path / "kept")
    step = checkpoints.convert(hf, tmp_path / "ck", engine=engine)
    shutil.rmtree(hf)
    assert digests(checkpoints.export(step, tmp_path / "back"), names) == names
    (tmp_path / "ck" / "bridge.json").unlink()
    shutil.rmtree(tmp_path / "ck" / "hf")
    with pytest.raises(CheckpointError, match=r"has no bridge\.json beside it") as found:
        checkpoints.export(step, tmp_path / "foreign")
    assert "--base DIR" in str(found.value)
    foreign = checkpoints.export(step, tmp_path / "foreign", "--base", kept)
    assert digests(foreign, names) == names
    assert checkpoints.folders_differ(kept, foreign) == []


def instruct(hf: Path, eos: Any, closing: str) -> None:
    """Small files of a model whose template closes its turns with `closing`."""
    added = [{"id": 254, "content": "<|end_of_text|>"}, {"id": 255, "content": "<|eot_id|>"}]
    fault_models.write_json(hf / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": added})
    (hf / "chat_template.jinja").write_text(TEMPLATE.replace("<|eot_id|>", closing))
    fault_models.write_json(hf / "generation_config.json", {**fault_models.GENERATION, "eos_token_id": eos})


@pytest.mark.parametrize("verb", ["convert", "export"])
@pytest.mark.parametrize(
    ("eos", "closing", "warns"),
    [
        ([254, 255, 257], "<|eot_id|>", False),
        (255, "<|eot_id|>", False),
        ([254], "<|eot_id|>", True),
        (254, "<|eot_id|>", True),
        (254, "\n", False),
    ],
)
def test_case_39_and_40_end_tokens(eos: Any, closing: str, warns: bool, verb: str, hf: Path, tmp_path: Path) -> None:
    """39: a list of end tokens survives. 40: a base model with a chat template would never stop: it is said."""
    instruct(hf, eos, closing)
    result = checkpoints.run("convert", hf, "--to", "maxtext", "--out", tmp_path / "ck")
    if verb == "export":
        result = checkpoints.run("export", tmp_path / "ck", "--out", tmp_path / "back")
        assert json.loads((tmp_path / "back" / "generation_config.json").read_text())["eos_token_id"] == eos
        assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == [257, 258]
    assert ("closes a turn with <|eot_id|> (255)" in result.stderr) is warns


def test_case_41_and_45_the_config_names_the_tokenizer_and_no_pad(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """45: the run uses the model's own tokenizer and template. 41: nothing sets pad to eos; masks go by position."""
    small_files(hf)
    checkpoints.convert(hf, tmp_path / "checkpoints" / "maxtext")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bridge.yaml").write_text("model: {source: hf}\ndata: {train: x.jsonl}\n")
    settings = yaml.safe_load(checkpoints.run("config", "--engine", "maxtext").stdout)
    folder = Path(settings["tokenizer_path"])
    assert (folder / "chat_template.jinja").read_bytes() == (hf / "chat_template.jinja").read_bytes()
    assert not [key for key in settings if "chat_template" in key or "pad" in key.split("_")]
