"""Public bug reports of this kind of tool, as kinds of fault: sizes, dtypes, and where a model may lie.

The numbers are those of the list of cases.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import checkpoints
import fault_models
import numpy as np
import pytest

from bridge.errors import BridgeError, CheckpointError

ENGINES = ("maxtext", "tunix")


def round_trip(hf: Path, folder: Path, engine: str) -> list[str]:
    """The tensors that a round trip changes."""
    step = checkpoints.convert(hf, folder / "ck", engine=engine)
    return checkpoints.folders_differ(hf, checkpoints.export(step, folder / "back"))


def spec(folder: Path, source: str, text: str = "") -> Path:
    path = folder / "bridge.yaml"
    path.write_text(f"model: {{source: {json.dumps(source)}}}\ndata: {{train: x.jsonl}}\n{text}")
    return path


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5, "num_hidden_layers": 7},
        {"hidden_size": 72, "intermediate_size": 33, "num_hidden_layers": 1, "vocab_size": 300, "head_dim": 10},
    ],
)
def test_case_33_sizes_that_no_released_model_has(sizes: dict[str, int], engine: str, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf", **sizes)
    back = checkpoints.export(checkpoints.convert(hf, tmp_path / "ck", engine=engine), tmp_path / "back")
    assert fault_models.arrays_of(back).keys() == fault_models.arrays_of(hf).keys()
    differ = checkpoints.folders_differ(hf, back)
    # 1/sqrt(head_dim) is no power of two there, and the source is f32: one ulp, as the help says.
    assert [name for name in differ if engine == "tunix" or "q_proj" not in name] == []
    for name in differ:
        a, b = fault_models.arrays_of(hf)[name], fault_models.arrays_of(back)[name]
        assert np.max(np.abs(a.view(np.int32) - b.view(np.int32))) <= 1


def test_case_33_no_tensors_is_an_error(tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    for header in ({}, {"__metadata__": {"format": "pt"}}):
        fault_models.write_safetensors(hf / "model.safetensors", header)
        with pytest.raises(CheckpointError, match="holds no tensors"):
            checkpoints.convert(hf, tmp_path / "ck")
    item = tmp_path / "tree" / "0" / "items"
    item.mkdir(parents=True)
    fault_models.write_json(item / "_METADATA", {"tree_metadata": {}})
    fault_models.write_json(item.parent / "_CHECKPOINT_METADATA", {})
    with pytest.raises(CheckpointError, match="holds no arrays"):
        checkpoints.export(tmp_path / "tree", tmp_path / "back", "--base", hf)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_case_37_every_float_of_two_or_four_bytes(kind: str, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf", dtype=kind)
    for engine in ENGINES:
        assert round_trip(hf, tmp_path / engine, engine) == []


def test_case_37_mixed_dtypes_in_one_file(tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf", dtype="bfloat16")
    arrays = fault_models.arrays_of(hf)
    for number, name in enumerate(sorted(arrays)):
        arrays[name] = arrays[name].astype((np.float32, np.float16, arrays[name].dtype)[number % 3])
    fault_models.write_tensors(hf, arrays)
    for engine in ENGINES:
        assert round_trip(hf, tmp_path / engine, engine) == []


@pytest.mark.parametrize(
    ("code", "width"), [("F8_E4M3", 1), ("F8_E5M2", 1), ("I8", 1), ("F64", 8), ("F4", 1), ("U3", 1)]
)
def test_case_37_other_dtypes_are_refused_by_name(code: str, width: int, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    header, data = fault_models.read_safetensors(hf / "model.safetensors")
    name = "model.norm.weight"
    others = {key: entry for key, entry in header.items() if key not in (name, "__metadata__")}
    kept = b"".join(data[slice(*entry["data_offsets"])] for entry in others.values())
    position = 0
    for entry in others.values():
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        entry["data_offsets"] = [position, position + size]
        position += size
    others[name] = {"dtype": code, "shape": [64], "data_offsets": [position, position + 64 * width]}
    fault_models.write_safetensors(hf / "model.safetensors", others, kept + bytes(64 * width))
    with pytest.raises(CheckpointError, match=code) as found:
        checkpoints.convert(hf, tmp_path / "ck")
    assert name in str(found.value)
    assert "float32" in str(found.value) or "F32" in str(found.value)


@pytest.mark.parametrize("address", ["az://bucket/model", "s3://bucket/model", "https://host/model"])
def test_case_48_an_object_store_is_refused_at_once(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    for args in ((address, "--out", "ck"), (hf, "--out", address)):
        with pytest.raises(BridgeError, match="is not on a file system of this host") as found:
            checkpoints.run("convert", *args, "--to", "maxtext")
        assert "copy it here first" in str(found.value)
    with pytest.raises(BridgeError, match="is not on a file system of this host"):
        checkpoints.run("convert", "--spec", spec(tmp_path, str(hf), f"workdir: {address}\n"), "--to", "maxtext")
    with pytest.raises(BridgeError, match="is not on a file system of this host"):
        checkpoints.run("convert", "--spec", spec(tmp_path, address), "--to", "maxtext", "--out", "ck")
    assert time.monotonic() - start < 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bridge.yaml", "hf"]
