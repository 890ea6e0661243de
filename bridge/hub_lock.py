"""The lock: which commit each hub id of a spec stands for. It is `bridge.json` beside the spec, or beside a download.

A branch moves; what was downloaded once is taken again until `bridge download --update` moves the lock.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from bridge import sidecar
from bridge.errors import OutputError, SpecError
from bridge.model_spec import read_json

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Pin:
    """What was asked for, a branch, a tag, a commit or None, and the commit that the hub gave."""

    asked: str | None
    commit: str


def read(folder: Path) -> dict[str, Pin]:
    """The pins of a folder's lock by hub id; none where there is no lock.

    Raises:
        SpecError: it is damaged.
    """
    path = folder / sidecar.FILE
    if not path.is_file() or not sidecar.is_lock(path):
        return {}
    models = read_json(path).get("models")
    try:
        pins = {name: Pin(entry["asked"], entry["commit"]) for name, entry in models.items()}  # type: ignore[union-attr]
        if all(COMMIT.fullmatch(pin.commit) and isinstance(pin.asked, str | None) for pin in pins.values()):
            return pins
    except (AttributeError, KeyError, TypeError):
        pass
    raise SpecError(f"{path} is damaged: it pins no commits", hint="remove it, and run bridge download again")


def commit(folder: Path, model_id: str, asked: str | None) -> str | None:
    """The commit that is pinned for a model at the revision asked for; None where none is.

    Raises:
        SpecError: as `read`.
    """
    pin = read(folder).get(model_id)
    return pin.commit if pin is not None and pin.asked == asked else None


def write(folder: Path, model_id: str, asked: str | None, found: str) -> None:
    """Pin a model to a commit; the other pins of the lock are kept.

    Raises:
        SpecError: as `read`.
        OutputError: it cannot be written, or a checkpoint's `bridge.json` lies there.
    """
    path = folder / sidecar.FILE
    if path.exists() and not sidecar.is_lock(path):
        raise OutputError(f"{path} belongs to a checkpoint", hint="keep the spec, and downloads, in another folder")
    pins = {**read(folder), model_id: Pin(asked, found)}
    models = {name: {"asked": pins[name].asked, "commit": pins[name].commit} for name in sorted(pins)}
    text = json.dumps({"format": sidecar.FORMAT, "kind": sidecar.LOCK, "models": models}, indent=2)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{text}\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error
