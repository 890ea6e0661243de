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
"""Below this, compiling a permutation costs more than XLA saves."""


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


def _permute(bits: Array, shape: tuple[int, ...], order: tuple[int, ...], out: tuple[int, ...], narrow: bool) -> Array:
    """Reshape, transpose, reshape; with `narrow`, float32 bits become bfloat16 bits on the way."""
    if order == tuple(range(len(order))) and not narrow:
        return bits.reshape(out)
    if bits.nbytes < XLA_FROM_BYTES:
        if narrow:
            bits = _round_to_bfloat16(bits, np)
        return np.ascontiguousarray(np.transpose(bits.reshape(shape), order)).reshape(out)
    return np.asarray(_xla_permute(shape, order, out, narrow)(bits))


@functools.cache
def _xla_permute(
    shape: tuple[int, ...], order: tuple[int, ...], out: tuple[int, ...], narrow: bool
) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    def permute(bits: Any) -> Any:
        if narrow:
            bits = _round_to_bfloat16(bits, jnp)
        return jnp.transpose(bits.reshape(shape), order).reshape(out)

    return jax.jit(permute)


def _round_to_bfloat16(bits: Any, xp: Any) -> Any:
    """float32 bits -> bfloat16 bits, to nearest, ties to even; NaN stays NaN. `xp` is numpy or jax.numpy."""
    one, sixteen = xp.uint32(1), xp.uint32(16)
    rounded = (bits + (xp.uint32(0x7FFF) + ((bits >> sixteen) & one))) >> sixteen
    nan = (bits & xp.uint32(0x7FFFFFFF)) > xp.uint32(0x7F800000)
    return xp.where(nan, (bits >> sixteen) | xp.uint32(0x40), rounded).astype(xp.uint16)


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
    narrow = source == "float32" and target == "bfloat16" and scale == 1.0
    moved = _permute(bits, block.hf_split, block.order, block.engine_shape, narrow)
    if narrow or (source == target and scale == 1.0):
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
    narrow = source == "float32" and target == "bfloat16" and scale == 1.0
    flat = (int(np.prod(block.hf_split)),)
    moved = _permute(bits, block.engine_split, block.inverse_order, flat, narrow)
    if narrow or (source == target and scale == 1.0):
        return moved
    if scale != 1.0:
        return from_float64(to_float32(moved, source).astype(np.float64) / scale, target)
    return from_float32(to_float32(moved, source), target)


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
        rounded: Array = _round_to_bfloat16(values.view(np.uint32), np)
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
