"""Corrections of MaxText 0.2.5."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from bridge import fixes_tunix, lora_provider
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


def tied_logits(frequencies: Frequencies) -> None:
    """Compute tied logits in the model's dtype: MaxText rounds the embedding to bfloat16 whatever it is."""
    del frequencies
    from maxtext.layers import embeddings, nnx_decoders

    for module in (embeddings, nnx_decoders):
        if not hasattr(module, "attend_on_embedding"):
            raise AttributeError(f"{module.__name__} has no attend_on_embedding")
        module.attend_on_embedding = _attend


def _attend(query: Any, embedding_table: Any, attend_dtype: Any, config: Any, out_sharding: Any = None) -> Any:
    """Logits [..., vocab] of `query` [..., embed] on `embedding_table` [vocab, embed], in the query's dtype."""
    import jax.numpy as jnp
    from maxtext.layers import embeddings

    if config.shard_mode != embeddings.ShardMode.EXPLICIT:
        out_sharding = None
    if out_sharding is not None:
        out_sharding = embeddings.truncate_out_sharding(out_sharding, query.ndim)
    table = embeddings._maybe_move_embedding_to_device(embedding_table, config)
    table = jnp.asarray(table, query.dtype).T
    return jnp.dot(query, table, preferred_element_type=attend_dtype, out_sharding=out_sharding)


def float32_adapters(frequencies: Frequencies) -> None:
    """Give MaxText's models f32 adapters, whatever the dtype of their base; activations keep theirs.

    Raises:
        AttributeError: MaxText is not as it was when this was written.
    """
    del frequencies
    from maxtext.utils import lora_utils

    build, apply = lora_utils._build_lora_provider, lora_utils.apply_lora_to_model
    if getattr(apply, "corrected", False):
        return
    fixes_tunix.require_arguments(build, ("mt_config",))
    fixes_tunix.require_arguments(apply, ("model", "mesh", "mt_config"))
    if "_build_lora_provider" not in apply.__code__.co_names:
        raise AttributeError("apply_lora_to_model no longer calls _build_lora_provider")

    @functools.wraps(apply)
    def apply_lora_to_model(model: Any, mesh: Any, mt_config: Any) -> Any:
        import jax.numpy as jnp
        from flax import nnx

        adapted = apply(model, mesh, mt_config)
        for _, value in nnx.iter_graph(adapted):
            if isinstance(value, nnx.LoRAParam):
                value.set_value(value.get_value().astype(jnp.float32))
        return adapted

    apply_lora_to_model.corrected = True  # type: ignore[attr-defined]
    lora_utils._build_lora_provider = lambda mt_config: lora_provider.like(build(mt_config))
    lora_utils.apply_lora_to_model = apply_lora_to_model


def accumulation(frequencies: Frequencies) -> None:
    """Let the optimizer alone accumulate gradients, as Tunix 0.1.7 has it do; MaxText looks for a later Tunix's own.

    Raises:
        AttributeError: MaxText or Tunix is not as it was when this was written.
    """
    del frequencies
    from maxtext.trainers.post_train.sft import train_sft
    from tunix.sft import peft_trainer

    stock = train_sft.MaxTextPeftTrainer.create_train_step_fn
    if getattr(stock, "corrected", False):
        return
    if "MultiSteps" not in peft_trainer.PeftTrainer.__init__.__code__.co_names:
        raise AttributeError("PeftTrainer no longer accumulates gradients by optax.MultiSteps")

    @functools.wraps(stock)
    def create_train_step_fn(self: Any) -> Any:
        config = self.config
        self.config = dataclasses.replace(config, gradient_accumulation_steps=None)
        try:
            return stock(self)
        finally:
            self.config = config

    create_train_step_fn.corrected = True  # type: ignore[attr-defined]
    train_sft.MaxTextPeftTrainer.create_train_step_fn = create_train_step_fn


FIXES = (
    Fix(
        name="maxtext-rope-frequencies",
        engine="maxtext",
        reason="MaxText's Llama 3.1 scaling is hard-coded (factor 8, 8192 positions): Llama 3.2's factor 32 cannot be "
        "said, and its frequencies differ from PyTorch's by an ulp, which shows at long positions",
        proof="tests/parity/test_maxtext_logits.py",
        install=rope,
    ),
    Fix(
        name="maxtext-tied-logits",
        engine="maxtext",
        reason="MaxText rounds a tied embedding to bfloat16 before it computes logits, in a float32 run too: 0.01 off "
        "in the logits of a float32 model, in training and in checks",
        proof="tests/parity/test_maxtext_logits.py",
        install=tied_logits,
    ),
    Fix(
        name="maxtext-lora-float32",
        engine="maxtext",
        reason="MaxText trains adapters in the dtype of their base; in bfloat16 they keep three digits, in which the "
        "optimizer's small steps are rounded away or doubled",
        proof="tests/parity/test_maxtext_adapters.py",
        install=float32_adapters,
    ),
    Fix(
        name="maxtext-orpo-mean-likelihood",
        engine="maxtext",
        reason="MaxText's ORPO is Tunix 0.1.7's, which takes the odds from the sum of an answer's log-probabilities",
        proof="tests/parity/test_tunix_losses.py",
        install=fixes_tunix.orpo,
    ),
    Fix(
        name="maxtext-gradient-accumulation",
        engine="maxtext",
        reason="MaxText's SFT step asks for an accumulator that Tunix 0.1.7 does not have: with "
        "gradient_accumulation above 1 every run ends at its first step",
        proof="tests/functional/test_maxtext_mesh.py",
        install=accumulation,
    ),
)
