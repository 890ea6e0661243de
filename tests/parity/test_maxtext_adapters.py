"""MaxText's adapters in f32 on a bf16 base: what they are, what they compute, and what stock MaxText makes of them."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import adapter_cases as cases
import numpy as np
import pytest
import yaml
from conftest import Tiny

from bridge import engine_fixes
from bridge.configs.maxtext import model_section, module_path
from bridge.model_spec import ModelSpec
from bridge.rope import inverse_frequencies

TOKENS = 32


def built(base: Path, scanned: bool, folder: Path, **lora: Any) -> tuple[Any, Any, Any]:
    """MaxText's model in bf16 without adapters, its mesh, and settings that ask for them."""
    model = ModelSpec.from_folder(base)
    engine_fixes.apply("maxtext", inverse_frequencies(model))
    from maxtext.configs import pyconfig
    from maxtext.utils import model_creation_utils

    text = {
        "base_config": "post_train/sft.yml",
        "run_name": "test",
        "base_output_directory": str(folder),
        "load_parameters_path": str(cases.convert(base, folder / "base", "maxtext", scanned)),
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "log_config": False,
        "enable_tensorboard": False,
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "attention": "dot_product",
        "per_device_batch_size": 1,
        "max_target_length": TOKENS,
        **model_section(model, scanned),
        "lora": {"enable_lora": True, "lora_rank": 4, "lora_alpha": 8.0, "lora_module_path": module_path(cases.ALL)}
        | lora,
    }
    (folder / "config.yml").write_text(yaml.safe_dump(text))
    with contextlib.redirect_stdout(io.StringIO()):
        settings = pyconfig.initialize_pydantic(["", str(folder / "config.yml")])
        return *model_creation_utils.from_pretrained(settings), settings


def adapted(network: Any, mesh: Any, settings: Any, *, stock: bool = False) -> Any:
    import jax
    from flax.core.spmd import logical_axis_rules
    from maxtext.utils import lora_utils

    apply: Any = lora_utils.apply_lora_to_model
    with jax.set_mesh(mesh), logical_axis_rules(settings.logical_axis_rules):
        return (apply.__wrapped__ if stock else apply)(network, mesh, settings)


def adapter_dtypes(network: Any) -> set[str]:
    import jax
    from flax import nnx

    return {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(network, nnx.LoRAParam))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scanned", "lora"), [(True, {}), (False, {}), (True, {"lora_weight_qtype": "nf4", "lora_tile_size": 32})]
)
def test_adapters_are_float32_and_activations_are_not(
    scanned: bool, lora: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    """A step of 1e-4 arrives in every value; in bf16 it would be lost in those above 0.05."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    base = tiny("head_dim_128", mlp=96, layers=2)
    network, mesh, settings = built(base, scanned, tmp_path, **lora)
    assert adapter_dtypes(adapted(network, mesh, settings, stock=True)) == {"bfloat16"}
    network = adapted(network, mesh, settings)
    assert adapter_dtypes(network) == {"float32"}
    others = nnx.to_flat_state(nnx.state(network, nnx.Not(nnx.LoRAParam)))
    assert "float32" not in {str(leaf.get_raw_value().dtype) for _, leaf in others}
    before = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(nnx.state(network, nnx.LoRAParam))])

    def loss(model: Any, ids: Any) -> Any:
        logits = model(
            decoder_input_tokens=ids,
            decoder_positions=jnp.arange(TOKENS)[None],
            decoder_segment_ids=jnp.ones((1, TOKENS), jnp.int32),
            enable_dropout=False,
        )
        return jnp.mean(logits**2)

    ids = jnp.asarray(np.random.default_rng(0).integers(0, 250, (1, TOKENS)), jnp.int32)
    # A scan over layers refuses activations that its layers widen.
    with jax.set_mesh(mesh):
        gradient = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)))(network, ids)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradient)} == {"float32"}
    assert any(np.abs(np.asarray(leaf)).max() > 0 for leaf in jax.tree.leaves(gradient))
    nnx.update(network, jax.tree.map(lambda leaf: leaf + 1e-4, nnx.state(network, nnx.LoRAParam)))
    after = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(nnx.state(network, nnx.LoRAParam))])
    np.testing.assert_allclose(after - before, 1e-4, rtol=1e-2)
