"""LoRA adapters for tests, and by hand what each engine must hold of them. numpy and stock Orbax only.

random_factors(config, ...)          (layer, target) -> (A, B) in PEFT's layout
peft_tensors(factors)                the tensors of a PEFT adapter
write_peft(folder, factors, ...)     a PEFT adapter folder
engine_tree(factors, config, ...)    dotted path -> array of an engine's adapter checkpoint, written out by hand
write_orbax(item, tree)              the same through stock Orbax
read_orbax(item)                     any checkpoint through stock Orbax
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import oracles

Array = NDArray[Any]
Factors = dict[tuple[int, str], tuple[Array, Array]]

ALL = ("q", "k", "v", "o", "gate", "up", "down")
PARENT = {
    "q": "self_attn",
    "k": "self_attn",
    "v": "self_attn",
    "o": "self_attn",
    "gate": "mlp",
    "up": "mlp",
    "down": "mlp",
}
MAXTEXT_NAME = {
    "q": "self_attention.query",
    "k": "self_attention.key",
    "v": "self_attention.value",
    "o": "self_attention.out",
    "gate": "mlp.wi_0",
    "up": "mlp.wi_1",
    "down": "mlp.wo",
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(out, in) of every target."""
    embed, mlp, head_dim = config["hidden_size"], config["intermediate_size"], oracles.head_dim_of(config)
    q, kv = config["num_attention_heads"] * head_dim, oracles.kv_heads_of(config) * head_dim
    return {
        "q": (q, embed),
        "k": (kv, embed),
        "v": (kv, embed),
        "o": (embed, q),
        "gate": (mlp, embed),
        "up": (mlp, embed),
        "down": (embed, mlp),
    }


def random_factors(
    config: Mapping[str, Any],
    rank: int,
    targets: tuple[str, ...] = ALL,
    dtype: Any = np.float32,
    seed: int = 0,
    size: float = 0.3,
) -> Factors:
    """Normal values; `size` is about the spread of B A relative to a weight's."""
    random = np.random.default_rng(seed)
    found: Factors = {}
    for layer in range(config["num_hidden_layers"]):
        for target in targets:
            out, columns = shapes(config)[target]
            a = random.standard_normal((rank, columns)) / math.sqrt(columns)
            b = size * random.standard_normal((out, rank)) / math.sqrt(rank)
            found[layer, target] = (a.astype(np.float32).astype(dtype), b.astype(np.float32).astype(dtype))
    return found


def module(layer: int, target: str) -> str:
    """The Hugging Face name of an adapted module."""
    return f"model.layers.{layer}.{PARENT[target]}.{target}_proj"


def peft_tensors(factors: Factors) -> dict[str, Array]:
    """Names as PEFT's `save_pretrained` writes them."""
    tensors = {}
    for (layer, target), (a, b) in factors.items():
        tensors[f"base_model.model.{module(layer, target)}.lora_A.weight"] = a
        tensors[f"base_model.model.{module(layer, target)}.lora_B.weight"] = b
    return tensors


def write_peft(folder: Path, factors: Factors, rank: int, alpha: float, **config: Any) -> Path:
    """A PEFT folder; `config` adds or replaces keys of adapter_config.json."""
    write_tensors(folder, peft_tensors(factors))
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({f"{target}_proj" for _, target in factors}),
        "base_model_name_or_path": "some/base",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return folder


def write_tensors(folder: Path, tensors: Mapping[str, Array]) -> None:
    """adapter_model.safetensors, through torch because numpy has no bf16 of its own."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    converted = {}
    for name, array in tensors.items():
        kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(array.dtype.name, torch.float32)
        converted[name] = torch.from_numpy(np.ascontiguousarray(array.astype(np.float32))).to(kind)
    save_file(converted, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def read_tensors(folder: Path, name: str = "adapter_model.safetensors") -> dict[str, Array]:
    """Every tensor of one safetensors file, in its own dtype."""
    import safetensors

    opened: Any = safetensors.safe_open
    with opened(folder / name, framework="numpy") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def engine_tree(factors: Factors, config: Mapping[str, Any], engine: str, scanned: bool = True) -> dict[str, Array]:
    """What the engine must hold: Tunix keeps heads apart, MaxText joins them, interleaves q and k and scales q."""
    if engine == "tunix":
        return _tunix(factors, config)
    tree: dict[str, Array] = {}
    for target in dict.fromkeys(target for _, target in factors):
        pairs = [_maxtext(*factors[layer, target], target, config) for layer in range(config["num_hidden_layers"])]
        for letter, arrays in (("a", [a for a, _ in pairs]), ("b", [b for _, b in pairs])):
            name = f"{MAXTEXT_NAME[target]}.kernel_lora_{letter}.value"
            if scanned:
                tree[f"decoder.layers.{name}"] = np.stack(arrays, axis=1)
            else:
                tree |= {f"decoder.layers_{layer}.{name}": array for layer, array in enumerate(arrays)}
    return tree


def _maxtext(a: Array, b: Array, target: str, config: Mapping[str, Any]) -> tuple[Array, Array]:
    """(in, rank) and (rank, out)."""
    right = np.ascontiguousarray(b.T)
    if target in ("q", "k"):
        head_dim = oracles.head_dim_of(config)
        half = head_dim // 2
        right = np.empty_like(right)
        for row in range(b.shape[0]):
            head, place = divmod(row, head_dim)
            pair, second = place % half, place >= half
            right[:, head * head_dim + 2 * pair + second] = b[row]
        if target == "q":
            right = right.astype(np.float32) * np.float32(1 / math.sqrt(head_dim))
    return np.ascontiguousarray(a.T), right


def _tunix(factors: Factors, config: Mapping[str, Any]) -> dict[str, Array]:
    head_dim = oracles.head_dim_of(config)
    tree = {}
    for (layer, target), (a, b) in factors.items():
        left, right = a.T, b.T
        if target == "o":
            left = a.T.reshape(-1, head_dim, a.shape[0])
        if target in ("q", "k", "v"):
            right = b.T.reshape(b.shape[1], -1, head_dim)
        at = (
            f"layers.{layer}.mlp.{target}_proj.kernel"
            if PARENT[target] == "mlp"
            else f"layers.{layer}.attn.{target}_proj.w"
        )
        tree[f"{at}_lora_a.value"], tree[f"{at}_lora_b.value"] = np.ascontiguousarray(left), np.ascontiguousarray(right)
    return tree


def write_orbax(step: Path, tree: Mapping[str, Array], item: str = "model_params") -> Path:
    """A checkpoint step as the engines' trainers save it; returns the item's folder."""
    import orbax.checkpoint as ocp

    nested: dict[str, Any] = {}
    for name, array in tree.items():
        *parents, last = name.split(".")
        node = nested
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(item)) as checkpointer:
        checkpointer.save(step, ocp.args.Composite(**{item: ocp.args.PyTreeSave(item=nested)}))
    return step / item


def convert(folder: Path, out: Path, engine: str, scanned: bool = True) -> Path:
    """Convert a Hugging Face folder with bridge; returns the item's folder under `<out>/0`."""
    from bridge.converters.hf_store import HfSource
    from bridge.converters.orbax_store import TreeSink
    from bridge.converters.plan import make_plan, table_for
    from bridge.converters.transfer import import_checkpoint
    from bridge.model_spec import ModelSpec

    model = ModelSpec.from_folder(folder)
    table = table_for(model, engine)
    sink = TreeSink(out / "0", table.item)
    with HfSource(folder) as source:
        import_checkpoint(make_plan(table, model, scanned), model, source, sink)
    sink.finish({"scan_layers": scanned} if engine == "maxtext" else {})
    return sink.folder


def read_orbax(item: Path) -> dict[str, Array]:
    """Dotted path -> array, restored by stock Orbax."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(item).item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        restored = checkpointer.restore(item, args=ocp.args.PyTreeRestore(restore_args=arguments))
    leaves = jax.tree_util.tree_flatten_with_path(restored)[0]
    return {".".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in leaves}


def unequal(found: Mapping[str, Array], expected: Mapping[str, Array]) -> list[str]:
    """Names that only one side has, and names whose dtype, shape or bits differ."""
    names = sorted(found.keys() ^ expected.keys())
    for name in sorted(found.keys() & expected.keys()):
        ours, theirs = np.ascontiguousarray(found[name]), np.ascontiguousarray(expected[name])
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape) or ours.tobytes() != theirs.tobytes():
            names.append(name)
    return names
