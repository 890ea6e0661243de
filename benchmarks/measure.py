"""What one command costs, and a copy of the same bytes to hold it against."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ENV = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
BRIDGE = [sys.executable, "-m", "bridge"]


@dataclass(frozen=True)
class Cost:
    """One command and all its processes: wall and processor seconds, peak resident bytes of one, its exit status."""

    wall: float
    cpu: float
    peak: int = 0
    status: int = 0


def run(argv: Sequence[str], folder: Path | None = None, must: bool = True) -> tuple[Cost, str]:
    """Run a command to its end, in a folder; if it must, it has to succeed. Its cost, and what it said on stderr."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        begun = time.perf_counter()
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": said}
        child = subprocess.Popen(argv, cwd=folder, env=ENV, **streams)
        _, status, usage = os.wait4(child.pid, 0)
        wall, child.returncode = time.perf_counter() - begun, os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read()
    if child.returncode and must:
        raise SystemExit(f"{' '.join(argv)} ended with {child.returncode}:\n{text[-3000:]}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, child.returncode), text


def measure(argv: Sequence[str], must: bool = True) -> Cost:
    """What a command costs."""
    return run(argv, must=must)[0]


def copy(source: Path, target: Path) -> Cost:
    """`cp -r` and `sync` of the copied files, which is what writing safely costs."""
    return measure(["sh", "-c", f"cp -r '{source}' '{target}' && find '{target}' -type f -exec sync {{}} +"])


def warm(folder: Path, cold: bool) -> None:
    """Bring a folder's bytes into the page cache, or out of it, so that both sides of a pair read alike."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            if cold:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="bridge-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
