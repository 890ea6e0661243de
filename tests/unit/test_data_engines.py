"""The arrays given to each engine, judged by the engine's own loss function on logits of our own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge.launchers.batches import Batch, maxtext_batch, tunix_batch
from bridge.launchers.rows import Examples, Rows
from bridge.launchers.tokenizer import Encoded

VOCAB, LENGTH = 11, 8


def batch() -> Batch:
    """Two rows: two examples and padding; one example that fills the row. The last token of each is learnt."""
    random = np.random.default_rng(0)
    examples = []
    for length in (3, 4, 8):
        loss = random.random(length) < 0.5
        loss[0], loss[-1] = False, True
        examples.append(Encoded(random.integers(0, VOCAB, length).astype(np.int32), loss))
    return next(Rows(Examples.of(examples), LENGTH, True, 0, 2).eval_batches())


def logits() -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((2, LENGTH, VOCAB)).astype(np.float32)


def by_hand(rows: Batch, scores: NDArray[np.float32]) -> float:
    """Mean negative log-likelihood of the learnt tokens, each predicted from the token before it in its example."""
    total, count = 0.0, 0
    for row in range(len(rows.tokens)):
        for at in range(LENGTH):
            if rows.loss[row, at]:
                assert rows.segments[row, at] == rows.segments[row, at - 1]
                before = scores[row, at - 1].astype(np.float64)
                total += np.log(np.exp(before).sum()) - before[rows.tokens[row, at]]
                count += 1
    assert count == int(rows.loss.sum()) >= 3
    return total / count


def test_rows_are_what_the_reference_assumes() -> None:
    rows = batch()
    assert rows.segments.tolist() == [[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], list(range(8))]


def test_maxtext_arrays() -> None:
    rows = batch()
    arrays = maxtext_batch(rows)
    assert list(arrays) == [
        "inputs",
        "inputs_position",
        "inputs_segmentation",
        "targets",
        "targets_position",
        "targets_segmentation",
    ]
    assert all(array.dtype == np.int32 and array.shape == (2, LENGTH) for array in arrays.values())
    learnt = arrays["targets_segmentation"] != 0
    assert (learnt[:, :-1] == rows.loss[:, 1:]).all()
    assert not learnt[:, -1].any()
    assert (arrays["targets"][:, :-1] == rows.tokens[:, 1:]).all()
    assert not learnt[0, 2]  # from the last token of an example to the first of the next


def test_tunix_counts_the_learnt_tokens() -> None:
    import jax.numpy as jnp
    from tunix.sft.peft_trainer import _default_loss_fn

    rows, scores = batch(), logits()
    arrays = tunix_batch(rows)
    assert arrays["segments"] is rows.segments

    def model(*_: Any) -> tuple[Any, None]:
        return jnp.asarray(scores), None

    def loss(mask: Any) -> float:
        tokens, positions = jnp.asarray(arrays["input_tokens"]), jnp.asarray(arrays["positions"])
        return float(_default_loss_fn(model, tokens, jnp.asarray(mask), positions, None))  # type: ignore[arg-type]

    assert loss(arrays["input_mask"]) == pytest.approx(by_hand(rows, scores), rel=1e-5)
    assert loss(np.roll(rows.loss, 1, axis=1)) != pytest.approx(by_hand(rows, scores), rel=1e-2)


@pytest.mark.slow
def test_maxtext_counts_the_learnt_tokens() -> None:
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train

    rows, scores = batch(), logits()

    class Fixed(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.mesh = jax.make_mesh((1,), ("data",))

        def __call__(self, **_: Any) -> Any:
            return jnp.asarray(scores)

    settings = (
        "run_name=r hardware=cpu skip_jax_distributed_system=true model_name=default vocab_size=11 "
        f"max_target_length={LENGTH} per_device_batch_size=2 dataset_type=synthetic enable_checkpointing=false"
    )
    config = pyconfig.initialize(["train", *settings.split()])
    with jax.set_mesh(Fixed().mesh):
        arrays = {name: jnp.asarray(array) for name, array in maxtext_batch(rows).items()}
        loss, aux = train.loss_fn(Fixed(), config, arrays, None, None, is_train=True)
    assert float(loss) == pytest.approx(by_hand(rows, scores), rel=1e-5)
    assert int(aux["total_weights"]) == int(rows.loss.sum())
