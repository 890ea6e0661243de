"""Convert and export against `cp -r` and `sync` of the same bytes, in pairs, in one run: ratios, not seconds.

    python benchmarks/run.py --size tiny|1b|8b [--pairs 3] [--engine maxtext|tunix] [--peers] [--out FILE.json]

The machine may be shared: each figure is the median over pairs that ran one after the other. `--peers` times MaxText's
own converter on the same folder, where its table of known models allows it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import shapes

ENV = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Cost:
    """One command: wall and processor seconds, peak resident memory in bytes."""

    wall: float
    cpu: float
    peak: int


def measure(argv: list[str]) -> Cost:
    """Run a command to its end; it must succeed."""
    begun = time.perf_counter()
    child = subprocess.Popen(argv, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    text = child.stderr.read() if child.stderr else b""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {child.returncode}:\n{text.decode()[-2000:]}")
    return Cost(time.perf_counter() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def copy(source: Path, target: Path) -> Cost:
    """`cp -r` and `sync` of the copied files, which is what writing safely costs."""
    return measure(["sh", "-c", f"cp -r '{source}' '{target}' && find '{target}' -type f -exec sync {{}} +"])


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="bridge-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_up() -> float:
    """Seconds that any conversion spends before its first byte: imports, measured on the dry run."""
    with scratch(Path(tempfile.gettempdir())) as folder:
        source = shapes.write(folder / "source", "tiny")
        return measure(
            [*BRIDGE, "convert", str(source), "--to", "maxtext", "--out", str(folder / "x"), "--dry-run"]
        ).wall


BRIDGE = [sys.executable, "-m", "bridge"]


def pairs(source: Path, engine: str, count: int, folder: Path) -> dict[str, list[dict[str, Cost]]]:
    """`count` pairs of (copy, convert) and of (copy, export); every output is removed as soon as it is measured."""
    found: dict[str, list[dict[str, Cost]]] = {"convert": [], "export": []}
    for _ in range(count):
        checkpoint, copied, back = folder / "checkpoint", folder / "copied", folder / "back"
        pair = {"copy": copy(source, copied)}
        shutil.rmtree(copied)
        pair["bridge"] = measure([*BRIDGE, "convert", str(source), "--to", engine, "--out", str(checkpoint)])
        found["convert"].append(pair)
        pair = {"copy": copy(checkpoint, copied)}
        shutil.rmtree(copied)
        pair["bridge"] = measure([*BRIDGE, "export", str(checkpoint), "--to", "hf", "--out", str(back)])
        found["export"].append(pair)
        shutil.rmtree(checkpoint)
        shutil.rmtree(back)
    return found


def peers(source: Path, size: str, folder: Path) -> dict[str, Cost]:
    """MaxText's own converter, eager, where it knows the shape; it needs PyTorch and holds the model in memory."""
    names = {"8b": "llama3.1-8b"}
    if size not in names:
        return {}
    argv = [sys.executable, "-m", "maxtext.checkpoint_conversion.to_maxtext", f"model_name={names[size]}"]
    argv += [f"base_output_directory={folder / 'peer'}", "scan_layers=true", "hardware=cpu", "use_multimodal=false"]
    argv += ["skip_jax_distributed_system=true", f"--hf_model_path={source}", "--lazy_load_tensors=true"]
    return {"maxtext to_maxtext (lazy)": measure(argv)}


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(shapes.SHAPES), default="tiny")
    parser.add_argument("--engine", choices=["maxtext", "tunix"], default="maxtext")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the bytes go")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results.json"))
    options = parser.parse_args()
    with scratch(options.folder) as folder:
        source = shapes.write(folder / "source", options.size)
        size = sum(path.stat().st_size for path in source.iterdir())
        begin = start_up()
        found = pairs(source, options.engine, options.pairs, folder)
        others = peers(source, options.size, folder) if options.peers else {}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"{options.size} ({size / 1e9:.2f} GB) to {options.engine}, {options.pairs} pairs, on {machine}")
    print(f"{'':24} {'wall / cp':>10} {'less start':>10} {'wall s':>8} {'cpu s':>8} {'peak MiB':>9}")
    rows = {}
    for name, measured in found.items():
        ratio = statistics.median(pair["bridge"].wall / pair["copy"].wall for pair in measured)
        bare = statistics.median((pair["bridge"].wall - begin) / pair["copy"].wall for pair in measured)
        wall = statistics.median(pair["bridge"].wall for pair in measured)
        cpu = statistics.median(pair["bridge"].cpu for pair in measured)
        peak = max(pair["bridge"].peak for pair in measured)
        print(f"{name:24} {ratio:10.2f} {bare:10.2f} {wall:8.2f} {cpu:8.2f} {peak / 2**20:9.0f}")
        rows[name] = {"ratio": ratio, "ratio_less_start": bare, "wall": wall, "cpu": cpu, "peak": peak}
    for name, cost in others.items():
        print(f"{name:24} {'':10} {'':10} {cost.wall:8.2f} {cost.cpu:8.2f} {cost.peak / 2**20:9.0f}")
    result = {
        "size": options.size,
        "bytes": size,
        "engine": options.engine,
        "machine": machine,
        "start_up": begin,
        "rows": rows,
        "pairs": {name: [{k: asdict(v) for k, v in pair.items()} for pair in value] for name, value in found.items()},
        "peers": {name: asdict(cost) for name, cost in others.items()},
        "self_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
