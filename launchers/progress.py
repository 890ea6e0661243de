"""What a run says while it trains: one line a step on stdout, marked, so that the launcher can show it."""

from __future__ import annotations

import time
from collections.abc import Callable

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
    """Step times, tokens a second and the time left.

    The trainer reports a step's loss while the next one runs, so steps are timed from begin to begin, or to the
    beginning of an evaluation. The first step, which compiles, is kept out of the mean.
    """

    def __init__(self, steps: int, tokens_per_step: int) -> None:
        self._steps, self._tokens = steps, tokens_per_step
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

    def report(self, step: int, loss: float) -> dict[str, float]:
        """Say a step's loss and time; returns `step_time` (s) and `tokens_per_second`."""
        now = time.perf_counter()
        seconds = self._ended.pop(step, now) - self._begun.pop(step, now)
        self._times.append(seconds)
        counted = self._times[1:] or self._times
        left = (self._steps - step) * sum(counted) / len(counted)
        say(f"step {step}/{self._steps}  loss {loss:.4f}  {seconds:.2f} s/step  {_minutes(left)} left")
        return {"step_time": round(seconds, 4), "tokens_per_second": round(self._tokens / max(seconds, 1e-9), 1)}


def _minutes(seconds: float) -> str:
    whole = int(seconds + 0.5)
    return f"{whole // 60}:{whole % 60:02d}"
