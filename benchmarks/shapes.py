"""Model folders of known shapes with random or absent (sparse) weights, for benchmarks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from bridge.converters.hf_store import HfSink
from bridge.converters.plan import Tensor, make_plan, table_for
from bridge.model_spec import ModelSpec

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from llama_shapes import LLAMA_1B, LLAMA_8B, LLAMA_70B, LLAMA_405B

SHAPES = {
    "tiny": replace(LLAMA_8B, layers=4, embed=256, heads=8, kv_heads=2, head_dim=32, mlp=768, vocab=2048),
    "1b": LLAMA_1B,
    "8b": LLAMA_8B,
    "70b": LLAMA_70B,
    "405b": LLAMA_405B,
}
SHARD_BYTES = 5_000_000_000
PIECE = 16 << 20


def config_of(model: ModelSpec) -> dict[str, object]:
    """The config.json of a shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab,
        "hidden_size": model.embed,
        "intermediate_size": model.mlp,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": model.context,
        "torch_dtype": model.dtype,
        **model.rope_config(),
    }


def write(folder: Path, name: str, *, sparse: bool = False) -> Path:
    """Write a shape as a Hugging Face folder: normal bfloat16 of deviation 0.02, or holes that read as zeros.

    No two pieces are alike: a compressor that found one in another would be given what no model has.
    """
    model = SHAPES[name]
    folder.mkdir(parents=True)
    plan = make_plan(table_for(model, "maxtext"), model)
    tensors = {name: Tensor(move.hf_shape, "bfloat16") for move in plan for name in move.hf}
    rng = np.random.Generator(np.random.SFC64(0))
    normal = np.sort(rng.normal(0, 0.02, 1 << 16)).astype(np.float32)
    values = (normal.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    with HfSink(folder, tensors, SHARD_BYTES) as sink:
        for tensor_name, tensor in tensors.items():
            count = int(np.prod(tensor.shape))
            for start in range(0, 0 if sparse else count, PIECE):
                chosen = rng.integers(0, 1 << 16, min(PIECE, count - start), np.uint16)
                sink.write(tensor_name, start, values[chosen])
    (folder / "config.json").write_text(json.dumps(config_of(model), indent=2))
    return folder
