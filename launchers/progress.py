"""What a run says while it trains: one line a step on stdout, marked, so that the launcher can show it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bridge import flops
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

MARK = "bridge: "

Listener = Callable[[int | None], None]
_listeners: list[Listener] = []


def say(text: str) -> None:
    """Print a line that the launcher shows to the user; the engine's own chatter goes to the log only."""
    print(f"{MARK}{text}", flush=True)
    advanced()


def advanced(step: int | None = None) -> None:
    """The run got on: it is at the beginning of optimizer step `step` (from 1), or elsewhere (None)."""
    for listener in _listeners:
        listener(step)


def listen(listener: Listener) -> None:
    """Call `listener` whenever the run gets on; for the watchdog."""
    _listeners.append(listener)


class StepClock:
    """Step times, tokens a second, model FLOP utilisation and the time left.

    The trainer reports a step's loss while the next one runs, so steps are timed from begin to begin, or to the
    beginning of an evaluation. The first step, which compiles, is kept out of the mean.
    """

    def __init__(
        self, steps: int, tokens_per_step: int, flops_per_step: float = 0.0, peak_flops: float | None = None
    ) -> None:
        """A clock of a run.

        Args:
            steps: of the whole run.
            tokens_per_step: positions that all devices compute in an optimizer step.
            flops_per_step: model FLOPs of it, see `bridge.flops`.
            peak_flops: what all devices could do in a second; None: not known, and no utilisation is said.
        """
        self._steps, self._tokens, self._flops, self._peak = steps, tokens_per_step, flops_per_step, peak_flops
        self._begun: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._times: list[float] = []

    def begin(self, step: int) -> None:
        """Step `step`, from 1, begins now; the one before it has ended unless it had already."""
        now = time.perf_counter()
        advanced(step)
        self._begun.setdefault(step, now)
        self._ended.setdefault(step - 1, now)

    def end(self, step: int) -> None:
        """Step `step` has ended: what follows is no training."""
        advanced()
        self._ended.setdefault(step, time.perf_counter())

    def report(self, step: int, loss: float, eval_loss: float | None = None) -> dict[str, float]:
        """Say how a step went, with the newest eval loss; returns `step_time` (s), `tokens_per_second`, `mfu` (0-1)."""
        now = time.perf_counter()
        seconds = self._ended.pop(step, now) - self._begun.pop(step, now)
        self._times.append(seconds)
        counted = self._times[1:] or self._times
        left = (self._steps - step) * sum(counted) / len(counted)
        rate = self._tokens / max(seconds, 1e-9)
        measured = {"step_time": round(seconds, 4), "tokens_per_second": round(rate, 1)}
        if self._peak is not None:
            measured["mfu"] = round(self._flops / max(seconds, 1e-9) / self._peak, 4)
        say(
            f"step {step}/{self._steps}  loss {loss:.4f}"
            + (f"  eval {eval_loss:.4f}" if eval_loss is not None else "")
            + f"  {rate:,.0f} tokens/s"
            + (f"  MFU {100 * measured['mfu']:.1f} %" if "mfu" in measured else "")
            + f"  {_duration(left)} left"
        )
        return measured


def clock_of(run: RunSpec, model: ModelSpec, rows: Any, adapters: bool) -> StepClock:
    """The clock of a run on this process's devices and all others.

    Args:
        run: resolved, with steps.
        model: the facts.
        rows: `Rows` or `Pairs`.
        adapters: whether adapters are trained on frozen weights.
    """
    import jax

    tokens = rows.tokens_per_batch * run.train.gradient_accumulation
    cost = tokens * flops.a_token(model, run, rows.row_length, adapters)
    peak = flops.peak(jax.devices()[0].device_kind, jax.device_count(), run.train.dtype)
    return StepClock(run.train.total_steps, tokens, cost, peak)


def learning_rates(schedule: Callable[[Any], Any], steps: int) -> list[float]:
    """The rate of every step of a run, from the first, as the schedule has it.

    All at once and before training: a single one, asked for between two steps, would wait for the device.
    """
    import numpy as np

    return [float(rate) for rate in np.broadcast_to(np.asarray(schedule(np.arange(steps))), (steps,))]


def _duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    hours = f"{whole // 3600}:" if whole >= 3600 else ""
    return f"{hours}{whole // 60 % 60:0{2 if hours else 1}d}:{whole % 60:02d}"
