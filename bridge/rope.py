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


def inverse_frequencies(model: ModelSpec) -> tuple[float, ...]:
    """The `head_dim / 2` inverse frequencies, radians a position, each a float32 value.

    They equal `LlamaRotaryEmbedding.inv_freq` bit for bit. PyTorch's power function is not always correctly rounded
    and depends on the processor, so PyTorch itself computes it where it is installed. Without it the correctly
    rounded power is taken: the same bits for head_dim 64 and 128 at theta 500000, one ulp off in about 1 % of the
    entries for other pairs.
    """
    exponent = np.arange(0, model.head_dim, 2, dtype=F32) / F32(model.head_dim)
    frequencies = F32(1.0) / _power(model.rope_theta, exponent)
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


def _power(theta: float, exponent: NDArray[Any]) -> NDArray[Any]:
    if importlib.util.find_spec("torch") is not None:
        import torch

        power: NDArray[Any] = torch.pow(theta, torch.from_numpy(exponent)).numpy()
        return power
    return (np.float64(F32(theta)) ** exponent.astype(np.float64)).astype(F32)
