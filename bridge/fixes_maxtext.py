"""Corrections of MaxText 0.2.5."""

from __future__ import annotations

from typing import Any

from bridge.engine_fixes import Fix, Frequencies


def rope(frequencies: Frequencies) -> None:
    """Replace the Llama RoPE of `maxtext.layers.attentions` by one with PyTorch's frequencies as constants."""
    from maxtext.layers import attentions, embeddings

    attentions.LLaMARotaryEmbedding = _rope_class(embeddings.LLaMARotaryEmbedding, frequencies)


def _rope_class(base: Any, frequencies: Frequencies) -> type[Any]:
    import jax.numpy as jnp
    import numpy as np

    constants = np.asarray(frequencies, dtype=np.float32)

    class PyTorchRotaryEmbedding(base):  # type: ignore[misc]
        """Interleaved pairs (2i, 2i+1) turned by position x constants[i]; inputs [batch, length, heads, head_dim]."""

        def __call__(self, inputs: Any, position: Any = None) -> Any:
            if inputs.shape[-1] != 2 * len(constants):
                raise ValueError(f"head_dim is {inputs.shape[-1]}, the RoPE constants are for {2 * len(constants)}")
            if position is None:
                position = jnp.arange(inputs.shape[1])[None]
            angle = position.astype(jnp.float32)[:, :, None, None] * constants
            sin, cos = jnp.sin(angle), jnp.cos(angle)
            even, odd = inputs[..., ::2], inputs[..., 1::2]
            turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(inputs.shape)
            return turned.astype(self.fprop_dtype) if self.cast_as_fprop_dtype else turned

    return PyTorchRotaryEmbedding


FIXES = (
    Fix(
        name="maxtext-rope-frequencies",
        engine="maxtext",
        reason="MaxText's Llama 3.1 scaling is hard-coded (factor 8, 8192 positions): Llama 3.2's factor 32 cannot be "
        "said, and its frequencies differ from PyTorch's by an ulp, which shows at long positions",
        proof="tests/parity/test_maxtext_logits.py",
        install=rope,
    ),
)
