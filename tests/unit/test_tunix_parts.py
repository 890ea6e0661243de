"""The small parts of a Tunix run: schedule, attention mask of packed rows, weights of eval batches, the plan."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bridge.launchers.rows import Examples, Rows
from bridge.launchers.tokenizer import Encoded
from bridge.launchers.tunix_hooks import eval_weights
from bridge.launchers.tunix_loss import row_inputs
from bridge.launchers.tunix_runtime import model_facts, schedule, settings
from bridge.model_spec import ModelSpec, RopeScaling


@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_schedule(kind: str) -> None:
    """Up from 0 in a quarter of the steps, then as written out here: the last of 8 steps has the final rate."""
    shape = {"kind": kind, "warmup": 0.25, "final": 0.2}
    rate = schedule(settings(train={"steps": 8, "learning_rate": 1e-3, "schedule": shape}))
    found = [float(rate(step)) for step in range(8)]
    cosine = [1e-3 * (0.2 + 0.8 * (1 + math.cos(math.pi * step / 5)) / 2) for step in range(6)]
    expected = [0.0, 5e-4, *(cosine if kind == "cosine" else [1e-3] * 6)]
    assert found == pytest.approx(expected, rel=1e-5)


def test_no_warmup_and_nothing_but_warmup() -> None:
    level = {"kind": "constant", "warmup": 0.0}
    assert float(schedule(settings(train={"schedule": level, "learning_rate": 1e-3}))(0)) == pytest.approx(1e-3)
    rising = {"kind": "cosine", "warmup": 1.0}
    rate = schedule(settings(train={"steps": 4, "schedule": rising, "learning_rate": 1e-3}))
    assert [float(rate(step)) for step in range(4)] == pytest.approx([0, 2.5e-4, 5e-4, 7.5e-4])


def test_packed_examples_do_not_see_each_other() -> None:
    batch: dict[str, Any] = {
        "input_tokens": np.zeros((1, 5), np.int32),
        "input_mask": np.ones((1, 5), bool),
        "positions": np.array([[0, 1, 0, 1, 0]]),
        "segments": np.array([[1, 1, 2, 2, 0]]),
    }
    inputs = row_inputs(batch)
    by_hand = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(inputs["attention_mask"][0], np.array(by_hand, bool))
    assert set(inputs) == {"input_tokens", "input_mask", "positions", "attention_mask"}


def test_the_eval_loss_is_a_mean_over_tokens() -> None:
    """Five examples of 1 to 5 learnt tokens with losses of their own, two rows a batch, the last batch half full."""
    examples = [Encoded(np.arange(6, dtype=np.int32), np.arange(6) >= 6 - count) for count in range(1, 6)]
    rows = Rows(Examples.of(examples), 8, False, 0, global_rows=2)
    loss = {count: 10.0 * count for count in range(1, 6)}
    batches = [(1, 2), (3, 4), (5,)]
    means = [sum(count * loss[count] for count in batch) / sum(batch) for batch in batches]
    weights = eval_weights(rows)
    found = np.mean([weight * mean for weight, mean in zip(weights, means, strict=True)])
    assert found == pytest.approx(sum(count * loss[count] for count in loss) / 15, rel=1e-6)
    assert np.mean(means) != pytest.approx(found, rel=1e-2)


def test_model_facts() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
    sizes = {"layers": 1, "embed": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "mlp": 16, "vocab": 32, "context": 64}
    facts: dict[str, Any] = {**sizes, "tied": True, "rope_theta": 5e5, "norm_eps": 1e-5, "dtype": "float32"}
    assert model_facts(rope_scaling=scaling, **facts) == ModelSpec(
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192), **facts
    )
    assert model_facts(**facts).rope_scaling is None
