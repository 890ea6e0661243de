"""How long a run is: steps counted from epochs, the rows of the data and the devices; and epochs from steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import sidecar
from bridge.commands.workspace import Workspace, at_hand
from bridge.errors import LaunchError
from bridge.run_spec import RunSpec

if TYPE_CHECKING:
    from bridge.launchers.data import Pairs, Rows


@dataclass(frozen=True)
class Length:
    """Rows that a run trains on, with repetitions, and the optimizer steps that they make."""

    epochs: float
    rows: int
    rows_a_step: int
    steps: int

    def __str__(self) -> str:
        """`2 epochs of the data are 75 rows: 19 steps of 4`."""
        return f"{self.epochs:g} epochs of the data are {self.rows:,} rows: {self.steps:,} steps of {self.rows_a_step}"


def count(run: RunSpec, rows: Rows | Pairs, devices: int) -> Length:
    """The length of a run, from its epochs where it has them; every row is seen so many times at least.

    Args:
        run: its batch counts, and its epochs or steps.
        rows: the training data.
        devices: of all processes; each takes `batch_per_device` rows of a micro step.
    """
    a_step = run.train.batch_per_device * devices * run.train.gradient_accumulation
    if run.train.epochs is None:
        steps = run.train.total_steps
        return Length(steps * a_step / rows.rows_of(1), steps * a_step, a_step, steps)
    total = rows.rows_of(run.train.epochs)
    return Length(run.train.epochs, total, a_step, -(-total // a_step))


def resolve(
    workspace: Workspace, run: RunSpec, devices: int, converted: Path, say: Callable[[str], None]
) -> tuple[RunSpec, Length | None]:
    """The run with steps in the place of epochs: the data is read and laid out as the engine will do it.

    Every invocation of a run comes to the same number, whatever its processes.

    Raises:
        SpecError, AccessError: as `data.prepare`.
    """
    if run.train.epochs is None:
        return run, None
    from bridge.launchers.data import load_tokenizer, prepare

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    say("train.epochs: counting the rows of the data ...")
    own = run.model.tokenizer is None and (converted / sidecar.HF).is_dir()
    tokenizer = load_tokenizer(at_hand(converted / sidecar.HF) if own else workspace.tokenizer_folder())
    length = count(run, prepare(run, workspace.base, tokenizer, "train", 1), devices)
    train = run.train.model_copy(update={"steps": length.steps, "epochs": None})
    return run.model_copy(update={"train": train}), length


def check_resumed(run_dir: Path, length: Length | None) -> None:
    """Compare a run's length with what it was when it began: the schedule and the data of a resumed run hang on it.

    Raises:
        LaunchError: as many epochs are another number of steps now.
    """
    from bridge.launchers.run_file import FILE, RunFile

    if length is None or not (run_dir / FILE).is_file():
        return
    before = RunFile.read(run_dir)
    if before.epochs == length.epochs and before.spec.train.steps != length.steps:
        raise LaunchError(
            f"train.epochs {length.epochs:g} was {before.spec.train.steps} steps when the run began, "
            f"and is {length.steps} now: the data, the batch or the devices have changed",
            hint=f"train.steps={before.spec.train.steps} goes on as it began",
        )
