"""All benchmarks of a size, in one run: ratios, not seconds. Prints tables, writes JSON.

    python benchmarks/run.py --size tiny|1b|8b|70b|405b [--engine maxtext|tunix] [--pairs 3] [--parts PART ...]

    pairs     convert and export against `cp -r` and `sync` of the same bytes, one after the other; the source in the
              page cache, which is the worst case for us, or with --cold read from the disk
    forms     the other ways to convert: Tunix, unscanned, compressed, with --check; peak memory
    peers     MaxText's and Tunix's own tools on the same folder
    restore   stock Orbax onto 8 simulated devices: our checkpoint, and the one MaxText's converter wrote
    starts    how soon `--help`, `inspect` and `--dry-run` answer, and what `bridge launch` adds to an engine
    scale     sparse files: holes are read as zeros, zeros are written as holes; whole conversion and export

70b and 405b are measured with `scale` alone. --curve shows what `scale` found of several sizes, one below the other.
The machine may be shared: each figure is the median over pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import overhead
import peers
import shapes
from measure import BRIDGE, ENV, Cost, copy, measure, scratch, warm

PARTS = {
    "tiny": ["pairs", "forms", "peers", "restore", "starts"],
    "1b": ["pairs", "forms", "peers", "restore", "starts"],
    "8b": ["pairs"],
    "70b": ["scale"],
    "405b": ["scale"],
}
FORMS = {
    "MaxText": ["--to", "maxtext"],
    "MaxText, unscanned": ["--to", "maxtext", "--unscanned"],
    "MaxText, --check": ["--to", "maxtext", "--check"],
    "MaxText, zstd:1": ["--to", "maxtext", "--compression", "zstd:1"],
    "MaxText, zstd:3": ["--to", "maxtext", "--compression", "zstd:3"],
    "Tunix": ["--to", "tunix"],
    "Tunix, --check": ["--to", "tunix", "--check"],
}


def start_up(folder: Path) -> float:
    """Seconds before and after the bytes: a whole conversion of a tiny model, imports and all."""
    source = shapes.write(folder / "start", "tiny")
    argv = [*BRIDGE, "convert", str(source), "--to", "maxtext", "--out", str(folder / "start-out")]
    walls = []
    for _ in range(3):
        walls.append(measure(argv).wall)
        shutil.rmtree(folder / "start-out")
    return statistics.median(walls)


def pairs(source: Path, engine: str, count: int, folder: Path, cold: bool) -> dict[str, list[dict[str, Cost]]]:
    """`count` pairs of (copy, convert) and of (copy, export); every output is removed as soon as it is measured."""
    found: dict[str, list[dict[str, Cost]]] = {"convert": [], "export": []}
    checkpoint, copied, back = folder / "checkpoint", folder / "copied", folder / "back"
    for _ in range(count):
        for name, what, argv in (
            ("convert", source, ["convert", str(source), "--to", engine, "--out", str(checkpoint)]),
            ("export", checkpoint, ["export", str(checkpoint), "--to", "hf", "--out", str(back)]),
        ):
            warm(what, cold)
            pair = {"copy": copy(what, copied)}
            shutil.rmtree(copied)
            warm(what, cold)
            pair["bridge"] = measure([*BRIDGE, *argv])
            found[name].append(pair)
        shutil.rmtree(checkpoint)
        shutil.rmtree(back)
    return found


def pair_rows(found: dict[str, list[dict[str, Cost]]], begin: float) -> dict[str, dict[str, float]]:
    """Medians over the pairs."""
    rows = {}
    for name, measured in found.items():
        rows[name] = {
            "ratio": statistics.median(pair["bridge"].wall / pair["copy"].wall for pair in measured),
            "ratio_less_start": statistics.median(
                (pair["bridge"].wall - begin) / pair["copy"].wall for pair in measured
            ),
            "wall": statistics.median(pair["bridge"].wall for pair in measured),
            "cpu": statistics.median(pair["bridge"].cpu for pair in measured),
            "peak": max(pair["bridge"].peak for pair in measured),
            "copy_wall": statistics.median(pair["copy"].wall for pair in measured),
        }
    print(f"{'':10} {'wall / cp':>10} {'less start':>10} {'wall s':>8} {'cp s':>8} {'cpu s':>8} {'peak MiB':>9}")
    for name, row in rows.items():
        print(
            f"{name:10} {row['ratio']:10.2f} {row['ratio_less_start']:10.2f} {row['wall']:8.2f} "
            f"{row['copy_wall']:8.2f} {row['cpu']:8.2f} {row['peak'] / 2**20:9.0f}"
        )
    return rows


def costs(title: str, measured: dict[str, Cost]) -> dict[str, dict[str, float]]:
    """Print and give the costs of some commands."""
    print(f"{title:40} {'wall s':>8} {'cpu s':>8} {'peak MiB':>9}")
    for name, cost in measured.items():
        ended = f"  ended with {cost.status}" if cost.status else ""
        print(f"{name:40} {cost.wall:8.2f} {cost.cpu:8.2f} {cost.peak / 2**20:9.0f}{ended}")
    return {name: asdict(cost) for name, cost in measured.items()}


def forms(source: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Every way to convert, and the export of it."""
    measured = {}
    for name, flags in FORMS.items():
        out, back = folder / "form", folder / "form-back"
        measured[name] = measure([*BRIDGE, "convert", str(source), *flags, "--out", str(out)])
        measured["  back"] = measure([*BRIDGE, "export", str(out), "--to", "hf", "--out", str(back)])
        measured[f"{name}: export"] = measured.pop("  back")
        shutil.rmtree(out)
        shutil.rmtree(back)
    return costs("forms", measured)


def restores(ours: Path, theirs: Path, count: int) -> dict[str, Any]:
    """Both checkpoints restored onto 8 simulated devices, in turns."""
    found: dict[str, list[dict[str, float]]] = {"bridge": [], "MaxText to_maxtext": []}
    for _ in range(count):
        for name, item in zip(found, (ours, theirs), strict=True):
            warm(item, cold=False)
            argv = [sys.executable, str(Path(__file__).with_name("restore.py")), str(item)]
            done = subprocess.run(argv, env=ENV, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
    rows = {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}
    print(f"{'restored onto 8 devices':40} {'wall s':>8} {'cpu s':>8} {'decoded / array bytes':>22}")
    for name, row in rows.items():
        print(f"{name:40} {row['wall']:8.2f} {row['cpu']:8.2f} {row['decoded'] / row['arrays']:22.2f}")
    return rows


def scale(source: Path, engine: str, folder: Path) -> dict[str, dict[str, float]]:
    """A sparse model there and back."""
    out, back = folder / "checkpoint", folder / "back"
    bridge = [sys.executable, str(Path(__file__).with_name("roomy.py"))]
    measured = {"convert": measure([*bridge, "convert", str(source), "--to", engine, "--out", str(out)])}
    measured["export"] = measure([*bridge, "export", str(out), "--to", "hf", "--out", str(back)])
    return costs("scale", measured)


def curve(folder: Path) -> None:
    """What `scale` wrote of every size: flat in memory, linear in time."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("results-*.json")]
    print(f"{'':6} {'':8} {'GB':>8} {'wall s':>8} {'GB/s':>6} {'cpu s':>8} {'peak MiB':>9}")
    for result in sorted((result for result in found if "scale" in result), key=lambda result: float(result["bytes"])):
        for name, cost in result["scale"].items():
            size = result["bytes"] / 1e9
            print(
                f"{result['size']:6} {name:8} {size:8.1f} {cost['wall']:8.1f} {size / cost['wall']:6.2f} "
                f"{cost['cpu']:8.1f} {cost['peak'] / 2**20:9.0f}"
            )


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(shapes.SHAPES), default="tiny")
    parser.add_argument("--engine", choices=["maxtext", "tunix"], default="maxtext")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=["pairs", "forms", "peers", "restore", "starts", "scale"])
    parser.add_argument("--cold", action="store_true", help="read from the disk; always so for 8b")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the bytes go")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results-SIZE[-PART ...].json")
    parser.add_argument("--curve", action="store_true", help="measure nothing, show the results of `scale`")
    options = parser.parse_args()
    if options.curve:
        curve(Path(__file__).parent)
        return
    parts = options.parts or PARTS[options.size]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    result: dict[str, Any] = {"size": options.size, "engine": options.engine, "machine": machine}
    with scratch(options.folder) as folder:
        source = shapes.write(folder / "source", options.size, sparse="scale" in parts)
        size = sum(path.stat().st_size for path in source.iterdir())
        print(f"{options.size} ({size / 1e9:.2f} GB) on {machine}")
        result["bytes"] = size
        if "pairs" in parts:
            begin = start_up(folder)
            found = pairs(source, options.engine, options.pairs, folder, options.cold or options.size == "8b")
            result |= {"start_up": begin, "pairs": pair_rows(found, begin)}
        if "forms" in parts:
            result["forms"] = forms(source, folder)
        if "peers" in parts or "restore" in parts:
            others = peers.run(source, folder)
            if "peers" in parts:
                result["peers"] = costs("peers", others)
        if "restore" in parts:
            ours = folder / "ours"
            measure([*BRIDGE, "convert", str(source), "--to", "maxtext", "--out", str(ours)])
            theirs = folder / "maxtext-eager" / "0" / "items"
            result["restore"] = restores(ours / "0" / "items", theirs, options.pairs)
        if "scale" in parts:
            result["scale"] = scale(source, options.engine, folder)
    if "starts" in parts:
        result["starts"] = overhead.measure(pairs=options.pairs)
        overhead.show(result["starts"])
    name = "-".join(["results", options.size, *(options.parts or [])])
    out = options.out or Path(__file__).with_name(f"{name}.json")
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
