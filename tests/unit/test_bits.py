"""Bit patterns: one rounding and no other change, whether numpy or XLA moves them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import oracles
from bridge.converters import bits
from bridge.converters.layout import Block

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# 64 x 33 x 2 values moved to (33, 2, 64) and back.
BLOCK = Block(hf_split=(64, 33, 2), order=(1, 2, 0), engine_shape=(33, 128))
COUNT = 64 * 33 * 2


def unsigned(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def patterns(name: str, count: int = COUNT, seed: int = 1) -> NDArray[Any]:
    """Random bit patterns: normal and subnormal values, infinities and NaN payloads alike."""
    width = 4 if name == "float32" else 2
    drawn = np.random.default_rng(seed).integers(0, 1 << (8 * width), count, dtype=f"u{width}")
    top, exponent = (drawn.dtype.type(1 << (8 * width - 1)), {"bfloat16": 7, "float16": 10, "float32": 23}[name])
    drawn[::5] &= top | drawn.dtype.type((1 << exponent) - 1)  # subnormal
    drawn[:4] = [0, top, 1, top | drawn.dtype.type(1)]
    return drawn


def is_nan(found: NDArray[Any], name: str) -> NDArray[Any]:
    result: NDArray[Any] = np.isnan(found.view(DTYPES[name]).astype(np.float32))
    return result


@pytest.mark.parametrize("name", DTYPES)
def test_a_move_without_rounding_keeps_every_pattern(name: str) -> None:
    raw = patterns(name)
    moved = bits.import_block(raw, BLOCK, name, name, 1.0)
    assert moved.shape == BLOCK.engine_shape
    assert np.array_equal(moved, raw.reshape(64, 66).T.reshape(33, 128))
    assert np.array_equal(bits.export_block(moved, BLOCK, name, name, 1.0), raw)


def test_the_numpy_path_and_the_xla_path_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    ran: list[bool] = []
    put = jax.device_put

    def counted(*args: Any) -> Any:
        ran.append(True)
        return put(*args)

    monkeypatch.setattr(jax, "device_put", counted)
    for source, target in [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")]:
        raw = patterns(source)
        results = []
        for limit in (1 << 60, 0):
            monkeypatch.setattr(bits, "XLA_FROM_BYTES", limit)
            moved = bits.import_block(raw, BLOCK, source, target, 1.0)
            results.append((moved, bits.export_block(moved, BLOCK, target, source, 1.0)))
        assert np.array_equal(results[0][0], results[1][0])
        assert np.array_equal(results[0][1], results[1][1])
    assert len(ran) == 6, "the XLA path must have run, both ways, for each dtype"


def test_blocks_from_half_a_mebibyte_on_go_through_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    def refuse(*_: Any) -> Any:
        raise RuntimeError("through XLA")

    monkeypatch.setattr(jax, "device_put", refuse)
    block = Block((256, 512), (1, 0), (512, 256))
    raw = np.zeros(256 * 512, np.uint32)
    with pytest.raises(RuntimeError, match="through XLA"):
        bits.import_block(raw, block, "float32", "float32", 1.0)
    half = Block((128, 511), (1, 0), (511, 128))
    assert bits.import_block(raw[: 128 * 511], half, "float32", "float32", 1.0).shape == (511, 128)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_scale_is_divided_out_with_one_rounding(head_dim: int, target: str) -> None:
    """Values that were multiplied, and values whose quotient lies on, or a float32 step beside, a tie of bfloat16."""
    scale = float(np.float32(1 / np.sqrt(head_dim)))
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    near = np.concatenate([ties - 1, ties, ties + 1]).view(np.float32)
    with np.errstate(all="ignore"):
        values = np.concatenate([patterns("bfloat16").view(DTYPES["bfloat16"]).astype(np.float32), near])
        values = values * np.float32(scale)
        values = values[np.isfinite(values)]
        expected = oracles.round_once(values.astype(np.float64) / scale, DTYPES[target])
    block = Block((len(values),), (0,), (len(values),))
    found = bits.export_block(values.view(np.uint32), block, "float32", target, scale)
    assert np.array_equal(found, expected.view(found.dtype))


@pytest.mark.parametrize("target", DTYPES)
def test_float32_is_rounded_once(target: str) -> None:
    values = patterns("float32", 200_000).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        found, expected = bits.from_float32(values, target), unsigned(oracles.round_once(values, DTYPES[target]))
    nan = np.isnan(values)
    assert np.array_equal(found[~nan], expected[~nan])
    assert is_nan(found[nan], target).all()


@pytest.mark.parametrize("target", DTYPES)
def test_float64_is_rounded_once_and_not_by_way_of_float32(target: str) -> None:
    random = np.random.default_rng(2)
    places = {"bfloat16": 8, "float16": 11, "float32": 24}[target]
    middles = (random.integers(1 << (places - 1), 1 << places, 4000) + 0.5) * 2.0 ** random.integers(-30, 3, 4000)
    small = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}[target]
    subnormal = (random.integers(0, 100, 500) + 0.5) * small
    values = np.concatenate([middles, subnormal])
    values = np.concatenate([values, values * (1 + 2.0**-45), values * (1 - 2.0**-45), [0.0, np.inf, 3e39, 7e4]])
    values = np.concatenate([values, -values])
    with np.errstate(over="ignore"):
        found, expected = bits.from_float64(values, target), unsigned(oracles.round_once(values, DTYPES[target]))
        twice = bits.from_float32(values.astype(np.float32), target)
    assert np.array_equal(found, expected)
    if target != "float32":
        assert (twice != expected).sum() > 100, "these values tell one rounding from two"
    assert is_nan(bits.from_float64(np.array([np.nan, -np.nan]), target), target).all()


@pytest.mark.parametrize("name", DTYPES)
def test_float32_holds_every_pattern_of_the_narrow_types(name: str) -> None:
    raw = patterns(name, 1 << 16)
    values = bits.to_float32(raw, name)
    expected = raw.view(DTYPES[name]).astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(unsigned(values)[~nan], unsigned(expected)[~nan])
    assert np.isnan(values[nan]).all()


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_scaled_value_kept_in_float32_comes_back(name: str, head_dim: int) -> None:
    scale = float(np.float32(1 / np.sqrt(head_dim)))
    raw = patterns(name, COUNT, seed=head_dim)
    raw = np.where(np.isfinite(bits.to_float32(raw, name)), raw, raw.dtype.type(0))
    there = bits.import_block(raw, BLOCK, name, "float32", scale)
    values = raw.view(DTYPES[name]).astype(np.float32) * np.float32(scale)
    assert np.array_equal(there, unsigned(values).reshape(64, 66).T.reshape(33, 128))
    assert np.array_equal(bits.export_block(there, BLOCK, "float32", name, scale), raw)
    # Kept in the narrow type, values are lost where the scale is no power of two: what --help says.
    narrow = bits.export_block(bits.import_block(raw, BLOCK, name, name, scale), BLOCK, name, name, scale)
    normal = np.abs(bits.to_float32(raw, name)) > 1e-3
    assert (narrow != raw)[normal].any() == (head_dim != 64)


def test_a_scaled_float32_comes_back_within_one_ulp() -> None:
    raw = unsigned(np.random.default_rng(4).standard_normal(COUNT).astype(np.float32))
    for head_dim, exact in ((64, True), (128, False)):
        scale = float(np.float32(1 / np.sqrt(head_dim)))
        there = bits.import_block(raw, BLOCK, "float32", "float32", scale)
        back = bits.export_block(there, BLOCK, "float32", "float32", scale)
        apart = np.abs(back.astype(np.int64) - raw.astype(np.int64))
        assert apart.max() == (0 if exact else 1)
