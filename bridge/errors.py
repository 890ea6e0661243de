"""The errors of `bridge`.

BridgeError                 text + details + at most one hint; exit 1
  SpecError                 the spec or a config is wrong          (all problems at once, each with its path)
  UnsupportedError          understood, but this engine cannot express it
  CheckpointError           names, shapes, dtypes, truncated files (all problems, first few shown, count given)
  AccessError               hub: no token, gated, not found
  LaunchError               mesh, hosts, scheduler, engine died (with the engine's last lines)
  OutputError               an output folder is in the way, unwritable, or the disk is full
  MissingDependency         which extra to install
TableError                  a table contradicts itself: our bug, keeps its traceback
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

SHOWN = 12
LONGEST = 2000
"""Characters of a message, or of one detail, that are shown."""
TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}")
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")


def printable(text: str, *, lines: bool = False) -> str:
    """A text that may be shown: no token, no control characters, no more than `LONGEST` characters.

    Names of tensors and files come from outside: a terminal must not obey them, nor an encoder fail on them.

    Args:
        text: what is to be shown.
        lines: keep line feeds and tabs.
    """
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    text = TOKEN.sub("***", text)
    for name in TOKEN_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= 8:
            text = text.replace(value, "***")
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii") for c in text)


class BridgeError(Exception):
    """An error that `bridge` explains: one sentence, the details, at most one hint."""

    exit_code = 1

    def __init__(self, message: str, *, details: Sequence[str] = (), hint: str | None = None) -> None:
        self.message = printable(message, lines=True)
        super().__init__(self.message)
        self.details = tuple(printable(detail) for detail in details)
        self.hint = printable(hint, lines=True) if hint else None

    def __str__(self) -> str:
        lines = [self.message]
        lines += [f"  {detail}" for detail in self.details[:SHOWN]]
        if len(self.details) > SHOWN:
            lines.append(f"  ... and {len(self.details) - SHOWN} more")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class SpecError(BridgeError):
    """The spec, or a model's config, is wrong or not understood."""


class UnsupportedError(BridgeError):
    """Understood, but the engine cannot express it."""


class CheckpointError(BridgeError):
    """Names, shapes, dtypes or bytes of a checkpoint are not what they must be."""


class AccessError(BridgeError):
    """The hub refused, or does not have, what was asked for."""


class LaunchError(BridgeError):
    """A run could not start, or its engine died."""


class OutputError(BridgeError):
    """An output folder is in the way, cannot be written, or does not fit on the disk."""


class MissingDependency(BridgeError):
    """A package that an extra brings is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package {package}, which is not installed",
            hint=f"pip install 'bridge-llama[{extra}]'",
        )


class TableError(Exception):
    """A mapping table contradicts itself. This is a bug of `bridge`: it keeps its traceback."""
