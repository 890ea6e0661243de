"""What MaxText's post-training trainers take their data from and report to, in the place of MaxText's own hooks.

Source: maxtext/trainers/post_train/hooks.py, 0.2.5. MaxText's data hooks turn any error into an early end with exit
code 0; these let it through.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from bridge.launchers.batches import maxtext_batch
from bridge.launchers.data import Rows
from bridge.launchers.metrics import MetricsLog
from bridge.launchers.progress import StepClock, learning_rates, say


def data_hooks(train_rows: Any, eval_rows: Any) -> type[Any]:
    """A class in the place of MaxText's data hooks, feeding the rows, or the pairs, of bridge's data path."""
    import jax
    from maxtext.utils.sharding import get_input_data_sharding
    from tunix.sft.hooks import DataHooks

    class BridgeDataHooks(DataHooks):  # type: ignore[misc]
        """Batch k is asked for by its number, so a resumed run goes on at the right example."""

        def __init__(self, config: Any, mesh: Any, goodput_recorder: Any) -> None:
            del goodput_recorder
            self._sharding = get_input_data_sharding(config, mesh)
            self._limit = config.eval_steps
            self._eval: Iterator[Any] | None = None
            self._eval_count = 0
            self.train_data_iterator: Any = ()
            # The trainer only asks whether there is one, and that it can be iterated.
            self.eval_data_iterator = None if eval_rows is None else (eval_rows,)
            self.train_batch: Any = None
            self.eval_batch: Any = None

        def load_next_train_batch(self, train_ctx: Any) -> Any:
            step = train_ctx.iter_steps
            rows = train_rows
            self.train_batch = self._place(rows.batch(step) if isinstance(rows, Rows) else rows.preference_batch(step))
            return self.train_batch

        def load_next_eval_batch(self, train_ctx: Any) -> Any:
            del train_ctx
            if self._eval is None:
                self._eval, self._eval_count = eval_rows.eval_batches(), 0
            batch = None if 0 < self._limit <= self._eval_count else next(self._eval, None)
            if batch is None:
                self._eval = None
            self._eval_count += 1
            self.eval_batch = None if batch is None else self._place(batch)
            return self.eval_batch

        def _place(self, batch: Any) -> dict[str, Any]:
            """Every process has the global batch; each device takes its rows of it."""
            arrays = batch if isinstance(batch, dict) else maxtext_batch(batch)
            place = functools.partial(jax.make_array_from_callback, sharding=self._sharding)
            return {name: place(array.shape, data_callback=array.__getitem__) for name, array in arrays.items()}

    return BridgeDataHooks


def training_hooks(base: type[Any], metrics: MetricsLog, clock: StepClock) -> type[Any]:
    """MaxText's training hooks, which also write `metrics.jsonl` and say each step."""

    class BridgeTrainingHooks(base):  # type: ignore[misc]
        """One line a step."""

        def __init__(self, config: Any, mesh: Any, learning_rate_schedule: Any, goodput_recorder: Any) -> None:
            super().__init__(config, mesh, learning_rate_schedule, goodput_recorder)
            self._learning_rates = learning_rates(learning_rate_schedule, config.steps)

        def on_train_step_start(self, train_ctx: Any) -> None:
            clock.begin(train_ctx.train_steps + 1)
            super().on_train_step_start(train_ctx)

        def on_train_end(self, train_ctx: Any) -> None:
            clock.end(train_ctx.train_steps)
            super().on_train_end(train_ctx)

        def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float, step_time: float = 0.0) -> None:
            super().on_train_step_end(train_ctx, train_step, train_loss, step_time)
            loss = float(np.asarray(train_loss))
            measured = clock.report(train_step, loss, metrics.last_eval)
            metrics.train(train_step, loss, **measured, learning_rate=self._learning_rates[train_step - 1])

        def on_eval_step_start(self, train_ctx: Any) -> None:
            clock.end(train_ctx.train_steps)
            super().on_eval_step_start(train_ctx)

        def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
            count = self.eval_metadata["eval_step_count"]
            super().on_eval_step_end(train_ctx, eval_loss)
            loss = float(np.asarray(eval_loss)) / count
            metrics.eval(train_ctx.train_steps, loss)
            say(f"step {train_ctx.train_steps}  eval loss {loss:.4f}")

    return BridgeTrainingHooks
