"""Tunix's Llama, built from a model's facts and filled from a checkpoint: for training and for checks alike.

Source: tunix/models/llama3/model.py, 0.1.7. The corrections of `fixes_tunix` must be installed before it is built.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from bridge.errors import CheckpointError, UnsupportedError
from bridge.model_spec import ModelSpec
from bridge.places import orbax_path

Remat = Literal["none", "block", "decoder"]
AXES = ("fsdp", "tp")
# The axis of each projection that qwix cuts into tiles: the last one that it sums over.
TILED = {"q": "embed", "k": "embed", "v": "embed", "o": "head_dim", "gate": "embed", "up": "embed", "down": "mlp"}


def engine_config(model: ModelSpec, remat: Remat = "none") -> Any:
    """Tunix's `ModelConfig` of a model. `rope_theta` is set for the record: Tunix ignores it."""
    from tunix.models.llama3.model import ModelConfig, RematConfig

    return ModelConfig(
        num_layers=model.layers,
        vocab_size=model.vocab,
        embed_dim=model.embed,
        hidden_dim=model.mlp,
        num_heads=model.heads,
        head_dim=model.head_dim,
        num_kv_heads=model.kv_heads,
        rope_theta=int(model.rope_theta),
        norm_eps=model.norm_eps,
        weight_tying=model.tied,
        remat_config=RematConfig[remat.upper()],
    )


def abstract_model(model: ModelSpec, remat: Remat = "none") -> Any:
    """The model with shapes for weights: nothing is allocated."""
    from flax import nnx
    from tunix.models.llama3.model import Llama3

    config = engine_config(model, remat)
    return nnx.eval_shape(lambda: Llama3(config, rngs=nnx.Rngs(0)))


def load(model: ModelSpec, item: Path, dtype: str, mesh: Any = None, remat: Remat = "none") -> Any:
    """The model with the weights of a full checkpoint, each read straight into its shards.

    Args:
        model: the facts; every size must be the checkpoint's.
        item: absolute folder `<checkpoint>/<step>/model_params`, converted by bridge or written by Tunix.
        dtype: of all weights, `float32` or `bfloat16`; stored values are rounded once.
        mesh: a JAX mesh with the axes `fsdp` and `tp`; None means the first device.
        remat: what the backward pass computes again: nothing, each attention and MLP, or each layer.

    Raises:
        CheckpointError: no such checkpoint, or its names or shapes are not the model's.
    """
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    shapes = abstract_model(model, remat)
    graph, state = nnx.split(shapes)
    check(item, {path: leaf.shape for path, leaf in leaves(state).items()})
    shardings = leaves(named_shardings(state, mesh))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=shardings.get(path) or one)
        for path, leaf in leaves(state).items()
    }
    target = fill(state, wanted)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(orbax_path(item), target=target)
    return nnx.merge(graph, restored)


def named_shardings(state: Any, mesh: Any) -> Any:
    """The state with a `NamedSharding` for every leaf, as the model's own annotations say; empty without a mesh."""
    from flax import nnx

    return nnx.get_named_sharding(state, mesh) if mesh is not None else {}


def leaves(state: Any) -> dict[tuple[str, ...], Any]:
    """Path -> value of every weight, the path as a checkpoint spells it without the trailing `value`."""
    from flax import nnx

    if not state:
        return {}
    return {tuple(map(str, path)): raw(leaf) for path, leaf in nnx.to_flat_state(state)}


def fill(state: Any, values: dict[tuple[str, ...], Any]) -> Any:
    """The state with other values, by the paths of `leaves`; every Variable keeps its type and annotations."""
    from flax import nnx

    return nnx.from_flat_state(
        [(path, leaf.replace(values[tuple(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    )


def raw(leaf: Any) -> Any:
    """The value inside a Variable, without its hooks."""
    return leaf.get_raw_value() if hasattr(leaf, "get_raw_value") else leaf


def stored_shapes(item: Path) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path -> shape of every array of a Tunix checkpoint item; no data is read.

    Raises:
        CheckpointError: there is no finished checkpoint at `item`.
    """
    import jax
    import orbax.checkpoint as ocp

    if not (item / "_METADATA").exists():
        raise CheckpointError(
            f"{item} is no Tunix checkpoint: it has no _METADATA",
            hint="`bridge convert --to tunix` writes one; name its folder <checkpoint>/<step>/model_params",
        )
    tree = ocp.PyTreeCheckpointHandler().metadata(orbax_path(item)).tree
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
    return {
        tuple(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): tuple(leaf.shape)
        for path, leaf in found
    }


def check_tiles(model: ModelSpec, tile: int, projections: Collection[str] = tuple(TILED)) -> None:
    """Whether projections can be cut into NF4 tiles; the output projection is cut along head_dim, on either engine.

    Raises:
        UnsupportedError: a size is no multiple of the tile.
    """
    cut = {TILED[name] for name in projections}
    sizes = {name: getattr(model, name) for name in ("head_dim", "embed", "mlp") if name in cut}
    problems = [f"{name} {size} is no multiple of {tile}" for name, size in sizes.items() if size % tile]
    if problems:
        raise UnsupportedError(
            f"qlora cannot cut this model's projections into tiles of {tile}",
            details=problems,
            hint=f"lora.tile_size: {math.gcd(*sizes.values())} fits, or use the method lora",
        )


def check(item: Path, shapes: dict[tuple[str, ...], tuple[int, ...]]) -> None:
    """Compare the names and shapes of a checkpoint with what a model needs, before any data is read.

    Raises:
        CheckpointError: missing, unexpected or wrongly shaped arrays, all listed.
    """
    found = stored_shapes(item)
    needed = {(*path, "value"): tuple(shape) for path, shape in shapes.items()}
    problems = [f"missing      {'.'.join(path)}  {needed[path]}" for path in needed if path not in found]
    problems += [f"unexpected   {'.'.join(path)}  {found[path]}" for path in found if path not in needed]
    problems += [
        f"shape        {'.'.join(path)}  checkpoint has {found[path]}, the model needs {shape}"
        for path, shape in needed.items()
        if path in found and found[path] != shape
    ]
    if problems:
        raise CheckpointError(
            f"{item} does not match the model: {len(problems)} of {len(needed)} arrays", details=problems
        )
