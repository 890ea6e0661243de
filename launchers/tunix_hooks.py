"""What Tunix's trainer calls back: batches by their number, and a line and an entry for every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bridge.errors import LaunchError
from bridge.launchers import progress, tunix_dropout
from bridge.launchers.batches import Batch, tunix_batch
from bridge.launchers.metrics import MetricsLog
from bridge.launchers.progress import StepClock
from bridge.launchers.rows import Rows


def say(text: str) -> None:
    """As `progress.say`, by process 0 alone."""
    import jax

    if jax.process_index() == 0:
        progress.say(text)


class Feed:
    """Tunix's data hooks. Batch k is asked for by its number, so a resumed run goes on at the right example.

    Arrays are global before the trainer sees them: its DPO would otherwise pair one process's chosen answers with
    another's rejected ones.
    """

    def __init__(self, rows: Any, eval_rows: Any, mesh: Any, steps: int) -> None:
        self._rows, self._eval_rows, self._mesh, self._steps = rows, eval_rows, mesh, steps
        self._weights = eval_weights(eval_rows) if isinstance(eval_rows, Rows) else ()
        self._eval: Iterator[dict[str, Any]] | None = None

    def load_next_train_batch(self, trainer: Any) -> Any:
        """The batch of the trainer's micro step; None after the last step."""
        if trainer.train_steps >= self._steps:
            return None
        step = trainer.iter_steps
        tunix_dropout.at_step(trainer.model, step)
        if isinstance(self._rows, Rows):
            return self._place(tunix_batch(self._rows.batch(step)))
        return self._place(self._rows.preference_batch(step))

    def load_next_eval_batch(self, trainer: Any) -> Any:
        """The batches of one evaluation, then None."""
        del trainer
        if self._eval is None:
            self._eval = self._eval_batches()
        batch = next(self._eval, None)
        if batch is None:
            self._eval = None
        return batch

    def _eval_batches(self) -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(self._eval_rows.eval_batches()):
            if isinstance(batch, Batch):
                yield {**self._place(tunix_batch(batch)), "weight": self._weights[number]}
            else:
                yield self._place(batch)

    def _place(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Every process has the global batch; each device takes its rows of it."""
        import jax

        sharding = jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec("fsdp"))
        return {
            name: jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
            for name, array in arrays.items()
        }


def eval_weights(rows: Rows) -> tuple[np.float32, ...]:
    """What each eval batch's mean loss counts, so that the mean over batches is the mean over tokens."""
    counts = [int(batch.loss[:, 1:].sum()) for batch in rows.eval_batches()]
    total = max(sum(counts), 1)
    return tuple(np.float32(count * len(counts) / total) for count in counts)


class Watch:
    """Tunix's training hooks: `metrics.jsonl`, one line a step, and an end to a run whose loss is not a number."""

    def __init__(self, metrics: MetricsLog, clock: StepClock, learning_rates: Sequence[float]) -> None:
        self._metrics, self._clock, self._learning_rates = metrics, clock, learning_rates
        self._eval_batches = 0

    def on_train_start(self, trainer: Any) -> None:
        """Nothing."""

    def on_train_end(self, trainer: Any) -> None:
        """The last step has ended."""
        self._clock.end(trainer.train_steps)

    def on_train_step_start(self, trainer: Any) -> None:
        """Begin to count time, at the first micro step."""
        self._clock.begin(trainer.train_steps + 1)

    def on_train_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        """Record step `step`, from 1; Tunix calls this one step late.

        Raises:
            LaunchError: the loss is not a finite number.
        """
        del trainer
        value = float(np.asarray(loss))
        if not math.isfinite(value):
            hint = "lower train.learning_rate, or look at the data"
            raise LaunchError(f"the loss of step {step} is {value}", hint=hint)
        measured = self._clock.report(step, value, self._metrics.last_eval)
        # Of the schedule: the optimizer's own number is that of the next step by now.
        self._metrics.train(step, value, **measured, learning_rate=self._learning_rates[step - 1])

    def on_eval_step_start(self, trainer: Any) -> None:
        """Count a batch; what follows is no training."""
        self._clock.end(trainer.train_steps)
        self._eval_batches += 1

    def on_eval_step_end(self, trainer: Any, eval_loss: Any) -> None:
        """Record an evaluation; Tunix gives the sum over its batches."""
        value = float(np.asarray(eval_loss)) / self._eval_batches
        self._eval_batches = 0
        self._metrics.eval(trainer.train_steps, value)
        say(f"step {trainer.train_steps}  eval loss {value:.4f}")
