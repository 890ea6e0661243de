"""RoPE frequencies are PyTorch's, bit for bit where PyTorch is there, within one ulp where it is not."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import models
import oracles
from bridge import rope
from bridge.model_spec import ModelSpec

SCALINGS = [
    None,
    models.scaling(),
    models.scaling(32.0),
    models.scaling(original=32),
    models.scaling(4.0, 6001, 2.0, 8.0),
]


def config(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    kind = {"rope_type": "llama3", **scaling} if scaling else None
    return {
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": head_dim * 2,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 131072,
        "rope_theta": theta,
        "rope_scaling": kind,
    }


def transformers_frequencies(values: dict[str, Any]) -> NDArray[np.float32]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    known = {key: value for key, value in values.items() if not key.startswith("rope")}
    parameters = {"rope_type": "default", **(values["rope_scaling"] or {}), "rope_theta": values["rope_theta"]}
    found: NDArray[np.float32] = LlamaRotaryEmbedding(LlamaConfig(**known, rope_parameters=parameters)).inv_freq.numpy()
    return found


def ours(values: dict[str, Any]) -> NDArray[np.float32]:
    found = rope.inverse_frequencies(ModelSpec.from_hf_config(values))
    single = np.array(found, np.float32)
    assert single.astype(np.float64).tolist() == list(found), "each is a float32 value"
    return single


def ulps(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.int64]:
    return np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32).astype(np.int64))


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1e6])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128])
def test_frequencies_are_pytorchs_bit_for_bit(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> None:
    values = config(head_dim, theta, scaling)
    found = ours(values)
    assert np.array_equal(found, transformers_frequencies(values))
    # The blend of the two frequencies loses a few bits in float32.
    np.testing.assert_allclose(found, oracles.llama3_inverse_frequencies(values), rtol=5e-6)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_without_pytorch_they_are_within_one_ulp(
    scaling: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {
        (head_dim, theta): transformers_frequencies(config(head_dim, theta, scaling))
        for head_dim in (16, 64, 96, 128)
        for theta in (1e4, 5e5)
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for (head_dim, theta), reference in wanted.items():
        apart = ulps(ours(config(head_dim, theta, scaling)), reference)
        # The power differs by an ulp at most; the blend of a scaled frequency can make it a few.
        assert apart.max() <= (1 if scaling is None else 4)
        if head_dim in (64, 128) and theta == 5e5:
            assert apart.max() == 0


def test_scaling_changes_low_frequencies_alone() -> None:
    plain, scaled = ours(config(128, 5e5, None)), ours(config(128, 5e5, models.scaling()))
    wavelengths = 2 * np.pi / plain
    assert np.array_equal(plain[wavelengths < 8192 / 4], scaled[wavelengths < 8192 / 4])
    assert np.array_equal(plain[wavelengths > 8192] / 8, scaled[wavelengths > 8192])
    between = (wavelengths > 8192 / 4) & (wavelengths < 8192)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
