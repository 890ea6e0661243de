"""RoPE frequencies as PyTorch computes them, as constants for either engine.

Source: transformers/modeling_rope_utils.py (`_compute_default_rope_parameters`, `_compute_llama3_parameters`).
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.model_spec import ModelSpec

F32 = np.float32

PROVED_THETAS = (1e4, 1e5, 1.3e5, 5e5)
PROVED_HEAD_DIM = 128
"""Where PyTorch's power function rounds correctly in every entry, on each of its kinds of processor: for these thetas
(Llama 2, 3 and SmolLM2 have them) and every head_dim that divides this one. Proof: tests/unit/test_rope.py."""


def inverse_frequencies(model: ModelSpec) -> tuple[float, ...]:
    """The `head_dim / 2` inverse frequencies, radians a position, each a float32 value.

    They equal `LlamaRotaryEmbedding.inv_freq` bit for bit. PyTorch's power function is not always correctly rounded
    and depends on the processor. Where it is proved to be, the correctly rounded power is taken, and PyTorch, whose
    import takes seconds, is not loaded. For other models PyTorch itself computes it where it is installed; without it
    about 1 % of the entries are one ulp off.
    """
    exponent = np.arange(0, model.head_dim, 2, dtype=F32) / F32(model.head_dim)
    frequencies = F32(1.0) / _power(model.rope_theta, exponent, is_proved(model.rope_theta, model.head_dim))
    scaling = model.rope_scaling
    if scaling is not None:
        low, high = F32(scaling.low_freq_factor), F32(scaling.high_freq_factor)
        original, factor = F32(scaling.original_context), F32(scaling.factor)
        # PyTorch divides a number by a tensor as reciprocal times number; the bits depend on it.
        wavelength = (F32(1.0) / frequencies) * F32(2 * math.pi)
        long = F32(scaling.original_context / scaling.low_freq_factor)
        short = F32(scaling.original_context / scaling.high_freq_factor)
        slow = np.where(wavelength > long, frequencies / factor, frequencies)
        smooth = ((F32(1.0) / wavelength) * original - low) / (high - low)
        mixed = (F32(1.0) - smooth) * slow / factor + smooth * slow
        medium = ~(wavelength < short) & ~(wavelength > long)
        frequencies = np.where(medium, mixed, slow)
    return tuple(float(value) for value in frequencies)


def is_proved(theta: float, head_dim: int) -> bool:
    """Whether the correctly rounded power is known to be PyTorch's."""
    return theta in PROVED_THETAS and PROVED_HEAD_DIM % head_dim == 0


def _power(theta: float, exponent: NDArray[Any], proved: bool) -> NDArray[Any]:
    if not proved and importlib.util.find_spec("torch") is not None:
        import torch

        power: NDArray[Any] = torch.pow(theta, torch.from_numpy(exponent)).numpy()
        return power
    return (np.float64(F32(theta)) ** exponent.astype(np.float64)).astype(F32)
