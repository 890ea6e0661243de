"""Tiny Llama models as ordinary Hugging Face folders, made with transformers and torch.

    make_llama(folder, **choices)       any shape; every choice has a default
    make_preset(folder, "tied", ...)    a shape of `SHAPES`, with changes
    write_bpe_tokenizer, write_chatml_tokenizer

No two sizes of a shape are equal where a mix-up of axes could hide, no norm weight is 1, and every tensor is drawn
from its own stream, so the same seed gives the same weights whatever the dtype or the number of shards.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizer_folders import (
    TokenIds,
    eos_value,
    write_bpe_tokenizer,
    write_chatml_tokenizer,
    write_generation_config,
    write_json,
)

__all__ = ["SHAPES", "make_llama", "make_preset", "scaling", "write_bpe_tokenizer", "write_chatml_tokenizer"]

DtypeName = Literal["bfloat16", "float16", "float32"]

# Without a tokenizer the 259 ids are the bytes, bos and two end tokens.
BYTE_IDS = TokenIds(size=259, bos=256, eos=(257, 258), pad=None)


def scaling(factor: float = 8.0, original: int = 8192, low: float = 1.0, high: float = 4.0) -> dict[str, Any]:
    """Llama 3.1's RoPE scaling as config.json spells it, without `rope_type` (defaults: the values of 3.1 8B)."""
    return {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# Choices of `make_llama`. `scaled` has a small original context, so that scaling acts inside a few dozen tokens.
SHAPES: dict[str, dict[str, Any]] = {
    "untied": {"embed": 256, "heads": 4, "kv_heads": 2, "mlp": 160, "scaling": scaling()},  # head_dim 64, derived
    "tied": {"embed": 96, "heads": 6, "kv_heads": 2, "head_dim": 32, "tied": True, "scaling": scaling(32.0)},
    "mha": {"embed": 64, "heads": 4, "kv_heads": 4, "layers": 2},
    "mqa": {"embed": 96, "heads": 4, "kv_heads": 1, "head_dim": 32, "mlp": 80, "layers": 2},
    "head_dim_96": {"embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 96, "layers": 2},
    "head_dim_128": {"embed": 96, "heads": 4, "kv_heads": 2, "head_dim": 128, "mlp": 112, "scaling": scaling()},
    "llama3": {"embed": 64, "heads": 4, "kv_heads": 2},  # head_dim 16, derived; no scaling
    "scaled": {"embed": 96, "heads": 4, "kv_heads": 2, "head_dim": 64, "scaling": scaling(original=32)},
}


def make_preset(folder: Path, name: str, **changes: Any) -> Path:
    """Build the shape `name` of `SHAPES`, with `changes` to the choices of `make_llama`."""
    return make_llama(folder, **{**SHAPES[name], **changes})


def make_llama(
    folder: Path,
    *,
    layers: int = 3,
    embed: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    mlp: int = 96,
    vocab: int | None = None,
    tied: bool = False,
    dtype: DtypeName = "bfloat16",
    theta: float = 500000.0,
    scaling: Mapping[str, Any] | None = None,
    context: int | None = None,
    norm_eps: float = 1e-5,
    shards: int = 1,
    seed: int = 0,
    std: float | None = None,
    edge_values: bool = False,
    tokenizer: Literal["llama", "chatml"] | None = None,
    generation_config: bool = True,
    rope_spelling: Literal["both", "old", "new"] = "both",
) -> Path:
    """Write a Llama model with random weights and return `folder`.

    Args:
        head_dim: None leaves the key out of config.json; it is then embed / heads, as in Llama 3 and 3.1.
        vocab: None means as many ids as the tokenizer has, 259 without one.
        scaling: `scaling()` of this module, or None for plain RoPE.
        context: max_position_embeddings; None means 131072 with scaling and 8192 without, as in the originals.
        shards: number of safetensors files, with an index from two on.
        std: of the matrices; None means 1.4 / sqrt(columns), which gives attention scores a spread of about two:
            sharp enough that a wrong RoPE shows, while f32 still rounds to 1e-5.
        edge_values: put -0.0, the smallest subnormals and the smallest normals of the dtype into every tensor.
        rope_spelling: `old` writes rope_theta, rope_scaling and torch_dtype (transformers 4), `new` writes
            rope_parameters and dtype (transformers 5), `both` writes all of them.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    ids = BYTE_IDS
    if tokenizer is not None:
        ids = {"llama": write_bpe_tokenizer, "chatml": write_chatml_tokenizer}[tokenizer](folder)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        rope = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    config = LlamaConfig(
        vocab_size=vocab or ids.size,
        hidden_size=embed,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context or (131072 if scaling is not None else 8192),
        rms_norm_eps=norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=tied,
        bos_token_id=ids.bos,
        eos_token_id=eos_value(ids),
        pad_token_id=ids.pad,
        dtype=dtype,
    )
    torch_dtype = getattr(torch, dtype)
    make: Any = LlamaForCausalLM  # untyped in transformers
    model = make(config).to(torch_dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = _draw(name, tuple(parameter.shape), seed, std)
            parameter.copy_(torch.from_numpy(drawn).to(torch_dtype))
            if edge_values:
                limits = torch.finfo(torch_dtype)
                step = limits.smallest_normal * limits.eps
                edges = [-0.0, 0.0, step, -step, 3 * step, limits.smallest_normal, -limits.smallest_normal + step]
                parameter.view(-1)[: len(edges)] = torch.tensor(edges, dtype=torch_dtype)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation_config:
        write_generation_config(folder, ids)
    if shards > 1:
        _split(folder, shards)
    _respell(folder / "config.json", rope_spelling, dtype, rope, derive_head_dim=head_dim is None)
    return folder


def _draw(name: str, shape: tuple[int, ...], seed: int, std: float | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normal values for a matrix, 1 + 0.3 x normal within 0.3 ... 1.7 for a norm; each tensor of its own spread."""
    key = zlib.crc32(name.encode())
    random = np.random.default_rng([seed, key])
    if len(shape) == 1:
        return np.clip(1 + 0.3 * random.standard_normal(shape), 0.3, 1.7).astype(np.float32)
    spread = (1.4 / np.sqrt(shape[1]) if std is None else std) * (0.9 + 0.2 * (key % 97) / 97)
    return (spread * random.standard_normal(shape)).astype(np.float32)


def _split(folder: Path, shards: int) -> None:
    """Spread the tensors of model.safetensors over `shards` files, with the index that Hugging Face writes."""
    from safetensors.torch import load_file, save_file

    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    if shards > len(names):
        raise ValueError(f"{shards} shards for {len(names)} tensors")
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _respell(path: Path, spelling: str, dtype: str, rope: dict[str, Any], *, derive_head_dim: bool) -> None:
    """Rewrite the RoPE and dtype keys of a config.json that transformers 5 has written."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if derive_head_dim:
        config.pop("head_dim", None)
    for key in ("rope_parameters", "rope_theta", "rope_scaling", "dtype", "torch_dtype"):
        config.pop(key, None)
    if spelling in ("old", "both"):
        old = {key: value for key, value in rope.items() if key != "rope_theta"}
        config["rope_theta"] = rope["rope_theta"]
        config["rope_scaling"] = old if rope["rope_type"] != "default" else None
        config["torch_dtype"] = dtype
    if spelling in ("new", "both"):
        config["rope_parameters"] = dict(rope)
        config["dtype"] = dtype
    if spelling == "old":
        config["transformers_version"] = "4.43.0"
    write_json(path, dict(sorted(config.items())))
