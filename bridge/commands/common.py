"""What several verbs share: the spec option, the engine option, progress on stderr, JSON on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from bridge import places
from bridge.commands.workspace import SPEC, Workspace
from bridge.errors import BridgeError


class Place(click.Path):
    """A folder of this host, or of a bucket (`gs://BUCKET/FOLDER`)."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """The path; click itself would look for a folder `gs:` on this disk."""
        if isinstance(value, places.BucketPath) or places.in_bucket(str(value)):
            return places.place(value)
        return super().convert(value, param, ctx)


folder_type = Place(path_type=Path, file_okay=False)
place_type = Place(path_type=Path)
spec_option = click.option(
    "--spec", type=click.Path(path_type=Path, dir_okay=False), help=f"The spec; default: {SPEC} in this folder."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace an output that exists, once the new one is complete."
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Write nothing, start nothing: print the plan.")
engine_option = click.option("--engine", type=click.Choice(["maxtext", "tunix"]), help="Default: the spec's engine.")


def examples(*lines: str) -> str:
    """The closing examples of a verb's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def maybe_workspace(spec: Path | None) -> Workspace | None:
    """The workspace when a spec is named or lies in this folder, else None."""
    return Workspace.open(spec) if spec is not None or Path(SPEC).is_file() else None


def say(text: str) -> None:
    """A line for people, on stderr."""
    click.echo(text, err=True)


def emit(values: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(values, indent=2))


def on_cpu() -> None:
    """Keep this process's JAX on the CPU: conversions and checks need no accelerator, and must not take one."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def gigabytes(count: float) -> str:
    """`1.23 GB`, or MB below one."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def parse_size(text: str) -> int:
    """`1GiB`, `5GB`, `512MiB` or a number of bytes.

    Raises:
        BridgeError: something else.
    """
    units = {
        "": 1,
        "b": 1,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "tb": 10**12,
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
        "tib": 2**40,
    }
    number = text.strip().lower().rstrip("kmgtib")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise BridgeError(f"{text!r} is not a size", hint="for example 1GiB or 5GB") from error
    if size <= 0:
        raise BridgeError(f"{text!r} is not a positive size")
    return size


def memory_for(text: str, *folders: Path) -> int:
    """What slabs may be cut for, of the memory that a command may take.

    A quarter less where they come from a bucket or go there: requests hold a part of what they carry once more
    (measured with limits of 300 MiB to 1 GiB).
    """
    size = parse_size(text)
    return size * 3 // 4 if any(places.in_bucket(folder) for folder in folders) else size


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress over bytes on stderr: a bar on a terminal, a line every tenth otherwise."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.update(task, advance=count)
        return
    lines = SparseLines(title, total)
    yield lines.advance
    lines.finish()


class SparseLines:
    """A line each time another tenth is done, and a closing one with the rate."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, max(total, 1)
        self._done, self._shown = 0, 0
        self._start = self._last = time.perf_counter()
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        """More bytes are done."""
        with self._lock:
            self._done += count
            tenth = self._done * 10 // self._total
            now = time.perf_counter()
            if self._shown < tenth < 10 and now - self._last > 5:
                self._shown, self._last = tenth, now
                say(f"{self._title}: {tenth * 10} % of {gigabytes(self._total)}")

    def finish(self) -> None:
        """Say how much and how fast."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        say(f"{self._title}: {gigabytes(self._done)} in {seconds:.1f} s ({gigabytes(self._done / seconds)}/s)")
