"""How two sets of logits differ along the positions: what a report draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bridge.converters.parity.compare import Logits, Probe


@dataclass(frozen=True)
class Profile:
    """`difference` is (position, max |Δlogit|), the larger where probes share a position; `kl` nats, one a token."""

    difference: tuple[tuple[float, float], ...]
    kl: tuple[float, ...]


def profile(inputs: tuple[Probe, ...], reference: list[Logits], checkpoint: list[Logits]) -> Profile:
    """Compare logits, each (n, vocab), token by token; what is not finite stays so."""
    largest: dict[int, float] = {}
    divergence: list[float] = []
    for probe, ours, theirs in zip(inputs, reference, checkpoint, strict=True):
        # A token at a time: the f64 of a whole probe would be six times its logits.
        for position, a, b in zip(probe.positions.tolist(), ours, theirs, strict=True):
            gap = float(np.abs(a - b).max())
            largest[position] = max(gap, largest.get(position, gap))
            divergence.append(_kl(a, b))
    return Profile(tuple((float(place), gap) for place, gap in sorted(largest.items())), tuple(divergence))


def _kl(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    log_a, log_b = _log_softmax(a), _log_softmax(b)
    # Rounding may leave a few 1e-17 below zero.
    return max(float(np.exp(log_a) @ (log_a - log_b)), 0.0)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    normal: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normal
