"""What bridge itself costs: `bridge launch` against the same engine started by hand, and how soon the verbs answer.

    python benchmarks/overhead.py [--pairs 3] [--steps 20] [--out FILE.json]

The engines train the tests' tiny Llama. By hand means MaxText's own command on the configuration that `bridge config`
prints, and the Tunix program that it prints under plain Python. The two run one after the other, in turns, and the
figures are medians over the pairs. On a shared machine processor seconds say more than wall seconds do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "tests")]

from measure import BRIDGE, Cost, run  # noqa: E402

# MaxText calls its split train_sft unless it is told otherwise.
BY_HAND = {
    "maxtext": ("-m", "maxtext.trainers.post_train.sft.train_sft", "{program}", "train_split=train"),
    "tunix": ("{program}",),
}
PROGRAMS = {"maxtext": "config.yml", "tunix": "train.py"}
OWN = "the launcher's own "
# The command line as it is, and what of its costs is the launcher process's own: before, after, and beside the engine.
LAUNCH = f"""
import json, resource, sys, time
begun = time.perf_counter()
from bridge.commands import running
execute, marks = running.execute, []
def timed(*arguments):
    marks.append(time.perf_counter())
    execute(*arguments)
    marks.append(time.perf_counter())
running.execute = timed
from bridge.cli import cli
cli.main(standalone_mode=False)
usage, ended = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
own = {{"cpu": usage.ru_utime + usage.ru_stime, "wall": marks[0] - begun + ended - marks[1]}}
print({OWN!r} + json.dumps(own), file=sys.stderr)
"""


@dataclass(frozen=True)
class Pair:
    """The same training by hand and through the launcher, and the launcher process's share of the latter."""

    hand: Cost
    launch: Cost
    own: Cost


def by_hand(folder: Path, engine: str, number: int) -> Cost:
    """The engine's own program on what `bridge config` prints."""
    name = f"hand-{number}"
    program = folder / f"{name}-{PROGRAMS[engine]}"
    run([*BRIDGE, "config", "--engine", engine, "--run", name, "--out", str(program)], folder)
    return run([sys.executable, *(part.format(program=program) for part in BY_HAND[engine])], folder)[0]


def launched(folder: Path, engine: str, number: int) -> tuple[Cost, Cost]:
    """`bridge launch`, and the launcher process's own part."""
    argv = [sys.executable, "-c", LAUNCH, "launch", "sft", "--engine", engine, "--run", f"launch-{number}"]
    cost, text = run(argv, folder)
    line = next(line for line in text.splitlines() if line.startswith(OWN))
    return cost, Cost(**json.loads(line.removeprefix(OWN)))


def launch_pairs(folder: Path, engine: str, pairs: int, steps: int) -> list[Pair]:
    """`pairs` runs of each kind, the order reversed from one pair to the next."""
    from launch_runs import make_workplace

    make_workplace(folder, engine)
    spec = folder / "bridge.yaml"
    spec.write_text(spec.read_text().replace("\ntrain:\n", f"\ntrain:\n  steps: {steps}\n"))
    found = []
    for number in range(pairs):
        hand = by_hand(folder, engine, number) if number % 2 == 0 else None
        launch, own = launched(folder, engine, number)
        found.append(Pair(hand or by_hand(folder, engine, number), launch, own))
        shutil.rmtree(folder / "runs")
    return found


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians: what the launcher adds in seconds, and as a share of the run by hand."""

    def median(kind: str, what: str) -> float:
        return statistics.median(getattr(getattr(pair, kind), what) for pair in pairs)

    added = {
        f"added_{what}": statistics.median(getattr(pair.launch, what) - getattr(pair.hand, what) for pair in pairs)
        for what in ("wall", "cpu")
    }
    return {
        **added,
        "added_cpu_share": added["added_cpu"] / median("hand", "cpu"),
        **{f"{kind}_{what}": median(kind, what) for kind in ("hand", "launch", "own") for what in ("wall", "cpu")},
        "pairs": [asdict(pair) for pair in pairs],
    }


def start_up(folder: Path, times: int = 5) -> dict[str, dict[str, float]]:
    """How soon verbs answer on an 8B folder whose weights are holes: the median of `times`."""
    import shapes

    source = shapes.write(folder / "8b", "8b", sparse=True)
    verbs = {
        "--help": ("--help",),
        "inspect 8b": ("inspect", str(source)),
        "convert 8b --dry-run": ("convert", str(source), "--to", "maxtext", "--out", "converted", "--dry-run"),
    }
    found = {}
    for name, arguments in verbs.items():
        costs = [run([*BRIDGE, *arguments], folder)[0] for _ in range(times)]
        found[name] = {what: statistics.median(getattr(cost, what) for cost in costs) for what in ("wall", "cpu")}
    return found


def measure(pairs: int = 3, steps: int = 20, engines: Sequence[str] = tuple(BY_HAND)) -> dict[str, Any]:
    """All figures: `launch` by engine, and `start_up` by verb. Seconds."""
    with tempfile.TemporaryDirectory(prefix="bridge-bench-") as name:
        folder = Path(name)
        found: dict[str, Any] = {"steps": steps, "start_up": start_up(folder), "launch": {}}
        for engine in engines:
            (folder / engine).mkdir()
            found["launch"][engine] = summary(launch_pairs(folder / engine, engine, pairs, steps))
    return found


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    print(f"{'start-up':24} {'wall s':>8} {'cpu s':>8}")
    for name, cost in found["start_up"].items():
        print(f"{name:24} {cost['wall']:8.2f} {cost['cpu']:8.2f}")
    print(f"\n{'launch, ' + str(found['steps']) + ' steps':24} {'wall s':>8} {'cpu s':>8}")
    for engine, each in found["launch"].items():
        rows = {f"{engine} by hand": "hand", "  bridge launch": "launch", "  added": "added", "  launcher alone": "own"}
        for name, kind in rows.items():
            share = f"  {each['added_cpu_share']:+.1%}" if kind == "added" else ""
            print(f"{name:24} {each[f'{kind}_wall']:8.2f} {each[f'{kind}_cpu']:8.2f}{share}")


def main() -> None:
    """Measure, print, write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(options.pairs, options.steps)
    show(found)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
