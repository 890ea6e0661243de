"""The losses that Tunix's trainer is given: its own, on the model in the compute dtype, with rows kept apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def in_dtype(model: Any, dtype: str) -> Any:
    """The same model with its weights in another dtype; adapters stay f32, and NF4 scales as they were made.

    Inside a loss this is mixed precision: gradients flow back to the f32 weights, which take the small updates that
    bf16 would lose.
    """
    import jax.numpy as jnp
    from flax import nnx

    graph, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    if all(_keeps(path, leaf, dtype) for path, leaf in flat):
        return model
    cast = [
        (path, leaf if _keeps(path, leaf, dtype) else leaf.replace(leaf.get_raw_value().astype(jnp.dtype(dtype))))
        for path, leaf in flat
    ]
    return nnx.merge(graph, nnx.from_flat_state(cast))


def _keeps(path: tuple[Any, ...], leaf: Any, dtype: str) -> bool:
    import jax.numpy as jnp
    from flax import nnx

    value = leaf.get_raw_value()
    if isinstance(leaf, nnx.LoRAParam) or "array" in path or not jnp.issubdtype(value.dtype, jnp.floating):
        return True
    return bool(value.dtype == jnp.dtype(dtype))


def row_loss(dtype: str) -> Callable[..., Any]:
    """Tunix's (corrected) default loss. `weight` makes the mean over eval batches one over their tokens."""
    from tunix.sft import peft_trainer

    loss = peft_trainer._default_loss_fn

    # Every argument has its name: flax differentiates no **keywords.
    def weighted(
        model: Any, input_tokens: Any, input_mask: Any, positions: Any, attention_mask: Any, weight: Any = None
    ) -> Any:
        value = loss(in_dtype(model, dtype), input_tokens, input_mask, positions, attention_mask)
        return value if weight is None else value * weight

    return weighted


def preference_loss(dtype: str) -> Callable[..., Any]:
    """Tunix's (corrected) loss for dpo and orpo, with its metrics."""
    from tunix.sft.dpo import dpo_trainer

    preference = dpo_trainer.dpo_loss_fn

    def loss(
        model: Any,
        train_example: Any,
        algorithm: str = "dpo",
        beta: float = 0.1,
        lambda_orpo: float = 0.1,
        label_smoothing: float = 0.0,
    ) -> Any:
        return preference(in_dtype(model, dtype), train_example, algorithm, beta, lambda_orpo, label_smoothing)

    return loss


def row_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the loss for a batch of `tunix_batch`, inside the compiled step.

    A token sees those before it in its own example: attention mask `[rows, length, length]`, true where segments agree.
    """
    import jax.numpy as jnp

    segments = batch["segments"]
    same = segments[:, :, None] == segments[:, None, :]
    causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
    kept = {name: array for name, array in batch.items() if name != "segments"}
    return {**kept, "attention_mask": same & causal}
