"""Greedy generation by repeated forward passes of one fixed length: slow, simple, and the same for either engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bridge.converters.parity.compare import Forward


def generate(
    forward: Forward,
    prompt: Sequence[int],
    ends: Sequence[int],
    new_tokens: int,
    show: Callable[[int], None] = lambda _: None,
) -> list[int]:
    """The tokens that follow `prompt`, the likeliest each time, up to and with one of `ends`.

    Every pass has len(prompt) + new_tokens tokens, so that it is compiled once; attention is causal, so what lies
    behind the last token does not matter.
    """
    ids = np.zeros(len(prompt) + new_tokens, dtype=np.int32)
    ids[: len(prompt)] = prompt
    positions = np.arange(len(ids), dtype=np.int32)
    made: list[int] = []
    for at in range(len(prompt), len(ids)):
        made.append(int(forward(ids, positions)[at - 1].argmax()))
        ids[at] = made[-1]
        show(made[-1])
        if made[-1] in ends:
            break
    return made
