"""`ModelSpec`: what is read from a config.json, what is refused by name, and both spellings of RoPE and dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny
from hf_configs import LLAMA3, NEW, OLD, changed

import oracles
from bridge.errors import BridgeError, CheckpointError, SpecError, UnsupportedError
from bridge.hf_keys import FIXED_KEYS, NEUTRAL_KEYS
from bridge.model_spec import MAX_CONFIG_BYTES, ModelSpec, RopeScaling, read_json


def test_llama_3_1_8b_is_read_from_either_spelling() -> None:
    spec = ModelSpec.from_hf_config(OLD)
    assert spec == ModelSpec(
        layers=32,
        embed=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=14336,
        vocab=128256,
        tied=False,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
        norm_eps=1e-5,
        context=131072,
        dtype="bfloat16",
    )
    assert spec.parameters == 8_030_261_248  # as the model card has it
    assert ModelSpec.from_hf_config(NEW) == spec
    assert ModelSpec.from_hf_config({**OLD, **NEW}) == spec
    # Llama 3.1's first config.json said "type"; nothing else changes.
    older = {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()}
    assert ModelSpec.from_hf_config(changed(rope_scaling=older)) == spec


def test_a_tied_llama_3_2_1b_is_counted_once() -> None:
    config = changed(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        head_dim=64,
        tie_word_embeddings=True,
        rope_scaling={**LLAMA3, "factor": 32.0},
    )
    spec = ModelSpec.from_hf_config(config)
    assert (spec.tied, spec.head_dim, spec.parameters) == (True, 64, 1_235_814_400)
    assert spec.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("spelling", ["old", "new", "both"])
@pytest.mark.parametrize("name", ["untied", "tied", "mqa", "llama3", "head_dim_96"])
def test_facts_are_those_of_transformers(name: str, spelling: str, tiny: Tiny) -> None:
    from transformers import LlamaConfig

    folder = tiny(name, rope_spelling=spelling)
    spec, theirs = ModelSpec.from_folder(folder), LlamaConfig.from_pretrained(folder)
    rope = theirs.rope_parameters
    assert spec.rope_theta == rope["rope_theta"]
    assert (spec.rope_scaling is not None) == (rope["rope_type"] == "llama3")
    if spec.rope_scaling is not None:
        assert spec.rope_scaling.factor == rope["factor"]
        assert spec.rope_scaling.original_context == rope["original_max_position_embeddings"]
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
    )
    assert (spec.dtype, spec.tied) == (str(theirs.dtype).removeprefix("torch."), theirs.tie_word_embeddings)
    assert (spec.norm_eps, spec.context) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    tensors, _ = oracles.read_hf(folder)
    assert spec.parameters == sum(tensor.size for tensor in tensors.values())


def test_what_is_left_out_has_transformers_default() -> None:
    spec = ModelSpec.from_hf_config(
        changed(
            num_key_value_heads=...,
            rope_theta=...,
            rope_scaling=...,
            rms_norm_eps=...,
            tie_word_embeddings=...,
            torch_dtype=...,
            max_position_embeddings=...,
        )
    )
    assert (spec.kv_heads, spec.rope_theta, spec.rope_scaling) == (32, 10000.0, None)
    assert (spec.norm_eps, spec.tied, spec.context, spec.dtype) == (1e-6, False, 2048, "float32")


@pytest.mark.parametrize(
    "key", sorted(NEUTRAL_KEYS - {"model_type", "torch_dtype", "dtype", "max_position_embeddings"})
)
def test_a_key_that_says_nothing_about_the_forward_pass_is_accepted(key: str) -> None:
    assert ModelSpec.from_hf_config(changed(**{key: "anything"})) == ModelSpec.from_hf_config(OLD)


# One value of each fixed key that makes another computation.
REFUSED = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 4096,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention"],
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.01,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "partial_rotary_factor": 0.5,
    "qk_norm": True,
    "use_qk_norm": True,
    "num_local_experts": 8,
    "num_experts": 8,
    "quantization_config": {"quant_method": "fp8"},
}


def test_the_list_of_refused_values_is_complete() -> None:
    assert REFUSED.keys() >= FIXED_KEYS.keys()


@pytest.mark.parametrize("key", sorted(FIXED_KEYS))
def test_a_key_that_changes_the_computation_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedError) as found:
        ModelSpec.from_hf_config(changed(**{key: REFUSED[key]}))
    assert f"{key}: {REFUSED[key]!r}" in str(found.value)
    for harmless in FIXED_KEYS[key]:
        assert ModelSpec.from_hf_config(changed(**{key: harmless})) == ModelSpec.from_hf_config(OLD)


@pytest.mark.parametrize(
    "key", ["no_rope_layers", "scale_emb", "clip_qkv", "rope_interleaved", "cross_attention_layers"]
)
def test_a_key_that_nobody_knows_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{key}: 1 is not understood"):
        ModelSpec.from_hf_config(changed(**{key: 1}))
    assert ModelSpec.from_hf_config(changed(**{key: None})) == ModelSpec.from_hf_config(OLD)


def test_the_newer_dtype_key_wins_as_in_transformers_5() -> None:
    assert ModelSpec.from_hf_config(changed(dtype="float16")).dtype == "float16"
    assert ModelSpec.from_hf_config(changed(dtype=None)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: '1e-5' is not a positive number"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": 4096.0}, "hidden_size: 4096.0 is not a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not a positive integer"),
        ({"num_attention_heads": True}, "num_attention_heads: True is not a positive integer"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({"num_attention_heads": 24}, "hidden_size 4096 is not a multiple of num_attention_heads 24"),
        ({"head_dim": 127}, "head_dim 127 is odd"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is neither true nor false"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn'"),
        ({"torch_dtype": "int8"}, "dtype: 'int8'"),
    ],
)
def test_a_value_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as found:
        ModelSpec.from_hf_config(changed(**changes))
    assert message in str(found.value)


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(SpecError, match="3 problem") as found:
        ModelSpec.from_hf_config(changed(vocab_size=..., hidden_size="x", rms_norm_eps=-1))
    assert len(found.value.details) == 3


@pytest.mark.parametrize("kind", ["llama4", "mllama", "qwen3", "mistral", None])
def test_another_family_is_refused(kind: str | None) -> None:
    with pytest.raises(UnsupportedError, match=f"model_type is {kind!r}"):
        ModelSpec.from_hf_config(changed(model_type=kind))


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(SpecError, match="not a JSON object"):
        ModelSpec.from_hf_config([])  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [OLD, changed(rope_scaling=None), NEW])
def test_facts_survive_json(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_hf_config(config)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    "damage",
    [{"layers": ...}, {"layers": 0}, {"heads": "8"}, {"dtype": "int4"}, {"color": 1}, {"rope_scaling": {"factor": 1}}],
)
def test_damaged_facts_are_refused(damage: dict[str, Any]) -> None:
    facts = {**ModelSpec.from_hf_config(OLD).to_json(), **damage}
    with pytest.raises(CheckpointError, match="damaged"):
        ModelSpec.from_json({key: value for key, value in facts.items() if value is not ...})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"{", "cannot be read as JSON"),
        (b"[1]", "is not a JSON object"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 200_000, "cannot be read as JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "larger than 16 MiB"),
    ],
)
def test_a_file_that_is_no_config_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BridgeError, match=message):
        read_json(tmp_path / "config.json")
    with pytest.raises(BridgeError, match=message):
        ModelSpec.from_folder(tmp_path)
