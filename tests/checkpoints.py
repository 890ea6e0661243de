"""Checkpoints for the tests of conversion and export: bridge's own commands in process, and stock Orbax beside them.

run(*args)                       a bridge command in this process
convert(source, out, *args)      `bridge convert`, returns the step folder
export(checkpoint, out, *args)   `bridge export`, returns the Hugging Face folder
restore(item), load_v1(step)     every array of a tree through stock Orbax, both of its interfaces
save(step, item, tree, ...)      a checkpoint as engines write it, through stock Orbax
different(a, b)                  the names whose arrays are not the same by dtype, shape and every bit
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import oracles

Array = NDArray[Any]
Tree = dict[str, Array]

ITEMS = {"maxtext": "items", "tunix": "model_params"}


@dataclass(frozen=True)
class Result:
    """What a command printed, and its exit code."""

    code: int
    stdout: str
    stderr: str


def run(*args: object) -> Result:
    """Run a bridge command in this process; a BridgeError is raised, not printed."""
    from bridge.cli import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(arg) for arg in args], standalone_mode=False) or 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def convert(source: Path, out: Path, *args: object, engine: str = "maxtext") -> Path:
    """Convert a Hugging Face folder; returns the step folder `<out>/0`."""
    run("convert", source, "--to", engine, "--out", out, *args)
    return out / "0"


def export(checkpoint: Path, out: Path, *args: object) -> Path:
    """Export a checkpoint to a Hugging Face folder."""
    run("export", checkpoint, "--to", "hf", "--out", out, *args)
    return out


def verify(checkpoint: Path, *args: object) -> tuple[int, dict[str, Any]]:
    """`bridge verify --json`: the exit code and the report."""
    result = run("verify", checkpoint, "--json", *args)
    return result.code, json.loads(result.stdout)


def restore(item: Path) -> Tree:
    """Dotted path -> array of a tree, restored by stock Orbax (the checkpointer that both engines use)."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(item).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return flat(checkpointer.restore(item, args=ocp.args.PyTreeRestore(restore_args=as_numpy)))


def load_v1(step: Path, item: str) -> Tree:
    """The same through Orbax's newer interface, given the step folder."""
    import orbax.checkpoint.experimental.v1 as ocp

    return flat(ocp.load(step, checkpointable_name=item))


def save(step: Path, item: str, tree: Mapping[str, Array], *, ocdbt: bool = True, zarr3: bool = True) -> Path:
    """Write dotted paths and arrays as a step with one item, through stock Orbax; returns the item's folder."""
    import orbax.checkpoint as ocp

    nested: dict[str, Any] = {}
    for name, array in tree.items():
        *parents, last = name.split(".")
        node = nested
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**{item: handler})) as checkpointer:
        checkpointer.save(step, ocp.args.Composite(**{item: ocp.args.PyTreeSave(item=nested)}))
    return step / item


def stored_chunk(item: Path, name: str) -> tuple[int, ...]:
    """The shape of the chunks of an array of a zarr2 checkpoint in OCDBT, read by TensorStore alone."""
    import tensorstore

    store = {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{name}/"}
    array = tensorstore.open({"driver": "zarr", "kvstore": store}, open=True).result()
    return tuple(array.chunk_layout.read_chunk.shape)


def flat(tree: Any) -> Tree:
    """Dotted path -> array of nested dicts."""
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in leaves}


def without_step(tree: Tree) -> Tree:
    """The weights alone."""
    return {name: array for name, array in tree.items() if name != "step"}


def different(a: Mapping[str, Array], b: Mapping[str, Array]) -> list[str]:
    """The names that only one side has, or whose arrays differ in dtype, shape or any bit."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a
        or name not in b
        or (a[name].dtype, a[name].shape) != (b[name].dtype, b[name].shape)
        or np.ascontiguousarray(a[name]).tobytes() != np.ascontiguousarray(b[name]).tobytes()
    )


def folders_differ(a: Path, b: Path) -> list[str]:
    """The names of the tensors in which two Hugging Face folders differ, by any bit."""
    return different(oracles.read_hf(a)[0], oracles.read_hf(b)[0])


def maxtext_expected(source: Path, scanned: bool) -> Tree:
    """What bridge must write for MaxText: the oracle's f32 values, all but the query kernel in the source's dtype."""
    tensors, config = oracles.read_hf(source)
    kind = tensors["model.embed_tokens.weight"].dtype
    tree = oracles.maxtext_tree(tensors, config, scanned)
    return {name: array if "query" in name else array.astype(kind) for name, array in tree.items()}
