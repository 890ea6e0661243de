"""Logits of a checkpoint from the real MaxText model, in f32 on the CPU, with bridge's corrections."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge import engine_fixes
from bridge.converters.parity.compare import Forward, Logits, Probe


def logits(config: str, item: Path, inputs: tuple[Probe, ...], frequencies: tuple[float, ...]) -> list[Logits]:
    """f32 logits (n, vocab) of every probe.

    Args:
        config: the YAML that training uses; dtypes, lengths and the checkpoint are overridden here.
        item: the tree to load, as `load_parameters_path` takes it.
        inputs: token ids and positions.
        frequencies: `head_dim / 2` inverse RoPE frequencies.
    """
    longest = max(len(probe.ids) for probe in inputs)
    with forward_pass(config, item, longest, frequencies) as forward:
        return [forward(probe.ids, probe.positions) for probe in inputs]


@contextlib.contextmanager
def forward_pass(
    config: str, item: Path, longest: int, frequencies: tuple[float, ...], adapter: Path | None = None
) -> Iterator[Forward]:
    """A function from ids and positions, (n,) each, to f32 logits (n, vocab); at most `longest` tokens.

    Args:
        config, item, frequencies: as `logits`.
        longest: tokens of the longest input.
        adapter: the tree of a trained adapter, for a config that enables them.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    engine_fixes.apply("maxtext", frequencies)
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.utils import model_creation_utils

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "config.yml"
        path.write_text(config, encoding="utf-8")
        settings = pyconfig.initialize_pydantic(
            ["", str(path)],
            load_parameters_path=str(item),
            dtype="float32",
            weight_dtype="float32",
            attention="dot_product",
            matmul_precision="highest",
            float32_logits=True,
            per_device_batch_size=1,
            max_target_length=longest,
            enable_tensorboard=False,
        )
        model, mesh = model_creation_utils.from_pretrained(settings)
        if adapter is not None:
            model = _adapted(model, mesh, settings, adapter)

    def step(model: Any, ids: Any, positions: Any) -> Any:
        return model(
            decoder_input_tokens=ids[None],
            decoder_positions=positions[None],
            decoder_segment_ids=jnp.ones((1, len(ids)), jnp.int32),
            enable_dropout=False,
        )[0]

    compiled = nnx.jit(step)

    def forward(ids: NDArray[np.int32], positions: NDArray[np.int32]) -> Logits:
        with jax.set_mesh(mesh):
            return np.asarray(compiled(model, jnp.asarray(ids), jnp.asarray(positions)), dtype=np.float32)

    yield forward


def _adapted(model: Any, mesh: Any, settings: Any, adapter: Path) -> Any:
    """The model with the adapters that MaxText's trainer would give it, and their trained values."""
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.utils import lora_utils

    with jax.set_mesh(mesh), logical_axis_rules(settings.logical_axis_rules):
        model = lora_utils.apply_lora_to_model(model, mesh, settings)
    state = nnx.state(model, nnx.LoRAParam)
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(model, checkpointer.restore(adapter, target=target))
    return model
