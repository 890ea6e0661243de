"""Which checkpoints a run writes and keeps, for both engines: they share Tunix's trainer and Orbax's manager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bridge.launchers.metrics import MetricsLog, best_step


@dataclass(frozen=True)
class LatestAndBest:
    """An Orbax preservation policy: the last `keep`, and the best by eval loss beside them."""

    keep: int
    metrics: MetricsLog

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's protocol (orbax/checkpoint/_src/checkpoint_managers/preservation_policy.py)."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.keep :], best_step(self.metrics.eval_losses, steps)}
        return [step in kept for step in steps]


def checkpoint_options(save_every: int, keep: int, metrics: MetricsLog) -> Any:
    """Orbax options: every `save_every` steps (the trainer adds the last), not after step 1, with `LatestAndBest`."""
    import orbax.checkpoint as ocp

    return ocp.CheckpointManagerOptions(
        save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(save_every),
        preservation_policy=LatestAndBest(keep, metrics),
        enable_async_checkpointing=True,
    )
