"""What a run says while it trains: one line a step on stdout, marked, so that the launcher can show it."""

from __future__ import annotations

import time

MARK = "bridge: "


def say(text: str) -> None:
    """Print a line that the launcher shows to the user; the engine's own chatter goes to the log only."""
    print(f"{MARK}{text}", flush=True)


class StepClock:
    """Step times, tokens a second and the time left; the first step, which compiles, is kept out of the mean."""

    def __init__(self, steps: int, tokens_per_step: int) -> None:
        self._steps, self._tokens = steps, tokens_per_step
        self._last = time.perf_counter()
        self._total = 0.0
        self._counted = -1

    def restart(self) -> None:
        """Begin a step now, after something that is no training (evaluation)."""
        self._last = time.perf_counter()

    def step(self, step: int, loss: float) -> dict[str, float]:
        """Say that a step is finished; returns `step_time` (s) and `tokens_per_second`."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._counted += 1
        if self._counted > 0:
            self._total += seconds
        mean = self._total / self._counted if self._counted > 0 else seconds
        left = (self._steps - step) * mean
        say(f"step {step}/{self._steps}  loss {loss:.4f}  {seconds:.2f} s/step  {_minutes(left)} left")
        return {"step_time": round(seconds, 4), "tokens_per_second": round(self._tokens / max(seconds, 1e-9), 1)}


def _minutes(seconds: float) -> str:
    whole = int(seconds + 0.5)
    return f"{whole // 60}:{whole % 60:02d}"
