"""SIGKILL at any moment: no half output, nothing earlier harmed, the source untouched, and the next run cleans up.

`make test` kills 25 times at seeded random moments for each of convert and export and each engine, `make soak` 100
times (BRIDGE_KILLS), and each of them at file events, where the moments that matter lie.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import fault_models
import pytest

from bridge import outputs

KILLS = int(os.environ.get("BRIDGE_KILLS", "25"))
EVENT_KILLS = max(10, KILLS // 2)
ENGINES = ("maxtext", "tunix")
WORKER = Path(checkpoints.__file__).with_name("kill_worker.py")

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with worker() as ask:
        yield ask


@contextmanager
def worker() -> Iterator[Run]:
    """Run a command in a forked process, killed after some seconds or at a file event, or not at all."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(WORKER)], **pipes) as process:

        def ask(*args: object, kill_after: float | None = None, kill_at: int | None = None) -> dict[str, Any]:
            asked = {"args": [str(arg) for arg in args], "kill_after": kill_after, "kill_at": kill_at}
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer

        yield ask
        assert process.stdin is not None
        process.stdin.close()


@dataclass(frozen=True)
class Case:
    """A command, what it reads, and what may lie at its output: the tensors of the new one, or of an older one."""

    verb: str
    engine: str
    source: Path
    older: Path
    scratch: Path
    new_content: dict[str, bytes]
    old_content: dict[str, bytes]

    def args(self, out: Path, overwrite: bool) -> list[object]:
        to = self.engine if self.verb == "convert" else "hf"
        return [self.verb, self.source, "--to", to, "--out", out, *(["--overwrite"] if overwrite else [])]

    def content(self, out: Path) -> dict[str, bytes]:
        """The tensors that an output holds, as a Hugging Face file's bytes; fails if it is not whole."""
        if self.verb == "export":
            assert (out / "config.json").is_file()
            return content(out)
        shutil.rmtree(self.scratch, ignore_errors=True)
        return content(checkpoints.export(out, self.scratch))


def content(folder: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in fault_models.arrays_of(folder).items()}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder in memory where there is one: what counts is the order of the steps, not how long fsync takes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture(params=[(verb, engine) for verb in ("convert", "export") for engine in ENGINES], ids="-".join)
def case(request: pytest.FixtureRequest, place: Path) -> Iterator[Case]:
    verb, engine = request.param
    folder = place / f"{verb}_{engine}"
    new = fault_models.write_model(folder / "new_hf")
    old = fault_models.write_model(folder / "old_hf", intermediate_size=80)
    contents = content(new), content(old)
    older = checkpoints.convert(old, folder / "old", engine=engine).parent
    if verb == "export":
        new = checkpoints.convert(new, folder / "new", engine=engine).parent
        older = checkpoints.export(older, folder / "older")
    yield Case(verb, engine, new, older, folder / "scratch", *contents)
    shutil.rmtree(folder)


@pytest.fixture
def folder(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)


def stamp(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file's inode, time and bytes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@dataclass
class Tally:
    """What the kills met."""

    killed: int = 0
    within: int = 0
    finished: int = 0


def kill_and_check(case: Case, run: Run, folder: Path, overwrite: bool, tally: Tally, **kill: Any) -> float:
    """One kill, and everything that must hold after it and after the next run, whose seconds are returned."""
    out = folder / "out"
    before = stamp(case.source)
    if overwrite:
        shutil.copytree(case.older, out)
    killed = run(*case.args(out, overwrite), **kill)
    if killed["signal"]:
        assert killed["signal"] == signal.SIGKILL
        tally.killed += 1
        tally.within += any(outputs.TEMPORARY in name for name in names(folder))
    else:
        assert killed["code"] == 0, killed
        tally.finished += 1
    if out.exists():
        assert case.content(out) in ([case.new_content, case.old_content] if overwrite else [case.new_content])
    else:
        aside = [name for name in names(folder) if outputs.ASIDE in name]
        assert len(aside) == overwrite, "what was there is moved aside, not deleted"
        for name in aside:
            assert case.content(folder / name) == case.old_content
            back = run(*case.args(out, False))
            assert (back["code"], "exists" in back["said"]) == (1, True), "it is put back, and not replaced unasked"
            assert case.content(out) == case.old_content
    assert stamp(case.source) == before
    again = run(*case.args(out, True))
    assert again["code"] == 0, again
    assert case.content(out) == case.new_content
    assert names(folder) == ["out"]
    assert stamp(case.source) == before
    shutil.rmtree(out)
    return float(again["seconds"])


def test_killed_at_random_times(case: Case, run: Run, folder: Path) -> None:
    seconds = min(run(*case.args(folder / "out", True))["seconds"] for _ in range(2))
    shutil.rmtree(folder / "out")
    chance = random.Random(f"{case.verb} {case.engine}")
    tally = Tally()
    while tally.killed < KILLS and tally.finished < 4 * KILLS:
        delay = chance.uniform(0, seconds)
        seconds = kill_and_check(case, run, folder, bool(tally.killed % 2), tally, kill_after=delay)
    print(f"{case.verb} {case.engine}: {tally}")
    assert tally.killed == KILLS
    assert tally.within > 0, "some kills must come while the output is being written"


def test_killed_at_file_events(case: Case, run: Run, folder: Path) -> None:
    shutil.copytree(case.older, folder / "out")
    events = run(*case.args(folder / "out", True))["events"]
    shutil.rmtree(folder / "out")
    chance = random.Random(f"{case.verb} {case.engine}")
    # The last ones are the renames, and the removal of what was moved aside: all of them; a sample of the others.
    last = range(max(1, events - 8), events + 1)
    chosen = sorted({*chance.sample(range(1, events + 1), min(EVENT_KILLS, events)), *last})
    tally = Tally()
    for number in chosen:
        kill_and_check(case, run, folder, True, tally, kill_at=number)
    print(f"{case.verb} {case.engine}: {tally} of {events} events")
    assert tally.killed >= len(chosen) - 1
    assert tally.within > 0


def test_two_at_once_into_the_same_place(case: Case, run: Run, folder: Path) -> None:
    """One wins, the other says so; whichever it is, the output is whole."""
    sentences = ("is being written by another process", "out exists")
    with worker() as other, ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            both = [pool.submit(ask, *case.args(folder / "out", False)) for ask in (run, other)]
            first, second = sorted((future.result() for future in both), key=lambda answer: answer["code"])
            assert (first["code"], second["code"]) == (0, 1), (first, second)
            assert any(sentence in second["said"] for sentence in sentences), second
            assert case.content(folder / "out") == case.new_content
            assert names(folder) == ["out"]
            shutil.rmtree(folder / "out")
