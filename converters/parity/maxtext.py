"""Logits of a checkpoint from the real MaxText model, in f32 on the CPU, with bridge's corrections."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from pathlib import Path

import numpy as np

from bridge import engine_fixes
from bridge.converters.parity.compare import Logits, Probe


def logits(config: str, item: Path, inputs: tuple[Probe, ...], frequencies: tuple[float, ...]) -> list[Logits]:
    """f32 logits (n, vocab) of every probe.

    Args:
        config: the YAML that training uses; dtypes, lengths and the checkpoint are overridden here.
        item: the tree to load, as `load_parameters_path` takes it.
        inputs: token ids and positions.
        frequencies: `head_dim / 2` inverse RoPE frequencies.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    engine_fixes.apply("maxtext", frequencies)
    import jax
    import jax.numpy as jnp
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
            max_target_length=max(len(probe.ids) for probe in inputs),
            enable_tensorboard=False,
        )
        model, mesh = model_creation_utils.from_pretrained(settings)

        def forward(probe: Probe) -> Logits:
            out = model(
                decoder_input_tokens=jnp.asarray(probe.ids)[None],
                decoder_positions=jnp.asarray(probe.positions)[None],
                decoder_segment_ids=jnp.ones((1, len(probe.ids)), jnp.int32),
                enable_dropout=False,
            )
            return np.asarray(out[0], dtype=np.float32)

        with jax.set_mesh(mesh):
            return [forward(probe) for probe in inputs]
