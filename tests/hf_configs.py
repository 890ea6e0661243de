"""The config.json of Llama 3.1 8B in both spellings, for tests of what is read from one."""

from __future__ import annotations

import copy
from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The config.json of Llama 3.1 8B as the hub has it (transformers 4), and the same as transformers 5 writes it.
OLD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "vocab_size": 128256,
}
NEW = {key: value for key, value in OLD.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
NEW |= {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "dtype": "bfloat16", "head_dim": 128}


def changed(**values: Any) -> dict[str, Any]:
    """OLD with changes; `...` removes a key."""
    config = {**copy.deepcopy(OLD), **values}
    return {key: value for key, value in config.items() if value is not ...}
