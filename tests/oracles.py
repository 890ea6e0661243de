"""An independent, slow and obvious reference of what `bridge` computes. numpy only, one tensor at a time.

    read_hf(folder)                      tensors and config of a Hugging Face folder
    maxtext_tree(tensors, config, ...)   what a MaxText checkpoint must hold
    tunix_tree(tensors, config)          what a Tunix checkpoint must hold
    llama3_inverse_frequencies(config)   RoPE frequencies in f64
    forward(tensors, config, ids)        logits in f64
    round_once(values, dtype)            correct rounding to bf16, f16 or f32

Nothing here is shared with the code under test, nor between the two layouts: what is written twice is checked twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Config = Mapping[str, Any]


def read_hf(folder: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Every tensor in its own dtype (bf16 as ml_dtypes), and the parsed config.json. Any number of shards."""
    import safetensors

    open_file: Any = safetensors.safe_open  # untyped
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with open_file(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                if name in tensors:
                    raise ValueError(f"{name} lies in two files of {folder}")
                tensors[name] = opened.get_tensor(name)
    return tensors, config


def head_dim_of(config: Config) -> int:
    """head_dim as given, else derived."""
    if config.get("head_dim") is not None:
        return int(config["head_dim"])
    return int(config["hidden_size"]) // int(config["num_attention_heads"])


def kv_heads_of(config: Config) -> int:
    """Key and value heads as given, else as many as query heads."""
    if config.get("num_key_value_heads") is not None:
        return int(config["num_key_value_heads"])
    return int(config["num_attention_heads"])


def maxtext_tree(tensors: Mapping[str, Array], config: Config, scanned: bool) -> dict[str, Array]:
    """Dotted path -> f32 array of every weight in MaxText's own converted checkpoint.

    Scanned, layer kernels carry the layers on axis 1: query (embed, layers, heads, head_dim), out
    (heads, layers, head_dim, embed), wi_0 (embed, layers, mlp), norms (embed, layers). Unscanned, there is a
    `layers_0` ... per layer without that axis. Weights of bf16 and f16 sources are exact in f32; the query kernel is
    multiplied by float32(1 / sqrt(head_dim)) in f32, as MaxText's converter does when it saves in f32.
    """
    layers = int(config["num_hidden_layers"])
    tree: dict[str, Array] = {
        "params.params.token_embedder.embedding": _f32(tensors["model.embed_tokens.weight"]),
        "params.params.decoder.decoder_norm.scale": _f32(tensors["model.norm.weight"]),
    }
    if not config.get("tie_word_embeddings", False):
        tree["params.params.decoder.logits_dense.kernel"] = np.transpose(_f32(tensors["lm_head.weight"]))
    per_layer = [_maxtext_layer(tensors, config, layer) for layer in range(layers)]
    if scanned:
        for name in per_layer[0]:
            stacked = np.stack([kernels[name] for kernels in per_layer], axis=1)
            tree[f"params.params.decoder.layers.{name}"] = stacked
    else:
        for layer in range(layers):
            for name in per_layer[layer]:
                tree[f"params.params.decoder.layers_{layer}.{name}"] = per_layer[layer][name]
    return tree


def _maxtext_layer(tensors: Mapping[str, Array], config: Config, layer: int) -> dict[str, Array]:
    embed = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    kv_heads = kv_heads_of(config)
    head_dim = head_dim_of(config)
    half = head_dim // 2
    at = f"model.layers.{layer}."

    q = _f32(tensors[at + "self_attn.q_proj.weight"])
    scale = np.float32(1.0 / math.sqrt(head_dim))
    query = np.empty((embed, heads, head_dim), np.float32)
    for head in range(heads):
        for pair in range(half):
            query[:, head, 2 * pair] = q[head * head_dim + pair, :] * scale
            query[:, head, 2 * pair + 1] = q[head * head_dim + half + pair, :] * scale

    k = _f32(tensors[at + "self_attn.k_proj.weight"])
    key = np.empty((embed, kv_heads, head_dim), np.float32)
    for head in range(kv_heads):
        for pair in range(half):
            key[:, head, 2 * pair] = k[head * head_dim + pair, :]
            key[:, head, 2 * pair + 1] = k[head * head_dim + half + pair, :]

    v = _f32(tensors[at + "self_attn.v_proj.weight"])
    value = np.empty((embed, kv_heads, head_dim), np.float32)
    for head in range(kv_heads):
        for index in range(head_dim):
            value[:, head, index] = v[head * head_dim + index, :]

    o = _f32(tensors[at + "self_attn.o_proj.weight"])
    out = np.empty((heads, head_dim, embed), np.float32)
    for head in range(heads):
        for index in range(head_dim):
            out[head, index, :] = o[:, head * head_dim + index]

    return {
        "self_attention.query.kernel": query,
        "self_attention.key.kernel": key,
        "self_attention.value.kernel": value,
        "self_attention.out.kernel": out,
        "mlp.wi_0.kernel": np.transpose(_f32(tensors[at + "mlp.gate_proj.weight"])),
        "mlp.wi_1.kernel": np.transpose(_f32(tensors[at + "mlp.up_proj.weight"])),
        "mlp.wo.kernel": np.transpose(_f32(tensors[at + "mlp.down_proj.weight"])),
        "pre_self_attention_layer_norm.scale": _f32(tensors[at + "input_layernorm.weight"]),
        "post_self_attention_layer_norm.scale": _f32(tensors[at + "post_attention_layernorm.weight"]),
    }


def tunix_tree(tensors: Mapping[str, Array], config: Config) -> dict[str, Array]:
    """Dotted path, ending in `value`, -> array in the source's dtype of every weight of a Tunix Llama3.

    q_proj.w (embed, heads, head_dim), k_proj.w and v_proj.w (embed, kv_heads, head_dim), o_proj.w
    (heads, head_dim, embed), gate_proj.kernel and up_proj.kernel (embed, mlp), down_proj.kernel (mlp, embed),
    lm_head.w (embed, vocab). Heads keep Hugging Face's halves; nothing is scaled.
    """
    embed = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    kv_heads = kv_heads_of(config)
    head_dim = head_dim_of(config)
    tree: dict[str, Array] = {
        "embedder.input_embedding.value": tensors["model.embed_tokens.weight"],
        "final_norm.w.value": tensors["model.norm.weight"],
    }
    if not config.get("tie_word_embeddings", False):
        tree["lm_head.w.value"] = tensors["lm_head.weight"].T
    for layer in range(int(config["num_hidden_layers"])):
        hf = f"model.layers.{layer}."
        to = f"layers.{layer}."
        tree[to + "input_layernorm.w.value"] = tensors[hf + "input_layernorm.weight"]
        tree[to + "post_attention_layernorm.w.value"] = tensors[hf + "post_attention_layernorm.weight"]
        q = tensors[hf + "self_attn.q_proj.weight"]
        tree[to + "attn.q_proj.w.value"] = q.T.reshape(embed, heads, head_dim)
        k = tensors[hf + "self_attn.k_proj.weight"]
        tree[to + "attn.k_proj.w.value"] = k.T.reshape(embed, kv_heads, head_dim)
        v = tensors[hf + "self_attn.v_proj.weight"]
        tree[to + "attn.v_proj.w.value"] = v.T.reshape(embed, kv_heads, head_dim)
        o = tensors[hf + "self_attn.o_proj.weight"]
        tree[to + "attn.o_proj.w.value"] = o.T.reshape(heads, head_dim, embed)
        tree[to + "mlp.gate_proj.kernel.value"] = tensors[hf + "mlp.gate_proj.weight"].T
        tree[to + "mlp.up_proj.kernel.value"] = tensors[hf + "mlp.up_proj.weight"].T
        tree[to + "mlp.down_proj.kernel.value"] = tensors[hf + "mlp.down_proj.weight"].T
    return tree


def llama3_inverse_frequencies(config: Config) -> NDArray[np.float64]:
    """RoPE's inverse frequencies (head_dim / 2,) in radians per position, from either spelling of config.json.

    Plain RoPE, and Llama 3.1's scaling where it is set: wavelengths above original / low_freq_factor are divided by
    `factor`, those below original / high_freq_factor are kept, and those between are blended.
    Source: transformers/modeling_rope_utils.py, `_compute_llama3_parameters`, written out by hand.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope["rope_theta"] if "rope_theta" in rope else config.get("rope_theta", 10000.0))
    head_dim = head_dim_of(config)
    frequencies = [theta ** (-(2.0 * pair) / head_dim) for pair in range(head_dim // 2)]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return np.array(frequencies, np.float64)
    if kind != "llama3":
        raise ValueError(f"the oracle knows no RoPE of type {kind!r}")
    factor = float(rope["factor"])
    low = float(rope["low_freq_factor"])
    high = float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    scaled = []
    for frequency in frequencies:
        wavelength = 2.0 * math.pi / frequency
        if wavelength < original / high:
            scaled.append(frequency)
        elif wavelength > original / low:
            scaled.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            scaled.append((1.0 - smooth) * frequency / factor + smooth * frequency)
    return np.array(scaled, np.float64)


def forward(
    tensors: Mapping[str, Array],
    config: Config,
    token_ids: Sequence[int],
    positions: Sequence[int] | None = None,
    inverse_frequencies: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Logits (tokens, vocab) in f64 of one sequence under causal attention.

    `positions` (default 0, 1, 2, ...) turn RoPE only: a token sees the tokens before it in the list, wherever they are.
    `inverse_frequencies` replaces the frequencies of the config, for a comparison with those of another program.
    """
    heads = int(config["num_attention_heads"])
    kv_heads = kv_heads_of(config)
    head_dim = head_dim_of(config)
    eps = float(config.get("rms_norm_eps", 1e-6))
    count = len(token_ids)
    places = np.arange(count) if positions is None else np.asarray(positions)
    frequencies = llama3_inverse_frequencies(config) if inverse_frequencies is None else inverse_frequencies
    angles = places.astype(np.float64)[:, None] * frequencies[None, :]
    angles = np.concatenate([angles, angles], axis=1)

    embedding = _f64(tensors["model.embed_tokens.weight"])
    hidden = embedding[np.asarray(token_ids)]
    for layer in range(int(config["num_hidden_layers"])):
        at = f"model.layers.{layer}."
        normed = _rms_norm(hidden, _f64(tensors[at + "input_layernorm.weight"]), eps)
        q = normed @ _f64(tensors[at + "self_attn.q_proj.weight"]).T
        k = normed @ _f64(tensors[at + "self_attn.k_proj.weight"]).T
        v = normed @ _f64(tensors[at + "self_attn.v_proj.weight"]).T
        mixed = np.empty((count, heads * head_dim), np.float64)
        for head in range(heads):
            group = head // (heads // kv_heads)
            mine = slice(head * head_dim, (head + 1) * head_dim)
            theirs = slice(group * head_dim, (group + 1) * head_dim)
            query = _rotate(q[:, mine], angles)
            key = _rotate(k[:, theirs], angles)
            scores = query @ key.T / math.sqrt(head_dim)
            scores[np.triu_indices(count, 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights = weights / weights.sum(axis=1, keepdims=True)
            mixed[:, mine] = weights @ v[:, theirs]
        hidden = hidden + mixed @ _f64(tensors[at + "self_attn.o_proj.weight"]).T
        normed = _rms_norm(hidden, _f64(tensors[at + "post_attention_layernorm.weight"]), eps)
        gate = normed @ _f64(tensors[at + "mlp.gate_proj.weight"]).T
        up = normed @ _f64(tensors[at + "mlp.up_proj.weight"]).T
        hidden = hidden + (gate / (1.0 + np.exp(-gate)) * up) @ _f64(tensors[at + "mlp.down_proj.weight"]).T
    final = _rms_norm(hidden, _f64(tensors["model.norm.weight"]), eps)
    head_weight = embedding if config.get("tie_word_embeddings", False) else _f64(tensors["lm_head.weight"])
    return final @ head_weight.T


def _rms_norm(x: NDArray[np.float64], weight: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    mean_square = np.sum(x * x, axis=1, keepdims=True) / x.shape[1]
    normed: NDArray[np.float64] = weight * (x / np.sqrt(mean_square + eps))
    return normed


def _rotate(x: NDArray[np.float64], angles: NDArray[np.float64]) -> NDArray[np.float64]:
    half = x.shape[1] // 2
    turned = np.concatenate([-x[:, half:], x[:, :half]], axis=1)
    rotated: NDArray[np.float64] = x * np.cos(angles) + turned * np.sin(angles)
    return rotated


def round_once(values: Array, dtype: Any) -> Array:
    """Round f32 or f64 values to `dtype` (bf16, f16, f32): to nearest, ties to even, in one step.

    A cast by way of f32 rounds twice. Subnormals, signed zeros, infinities and NaN are as IEEE 754 says.
    """
    target = np.dtype(dtype)
    finfo: Any = ml_dtypes.finfo  # untyped
    limits = finfo(target)
    exact = np.asarray(values)
    if exact.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise TypeError(f"round_once takes f32 or f64, not {exact.dtype}")
    exact = exact.astype(np.float64)
    _, exponent = np.frexp(exact)  # |x| = m * 2**exponent, 0.5 <= m < 1
    exponent = np.maximum(exponent - 1, int(limits.minexp))
    # One unit in the last place is 2**unit; dividing by it is exact, so rint is the only rounding.
    unit = exponent - int(limits.nmant)
    rounded = np.ldexp(np.rint(np.ldexp(exact, -unit)), unit)
    rounded = np.where(np.isfinite(exact), rounded, exact)
    too_large = np.abs(rounded) > float(limits.max)
    rounded = np.where(too_large, np.copysign(np.inf, rounded), rounded)
    # Every value is now one of `target`, so the way through f32 changes nothing.
    return rounded.astype(np.float32).astype(target)


def _f32(x: Array) -> NDArray[np.float32]:
    return np.asarray(x).astype(np.float32)


def _f64(x: Array) -> NDArray[np.float64]:
    return np.asarray(x).astype(np.float64)
