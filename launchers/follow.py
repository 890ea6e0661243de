"""Follow a run that Slurm or Kubernetes runs: its logs are read, its lines shown, its errors explained."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import LaunchError
from bridge.launchers.progress import MARK
from bridge.launchers.shim import EXPLAINED
from bridge.launchers.supervise import SHOWN, TAIL, Show, StoppedByUser


@dataclass
class Followed:
    """Log files by process, and how far each has been read."""

    files: Mapping[int, Path]
    show: Show
    verbose: bool = False
    offsets: dict[int, int] = field(default_factory=dict)
    tails: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin at the present ends: a resumed run appends to its logs."""
        for number, path in self.files.items():
            self.offsets[number] = path.stat().st_size if path.exists() else 0
            self.tails[number] = []

    def line(self, number: int, text: str) -> None:
        """Take one line of a process."""
        tail = self.tails.setdefault(number, [])
        tail.append(text)
        del tail[:-TAIL]
        if number and not self.verbose:
            return
        prefix = f"[{number}] " if self.verbose and len(self.files) > 1 else ""
        if text.startswith(MARK) and not text.startswith(EXPLAINED):
            self.show(prefix + text.removeprefix(MARK))
        elif self.verbose:
            self.show(prefix + text)

    def failure(self, what: str, code: int, log: Path | None, culprit: int | None = None) -> LaunchError:
        """The error of a failed run: a process's own explanation where one gave it, else last lines.

        `culprit` is the process that failed first, where that is known; `log` holds more.
        """
        for tail in ([self.tails[culprit]] if culprit is not None else []) + list(self.tails.values()):
            explained = next((i for i in range(len(tail) - 1, -1, -1) if tail[i].startswith(EXPLAINED)), None)
            if explained is not None:
                first, *rest = tail[explained:]
                details = [line.strip() for line in rest if line.startswith("  ")]
                error = LaunchError(first.removeprefix(EXPLAINED), details=details, hint=what)
                error.exit_code = code
                return error
        tail = self.tails[culprit] if culprit is not None else max(self.tails.values(), key=_looks_guilty, default=[])
        if not tail and log is not None and log.exists():
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()
        error = LaunchError(what, details=tail[-SHOWN:], hint=f"the logs: {log.parent}" if log else None)
        error.exit_code = code
        return error

    def stopped(
        self, number: signal.Signals, what: str, hint: str = "--resume goes on from the newest checkpoint"
    ) -> StoppedByUser:
        """The error of a run that the user stopped, or stopped to follow."""
        error = StoppedByUser(f"{number.name}: {what}", hint=hint)
        error.exit_code = 128 + number
        return error


def follow_files(followed: Followed) -> None:
    """Read what has been added, whole lines only."""
    for number, path in followed.files.items():
        if not path.exists():
            continue
        with path.open("rb") as file:
            file.seek(followed.offsets[number])
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        followed.offsets[number] += len(whole)
        for text in whole.decode(errors="replace").splitlines():
            followed.line(number, text)


def _looks_guilty(tail: list[str]) -> tuple[bool, int]:
    return any("Traceback" in line or "Error" in line for line in tail), len(tail)
