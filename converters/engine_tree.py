"""Engine checkpoints as they occur: written by bridge, by the engine's own converter, or by its trainers.

MaxText's Linen trees lie under `params/params`, its NNX trees bare or under `base` with a trailing `value`
(maxtext/utils/model_creation_utils.py, `from_pretrained`); Tunix's have a trailing `value`. All are brought to the
paths of the mapping table. What is no weight (step, optimizer, random state) is listed and left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bridge.converters.layout import Table
from bridge.converters.orbax_source import Leaf, TreeSource, tree_paths
from bridge.errors import CheckpointError

Keys = tuple[str, ...]

ROOTS = {
    "token_embedder": "maxtext",
    "decoder": "maxtext",
    "embedder": "tunix",
    "layers": "tunix",
    "final_norm": "tunix",
    "lm_head": "tunix",
}
WRAPPERS = (("params", "params"), ("params",), ("base",), ("model_params",))
NOT_WEIGHTS = ("rngs", "dropout", "opt_state", "step", "nnx_aux", "batch_stats")


@dataclass(frozen=True)
class EngineTree:
    """What a checkpoint's tree holds: whose it is, how layers lie, and each weight by its path without wrappers."""

    engine: str
    scanned: bool
    weights: dict[Keys, Keys]
    """Path within the model -> path in the tree."""
    adapters: dict[Keys, Keys]
    left_out: tuple[str, ...]


def recognise(folder: Path) -> EngineTree:
    """Say what the tree in `folder` is; only its metadata is read.

    Raises:
        CheckpointError: it is damaged, or no Llama of either engine.
    """
    weights: dict[Keys, Keys] = {}
    adapters: dict[Keys, Keys] = {}
    left_out = []
    for path in tree_paths(folder):
        inner = _unwrapped(path)
        if inner is None:
            left_out.append(".".join(path))
            continue
        target = adapters if "lora" in inner[-1] else weights
        if inner in target:
            raise CheckpointError(
                f"{folder} has {'.'.join(inner)} twice: {'.'.join(target[inner])} and {'.'.join(path)}"
            )
        target[inner] = path
    engines = {ROOTS[path[0]] for path in (*weights, *adapters)}
    if len(engines) != 1:
        seen = ", ".join(sorted({path[0] for path in tree_paths(folder)}))
        raise CheckpointError(f"{folder} is no Llama checkpoint of MaxText or Tunix", details=[f"its tree has: {seen}"])
    engine = engines.pop()
    scanned = engine == "maxtext" and any(path[:2] == ("decoder", "layers") for path in (*weights, *adapters))
    return EngineTree(engine, scanned, weights, adapters, tuple(left_out))


def _unwrapped(path: Keys) -> Keys | None:
    """A weight's path within the model; None for what is no weight."""
    if any(key in NOT_WEIGHTS for key in path):
        return None
    for wrapper in WRAPPERS:
        if path[: len(wrapper)] == wrapper and len(path) > len(wrapper) and path[len(wrapper)] in ROOTS:
            path = path[len(wrapper) :]
            break
    if path[-1] == "value":
        path = path[:-1]
    return path if path and path[0] in ROOTS else None


def open_weights(folder: Path, tree: EngineTree, table: Table, cache_bytes: int = 0) -> TreeSource:
    """The weights of a checkpoint under the table's own paths.

    Raises:
        CheckpointError: an array cannot be opened.
    """
    source = TreeSource(folder, cache_bytes, only=frozenset(tree.weights.values()))
    leaves: dict[Keys, Leaf] = {}
    for inner, path in tree.weights.items():
        named = (*table.prefix, *inner, *table.suffix)
        leaves[named] = replace(source.leaves[path], path=named)
    source.leaves = leaves
    return source
