"""The rounding oracle against ml_dtypes' cast, and against arithmetic with exact fractions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import oracles

FORMATS = {"bfloat16": (ml_dtypes.bfloat16, 8, -126, 127), "float16": (np.float16, 11, -14, 15)}


@pytest.mark.parametrize("name", FORMATS)
def test_round_once_of_single_precision_is_ml_dtypes_cast(name: str) -> None:
    dtype = FORMATS[name][0]
    patterns = np.random.default_rng(3).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    values = patterns.view(np.float32)
    edges = [0.0, -0.0, np.inf, -np.inf, 65519.0, 65520.0, 3.4e38]
    values = np.concatenate([values[~np.isnan(values)], np.array(edges, np.float32)])
    with np.errstate(over="ignore"):
        expected = values.astype(dtype)
    rounded = oracles.round_once(values, dtype)
    assert rounded.dtype == expected.dtype
    assert rounded.tobytes() == expected.tobytes()
    assert np.isnan(oracles.round_once(np.array([np.nan], np.float32), dtype).astype(np.float32)).all()


def values_near_ties(significant: int, lowest: int, highest: int) -> Iterator[float]:
    """f64 values on, just above and just below the middle between two neighbours, subnormals and overflow included."""
    random = np.random.default_rng(5)
    for _ in range(1500):
        unit = 2.0 ** (int(random.integers(lowest - 4, highest + 1)) - significant + 1)
        unit = max(unit, 2.0 ** (lowest - significant + 1))
        middle = (int(random.integers(0, 1 << significant)) + 0.5) * unit
        for value in (middle, middle * (1 + 2.0**-40), middle * (1 - 2.0**-40), middle * (1 + 2.0**-52)):
            yield from (value, -value)


def exactly_rounded(value: float, significant: int, lowest: int, highest: int) -> Fraction | float:
    """Nearest, ties to even, in whole-number arithmetic."""
    exact = abs(Fraction(value))
    if exact == 0:
        return value
    exponent = max(math.frexp(value)[1] - 1, lowest)
    unit = Fraction(2) ** (exponent - significant + 1)
    count, rest = divmod(exact, unit)
    if rest * 2 > unit or (rest * 2 == unit and count % 2 == 1):
        count += 1
    result = count * unit
    sign = math.copysign(1, value)
    return math.copysign(math.inf, value) if result >= Fraction(2) ** (highest + 1) else int(sign) * result


@pytest.mark.parametrize("name", FORMATS)
def test_round_once_of_double_precision_is_exact_arithmetic(name: str) -> None:
    dtype, *numbers = FORMATS[name]
    values = np.array(list(values_near_ties(*numbers)), np.float64)
    rounded = oracles.round_once(values, dtype).astype(np.float64)
    expected = [exactly_rounded(value, *numbers) for value in values.tolist()]
    wrong = [v for v, r, e in zip(values.tolist(), rounded.tolist(), expected, strict=True) if r != e]
    assert wrong == []
    # Two roundings, by way of f32, are found out by the same values.
    with np.errstate(over="ignore"):
        twice = values.astype(np.float32).astype(dtype).astype(np.float64)
    assert sum(t != e for t, e in zip(twice.tolist(), expected, strict=True)) > 100


def test_round_once_keeps_the_sign_of_zero_and_refuses_integers() -> None:
    assert np.signbit(oracles.round_once(np.array([-1e-300]), ml_dtypes.bfloat16).astype(np.float32)).all()
    with pytest.raises(TypeError, match="int64"):
        oracles.round_once(np.array([1, 2]), np.float16)
