"""Coverage-guided fuzzing of every reader of outside bytes, with atheris: `make fuzz FUZZ_SECONDS=60`.

Each kind of file gets its share of the time. Input is either the bytes of a file or, where they start with a marker,
choices by which a valid file is changed. A finding is any exception but a BridgeError, more than five seconds, or more
than 2 GiB; atheris writes the input that led there into the corpus folder, and the exit code is not 0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ["JAX_PLATFORMS"] = "cpu"

CHANGES = b"\x01changes"


def fuzz(name: str, seconds: int, corpus: Path) -> None:
    """Fuzz one kind of file in this process; it does not return."""
    import atheris

    with atheris.instrument_imports(include=["bridge"]):
        import fuzz_targets
    target = fuzz_targets.targets()[name]
    value, rest = target.parts()

    def one(data: bytes) -> None:
        if data.startswith(CHANGES):
            provider = atheris.FuzzedDataProvider(data[len(CHANGES) :])
            changed = value
            for _ in range(1 + provider.ConsumeIntInRange(0, 3)):
                changed = fuzz_targets.nasty(changed, lambda below: provider.ConsumeIntInRange(0, below - 1))
            data = target.encode(changed, rest)
        target.read(data)

    for number, seed in enumerate((target.seed, *target.more)):
        (corpus / f"seed-{number}").write_bytes(seed)
    (corpus / "changes").write_bytes(CHANGES + bytes(range(40)))
    limits = [f"-max_total_time={seconds}", "-timeout=5", "-rss_limit_mb=2048", "-max_len=200000"]
    places = ["-print_final_stats=1", f"-artifact_prefix={corpus.parent}/", str(corpus)]
    atheris.Setup([sys.argv[0], *limits, *places], one)
    atheris.Fuzz()


def main() -> int:
    """Fuzz every kind of file, each in a process of its own; returns the number of kinds with a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="in all")
    parser.add_argument("--target", help="one kind of file only")
    parser.add_argument("--corpus", type=Path, help="kept between runs; default: a temporary folder")
    args = parser.parse_args()
    if args.target and args.corpus:  # atheris ends the process without any clean-up
        (args.corpus / args.target).mkdir(parents=True, exist_ok=True)
        fuzz(args.target, args.seconds, args.corpus / args.target)
        return 1
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="bridge-corpus-", dir=memory) as temporary:
        os.environ.setdefault("BRIDGE_FUZZ_HOME", temporary)
        base = args.corpus or Path(temporary)
        import fuzz_targets

        names, failed, total = [args.target] if args.target else list(fuzz_targets.targets()), 0, 0
        for name in names:
            share = str(max(2, args.seconds // len(names)))
            command = [sys.executable, __file__, "--target", name, "--seconds", share, "--corpus", str(base)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = done.stderr.splitlines()
            count = next((int(line.split()[-1]) for line in lines if "number_of_executed_units" in line), 0)
            total += count
            print(f"{name:18} {count:8} inputs  {'ok' if done.returncode == 0 else 'FINDING'}", flush=True)
            if done.returncode != 0:
                failed += 1
                print("\n".join([*done.stdout.splitlines()[-40:], *lines[-40:]]), file=sys.stderr)
        print(f"{total} inputs, {failed} of {len(names)} kinds of file with a finding")
    return failed


if __name__ == "__main__":
    sys.exit(main())
