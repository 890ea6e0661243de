"""NF4 against qwix itself: codes, scales and dequantized values, bit for bit, for every kind of projection."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bridge.converters import nf4
from bridge.errors import UnsupportedError

EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP = 128, 4, 2, 64, 96
TILE = 32
# The einsum or contraction that each projection is, on Tunix, and the shape of its weight there.
PROJECTIONS = {
    "q": ("BTD,DNH->BTNH", (EMBED, HEADS, HEAD_DIM)),
    "k": ("BSD,DKH->BSKH", (EMBED, KV_HEADS, HEAD_DIM)),
    "o": ("BTNH,NHD->BTD", (HEADS, HEAD_DIM, EMBED)),
    "gate": ("BTD,DF->BTF", (EMBED, MLP)),
    "down": ("BTF,FD->BTD", (MLP, EMBED)),
}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def weight(shape: tuple[int, ...], dtype: str) -> Any:
    """Normal values of very different tiles: one all zeros, one tiny, one of ties between two levels."""
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    flat = values.reshape(shape[0] * (shape[1] if len(shape) == 3 and shape[0] == HEADS else 1), -1)
    flat[:, 0] = 0
    flat[:, 1] *= 1e-25
    flat[:, 2] = np.tile([1.0, 0.5, -0.25, 0.125], len(flat) // 4)
    middle = (nf4.LEVELS[1:] + nf4.LEVELS[:-1]) / 2
    flat[: len(middle) + 1, 3] = np.concatenate([[1.0], middle])
    return values.astype(DTYPES[dtype])


def by_qwix(values: Any, einsum: str, tile: int = TILE) -> tuple[Any, Any, Any]:
    import jax.numpy as jnp
    from qwix._src.core import einsum as qwix_einsum
    from qwix._src.core import qarray

    lhs = einsum.split(",")[0]
    how = qwix_einsum.get_how_to_quantize(
        einsum_str=einsum, ndims=(len(lhs), values.ndim), for_lhs=False, tile_size=tile, qtype="nf4"
    )
    quantized = qarray.quantize(jnp.asarray(values), how)
    return (
        np.asarray(quantized.qvalue).astype(np.uint8),
        np.asarray(quantized.scale).astype(np.float32),
        np.asarray(qarray.dequantize(quantized)).astype(np.float32),
    )


def rows(array: Any, target: str) -> Any:
    """An array of the engine as Hugging Face's (out, in)."""
    flat = array.reshape(-1, array.shape[-1]) if target == "o" else array.reshape(array.shape[0], -1)
    return np.ascontiguousarray(flat.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", PROJECTIONS)
def test_nf4_is_qwixs_nf4(target: str, dtype: str) -> None:
    einsum, shape = PROJECTIONS[target]
    values = weight(shape, dtype)
    codes, scales, dequantized = by_qwix(values, einsum)
    shared = HEADS if target == "o" else 1
    ours = nf4.quantize(rows(values.astype(np.float32), target), dtype, TILE, shared)
    assert ours[0].tobytes() == rows(codes, target).tobytes()
    assert ours[1].tobytes() == rows(scales, target).tobytes()
    back = nf4.dequantize(*ours, dtype, TILE, shared)
    assert np.array_equal(back, rows(dequantized, target))
    assert np.array_equal(nf4.through_nf4(rows(values.astype(np.float32), target), dtype, TILE, shared), back)
    # Another tile, and heads that do not share their scales, are seen.
    assert not np.array_equal(nf4.through_nf4(rows(values.astype(np.float32), target), dtype, TILE // 2, shared), back)
    if target == "o":
        assert not np.array_equal(nf4.through_nf4(rows(values.astype(np.float32), target), dtype, TILE, 1), back)


def test_qwix_is_seen_to_round_to_the_bases_dtype() -> None:
    einsum, shape = PROJECTIONS["gate"]
    values = weight(shape, "bfloat16").astype(np.float32)
    there = by_qwix(weight(shape, "bfloat16"), einsum)[2]
    assert not np.array_equal(nf4.through_nf4(rows(values, "gate"), "float32", TILE), rows(there, "gate"))


def test_bases_that_cannot_be_rebuilt_are_refused() -> None:
    nf4.check_base("o_proj", 256, "bfloat16", 32, 4)
    with pytest.raises(UnsupportedError, match=r"o_proj: 16 inputs cannot be cut into NF4 tiles of 32"):
        nf4.check_base("o_proj", 64, "bfloat16", 32, 4)
    with pytest.raises(UnsupportedError, match=r"o_proj: NF4 of a float16 base"):
        nf4.check_base("o_proj", 256, "float16", 32, 4)
