"""Dtypes and permutations on bit patterns, so that no value changes but by the one rounding that was asked for.

XLA on CPU flushes subnormal floats to zero, so values travel through it as unsigned integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.converters.layout import Block

Array = NDArray[Any]

XLA_FROM_BYTES = 512 << 10
"""Below this, calling XLA costs more than it saves."""


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a dtype name; `bfloat16` comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        brain: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return brain
    return np.dtype(name)


def bits_dtype(name: str) -> np.dtype[Any]:
    """The unsigned integer of the same width."""
    return np.dtype(f"u{numpy_dtype(name).itemsize}")


def _permute(bits: Array, shape: tuple[int, ...], order: tuple[int, ...], out: tuple[int, ...]) -> Array:
    """Reshape, transpose, reshape.

    XLA's host transpose, which `device_put` of a strided array runs, does 5 to 8 GB/s a core where numpy's copy and
    a compiled transpose do 0.6 (xla/pjrt/transpose.h).
    """
    if order == tuple(range(len(order))):
        return bits.reshape(out)
    moved = np.transpose(bits.reshape(shape), order)
    if bits.nbytes < XLA_FROM_BYTES:
        return np.ascontiguousarray(moved).reshape(out)
    import jax

    return np.asarray(jax.device_put(moved)).reshape(out)


def _round_to_bfloat16(bits: Any, xp: Any) -> Any:
    """float32 bits -> bfloat16 bits, to nearest, ties to even; NaN stays NaN. `xp` is numpy or jax.numpy."""
    one, sixteen = xp.uint32(1), xp.uint32(16)
    rounded = (bits + (xp.uint32(0x7FFF) + ((bits >> sixteen) & one))) >> sixteen
    nan = (bits & xp.uint32(0x7FFFFFFF)) > xp.uint32(0x7F800000)
    return xp.where(nan, (bits >> sixteen) | xp.uint32(0x40), rounded).astype(xp.uint16)


@functools.cache
def _xla_round() -> Callable[[Array], Any]:
    """The rounding as one pass of compiled code, where numpy makes eight."""
    import jax
    import jax.numpy as jnp

    return jax.jit(functools.partial(_round_to_bfloat16, xp=jnp))


def import_block(bits: Array, block: Block, source: str, target: str, scale: float) -> Array:
    """One contiguous Hugging Face block, as bits, in the engine's order and dtype.

    Args:
        bits: any shape, unsigned integers of the width of `source`.
        block: the permutation.
        source, target: dtype names.
        scale: what values are multiplied with, in float32 as the engine's converter does.

    Returns:
        An array of `block.engine_shape` and the unsigned integer of `target`.
    """
    moved = _permute(bits, block.hf_split, block.order, block.engine_shape)
    if source == target and scale == 1.0:
        return moved
    values = to_float32(moved, source)
    if scale != 1.0:
        values = values * np.float32(scale)
    return from_float32(values, target)


def export_block(bits: Array, block: Block, source: str, target: str, scale: float) -> Array:
    """The inverse of `import_block`: values are divided by `scale` and rounded once.

    Args:
        bits: `block.engine_shape`, unsigned integers of the width of `source`.
        block, source, target, scale: as `import_block`; `source` is now the engine's dtype.

    Returns:
        A contiguous array of the Hugging Face block, as unsigned integers of the width of `target`.
    """
    flat = (int(np.prod(block.hf_split)),)
    moved = _permute(bits, block.engine_split, block.inverse_order, flat)
    if source == target and scale == 1.0:
        return moved
    values = to_float32(moved, source)
    return from_float32(values, target) if scale == 1.0 else _divided(values, scale, target)


def _divided(values: NDArray[np.float32], scale: float, target: str) -> Array:
    """Bit patterns of values / scale, rounded once.

    A float32 quotient lies on the same side of a bfloat16 midpoint as the exact one, or on the midpoint itself: only
    those, one in 65,536, need more digits.
    """
    if target == "float16":
        return from_float64(values.astype(np.float64) / scale, target)
    near = values / np.float32(scale)
    rounded = from_float32(near, target)
    if target == "bfloat16":
        middle = np.flatnonzero((near.view(np.uint32) & np.uint32(0xFFFF)) == np.uint32(0x8000))
        rounded[middle] = from_float64(values[middle].astype(np.float64) / scale, target)
    return rounded


def to_float32(bits: Array, source: str) -> NDArray[np.float32]:
    """Exact values of bf16, f16 or f32 bit patterns."""
    if source == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if source == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view(np.float32)


def from_float32(values: NDArray[np.float32], target: str) -> Array:
    """Bit patterns of `target`, rounded once to nearest even."""
    values = np.ascontiguousarray(values)
    if target == "bfloat16":
        bits = values.view(np.uint32)
        rounded: Array = _round_to_bfloat16(bits, np) if bits.nbytes < XLA_FROM_BYTES else np.array(_xla_round()(bits))
        return rounded
    if target == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return values.view(np.uint32)


def from_float64(values: NDArray[np.float64], target: str) -> Array:
    """Bit patterns of `target`, rounded once to nearest even (never through a rounded float32)."""
    if target == "float32":
        return values.astype(np.float32).view(np.uint32)
    if target == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    # Round to odd first: with two spare bits or more, the second rounding then equals a single one.
    near = values.astype(np.float32)
    bits = near.view(np.uint32)
    with np.errstate(invalid="ignore"):
        inexact = near.astype(np.float64) != values
        too_far = np.abs(near.astype(np.float64)) > np.abs(values)
    finite = np.isfinite(values)
    bits = np.where(finite & too_far, bits - np.uint32(1), bits)
    bits = np.where(finite & inexact, bits | np.uint32(1), bits)
    rounded: Array = _round_to_bfloat16(bits, np)
    return rounded
