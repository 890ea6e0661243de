"""Public bug reports of this kind of tool, as kinds of fault: what a model is, and where each weight goes.

The numbers are those of the list of cases; each test is a kind, tried on a tiny Llama: hidden 64, head_dim 16.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import checkpoints
import fault_models
import numpy as np
import pytest
import yaml

import oracles
from bridge import rope
from bridge.errors import CheckpointError, SpecError, UnsupportedError
from bridge.model_spec import ModelSpec

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ENGINES = ("maxtext", "tunix")


def scaled(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "llama3", **LLAMA3, **changes}


def expected(hf: Path, engine: str) -> dict[str, Any]:
    tensors, config = oracles.read_hf(hf)
    return oracles.maxtext_tree(tensors, config, True) if engine == "maxtext" else oracles.tunix_tree(tensors, config)


def spec(folder: Path, hf: Path, text: str = "") -> Path:
    path = folder / "bridge.yaml"
    path.write_text(f"model: {{source: {json.dumps(str(hf))}}}\ndata: {{train: x.jsonl}}\n{text}")
    return path


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("heads", [(4, 2, None), (4, 1, None), (4, 4, None), (4, 2, 24)])
def test_case_1_and_3_heads_and_rope_layout(heads: tuple[int, int, int | None], engine: str, tmp_path: Path) -> None:
    """1: asymmetric Q and K come back bit for bit. 3: K has its own number of heads, head_dim is its own number."""
    queries, keys, head_dim = heads
    changes = {"num_attention_heads": queries, "num_key_value_heads": keys, "torch_dtype": "bfloat16"}
    hf = fault_models.write_model(
        tmp_path / "hf", dtype="bfloat16", **changes, **({"head_dim": head_dim} if head_dim else {})
    )
    step = checkpoints.convert(hf, tmp_path / "ck", engine=engine)
    stored = checkpoints.without_step(checkpoints.restore(step / checkpoints.ITEMS[engine]))
    wanted = expected(hf, engine)
    assert stored.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(stored[name].astype(np.float32), array.astype(np.float32), err_msg=name)
    assert checkpoints.folders_differ(hf, checkpoints.export(step, tmp_path / "back")) == []


def test_case_1_the_other_rope_layout_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query kernel with the halves interleaved, as another converter would write it: other logits, and found."""
    hf = fault_models.write_model(tmp_path / "hf", rope_scaling=scaled())
    tensors, config = oracles.read_hf(hf)
    wrong = dict(tensors)
    for name in [name for name in tensors if "q_proj" in name or "k_proj" in name]:
        heads = tensors[name].shape[0] // 16
        wrong[name] = tensors[name].reshape(heads, 8, 2, 64).swapaxes(1, 2).reshape(tensors[name].shape)
    tree = oracles.maxtext_tree(wrong, config, True)
    checkpoints.save(tmp_path / "ck" / "0", "items", tree)
    monkeypatch.chdir(tmp_path)
    spec(tmp_path, hf)
    assert checkpoints.verify(tmp_path / "ck", "--exact", "--reference", hf)[0] == 1
    ids = list(range(1, 64))
    delta = np.abs(oracles.forward(tensors, config, ids) - oracles.forward(wrong, config, ids)).max()
    assert delta > 1e-2, "the layout must matter to the logits, or the comparison would prove nothing"


@pytest.mark.parametrize("engine", ENGINES)
def test_case_2_one_wrong_head_fails_the_check(engine: str, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    tensors, config = oracles.read_hf(hf)
    name = "model.layers.1.self_attn.k_proj.weight"
    wrong = {**tensors, name: tensors[name].copy()}
    wrong[name][16:32] = np.roll(wrong[name][16:32], 8, axis=0)
    other = shutil.copytree(hf, tmp_path / "other")
    fault_models.write_tensors(other, wrong)
    step = checkpoints.convert(other, tmp_path / "ck", engine=engine)
    code, report = checkpoints.verify(step, "--exact", "--reference", hf)
    assert (code, report["ok"], report["different"]) == (1, False, [name])
    assert checkpoints.verify(step, "--exact", "--reference", other)[0] == 0
    ids = list(range(1, 40))
    delta = np.abs(oracles.forward(tensors, config, ids) - oracles.forward(wrong, config, ids)).max()
    assert delta > 1e-3


def test_case_5_the_export_speaks_to_both_transformers(tmp_path: Path) -> None:
    """A reader of transformers 4 knows rope_theta and rope_scaling only, one of 5 rope_parameters only."""
    new = {"rope_parameters": {**scaled(), "rope_theta": 500000.0}, "rope_scaling": None}
    hf = fault_models.write_model(tmp_path / "hf", **new)
    config = json.loads((hf / "config.json").read_text())
    del config["rope_theta"], config["rope_scaling"]
    fault_models.write_json(hf / "config.json", config)
    back = checkpoints.export(checkpoints.convert(hf, tmp_path / "ck"), tmp_path / "back")
    written = json.loads((back / "config.json").read_text())
    assert written["rope_theta"] == 500000.0
    assert written["rope_scaling"] == scaled()
    assert written["rope_parameters"] == {**scaled(), "rope_theta": 500000.0}
    assert written["torch_dtype"] == written["dtype"] == "float32"


@pytest.mark.parametrize("changes", [scaled(), scaled(factor=32.0), None])
def test_case_7_the_reference_uses_the_scaling(changes: dict[str, Any] | None, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf", rope_scaling=changes)
    tensors, config = oracles.read_hf(hf)
    ours = rope.inverse_frequencies(ModelSpec.from_folder(hf))
    np.testing.assert_allclose(ours, oracles.llama3_inverse_frequencies(config), rtol=3e-7)
    if changes:
        ids = list(range(1, 64))
        plain = oracles.forward(tensors, {**config, "rope_scaling": None}, ids)
        assert np.abs(oracles.forward(tensors, config, ids) - plain).max() > 1e-2, "scaling must act inside 64 tokens"


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "su", "mrope", "proportional"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_case_8_another_scaling_is_refused(kind: str, key: str, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf", rope_scaling={key: kind, "factor": 2.0})
    with pytest.raises(UnsupportedError, match=f"rope_scaling: rope type '{kind}'"):
        checkpoints.convert(hf, tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize(("factor", "scales"), [(8.0, True), (32.0, True), (None, False)])
def test_case_9_the_config_turns_scaling_on_and_its_constants_are_corrected(
    factor: float | None, scales: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MaxText hard-codes factor 8; the frequencies of the run are the model's own, installed before it is built."""
    rope_scaling = scaled(factor=factor, original_max_position_embeddings=8192) if factor else None
    hf = fault_models.write_model(tmp_path / "hf", rope_scaling=rope_scaling)
    checkpoints.convert(hf, tmp_path / "checkpoints" / "maxtext")
    monkeypatch.chdir(tmp_path)
    text = checkpoints.run("config", "--engine", "maxtext", "--spec", spec(tmp_path, hf)).stdout
    settings = yaml.safe_load(text)
    assert (settings["rope_type"], settings["rope_use_scale"]) == ("llama3.1", scales)
    assert settings["rope_max_timescale"] == 500000
    if factor == 32.0:
        ours = rope.inverse_frequencies(ModelSpec.from_folder(hf))
        other = fault_models.write_model(tmp_path / "eight", rope_scaling={**rope_scaling, "factor": 8.0})
        assert ours != rope.inverse_frequencies(ModelSpec.from_folder(other))


@pytest.mark.parametrize("engine", ENGINES)
def test_case_10_a_tied_model_without_a_head(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = fault_models.write_model(tmp_path / "hf", tie_word_embeddings=True)
    step = checkpoints.convert(hf, tmp_path / "checkpoints" / engine, engine=engine)
    back = checkpoints.export(step, tmp_path / "back")
    assert checkpoints.folders_differ(hf, back) == []
    assert HEAD not in fault_models.arrays_of(back)
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is True
    if engine == "maxtext":
        monkeypatch.chdir(tmp_path)
        text = checkpoints.run("config", "--engine", "maxtext", "--spec", spec(tmp_path, hf)).stdout
        assert yaml.safe_load(text)["logits_via_embedding"] is True


@pytest.mark.parametrize("engine", ENGINES)
def test_case_11_a_tied_model_that_carries_a_head(engine: str, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf", tie_word_embeddings=True)
    arrays = fault_models.arrays_of(hf)
    fault_models.write_tensors(hf, {**arrays, HEAD: arrays[EMBEDDING]})
    back = checkpoints.export(checkpoints.convert(hf, tmp_path / "ck", engine=engine), tmp_path / "back")
    assert HEAD not in fault_models.arrays_of(back)
    other = arrays[EMBEDDING].copy()
    other[3, 5] = np.nextafter(other[3, 5], np.float32(9))
    fault_models.write_tensors(hf, {**arrays, HEAD: other})
    with pytest.raises(CheckpointError, match=f"{HEAD} differs from {EMBEDDING}"):
        checkpoints.convert(hf, tmp_path / "no", engine=engine)


def test_case_12_an_untied_model_without_a_head(tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    arrays = fault_models.arrays_of(hf)
    del arrays[HEAD]
    fault_models.write_tensors(hf, arrays)
    with pytest.raises(CheckpointError, match=r"missing +lm_head\.weight  \(259, 64\)") as found:
        checkpoints.convert(hf, tmp_path / "ck")
    assert "tie_word_embeddings" in str(found.value)


@pytest.mark.parametrize(("largest", "fits"), [(0, True), (200, True), (258, True), (259, False), (5000, False)])
def test_case_15_the_tokenizer_may_be_smaller_but_not_larger(largest: int, fits: bool, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    added = [{"id": largest, "content": "<|x|>", "special": True}]
    fault_models.write_json(hf / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": added})
    if fits:
        checkpoints.convert(hf, tmp_path / "ck")
        return
    with pytest.raises(CheckpointError, match=f"token id {largest}, the embedding has 259 rows"):
        checkpoints.convert(hf, tmp_path / "ck")


@pytest.mark.parametrize(("engine", "options"), [("maxtext", ()), ("maxtext", ("--unscanned",)), ("tunix", ())])
def test_case_17_each_layer_keeps_its_own_values(engine: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """A stacked array in which every layer was the last one is what this finds."""
    hf = fault_models.write_model(tmp_path / "hf", num_hidden_layers=5)
    arrays = fault_models.arrays_of(hf)
    for name in arrays:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        arrays[name] = np.full_like(arrays[name], 1 + int(layer[1]) if layer else 9)
    fault_models.write_tensors(hf, arrays)
    step = checkpoints.convert(hf, tmp_path / "ck", *options, engine=engine)
    stored = checkpoints.without_step(checkpoints.restore(step / checkpoints.ITEMS[engine]))
    if engine == "maxtext" and not options:
        key = stored["params.params.decoder.layers.self_attention.key.kernel"]
        assert [set(key[:, layer].ravel()) for layer in range(5)] == [{float(n)} for n in range(1, 6)]
    assert checkpoints.folders_differ(hf, checkpoints.export(step, tmp_path / "back")) == []


def test_case_18_the_run_follows_the_layout_of_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    for options, scanned in ((("--unscanned",), False), ((), True)):
        checkpoints.convert(hf, tmp_path / "checkpoints" / "maxtext", *options, "--overwrite")
        text = checkpoints.run("config", "--engine", "maxtext", "--spec", spec(tmp_path, hf)).stdout
        assert yaml.safe_load(text)["scan_layers"] is scanned
    with pytest.raises(SpecError, match=r"maxtext\.scan_layers"):
        checkpoints.run("config", "--spec", spec(tmp_path, hf, "maxtext: {scan_layers: false}\n"))
    sidecar = tmp_path / "checkpoints" / "maxtext" / "bridge.json"
    sidecar.write_text(sidecar.read_text().replace('"scanned": true', '"scanned": false'))
    for setting in ("rope_type: default", "base_num_kv_heads: 4", "logits_via_embedding: true"):
        with pytest.raises(SpecError, match=rf"maxtext\.{setting.partition(':')[0]}"):
            checkpoints.run("config", "--spec", spec(tmp_path, hf, f"maxtext: {{{setting}}}\n"))
    with pytest.raises(CheckpointError, match="says scanned False, the tree is not so"):
        checkpoints.export(sidecar.parent, tmp_path / "back")


@pytest.mark.parametrize("change", ["extra", "missing", "renamed", "transposed"])
def test_case_20_names_are_compared_both_ways(change: str, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    arrays = fault_models.arrays_of(hf)
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "extra":
        arrays["model.layers.1.mlp.up_proj.bias"] = arrays["model.norm.weight"]
    if change == "transposed":
        arrays[name] = np.ascontiguousarray(arrays[name].T)
    if change in ("missing", "renamed"):
        moved = arrays.pop(name)
        if change == "renamed":
            arrays["model.layers.2.mlp.up_proj.weight"] = moved
    fault_models.write_tensors(hf, arrays)
    with pytest.raises(CheckpointError) as found:
        checkpoints.convert(hf, tmp_path / "ck")
    said = {
        "extra": ["unexpected   model.layers.1.mlp.up_proj.bias"],
        "missing": [f"missing      {name}  (96, 64)"],
        "renamed": [f"missing      {name}  (96, 64)", "unexpected   model.layers.2.mlp.up_proj.weight"],
        "transposed": [f"shape        {name}  file has (64, 96), this config needs (96, 64)"],
    }[change]
    assert [line for line in said if line not in str(found.value)] == []
    assert not (tmp_path / "ck").exists()
