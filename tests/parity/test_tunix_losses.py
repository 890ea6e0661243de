"""The corrected losses of Tunix against formulas written out in f64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge import fixes_tunix

VOCAB, LENGTH = 50, 9


@pytest.fixture
def stock() -> Iterator[tuple[Any, Any]]:
    """Tunix's own two losses, in force unless a test installs the corrections, and put back in any case."""
    from tunix.sft import peft_trainer
    from tunix.sft.dpo import dpo_trainer

    before = peft_trainer._default_loss_fn, dpo_trainer.dpo_loss_fn
    yield before
    peft_trainer._default_loss_fn, dpo_trainer.dpo_loss_fn = before


def log_likelihood(logits: Any, tokens: NDArray[Any]) -> NDArray[np.float64]:
    """Of tokens 1 and up, in f64, from logits `[rows, length, vocab]`."""
    values = np.asarray(logits, np.float64)[:, :-1]
    normal = values - np.log(np.exp(values).sum(-1, keepdims=True))
    picked: NDArray[np.float64] = np.take_along_axis(normal, tokens[:, 1:, None], -1)[..., 0]
    return picked


def test_the_loss_is_taken_in_float32(stock: tuple[Any, Any]) -> None:
    """On bf16 logits, whose log-softmax in bf16 is off in the third digit."""
    import jax.numpy as jnp
    from tunix.sft import peft_trainer

    random = np.random.default_rng(0)
    logits = jnp.asarray(random.standard_normal((2, LENGTH, VOCAB)) * 4, jnp.bfloat16)
    tokens, mask = random.integers(0, VOCAB, (2, LENGTH)), random.random((2, LENGTH)) < 0.5
    expected = -log_likelihood(logits, tokens)[mask[:, 1:]].mean()
    arguments = (lambda *_: (logits, None), jnp.asarray(tokens), jnp.asarray(mask), None, None)
    if stock[0] is not fixes_tunix.token_loss:
        assert float(stock[0](*arguments)) != pytest.approx(expected, rel=1e-4)
    fixes_tunix.loss([])
    assert float(peft_trainer._default_loss_fn(*arguments)) == pytest.approx(expected, rel=1e-6)
    nothing = (*arguments[:2], jnp.zeros((2, LENGTH), bool), None, None)
    assert float(peft_trainer._default_loss_fn(*nothing)) == 0
    with pytest.raises(ValueError, match="no images"):
        peft_trainer._default_loss_fn(*arguments, images=jnp.zeros(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_orpo_is_the_papers(stock: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, smoothing: float) -> None:
    """Two pairs, answers of 5, 3, 2 and 5 tokens: sum and mean of their log-probabilities rank them differently."""
    import jax.numpy as jnp
    from tunix.sft.dpo import dpo_trainer

    random = np.random.default_rng(1)
    logits = jnp.asarray(random.standard_normal((4, LENGTH, VOCAB)) * 2, jnp.float32)
    tokens, keep = random.integers(0, VOCAB, (4, LENGTH)), 5
    mask = np.arange(keep) < np.array([5, 3, 2, 5])[:, None]
    picked = log_likelihood(logits, tokens)[:, -keep:]
    mean = (picked * mask).sum(1) / mask.sum(1)
    odds = np.exp(mean) / (1 - np.exp(mean))
    better = 1 / (1 + odds[2:] / odds[:2])  # sigmoid of the log odds ratio
    ratio = -(1 - smoothing) * np.log(better) - smoothing * np.log(1 - better)
    expected = (-mean[:2] + 0.3 * ratio).mean()

    sums = jnp.asarray((picked * mask).sum(1), jnp.float32)
    monkeypatch.setattr(dpo_trainer, "compute_logps", lambda *_, **__: (sums[:2], sums[2:]))
    example = dpo_trainer.TrainExample(
        input_ids=jnp.asarray(tokens),
        positions=None,
        attention_mask=None,
        ref_chosen_logps=None,
        ref_rejected_logps=None,
        completion_mask=jnp.asarray(mask),
        logits_to_keep=keep,
    )
    settings = {"algorithm": "orpo", "lambda_orpo": 0.3, "label_smoothing": smoothing}
    if not hasattr(stock[1], "corrected"):
        assert float(stock[1](None, example, **settings)[0]) != pytest.approx(expected, rel=1e-2)
    fixes_tunix.orpo([])
    loss, metrics = dpo_trainer.dpo_loss_fn(None, example, **settings)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["odds_ratio"]) == pytest.approx((odds[:2] / odds[2:]).mean(), rel=1e-5)
    plain = dpo_trainer.dpo_loss_fn(None, example, algorithm="dpo", beta=0.2)[0]
    delta = 0.2 * ((picked * mask).sum(1)[:2] - (picked * mask).sum(1)[2:])
    assert float(plain) == pytest.approx(np.log1p(np.exp(-delta)).mean(), rel=1e-5)
