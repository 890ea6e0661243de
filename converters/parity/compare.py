"""Two sets of logits side by side, and the inputs they are computed on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.model_spec import ModelSpec

Logits = NDArray[np.float32]
Forward = Callable[[NDArray[np.int32], NDArray[np.int32]], Logits]
"""From token ids and positions, (n,) each, to logits (n, vocab)."""

FLOOR = 1e-4
MULTIPLE = 8.0
"""Engines add in another order than PyTorch: their rounding differs from its f64 by a few times what its f32 does."""


@dataclass(frozen=True)
class Probe:
    """One forward pass: token ids and their positions, shape (n,)."""

    name: str
    ids: NDArray[np.int32]
    positions: NDArray[np.int32]


@dataclass(frozen=True)
class Report:
    """What `verify` says. `kl` is in nats a token, `top1` a fraction, `nll_*` in nats a token."""

    ok: bool
    max_abs: float
    kl: float
    top1: float
    nll_reference: float
    nll_checkpoint: float
    tokens: int
    tolerance: float
    positions: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values; what is not finite becomes null."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


def probes(model: ModelSpec, tokens: int, tokenizer: Path | None) -> tuple[Probe, ...]:
    """The inputs: `tokens` in a row, and, where RoPE is scaled, 64 spaced out to beyond the original context.

    RoPE is relative, so a shifted block would show nothing.
    """
    count = min(tokens, model.context)
    ids = sample_ids(model, count, tokenizer)
    found = [Probe(f"0 to {count - 1}", ids, np.arange(count, dtype=np.int32))]
    if model.rope_scaling is not None:
        reach = min(model.context - 1, max(12600, int(1.5 * model.rope_scaling.original_context)))
        step = max(1, reach // 63)
        spaced = np.arange(64, dtype=np.int32) * step
        found.append(Probe(f"0, {step}, {2 * step}, ... {spaced[-1]}", np.resize(ids, 64), spaced))
    return tuple(found)


def sample_ids(model: ModelSpec, count: int, tokenizer: Path | None) -> NDArray[np.int32]:
    """Token ids of English text where a tokenizer is at hand, else drawn evenly from the vocabulary by a fixed seed."""
    if tokenizer is not None and (tokenizer / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        text = Path(__file__).with_name("text.txt").read_text(encoding="utf-8")
        ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text).ids
        if ids and max(ids) < model.vocab:
            return np.resize(np.asarray(ids, dtype=np.int32), count)
    return np.random.default_rng(0).integers(0, model.vocab, count, dtype=np.int32)


def tolerance_of(reference: list[Logits], exact: list[NDArray[np.float64]]) -> float:
    """max(1e-4, a small multiple of |PyTorch f32 - PyTorch f64|)."""
    rounding = max(float(np.abs(a - b).max()) for a, b in zip(reference, exact, strict=True))
    return max(FLOOR, MULTIPLE * rounding)


def compare(inputs: tuple[Probe, ...], reference: list[Logits], checkpoint: list[Logits], tolerance: float) -> Report:
    """Compare logits, each (n, vocab), probe by probe; what is not finite is never ok."""
    max_abs = max(float(np.abs(a - b).max()) for a, b in zip(reference, checkpoint, strict=True))
    log_a, log_b = (np.concatenate([_log_softmax(part) for part in side]) for side in (reference, checkpoint))
    kl = float((np.exp(log_a) * (log_a - log_b)).sum(axis=-1).mean())
    top1 = float((log_a.argmax(-1) == log_b.argmax(-1)).mean())
    first = inputs[0]
    return Report(
        ok=bool(max_abs <= tolerance),
        max_abs=max_abs,
        kl=max(kl, 0.0) if math.isfinite(kl) else kl,
        top1=top1,
        nll_reference=_nll(reference[0], first.ids),
        nll_checkpoint=_nll(checkpoint[0], first.ids),
        tokens=sum(len(probe.ids) for probe in inputs),
        tolerance=tolerance,
        positions="; ".join(probe.name for probe in inputs),
    )


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normal: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normal


def _nll(logits: Logits, ids: NDArray[np.int32]) -> float:
    return float(-np.take_along_axis(_log_softmax(logits[:-1]), ids[1:, None], axis=-1).mean())
