"""Where the lines of a run are shown: one line in place on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys

import click

from bridge.commands import common

SHOWN_LINES = 20
"""About so many step lines of a run are shown where lines cannot be replaced."""


class StepLines:
    """Shows a step in the place of the one before it, or about twenty steps a run; and every other line."""

    def __init__(self, steps: int, verbose: bool) -> None:
        self._every = 1 if verbose else max(1, steps // SHOWN_LINES)
        self._in_place = not verbose and (sys.stderr.isatty() or in_notebook())
        self._width = 0

    def show(self, line: str) -> None:
        """Show a line of the engine's process."""
        text = line.partition("] ")[2] if line.startswith("[") else line
        counted = text.startswith("step ") and "/" in text.split()[1]
        if self._in_place:
            self._replace(line, counted)
        elif not counted or self._is_due(text):
            common.say(line)

    def _is_due(self, text: str) -> bool:
        step, total = text.split()[1].split("/")
        return int(step) % self._every == 0 or step in ("1", total)

    def _replace(self, line: str, counted: bool) -> None:
        """Blanks clear what stood there: a notebook understands a carriage return, and not every escape sequence."""
        if counted:  # a line that wraps could not be replaced
            line = line[: shutil.get_terminal_size().columns - 1]
        clear = "\r" + " " * self._width + "\r" if self._width else ""
        click.echo(clear + line, err=True, nl=not counted)
        sys.stderr.flush()
        self._width = len(line) if counted else 0


def in_notebook() -> bool:
    """Whether what is written here goes to a cell of a notebook, which replaces lines as a terminal does."""
    return type(sys.stderr).__module__.partition(".")[0] == "ipykernel"
