"""LoRA dropout as qwix applies it, on a projection whose adapter is the identity: the output says what was dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge.launchers import tunix_adapters, tunix_dropout

WIDTH, ROWS, RATE, SCALE = 32, 64, 0.25, 2.0
INPUT = np.random.default_rng(0).uniform(1, 2, (ROWS, WIDTH)).astype(np.float32)


@pytest.fixture
def tower() -> Any:
    """`layers/0/mlp/gate_proj`: a weight of 0, A and B the identity, scale 2; nothing but the adapter adds anything."""
    import jax
    import jax.numpy as jnp
    import qwix
    from flax import nnx

    class Mlp(nnx.Module):
        def __init__(self) -> None:
            self.gate_proj = nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=jax.nn.initializers.zeros, rngs=RNGS)

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.mlp = Mlp()

    class Tower(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Layer()])

        def __call__(self, values: Any) -> Any:
            return self.layers[0].mlp.gate_proj(values)

    RNGS = nnx.Rngs(0)
    adapters = tunix_adapters.Adapters(WIDTH, SCALE * WIDTH, ("gate",), dropout=RATE)
    model = qwix.apply_lora_to_model(Tower(), tunix_adapters.provider(adapters), jnp.asarray(INPUT), rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.LoRAParam)
    nnx.update(model, jax.tree.map(lambda leaf: jnp.eye(*leaf.shape), state))
    return model


def output(model: Any, step: int | None) -> NDArray[np.float32]:
    """Of the model itself, or of what a training step makes of it."""
    if step is not None:
        tunix_dropout.at_step(model, step)
        model = tunix_dropout.dropping(model)
    return np.asarray(model(INPUT))


def test_a_share_is_left_out_and_the_rest_scaled_up(tower: Any) -> None:
    model = tunix_dropout.follow_steps(tower, seed=7)
    found = output(model, 3)
    kept = found != 0
    np.testing.assert_allclose(found[kept], (SCALE * INPUT / (1 - RATE))[kept], rtol=1e-6)
    assert kept.mean() == pytest.approx(1 - RATE, abs=5 * np.sqrt(RATE * (1 - RATE) / INPUT.size))
    np.testing.assert_array_equal(output(model, 3), found)
    assert (output(model, 4) != found).mean() > RATE
    mean = np.mean([output(model, step) for step in range(200)], axis=0)
    np.testing.assert_allclose(mean, SCALE * INPUT, rtol=6 * np.sqrt(RATE / (1 - RATE) / 200))
    other = tunix_dropout.follow_steps(model, seed=8)
    assert (output(other, 3) != found).mean() > RATE


def test_nothing_is_left_out_elsewhere(tower: Any) -> None:
    """A model that nobody trains cannot drop, and one that is being trained drops in its training loss alone."""
    np.testing.assert_allclose(output(tower, None), SCALE * INPUT, rtol=1e-6)
    np.testing.assert_allclose(output(tower, 3), SCALE * INPUT, rtol=1e-6)
    model = tunix_dropout.follow_steps(tower, seed=7)
    output(model, 3)
    np.testing.assert_allclose(output(model, None), SCALE * INPUT, rtol=1e-6)

    class Trainer:
        loss_fn = staticmethod(lambda model, values: model(values).sum())
        eval_loss_fn = loss_fn

    trainer: Any = tunix_dropout.only_in_training(Trainer())
    whole = (SCALE * INPUT).sum()
    assert float(trainer.eval_loss_fn(model, INPUT)) == pytest.approx(whole, rel=1e-5)
    assert float(trainer.loss_fn(model, INPUT)) == pytest.approx(output(model, 3).sum(), rel=1e-5)
    assert float(trainer.loss_fn(model, INPUT)) != pytest.approx(whole, rel=1e-4)
