"""The forward pass of the real Tunix model, in f32, with the correction of its RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge import engine_fixes, tunix_llama
from bridge.model_spec import ModelSpec


def logits(
    item: Path,
    model: ModelSpec,
    token_ids: Sequence[int] | NDArray[Any],
    positions: Sequence[int] | NDArray[Any],
    frequencies: Sequence[float],
) -> NDArray[np.float32]:
    """Logits `(n, vocab)` of one sequence of n tokens.

    Args:
        item: absolute folder `<checkpoint>/<step>/model_params` of a converted or fully trained checkpoint.
        model: its facts.
        token_ids: n ids; each sees those before it and itself.
        positions: n positions for RoPE, which need not be consecutive.
        frequencies: `head_dim / 2` inverse frequencies, see `bridge.rope`.

    Raises:
        CheckpointError: the checkpoint is not this model's.
        UnsupportedError: the corrections do not fit the installed Tunix.
    """
    engine_fixes.apply("tunix", frequencies)
    return forward(tunix_llama.load(model, item, "float32"), token_ids, positions)


def forward(
    llama: Any, token_ids: Sequence[int] | NDArray[Any], positions: Sequence[int] | NDArray[Any]
) -> NDArray[np.float32]:
    """Logits `(n, vocab)` of a Tunix model that is already built, with or without adapters."""
    import jax

    tokens, places = np.asarray(token_ids, np.int32)[None], np.asarray(positions, np.int32)[None]
    causal = np.tril(np.ones((tokens.shape[1],) * 2, np.bool_))[None]
    # Accelerators multiply f32 in a shorter format unless told otherwise.
    with jax.default_matmul_precision("highest"):
        out, _ = llama(jax.numpy.asarray(tokens), jax.numpy.asarray(places), None, jax.numpy.asarray(causal))
    return np.asarray(out[0], np.float32)
