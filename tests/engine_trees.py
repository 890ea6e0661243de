"""Trees and runs as the engines leave them, made from the oracle: for tests of what reads them.

linen, params_only, nnx, wrapped     the ways MaxText's tools lay out the same weights
trained_run(folder, source, steps)   a run of bridge's SFT on MaxText, with a checkpoint a step
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from checkpoints import Array, Tree, save

import oracles
from bridge import sidecar
from bridge.model_spec import ModelSpec

PREFIX = "params.params."
NORM = "decoder.decoder_norm.scale.value"


def linen(weights: Tree) -> Tree:
    """Pre-training: weights under params.params, with the optimizer's state and random state beside them."""
    names = {name.removeprefix("params."): array for name, array in weights.items()}
    moments = {f"opt_state.0.{kind}.{name}": array for name, array in names.items() for kind in ("mu", "nu")}
    counts = {"opt_state.0.count": np.int32(5), "step": np.int32(5)}
    noise = {"nnx_aux.model.decoder.rngs.params.key.value": np.arange(2, dtype=np.uint32)}
    return {**weights, **moments, **{name: np.asarray(value) for name, value in counts.items()}, **noise}


def params_only(weights: Tree) -> Tree:
    """A parameter-only checkpoint: one `params`."""
    return {name.removeprefix("params."): array for name, array in weights.items()}


def nnx(weights: Tree) -> Tree:
    """SFT through Tunix: bare, each leaf named `value`, with random state among the layers."""
    bare = {f"{name.removeprefix(PREFIX)}.value": array for name, array in weights.items()}
    noise = {"decoder.rngs.params.count.value": np.uint32(3), "decoder.dropout.rngs.key.value": np.uint32(4)}
    return {**bare, **{name: np.asarray(value) for name, value in noise.items()}}


def wrapped(weights: Tree) -> Tree:
    """The same under `base`, as preference training saves the model it trains."""
    return {f"base.{name}": array for name, array in nnx(weights).items()}


def trained_run(
    folder: Path, source: Path, steps: Mapping[int, Tree], losses: Mapping[int, float] | None = None
) -> Path:
    """Write a run's folder: bridge.json, the small files, a checkpoint a step, and eval losses in metrics.jsonl."""
    folder.mkdir(parents=True)
    model = ModelSpec.from_folder(source)
    sidecar.Sidecar(
        engine="maxtext",
        model=model,
        scanned=True,
        method="sft",
        source={"origin": str(source)},
        dtypes={"all": model.dtype},
    ).write(folder)
    sidecar.copy_side_files(source, folder / sidecar.HF)
    for step, tree in steps.items():
        save(folder / "checkpoints" / str(step), "model_params", tree, zarr3=False)
    lines = [json.dumps({"step": step, "eval_loss": loss}) + "\n" for step, loss in (losses or {}).items()]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def marked(source: Path, mark: float) -> Tree:
    """The weights of a model as SFT leaves them, the last norm filled with `mark`, by which an export is known."""
    tensors, config = oracles.read_hf(source)
    tree = nnx(oracles.maxtext_tree(tensors, config, scanned=True))
    return {**tree, NORM: np.full_like(tree[NORM], mark)}


def mark_of(folder: Path) -> float:
    """The mark in an export."""
    norm: Array = oracles.read_hf(folder)[0]["model.norm.weight"]
    return float(norm[0])
