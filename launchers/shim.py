"""What every engine process starts through: `python -m bridge.launchers.shim RUN_DIR`.

It ends at once when the engine fails. JAX's own exit handlers would otherwise wait up to 300 s for the other
processes (measured).
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

FAILED = 1
EXPLAINED = "bridge: error: "


def main() -> None:
    """Run the engine of a run folder; never returns to the interpreter's exit handlers."""
    run_dir = Path(sys.argv[1])
    code = 0
    try:
        run(run_dir)
    except BaseException as error:
        code = _report(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(run_dir: Path) -> None:
    """Train what a run folder describes.

    Raises:
        BridgeError: what went wrong, explained.
    """
    from bridge.errors import LaunchError
    from bridge.launchers.run_file import RunFile

    run_file = RunFile.read(run_dir)
    if run_file.engine == "maxtext":
        from bridge.launchers import maxtext_runtime

        maxtext_runtime.train(run_dir, run_file)
    elif run_file.engine == "tunix":
        import runpy

        runpy.run_path(str(run_dir / run_file.program), run_name="__main__")
    else:
        raise LaunchError(f"there is no engine {run_file.engine!r}")


def _report(error: BaseException) -> int:
    from bridge.errors import BridgeError

    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED if error.code else 0
    if isinstance(error, BridgeError):
        print(f"{EXPLAINED}{error}", file=sys.stderr)
        return error.exit_code
    traceback.print_exception(error)
    return FAILED


if __name__ == "__main__":
    main()
