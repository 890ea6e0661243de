"""Tiny Llama folders written byte by byte, without torch: for tests that break them.

write_model(folder, ...)      config.json, model.safetensors, generation_config.json, tokenizer.json
tensors(...)                  the arrays of such a model
write_safetensors(path, ...)  a file from a header and data, however wrong
read_safetensors(path)        header and data of a file
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# The shape that the cases ask for: hidden 64, 2 layers, 4 heads, 2 kv heads, head_dim 16, vocab 259.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 256,
    "eos_token_id": [257, 258],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 259,
}
GENERATION = {"bos_token_id": 256, "eos_token_id": [257, 258], "do_sample": True, "temperature": 0.6}
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int8": "I8"}


def tensors(config: dict[str, Any]) -> dict[str, Array]:
    """Random float32 arrays of a model, each drawn from its own stream."""
    embed, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or embed // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, embed), "model.norm.weight": (embed,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (embed,),
            f"{prefix}.post_attention_layernorm.weight": (embed,),
            f"{prefix}.self_attn.q_proj.weight": (queries, embed),
            f"{prefix}.self_attn.k_proj.weight": (keys, embed),
            f"{prefix}.self_attn.v_proj.weight": (keys, embed),
            f"{prefix}.self_attn.o_proj.weight": (embed, queries),
            f"{prefix}.mlp.gate_proj.weight": (mlp, embed),
            f"{prefix}.mlp.up_proj.weight": (mlp, embed),
            f"{prefix}.mlp.down_proj.weight": (embed, mlp),
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, embed)
    return {
        name: np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_model(folder: Path, *, dtype: str = "float32", shards: int = 1, **changes: Any) -> Path:
    """Write a whole model; `changes` are keys of config.json."""
    config = {**CONFIG, "torch_dtype": dtype, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    write_tensors(folder, {name: array.astype(kind) for name, array in tensors(config).items()}, shards)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", GENERATION)
    vocab = {f"t{number}": number for number in range(config["vocab_size"])}
    write_json(folder / "tokenizer.json", {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}})
    return folder


def write_tensors(folder: Path, arrays: dict[str, Array], shards: int = 1) -> None:
    """Write arrays as one file, or as several with an index."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", *encode(arrays))
        return
    names, weight_map = sorted(arrays), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write_safetensors(folder / file, *encode({name: arrays[name] for name in part}))
        weight_map.update(dict.fromkeys(part, file))
    total = sum(array.nbytes for array in arrays.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def encode(arrays: dict[str, Array]) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    return header, data


def write_safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """Write a file; `length` is what it claims its header has, `header` may be bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def arrays_of(folder: Path) -> dict[str, Array]:
    """Every tensor of a folder's files, by name; a name that is in two files is an error."""
    kinds = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
    found: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, data = read_safetensors(path)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if name in found:
                raise ValueError(f"{name} is there twice")
            found[name] = np.frombuffer(data[start:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return found


def write_json(path: Path, value: Any) -> None:
    """Write JSON."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
