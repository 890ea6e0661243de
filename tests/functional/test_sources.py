"""Hugging Face folders that cannot be converted as they are: each is refused with the tensor or the file named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Array, convert, different, export, maxtext_expected, restore, without_step
from conftest import Tiny
from safetensors.numpy import save_file

import oracles
from bridge import sidecar
from bridge.errors import BridgeError, CheckpointError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"
Change = Callable[[dict[str, Array]], Any]


def rewritten(source: Path, out: Path, change: Change, **config: Any) -> Path:
    """A copy of a folder with other tensors, and other keys in its config.json."""
    shutil.copytree(source, out)
    tensors, settings = oracles.read_hf(out)
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({**settings, **config}))
    return out


def refused(source: Path, out: Path) -> str:
    with pytest.raises(CheckpointError) as found:
        convert(source, out)
    assert not out.exists()
    return str(found.value)


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda t: t.pop(UP), ["1 of 21 tensors", f"missing      {UP}  (96, 64)"]),
        (
            lambda t: t.update({UP.replace("up", "side"): t[UP]}),
            ["1 of 21 tensors", "unexpected   model.layers.1.mlp.side_proj.weight  (96, 64)"],
        ),
        (lambda t: t.update({UP.replace(".1.", ".2."): t[UP]}), ["unexpected   model.layers.2.mlp.up_proj.weight"]),
        (
            lambda t: t.update({UP: t[UP].T}),
            [f"shape        {UP}  file has (64, 96), this config needs (96, 64)"],
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}),
            ["unexpected   model.layers.0.self_attn.q_proj.bias"],
        ),
        (lambda t: t.pop(HEAD), [f"missing      {HEAD}", "tie_word_embeddings false"]),
        (
            lambda t: t.update({EMBEDDING: t[EMBEDDING][:200], HEAD: t[HEAD][:200]}),
            ["2 of 21 tensors", EMBEDDING, "was the tokenizer resized?"],
        ),
        (lambda t: t.update({UP: t[UP].astype(np.int8)}), [f"dtype        {UP}  I8"]),
        (lambda t: t.update({UP: t[UP].astype(np.float64)}), [f"dtype        {UP}  F64"]),
    ],
)
def test_a_folder_that_does_not_match_its_config(change: Change, lines: list[str], tiny: Tiny, tmp_path: Path) -> None:
    text = refused(rewritten(tiny("mha"), tmp_path / "src", change), tmp_path / "out")
    assert [line for line in lines if line not in text] == [], text


def test_eight_bit_floats_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch

    source = shutil.copytree(tiny("mha"), tmp_path / "src")
    tensors = load_file(source / "model.safetensors")
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    save_torch(tensors, source / "model.safetensors")
    assert f"dtype        {UP}  F8_E4M3" in refused(source, tmp_path / "out")


def mixed(tensors: dict[str, Array]) -> None:
    """float32 norms, and one layer's matrix in float16, in a bfloat16 model."""
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name].astype(np.float32)
    tensors[UP] = tensors[UP].astype(np.float16)


def test_mixed_dtypes_come_back_bit_for_bit(tiny: Tiny, tmp_path: Path) -> None:
    source = rewritten(tiny("head_dim_96"), tmp_path / "src", mixed)
    step = convert(source, tmp_path / "out", "--check")
    found = without_step(restore(step / "items"))
    kinds = {name.split(".")[-2]: array.dtype.name for name, array in found.items()}
    assert (kinds["wi_0"], kinds["wi_1"], kinds["pre_self_attention_layer_norm"]) == ("bfloat16", "float32", "float32")
    exact = oracles.maxtext_tree(*oracles.read_hf(source), scanned=True)
    assert different({name: array.astype(np.float32) for name, array in found.items()}, exact) == []
    back = export(tmp_path / "out", tmp_path / "hf")
    assert different(oracles.read_hf(back)[0], oracles.read_hf(source)[0]) == []
    assert sidecar.read(tmp_path / "out").hf_dtype(UP) == "float16"  # type: ignore[union-attr]


def test_a_tied_model_may_carry_a_head_that_equals_the_embedding(tiny: Tiny, tmp_path: Path) -> None:
    both = rewritten(tiny("tied"), tmp_path / "both", lambda t: t.update({HEAD: t[EMBEDDING]}))
    step = convert(both, tmp_path / "out")
    assert different(without_step(restore(step / "items")), maxtext_expected(tiny("tied"), True)) == []
    back = export(tmp_path / "out", tmp_path / "hf")
    assert HEAD not in oracles.read_hf(back)[0]
    facts = sidecar.read(tmp_path / "out")
    assert facts is not None
    assert facts.layout["left_out"] == [HEAD]


def one_bit(tensors: dict[str, Array]) -> None:
    head = tensors[EMBEDDING].copy()
    head.view(np.uint16)[258, 95] ^= 1
    tensors[HEAD] = head


@pytest.mark.parametrize("change", [one_bit, lambda t: t.update({HEAD: t[EMBEDDING].astype(np.float32)})])
def test_a_tied_model_with_another_head_is_refused(change: Change, tiny: Tiny, tmp_path: Path) -> None:
    text = refused(rewritten(tiny("tied"), tmp_path / "src", change), tmp_path / "out")
    assert f"tie_word_embeddings true, but {HEAD} differs from {EMBEDDING}" in text


def test_old_rope_buffers_are_left_out(tiny: Tiny, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = rewritten(tiny("mha"), tmp_path / "src", lambda t: t.update({name: np.ones(8, np.float32)}))
    step = convert(source, tmp_path / "out")
    assert different(without_step(restore(step / "items")), maxtext_expected(tiny("mha"), True)) == []
    facts = sidecar.read(tmp_path / "out")
    assert facts is not None
    assert facts.layout["left_out"] == [name]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "model-00002-of-00003.safetensors").unlink(), ["1 of 3 files", "model-00002-of-00003"]),
        (
            lambda f: (f / "model-00003-of-00003.safetensors").write_bytes(
                (f / "model-00003-of-00003.safetensors").read_bytes()[:-7]
            ),
            ["model-00003-of-00003.safetensors is truncated"],
        ),
        (lambda f: (f / "model-00001-of-00003.safetensors").write_bytes(b""), ["model-00001", "truncated"]),
        (lambda f: (f / "model.safetensors.index.json").unlink(), ["neither model.safetensors nor", "fetch the index"]),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), ["index.json cannot be read as JSON"]),
        (
            lambda f: shutil.copy(f / "model-00001-of-00003.safetensors", f / "model-00002-of-00003.safetensors"),
            ["index and files disagree", "is in both"],
        ),
        (lambda f: (f / "config.json").unlink(), ["config.json does not exist"]),
        (lambda f: [p.rename(p.with_suffix(".bin")) for p in f.glob("*.safe*")], ["pickled weights"]),
    ],
)
def test_a_broken_download_is_named(damage: Any, words: list[str], tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny("mha", shards=3), tmp_path / "src")
    damage(source)
    text = refused(source, tmp_path / "out")
    assert [word for word in words if word not in text] == [], text


def test_an_index_cannot_leave_the_folder(tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny("mha", shards=2), tmp_path / "src")
    index = source / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"][UP] = "../elsewhere.safetensors"
    index.write_text(json.dumps(values))
    assert "is not a plain file name" in refused(source, tmp_path / "out")


@pytest.mark.parametrize(("vocab", "fits"), [(-1, False), (0, True), (40, True)])
def test_a_tokenizer_larger_than_the_embedding_is_refused(
    vocab: int, fits: bool, tiny: Tiny, tmp_path: Path, llama_tokenizer: Path
) -> None:
    size = 1 + max(json.loads((llama_tokenizer / "tokenizer.json").read_text())["model"]["vocab"].values())
    added = json.loads((llama_tokenizer / "tokenizer.json").read_text())["added_tokens"]
    size = max([size, *(token["id"] + 1 for token in added)])
    source = tiny("mqa", tokenizer="llama", vocab=size + vocab)
    if fits:
        convert(source, tmp_path / "out")
        return
    assert f"has token id {size - 1}, the embedding has {size - 1} rows" in refused(source, tmp_path / "out")


def test_where_there_is_no_model_at_all(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="neither a folder nor a hub id"):
        convert(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BridgeError, match=r"config\.json does not exist"):
        convert(tmp_path / "empty", tmp_path / "out")


def test_bfloat16_is_read_without_torch(tiny: Tiny) -> None:
    tensors, _ = oracles.read_hf(tiny("mha"))
    assert all(tensor.dtype == ml_dtypes.bfloat16 for tensor in tensors.values())
