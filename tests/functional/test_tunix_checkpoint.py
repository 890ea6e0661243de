"""A converted checkpoint is what Tunix and stock Orbax restore, bit for bit, by every way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from numpy.typing import NDArray
from tunix_checkpoints import convert

from bridge import engine_fixes, tunix_llama
from bridge.launchers import tunix_quantize
from bridge.model_spec import ModelSpec
from bridge.rope import inverse_frequencies
from oracles import read_hf, tunix_tree

Tree = dict[str, NDArray[Any]]


@pytest.fixture(params=[("untied", "bfloat16"), ("tied", "float32")], ids="-".join)
def case(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path) -> tuple[ModelSpec, Path, Tree]:
    """The facts, the converted item, and what it must hold by the oracle."""
    name, dtype = request.param
    folder = tiny(name, dtype=dtype, layers=2, edge_values=True)
    tree = {path.removesuffix(".value"): array for path, array in tunix_tree(*read_hf(folder)).items()}
    return ModelSpec.from_folder(folder), convert(folder, tmp_path / "out"), tree


def bits(array: Any) -> NDArray[Any]:
    values = np.asarray(array)
    return values.view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


def assert_equal(found: dict[str, Any], expected: Tree) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.asarray(found[name]).dtype == array.dtype, name
        np.testing.assert_array_equal(bits(found[name]), bits(array), err_msg=name)


def flat(tree: Any) -> dict[str, Any]:
    """A nested dict with trailing `value`s by dotted path."""
    import jax

    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(str(key.key) for key in path).removesuffix(".value"): leaf for path, leaf in found}


def model_leaves(llama: Any) -> dict[str, Any]:
    from flax import nnx

    return {".".join(path): leaf for path, leaf in tunix_llama.leaves(nnx.state(llama)).items()}


def test_tunix_restores_it(case: tuple[ModelSpec, Path, Tree]) -> None:
    from flax import nnx
    from tunix.models.llama3.model import Llama3
    from tunix.sft.checkpoint_manager import CheckpointManager

    model, item, expected = case
    engine_fixes.apply("tunix", inverse_frequencies(model))
    llama = Llama3(tunix_llama.engine_config(model), rngs=nnx.Rngs(0))
    dtype = next(iter(expected.values())).dtype
    nnx.update(
        llama,
        nnx.from_flat_state([(p, v.replace(v[...].astype(dtype))) for p, v in nnx.to_flat_state(nnx.state(llama))]),
    )
    manager = CheckpointManager(str(item.parents[1]))
    assert manager.maybe_restore(llama) == (0, {})
    manager.close()
    assert_equal(model_leaves(llama), expected)


def test_standard_checkpointer_restores_it(case: tuple[ModelSpec, Path, Tree]) -> None:
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    model, item, expected = case
    engine_fixes.apply("tunix", inverse_frequencies(model))
    dtype = next(iter(expected.values())).dtype
    graph, state = nnx.split(tunix_llama.abstract_model(model))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=one), state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(item, target=target)
    assert_equal(model_leaves(nnx.merge(graph, restored)), expected)


def test_orbax_v1_restores_it(case: tuple[ModelSpec, Path, Tree]) -> None:
    from orbax.checkpoint import v1

    _, item, expected = case
    assert_equal(flat(v1.load(item.parent, checkpointable_name="model_params")), expected)


def test_our_own_readers_restore_it(case: tuple[ModelSpec, Path, Tree]) -> None:
    """Into the model, whole, and leaf by leaf on the host; in f32 by one exact step."""
    model, item, expected = case
    engine_fixes.apply("tunix", inverse_frequencies(model))
    dtype = next(iter(expected.values())).dtype.name
    assert_equal(model_leaves(tunix_llama.load(model, item, dtype)), expected)
    exact = {name: array.astype(np.float32) for name, array in expected.items()}
    assert_equal(model_leaves(tunix_llama.load(model, item, "float32")), exact)
    for name in ("layers.1.attn.o_proj.w", "final_norm.w"):
        path = tuple(name.split("."))
        assert_equal({name: tunix_quantize.read(item, path, dtype)}, {name: expected[name]})


def test_a_changed_bit_is_seen(case: tuple[ModelSpec, Path, Tree]) -> None:
    _, item, expected = case
    broken = dict(expected)
    name = "layers.0.mlp.up_proj.kernel"
    broken[name] = broken[name].copy()
    bits(broken[name])[3, 5] ^= 1
    with pytest.raises(AssertionError, match=name):
        assert_equal(
            {name: tunix_quantize.read(item, tuple(name.split(".")), broken[name].dtype.name)}, {name: broken[name]}
        )
