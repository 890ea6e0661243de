"""The builders that other tests rely on: what they write is what transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
import oracles

MESSAGES = [
    {"role": "user", "content": " Who built it?\n"},
    {"role": "assistant", "content": "Über 12 men, in 1839."},
]


def read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    return load(folder)


def test_llama_tokenizer_writes_llama_turns(llama_tokenizer: Path) -> None:
    tokenizer = read_tokenizer(llama_tokenizer)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWho built it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nÜber 12 men, in 1839.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.bos_token_id) == 1
    # As with the original, encoding a finished chat text again puts a second bos in front.
    assert tokenizer(text).input_ids == [tokenizer.bos_token_id, *ids]
    assert tokenizer.pad_token is None
    assert not (llama_tokenizer / "chat_template.jinja").exists()
    ends = json.loads((llama_tokenizer / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    assert tokenizer.eos_token == "<|eot_id|>"


def test_chatml_tokenizer_writes_smollm2_turns(chatml_tokenizer: Path) -> None:
    tokenizer = read_tokenizer(chatml_tokenizer)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a careful assistant made for tests<|im_end|>\n"
        "<|im_start|>user\n Who built it?\n<|im_end|>\n"
        "<|im_start|>assistant\nÜber 12 men, in 1839.<|im_end|>\n"
    )
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    own = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, *MESSAGES], tokenize=False)
    assert own.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("kind", ["llama", "chatml"])
def test_model_and_tokenizer_agree(kind: str, tiny: Any) -> None:
    folder = tiny("llama3", tokenizer=kind)
    tokenizer = read_tokenizer(folder)
    tensors, config = oracles.read_hf(folder)
    assert tensors["model.embed_tokens.weight"].shape[0] == config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert config["bos_token_id"] == tokenizer.bos_token_id
    assert config["pad_token_id"] == tokenizer.pad_token_id


def test_shards_and_dtypes_hold_the_same_weights(tiny: Any, tmp_path: Path) -> None:
    whole, config = oracles.read_hf(tiny("tied", dtype="float32"))
    assert "head_dim" in config
    assert "lm_head.weight" not in whole
    sharded = models.make_preset(tmp_path, "tied", dtype="bfloat16", shards=3)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(sharded.glob("*.safetensors"))) == 3
    parts, _ = oracles.read_hf(sharded)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in parts.values())
    assert index["weight_map"].keys() == parts.keys() == whole.keys()
    for name, array in parts.items():
        np.testing.assert_array_equal(oracles.round_once(whole[name], array.dtype), array, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_edge_values_are_in_every_tensor(dtype: str, tiny: Any) -> None:
    tensors, _ = oracles.read_hf(tiny("mha", dtype=dtype, edge_values=True))
    subnormal = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}[dtype]
    normal = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126}[dtype]
    for array in tensors.values():
        first = array.reshape(-1)[:7].astype(np.float64)
        assert np.signbit(first[0])
        assert first.tolist() == [0, 0, subnormal, -subnormal, 3 * subnormal, normal, subnormal - normal]


def test_no_two_tensors_and_no_two_layers_are_alike(tiny: Any) -> None:
    tensors, config = oracles.read_hf(tiny("llama3"))
    assert "head_dim" not in config
    assert len({array.tobytes() for array in tensors.values()}) == len(tensors)
    norms = [array.astype(np.float32) for array in tensors.values() if array.ndim == 1]
    assert all(0.2 < norm.std() < 0.4 and norm.min() >= 0.29 for norm in norms)
