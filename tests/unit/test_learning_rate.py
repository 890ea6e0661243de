"""Learning rates: the schedule of either engine and what its optimizer really does, against a formula by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from bridge.configs import maxtext as configs
from bridge.launchers.progress import learning_rates
from bridge.run_spec import RunSpec, parse

pytestmark = pytest.mark.slow
PEAK = 3.0e-4
CASES = {
    "cosine": ("steps: 20", "warmup: 0.1, final: 0.1", 2),
    "cosine without a warm-up": ("steps: 7", "warmup: 0.0, final: 0.25", 0),
    "constant": ("steps: 8", "kind: constant, warmup: 0.25", 2),
    "constant at once": ("steps: 5", "kind: constant, warmup: 0.0", 0),
    "a last step alone": ("steps: 3", "warmup: 0.67, final: 0.5", 2),
}


def by_hand(run: RunSpec, warmup: int, step: int) -> float:
    """Of step `step`, from 0."""
    if step < warmup:
        return PEAK * step / warmup
    if run.train.schedule.kind == "constant":
        return PEAK
    last = run.train.total_steps - warmup - 1
    part = (step - warmup) / last if last else 1.0
    final = run.train.schedule.final
    return PEAK * (final + (1 - final) * (1 + math.cos(math.pi * part)) / 2)


def maxtext(run: RunSpec) -> tuple[Callable[[int], Any], Any]:
    from maxtext.configs import pyconfig
    from maxtext.optimizers import optimizers
    from maxtext.utils import maxtext_utils

    settings = (
        "run_name=r hardware=cpu skip_jax_distributed_system=true model_name=default vocab_size=11 "
        "dataset_type=synthetic enable_checkpointing=false"
    )
    rendered = {**configs._optimizer_section(run), "steps": run.train.total_steps}
    arguments = [f"{key}={str(value).lower()}" for key, value in rendered.items()]
    config = pyconfig.initialize(["train", *settings.split(), *arguments])
    schedule = maxtext_utils.create_learning_rate_schedule(config)
    return schedule, optimizers.get_optimizer(config, schedule)


def tunix(run: RunSpec) -> tuple[Callable[[int], Any], Any]:
    from bridge.launchers import tunix_runtime

    return tunix_runtime.schedule(run), tunix_runtime.adamw(run)


@pytest.mark.parametrize("engine", [maxtext, tunix])
@pytest.mark.parametrize("case", CASES)
def test_schedule_and_optimizer(engine: Callable[[RunSpec], tuple[Any, Any]], case: str) -> None:
    """Adam moves a weight of 0 under a constant gradient by exactly the learning rate."""
    import jax.numpy as jnp

    steps, shape, warmup = CASES[case]
    run = parse(f"model: {{source: m}}\ntrain: {{{steps}, learning_rate: {PEAK}, schedule: {{{shape}}}}}\n")
    schedule, optimizer = engine(run)
    found = learning_rates(schedule, run.train.total_steps)
    weight, gradient = jnp.zeros(()), jnp.ones(())
    state = optimizer.init(weight)
    for step in range(run.train.total_steps):
        expected = by_hand(run, warmup, step)
        assert found[step] == pytest.approx(expected, rel=1e-5, abs=1e-12)
        update, state = optimizer.update(gradient, state, weight)
        assert -float(update) == pytest.approx(expected, rel=1e-4, abs=1e-12)
        if engine is tunix:
            assert float(state.hyperparams["learning_rate"]) == pytest.approx(expected, rel=1e-5, abs=1e-12)
