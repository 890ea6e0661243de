"""Checkpoints that the engines' own tools wrote are read by `export` and `inspect`, whatever their dress."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_trees
import numpy as np
import pytest
from checkpoints import Tree, different, export, folders_differ, restore, run, save, stored_chunk
from conftest import Tiny
from maxtext_converter import by_maxtext

import oracles
from bridge.converters import transfer
from bridge.errors import CheckpointError
from bridge.launchers import stored_chunks
from bridge.model_spec import ModelSpec

DRESSES: dict[str, Callable[[Tree], Tree]] = {
    "linen": engine_trees.linen,
    "params": engine_trees.params_only,
    "nnx": engine_trees.nnx,
    "base": engine_trees.wrapped,
    "plain": dict,
}
STORES = [(True, True), (True, False), (False, False)]  # zarr3 and zarr2 in OCDBT, zarr2 in plain files


def inspect(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run("inspect", path, "--json").stdout)
    return facts


@pytest.mark.parametrize(("ocdbt", "zarr3"), STORES)
@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("dress", DRESSES)
def test_a_maxtext_checkpoint_is_exported_and_inspected(
    dress: str, scanned: bool, ocdbt: bool, zarr3: bool, tiny: Tiny, tmp_path: Path
) -> None:
    source = tiny("head_dim_96", edge_values=True)
    weights = oracles.maxtext_tree(*oracles.read_hf(source), scanned=scanned)
    tree = DRESSES[dress](weights)
    name = "items" if dress in ("linen", "params", "plain") else "model_params"
    item = save(tmp_path / "ckpt" / "7", name, tree, ocdbt=ocdbt, zarr3=zarr3)
    assert (item / "manifest.ocdbt").exists() == ocdbt
    for number, path in enumerate((tmp_path / "ckpt", tmp_path / "ckpt" / "7", item)):
        facts = inspect(path)
        assert (facts["format"], facts["scanned"], facts["step"]) == ("maxtext", scanned, 7)
        assert facts["model"] is None
        assert facts["parameters"] == sum(array.size for array in weights.values())
        assert facts["bytes"] == sum(array.nbytes for array in weights.values())
        assert len(facts["left_out"]) == len(tree) - len(weights)
        shapes = {key: {"shape": list(tree[key].shape), "dtype": "float32"} for key in facts["tensors"]}
        assert facts["tensors"] == shapes
        back = export(path, tmp_path / f"hf{number}", "--base", source)
        assert folders_differ(source, back) == []


@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_chunks_of_a_training_run_are_orbax_own_and_exported(
    engine: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored in many chunks: Orbax restores the same tree, and the export is the source."""
    from orbax.checkpoint._src.arrays import subchunking

    source = tiny("head_dim_96", edge_values=True)
    files = oracles.read_hf(source)
    tree = oracles.maxtext_tree(*files, scanned=True) if engine == "maxtext" else oracles.tunix_tree(*files)
    monkeypatch.setattr(subchunking, "choose_chunk_shape", subchunking.choose_chunk_shape)
    monkeypatch.setattr(stored_chunks, "ROW_BYTES", 3000)
    stored_chunks.install(ModelSpec.from_folder(source), scanned=engine == "maxtext")
    item = save(tmp_path / "ckpt" / "7", "model_params", tree, zarr3=False)
    chunks = {name: stored_chunk(item, name) for name in tree}
    cut = {name for name, array in tree.items() if chunks[name] != array.shape}
    assert len(cut) > len(tree) // 2
    stacked = [name for name in tree if ".layers." in name and "kernel" in name and engine == "maxtext"]
    assert all(chunks[name][1] == 1 for name in stacked)
    assert different(restore(item), tree) == []
    monkeypatch.setattr(transfer.Budget, "slab_bytes", property(lambda _: 4000))
    assert folders_differ(source, export(tmp_path / "ckpt", tmp_path / "hf", "--base", source)) == []


@pytest.mark.parametrize("name", ["tied", "mqa"])
@pytest.mark.parametrize("zarr3", [True, False])
def test_a_tunix_checkpoint_is_exported_and_inspected(name: str, zarr3: bool, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny(name, edge_values=True)
    tree = oracles.tunix_tree(*oracles.read_hf(source))
    save(tmp_path / "ckpt" / "3", "model_params", tree, zarr3=zarr3)
    facts = inspect(tmp_path / "ckpt")
    assert (facts["format"], facts["step"]) == ("tunix", 3)
    assert facts["tensors"].keys() == tree.keys()
    assert folders_differ(source, export(tmp_path / "ckpt", tmp_path / "hf", "--base", source)) == []


@pytest.mark.parametrize("scanned", [True, False])
def test_what_maxtexts_own_converter_wrote_is_exported_and_inspected(scanned: bool, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("head_dim_128")
    step = by_maxtext(source)[scanned]
    facts = inspect(step)
    assert (facts["format"], facts["scanned"]) == ("maxtext", scanned)
    assert facts["parameters"] == sum(array.size for array in oracles.read_hf(source)[0].values())
    assert folders_differ(source, export(step, tmp_path / "hf", "--base", source)) == []


def test_a_swapped_array_shows(tiny: Tiny, tmp_path: Path) -> None:
    """The comparison of the tests above tells gate from up, and layer from layer."""
    source = tiny("head_dim_96")
    weights = oracles.maxtext_tree(*oracles.read_hf(source), scanned=True)
    gate, up = (f"params.params.decoder.layers.mlp.wi_{i}.kernel" for i in (0, 1))
    save(tmp_path / "a" / "0", "items", {**weights, gate: weights[up], up: weights[gate]})
    wrong = folders_differ(source, export(tmp_path / "a", tmp_path / "hf-a", "--base", source))
    assert {name.rsplit(".", 2)[1] for name in wrong} == {"gate_proj", "up_proj"}
    save(tmp_path / "b" / "0", "items", {**weights, gate: weights[gate][:, ::-1]})
    wrong = folders_differ(source, export(tmp_path / "b", tmp_path / "hf-b", "--base", source))
    assert wrong == [f"model.layers.{layer}.mlp.gate_proj.weight" for layer in (0, 1)]


def test_a_base_of_another_shape_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    weights = oracles.maxtext_tree(*oracles.read_hf(tiny("head_dim_96")), scanned=True)
    save(tmp_path / "ckpt" / "0", "items", weights)
    with pytest.raises(CheckpointError, match="does not match the model"):
        export(tmp_path / "ckpt", tmp_path / "hf", "--base", tiny("mha"))
    assert not (tmp_path / "hf").exists()


def test_the_same_weight_twice_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    weights = oracles.maxtext_tree(*oracles.read_hf(tiny("mha")), scanned=True)
    both = {**weights, **engine_trees.wrapped(weights)}
    save(tmp_path / "ckpt" / "0", "items", both)
    with pytest.raises(CheckpointError, match="twice"):
        export(tmp_path / "ckpt", tmp_path / "hf", "--base", tiny("mha"))


@pytest.mark.parametrize("names", [["encoder.kernel"], ["decoder.norm", "embedder.input_embedding"], ["step"]])
def test_a_tree_of_something_else_is_named(names: list[str], tiny: Tiny, tmp_path: Path) -> None:
    save(tmp_path / "ckpt" / "0", "items", {name: np.zeros(3, np.float32) for name in names})
    with pytest.raises(CheckpointError, match="no Llama checkpoint") as found:
        export(tmp_path / "ckpt", tmp_path / "hf", "--base", tiny("mha"))
    assert all(name.split(".")[0] in str(found.value) for name in names)


def test_a_write_that_was_never_finished_is_no_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    weights = oracles.maxtext_tree(*oracles.read_hf(tiny("mha")), scanned=True)
    save(tmp_path / "ckpt" / "0", "items", weights)
    (tmp_path / "ckpt" / "0").rename(tmp_path / "ckpt" / "0.orbax-checkpoint-tmp-123")
    with pytest.raises(CheckpointError, match="no finished checkpoint") as found:
        export(tmp_path / "ckpt", tmp_path / "hf", "--base", tiny("mha"))
    assert "0.orbax-checkpoint-tmp-123 was never finished" in str(found.value)
    with pytest.raises(CheckpointError, match="never finished"):
        export(tmp_path / "ckpt" / "0.orbax-checkpoint-tmp-123" / "items", tmp_path / "hf", "--base", tiny("mha"))


def test_an_array_whose_bytes_are_gone_is_named(tiny: Tiny, tmp_path: Path) -> None:
    import shutil

    weights = oracles.maxtext_tree(*oracles.read_hf(tiny("mha")), scanned=True)
    item = save(tmp_path / "ckpt" / "0", "items", weights, ocdbt=False, zarr3=False)
    gone = "params.params.decoder.layers.mlp.wo.kernel"
    shutil.rmtree(item / gone)
    with pytest.raises(CheckpointError) as found:
        export(tmp_path / "ckpt", tmp_path / "hf", "--base", tiny("mha"))
    assert gone in str(found.value)
