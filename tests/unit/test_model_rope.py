"""RoPE in a config.json: both spellings read and written, other kinds and what is not understood refused."""

from __future__ import annotations

from typing import Any

import pytest
from hf_configs import LLAMA3, OLD, changed

from bridge.errors import SpecError, UnsupportedError
from bridge.model_spec import ModelSpec


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "su", "proportional", None])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("word", ["rope_type", "type"])
def test_another_rope_type_is_refused_and_not_dropped(key: str, word: str, kind: str | None) -> None:
    with pytest.raises(UnsupportedError, match=f"{key}: rope type {kind!r}"):
        ModelSpec.from_hf_config(changed(**{"rope_scaling": ..., key: {word: kind, "factor": 2.0}}))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"attention_factor": 1.2}, "attention_factor: 1.2 is not understood"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not understood"),
        ({"mscale": 1.0}, "mscale: 1.0 is not understood"),
    ],
)
def test_a_rope_key_that_is_not_understood_is_refused(extra: dict[str, Any], message: str) -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4, **extra}
    with pytest.raises(UnsupportedError, match=message):
        ModelSpec.from_hf_config(changed(rope_scaling={**LLAMA3, **extra}))
    with pytest.raises(UnsupportedError, match=message):
        ModelSpec.from_hf_config(changed(rope_scaling=..., rope_theta=..., rope_parameters=plain))


def test_a_partial_rotary_factor_of_one_and_empty_rope_keys_are_nothing() -> None:
    scaling = {**LLAMA3, "partial_rotary_factor": 1.0, "attention_factor": None}
    assert ModelSpec.from_hf_config(changed(rope_scaling=scaling)) == ModelSpec.from_hf_config(OLD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {**LLAMA3, "factor": 32.0, "rope_theta": 5e5}},
            "rope_scaling and rope_parameters disagree",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_scaling and rope_parameters disagree"),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, "rope_theta: 500000.0 here, 10000.0 in rope_parameters"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "factor missing"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor, low_freq_factor, high_freq_factor, original_max"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "factor: '8' is not a positive number"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must exceed low_freq_factor"),
        ({"rope_scaling": "llama3"}, "rope_scaling: 'llama3' is not an object"),
        ({"rope_theta": 0}, "rope_theta: 0 is not a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta: inf is not a positive number"),
    ],
)
def test_a_rope_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as found:
        ModelSpec.from_hf_config(changed(**changes))
    assert message in str(found.value)


@pytest.mark.parametrize("config", [OLD, changed(rope_scaling=None)])
def test_rope_is_written_in_both_spellings(config: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    spec = ModelSpec.from_hf_config(config)
    keys = spec.rope_config()
    assert keys["rope_theta"] == 500000.0
    assert keys["rope_scaling"] == config["rope_scaling"]
    assert LlamaConfig(rope_parameters=dict(keys["rope_parameters"])).rope_parameters == {
        "rope_theta": 500000.0,
        **(LLAMA3 if config["rope_scaling"] else {"rope_type": "default"}),
    }
    without = changed(rope_scaling=..., rope_theta=...)
    assert ModelSpec.from_hf_config({**without, **keys}) == spec
    for one in ({"rope_theta", "rope_scaling"}, {"rope_parameters"}):
        assert ModelSpec.from_hf_config({**without, **{key: keys[key] for key in one}}) == spec
