"""Corrections of Tunix 0.1.7."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from bridge.engine_fixes import Fix, Frequencies
from bridge.errors import UnsupportedError

ROPE_ARGUMENTS = ("inputs", "positions", "head_dim", "rope_theta")
BLOCK_ARGUMENTS = ("self", "x", "segment_pos", "cache", "attn_mask")
PREFERENCE_ARGUMENTS = ("model", "train_example", "algorithm", "beta", "lambda_orpo", "label_smoothing")
LOSS_ARGUMENTS = ("model", "input_tokens", "input_mask", "positions", "attention_mask", "images")

# What models built from now on get, and what the attention layer being traced has.
_installed: list[tuple[float, ...]] = []
_current: ContextVar[tuple[float, ...]] = ContextVar("rope_frequencies")


def rope(frequencies: Frequencies) -> None:
    """Give every Llama built from now on these RoPE frequencies; models built before keep theirs.

    Each attention layer holds its frequencies as a static attribute. They are thus part of what flax keys its jit
    caches by, and travel with the model through clone, split, merge, remat, LoRA, quantization and the sampler.

    Raises:
        AttributeError: Tunix is not as it was when this was written.
    """
    from tunix.models.llama3 import model as llama

    _installed[:] = [tuple(frequencies)]
    if getattr(llama.apply_rope, "corrected", False):
        return
    block, init = llama.Attention.block, llama.Attention.__init__
    require_arguments(llama.apply_rope, ROPE_ARGUMENTS)
    require_arguments(block, BLOCK_ARGUMENTS)
    names = block.__code__.co_names + block.__code__.co_consts
    if "apply_rope" not in names or any("rope_theta" in name for name in names if isinstance(name, str | tuple)):
        raise AttributeError("Attention.block no longer calls apply_rope without rope_theta")
    llama.apply_rope = apply_rope
    llama.Attention.__init__ = _remembering(init)
    llama.Attention.block = _telling(block)


def apply_rope(inputs: Any, positions: Any, head_dim: int) -> Any:
    """Turn the pairs (i, i + head_dim / 2) by position x frequency i, as Hugging Face does.

    Args:
        inputs: `[batch, length, heads, head_dim]`, any float dtype; the angles, sines and products are f32.
        positions: `[batch, length]`, tokens from the start.
        head_dim: must be twice the number of frequencies.

    Raises:
        ValueError: another head_dim.
    """
    import jax.numpy as jnp
    import numpy as np

    constants = np.asarray(_current.get(), dtype=np.float32)
    if head_dim != 2 * len(constants):
        raise ValueError(f"head_dim is {head_dim}, the RoPE constants are for {2 * len(constants)}")
    angle = positions.astype(jnp.float32)[..., None, None] * constants
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(inputs, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(inputs.dtype)


apply_rope.corrected = True  # type: ignore[attr-defined]


def _remembering(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.rope_frequencies = _installed[0]

    return __init__


def _telling(block: Any) -> Any:
    @functools.wraps(block)
    def with_frequencies(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "rope_frequencies"):
            raise UnsupportedError("this Tunix model was built before the correction of its RoPE was installed")
        token = _current.set(self.rope_frequencies)
        try:
            return block(self, *args, **kwargs)
        finally:
            _current.reset(token)

    return with_frequencies


def loss(_: Frequencies) -> None:
    """Replace the default loss of Tunix's trainer by one whose log-softmax runs in f32.

    Raises:
        AttributeError: Tunix is not as it was when this was written.
    """
    from tunix.sft import peft_trainer

    if peft_trainer._default_loss_fn is token_loss:
        return
    require_arguments(peft_trainer._default_loss_fn, LOSS_ARGUMENTS)
    if "_default_loss_fn" not in peft_trainer.PeftTrainer.__init__.__code__.co_names:
        raise AttributeError("PeftTrainer no longer takes _default_loss_fn")
    peft_trainer._default_loss_fn = token_loss


def token_loss(
    model: Any, input_tokens: Any, input_mask: Any, positions: Any, attention_mask: Any, images: Any = None
) -> Any:
    """Mean negative log-likelihood of the masked tokens, nats, f32; 0 where no token is masked in.

    Args:
        model: maps (tokens, positions, cache, attention mask) to `[batch, length, vocab]` logits and a cache.
        input_tokens: `[batch, length]` ids.
        input_mask: `[batch, length]`, true where the token is to be predicted (from the one before it).
        positions: `[batch, length]`.
        attention_mask: `[batch, length, length]`, true where a token (second axis) sees another (third axis).
        images: only None, Llama has no images.
    """
    import jax
    import jax.numpy as jnp

    if images is not None:
        raise ValueError("Llama takes no images")
    logits, _ = model(input_tokens, positions, None, attention_mask)
    logits = logits[:, :-1].astype(jnp.float32)
    target, mask = input_tokens[:, 1:, None], input_mask[:, 1:].astype(jnp.float32)
    # A comparison instead of a gather: it stays local where the vocabulary is sharded, and fuses into the sum.
    vocabulary = jax.lax.broadcasted_iota(target.dtype, logits.shape, 2)
    picked = jnp.sum(jnp.where(vocabulary == target, logits, 0.0), axis=-1)
    likelihood = (picked - jax.nn.logsumexp(logits, axis=-1)) * mask
    return -jnp.sum(likelihood) / jnp.maximum(jnp.sum(mask), 1.0)


def orpo(_: Frequencies) -> None:
    """Replace the ORPO half of Tunix's preference loss by the one of the paper; DPO is left as it is.

    Raises:
        AttributeError: Tunix is not as it was when this was written.
    """
    from tunix.sft.dpo import dpo_trainer

    if getattr(dpo_trainer.dpo_loss_fn, "corrected", False):
        return
    require_arguments(dpo_trainer.dpo_loss_fn, PREFERENCE_ARGUMENTS)
    if "dpo_loss_fn" not in dpo_trainer.DPOTrainer.__init__.__code__.co_names:
        raise AttributeError("DPOTrainer no longer takes dpo_loss_fn")
    stock = dpo_trainer.dpo_loss_fn

    @functools.wraps(stock)
    def dpo_loss_fn(
        model: Any,
        train_example: Any,
        algorithm: str = "dpo",
        beta: float = 0.1,
        lambda_orpo: float = 0.1,
        label_smoothing: float = 0.0,
    ) -> Any:
        if algorithm != "orpo":
            return stock(model, train_example, algorithm, beta, lambda_orpo, label_smoothing)
        return orpo_loss(model, train_example, lambda_orpo, label_smoothing)

    dpo_loss_fn.corrected = True  # type: ignore[attr-defined]
    dpo_trainer.dpo_loss_fn = dpo_loss_fn


def orpo_loss(model: Any, example: Any, strength: float, label_smoothing: float) -> tuple[Any, dict[str, Any]]:
    """ORPO: the chosen answer's negative log-likelihood, and `strength` times the odds ratio loss.

    Likelihoods are means over an answer's tokens, as in the paper (https://arxiv.org/abs/2403.07691, equations 2 to 7)
    and in TRL's ORPOTrainer.

    Args:
        model: the policy.
        example: Tunix's TrainExample; the first half of its rows is chosen, the second rejected.
        strength: lambda.
        label_smoothing: the share of pairs taken the other way round.
    """
    import jax
    import jax.numpy as jnp
    from tunix.sft.dpo import dpo_trainer

    mask = example.completion_mask
    sums = dpo_trainer.compute_logps(
        model, example.input_ids, example.positions, example.attention_mask, example.logits_to_keep, mask
    )
    lengths = jnp.maximum(mask.sum(axis=-1), 1)
    half = mask.shape[0] // 2
    # A likelihood of exactly 1 has no odds; f32 reaches it once an answer is learnt by heart.
    chosen = jnp.minimum(sums[0] / lengths[:half], -1e-7)
    rejected = jnp.minimum(sums[1] / lengths[half:], -1e-7)
    log_odds = chosen - rejected - (jnp.log(-jnp.expm1(chosen)) - jnp.log(-jnp.expm1(rejected)))
    ratio = -(1 - label_smoothing) * jax.nn.log_sigmoid(log_odds) - label_smoothing * jax.nn.log_sigmoid(-log_odds)
    metrics = {
        "rewards/chosen": strength * chosen.mean(),
        "rewards/rejected": strength * rejected.mean(),
        "rewards/margin": strength * (chosen - rejected).mean(),
        "rewards/accuracy": (chosen > rejected).mean(),
        "log_probs/chosen": chosen.mean(),
        "log_probs/rejected": rejected.mean(),
        "odds_ratio": jnp.exp(jnp.minimum(log_odds, 80.0)).mean(),
        "sft_loss": -chosen.mean(),
        "or_loss": ratio.mean(),
    }
    return (strength * ratio - chosen).mean(), metrics


def require_arguments(function: Any, expected: Sequence[str]) -> None:
    """Compare a function's arguments with those it had when a correction of it was written.

    Raises:
        AttributeError: it takes others.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != tuple(expected):
        raise AttributeError(f"{function.__qualname__} takes {found}, not {tuple(expected)}")


FIXES = (
    Fix(
        name="tunix-rope-frequencies",
        engine="tunix",
        reason="Tunix 0.1.7 turns every Llama by theta 1000000 whatever rope_theta says, and has no Llama 3.1 scaling: "
        "it would train under frequencies that PyTorch, vLLM and the export do not use",
        proof="tests/parity/test_tunix_logits.py",
        install=rope,
    ),
    Fix(
        name="tunix-loss-float32",
        engine="tunix",
        reason="Tunix 0.1.7 takes the log-softmax of the loss in the dtype of the logits; in bfloat16 that rounds the "
        "loss and its gradient to three digits",
        proof="tests/parity/test_tunix_losses.py",
        install=loss,
    ),
    Fix(
        name="tunix-orpo-mean-likelihood",
        engine="tunix",
        reason="Tunix 0.1.7 takes ORPO's odds from the sum of an answer's log-probabilities, not from their mean as "
        "the paper does: the odds overflow, and long answers lose for being long",
        proof="tests/parity/test_tunix_losses.py",
        install=orpo,
    ),
)
