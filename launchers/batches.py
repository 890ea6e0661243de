"""A batch of rows, and the arrays that each engine's loss takes for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridge.errors import SpecError

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """One process's rows of a global batch, each array `(rows, sequence_length)`.

    `segments`: 0 is padding, 1 and up are the examples of a row; `positions` start again at 0 in each;
    `loss[i]`: token i is a target, predicted from token i - 1; never the first token of an example.
    """

    tokens: Ints
    positions: Ints
    segments: Ints
    loss: Bools


def maxtext_batch(batch: Batch) -> dict[str, Ints]:
    """The six arrays of MaxText's `loss_fn` (trainers/pre_train/train.py), `(rows, sequence_length)` int32.

    The loss counts a target where `targets_segmentation` is not 0 and reads nothing else from it; `targets_position` is
    the position of the input that predicts the target, as MaxText's own pipeline leaves it. The last column has no
    target.
    """
    targets = _shift_left(batch.tokens)
    learnt = np.where(_shift_left(batch.loss), _shift_left(batch.segments), 0)
    return {
        "inputs": batch.tokens,
        "inputs_position": batch.positions,
        "inputs_segmentation": batch.segments,
        "targets": targets,
        "targets_position": batch.positions,
        "targets_segmentation": learnt.astype(np.int32),
    }


def tunix_batch(batch: Batch) -> dict[str, NDArray[np.generic]]:
    """What Tunix's trainer is given, `(rows, sequence_length)`.

    `input_mask` is the loss mask: `_default_loss_fn` (sft/peft_trainer.py) shifts it with the targets by one. The
    attention mask is made of `segments`: same segment, not 0, and causal.
    """
    return {
        "input_tokens": batch.tokens,
        "input_mask": batch.loss,
        "positions": batch.positions,
        "segments": batch.segments,
    }


def process_rows(global_rows: int, process_index: int, process_count: int) -> slice:
    """The contiguous rows of a global batch that one process reads.

    Raises:
        SpecError: the processes do not divide the batch.
    """
    if process_count < 1 or not 0 <= process_index < process_count:
        raise SpecError(f"process {process_index} of {process_count} does not exist")
    if global_rows < 1 or global_rows % process_count:
        raise SpecError(
            f"a batch of {global_rows} rows cannot be divided among {process_count} processes",
            hint="choose train.batch_per_device so that the rows of a step are a multiple of the processes",
        )
    rows = global_rows // process_count
    return slice(process_index * rows, (process_index + 1) * rows)


def _shift_left[Value: np.generic](array: NDArray[Value]) -> NDArray[Value]:
    shifted = np.zeros_like(array)
    shifted[:, :-1] = array[:, 1:]
    return shifted
