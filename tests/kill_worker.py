"""A process that imports once and forks for every bridge command, so that killing one costs a fraction of a second.

Reads JSON lines {"args": [...], "kill_after": seconds | null, "kill_at": number of a file event | null} and answers
each with {"signal": ..., "code": ..., "seconds": ..., "events": ...}. A file event is an audit event of Python: a
folder made, a file opened, renamed or removed; killing at a number is exact where a time is not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from typing import Any

EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "open", "shutil.copyfile", "shutil.rmtree")


def child(args: list[str], kill_at: int | None, report: int) -> None:
    """Run a command in the forked process; never returns."""
    from bridge.cli import cli
    from bridge.errors import BridgeError

    count = 0

    def audit(event: str, _: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS:
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    code, said = 0, io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            cli.main(args, standalone_mode=False)
        except BridgeError as error:
            code = 1
            said.write(str(error))
        except BaseException as error:
            code = 70
            said.write(repr(error))
    os.write(report, json.dumps({"events": count, "said": said.getvalue()[-2000:]}).encode())
    os._exit(code)


def main() -> None:
    """Import everything that a conversion needs, start no thread, then serve."""
    import click  # noqa: F401
    import numpy as np  # noqa: F401
    import tensorstore  # noqa: F401

    import bridge.commands.convert
    import bridge.commands.export
    import bridge.converters.check
    import bridge.converters.engine_tree
    import bridge.converters.plan
    import bridge.converters.tables.llama_maxtext
    import bridge.converters.tables.llama_tunix
    import bridge.converters.tokenizer_file
    import bridge.converters.transfer
    import bridge.launchers.metrics
    import bridge.outputs  # noqa: F401

    if threading.active_count() != 1:
        raise RuntimeError("a process with threads cannot be forked safely")
    for line in sys.stdin:
        asked = json.loads(line)
        reads, writes = os.pipe()
        begin = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child(asked["args"], asked["kill_at"], writes)
        os.close(writes)
        if asked["kill_after"] is not None:
            time.sleep(asked["kill_after"])
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(reads) as pipe:
            told = pipe.read()
        status = os.waitpid(pid, 0)[1]
        answer = {
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "seconds": time.monotonic() - begin,
            **(json.loads(told) if told else {}),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
