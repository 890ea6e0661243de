"""NF4 as qwix computes it: what a QLoRA run trained on, rebuilt from the same base without an engine.

Everything works on rows of Hugging Face matrices (out, in). A tile of consecutive inputs of one row shares a scale,
its largest magnitude; the output projection's tile is `tile` positions of *every* head (qwix tiles only the last
axis it sums over). Each step rounds to the dtype of the base, as qwix does outside jit.
Source: qwix/_src/core/{numerics,qarray,einsum,dot_general}.py, 0.1.8; the levels: https://arxiv.org/abs/2305.14314, E.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.converters.bits import from_float32, numpy_dtype, to_float32
from bridge.errors import UnsupportedError

Floats = NDArray[np.float32]

LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    dtype=np.float32,
)
# Below the square root of the smallest normal number qwix takes a scale of 1: the tile becomes zeros.
SMALLEST_SCALE = {"bfloat16": 2.0**-63, "float32": 2.0**-63}


def check_base(name: str, columns: int, dtype: str, tile: int, shared: int = 1) -> None:
    """Whether the quantization of a matrix can be rebuilt.

    Args:
        name: of the matrix, for the message.
        columns: inputs of one row.
        dtype: of the base model's arrays in the engine.
        tile: inputs that share one scale.
        shared: groups of inputs (the heads of the output projection) that share their scales.

    Raises:
        UnsupportedError: `columns / shared` is no multiple of `tile`, or the dtype is float16, which XLA does not
            divide to the nearest value (measured on a CPU).
    """
    if dtype not in SMALLEST_SCALE:
        raise UnsupportedError(
            f"{name}: NF4 of a {dtype} base cannot be rebuilt bit for bit",
            hint="merge into the original base, or say which dtype the engine held the base in",
        )
    if columns % shared or (columns // shared) % tile:
        raise UnsupportedError(
            f"{name}: {columns // shared} inputs cannot be cut into NF4 tiles of {tile}",
            hint="the adapter's tile_size is wrong, or it was not trained on this base",
        )


def rounded(values: Floats, dtype: str) -> Floats:
    """The nearest values of `dtype`, as float32."""
    return to_float32(from_float32(values, dtype), dtype) if dtype != "float32" else values


def quantize(values: Floats, dtype: str, tile: int, shared: int = 1) -> tuple[NDArray[np.uint8], Floats]:
    """Rows to levels and scales.

    Args:
        values: (rows, columns), each a value of `dtype`.
        dtype: of the base model's arrays in the engine; scales have it, too.
        tile, shared: as in `check_base`.

    Returns:
        Indices into `LEVELS` (rows, columns) and scales (rows, columns / shared / tile).
    """
    tiles = _tiles(values, tile, shared)
    scales = np.abs(tiles).max(axis=(1, 3))
    scales = np.where(scales < np.float32(SMALLEST_SCALE[dtype]), np.float32(1), scales)
    ratios = tiles / scales[:, None, :, None]
    codes = nearest_level(ratios) if dtype == "float32" else _table(dtype)[0][from_float32(ratios, dtype)]
    return codes.reshape(values.shape), scales


def dequantize(codes: NDArray[np.uint8], scales: Floats, dtype: str, tile: int, shared: int = 1) -> Floats:
    """The values (rows, columns) that `quantize` stands for: level times scale, rounded to `dtype`."""
    levels = _table(dtype)[1][_tiles(codes, tile, shared)]
    return rounded((levels * scales[:, None, :, None]).reshape(codes.shape), dtype)


def through_nf4(values: Floats, dtype: str, tile: int, shared: int = 1) -> Floats:
    """Rows (rows, columns) as a QLoRA run sees them: rounded to `dtype`, quantized and dequantized."""
    codes, scales = quantize(rounded(values, dtype), dtype, tile, shared)
    return dequantize(codes, scales, dtype, tile, shared)


def nearest_level(ratios: Floats) -> NDArray[np.uint8]:
    """The index of the level nearest to each value by the distance in float32; the lower one where two are as near."""
    above = np.clip(np.searchsorted(LEVELS, ratios), 1, len(LEVELS) - 1)
    up = np.abs(LEVELS[above] - ratios) < np.abs(LEVELS[above - 1] - ratios)
    return np.where(up, above, above - 1).astype(np.uint8)


@functools.cache
def _table(dtype: str) -> tuple[NDArray[np.uint8], Floats]:
    """The level of every 16-bit pattern (none for float32), and the levels in `dtype`."""
    levels = rounded(LEVELS, dtype)
    if numpy_dtype(dtype).itemsize != 2:
        return np.zeros(0, np.uint8), levels
    patterns = np.arange(1 << 16, dtype=np.uint16)
    return nearest_level(np.nan_to_num(to_float32(patterns, dtype), nan=0.0)), levels


def _tiles(values: NDArray[Any], tile: int, shared: int) -> NDArray[Any]:
    """(rows, columns) -> (rows, shared, tiles, tile)."""
    return values.reshape(values.shape[0], shared, -1, tile)
