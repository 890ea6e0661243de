"""What a process of the system tests runs: it meets the others as the shim does, and adds numbers over all."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    """`collective.py RUN_DIR [MODE]`: prints `sum=<1 + ... + n>`.

    MODE `raise` fails on process 1 before that, `wait` sleeps after it, `loop` adds again and again; in `hang`, under
    the watchdog, process 1 then stands still, as in a data loader that waits for ever, and process 0 waits for it.
    """
    from bridge.launchers import shim
    from bridge.launchers.member import Member
    from bridge.launchers.stopping import Stopping
    from bridge.launchers.watchdog import Watchdog

    member = Member.of(os.environ)
    stopping = Stopping(member.process, member.count, member.grace)
    stopping.install()
    shim.meet(Path(sys.argv[1]), member)
    shim.initialize(member, stopping)
    if sys.argv[2:] == ["raise"] and member.process == 1:
        raise RuntimeError("process 1 fails on purpose")
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    total = multihost_utils.process_allgather(np.float32(member.process + 1)).sum()
    print(f"bridge: sum={total:g} of {jax.process_count()} processes, {jax.device_count()} devices", flush=True)
    if sys.argv[2:] == ["hang"]:
        Watchdog(member.stall_timeout, shim.EXPLAINED)
    while sys.argv[2:] in (["loop"], ["hang"]):
        if sys.argv[2:] == ["hang"] and member.process == 1:
            time.sleep(600)
        multihost_utils.process_allgather(np.float32(member.process + 1))
        print("bridge: going on", flush=True)
    if sys.argv[2:] == ["wait"]:
        time.sleep(60)
    jax.distributed.shutdown()


if __name__ == "__main__":
    from bridge.launchers.shim import report

    if os.environ.get("BRIDGE_LIFELINE"):
        from bridge.launchers.stopping import end_with_launcher

        end_with_launcher()
    code = 0
    try:
        main()
    except BaseException as error:  # as the shim: exit at once, whatever it is
        code = report(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
