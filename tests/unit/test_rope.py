"""RoPE frequencies are PyTorch's, bit for bit where PyTorch is there or proved, else within one ulp."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
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
@pytest.mark.parametrize("theta", [10000.0, 100000.0, 130000.0, 500000.0, 1e6])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128])
def test_frequencies_are_pytorchs_bit_for_bit(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> None:
    values = config(head_dim, theta, scaling)
    found = ours(values)
    assert np.array_equal(found, transformers_frequencies(values))
    # The blend of the two frequencies loses a few bits in float32.
    np.testing.assert_allclose(found, oracles.llama3_inverse_frequencies(values), rtol=5e-6)


@given(
    head_dim=st.integers(1, 128).map(lambda half: 2 * half) | st.sampled_from([16, 32, 64, 128]),
    theta=st.floats(1e3, 1e8) | st.sampled_from(rope.PROVED_THETAS),
    scaling=st.sampled_from(SCALINGS),
)
@example(128, 1e6, None)  # PyTorch does not round it correctly on processors with AVX2
@settings(deadline=None, max_examples=100)
def test_any_frequencies_are_pytorchs(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> None:
    values = config(head_dim, theta, scaling)
    assert np.array_equal(ours(values), transformers_frequencies(values))


POWERS = """
import sys
from bridge import rope
from bridge.model_spec import ModelSpec
proved = [(t, d) for t in rope.PROVED_THETAS for d in range(2, 129, 2) if rope.is_proved(t, d)]
exponents = {d: rope.np.arange(0, d, 2, dtype=rope.F32) / rope.F32(d) for _, d in proved}
powers = [rope._power(t, exponents[d], True) for t, d in proved]
assert len(proved) == 4 * 7 and "torch" not in sys.modules
import torch
theirs = [torch.pow(t, torch.from_numpy(exponents[d])).numpy() for t, d in proved]
print(torch.backends.cpu.get_cpu_capability(), all(map(rope.np.array_equal, powers, theirs)))
wrong = rope._power(2e4, exponents[128], True), torch.pow(2e4, torch.from_numpy(exponents[128])).numpy()
print(rope.np.array_equal(*wrong))
"""


@pytest.mark.parametrize("kind", ["DEFAULT", "AVX2", "AVX512"])
def test_what_is_proved_holds_on_each_kind_of_processor(kind: str) -> None:
    """PyTorch computes powers in another way on each; the second line shows that a difference would be seen."""
    import torch

    best = torch.backends.cpu.get_cpu_capability()
    if kind != "DEFAULT" and best not in (kind, "AVX512"):
        pytest.skip(f"this processor's best is {best}")
    env = {**os.environ, "ATEN_CPU_CAPABILITY": kind.lower()}
    done = subprocess.run([sys.executable, "-c", POWERS], env=env, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [kind, "True", str(kind == "DEFAULT")]


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
