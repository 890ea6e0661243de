"""What to ask a model that was trained on a data set: how its first examples begin, up to the first answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bridge.errors import SpecError
from bridge.launchers.data import PREFERENCE_METHODS, parts_of
from bridge.launchers.examples import Record, find_form, read_records
from bridge.launchers.messages import ASSISTANT, Message, clean_messages
from bridge.run_spec import RunSpec

Beginning = str | list[Message]
"""Text to go on with, or the messages before an answer."""


def beginnings(run: RunSpec, base: Path) -> Iterator[Beginning]:
    """How the examples of the evaluation set begin, or else of the training set, each once.

    Raises:
        SpecError, AccessError: as `examples.read_records`; columns that are not understood.
    """
    seen: list[Beginning] = []
    for part in parts_of(run, "eval") or parts_of(run, "train"):
        preference = run.train.method in PREFERENCE_METHODS
        form = None
        for record in read_records(part.sources, base, run.data.split):
            form = form or find_form(tuple(record.values), run.data.column, preference)
            found = _beginning(record, form, run.data.column or "")
            if found and found not in seen:
                seen.append(found)
                yield found


def last_turn(beginning: Beginning) -> str:
    """What the user said last."""
    return beginning if isinstance(beginning, str) else str(beginning[-1]["content"])


def _beginning(record: Record, form: str, column: str) -> Beginning:
    values = record.values
    if form == "completion":
        return str(values["prompt"])
    value: Any = values.get(column) if form == "chat" else values.get("prompt") or values.get("chosen")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if value is None:
        raise SpecError(f"{record.where}: there is neither a prompt nor messages")
    before: list[Message] = []
    for message in clean_messages(value):
        if message["role"] == ASSISTANT:
            break
        before.append(message)
    return before
