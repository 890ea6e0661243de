"""Plans of MaxText runs."""

from __future__ import annotations

from bridge.launchers.plan import Launch, engine_env
from bridge.run_spec import RunSpec


def plan_launch(run: RunSpec, run_dir: str, hardware: str, python: str) -> tuple[Launch, ...]:
    """One process on this host, started through the shim.

    Args:
        run: the spec.
        run_dir: absolute folder of the run, with its `run.json` and `config.yml`.
        hardware: cpu, gpu or tpu.
        python: the interpreter.
    """
    argv = (python, "-m", "bridge.launchers.shim", run_dir)
    env = engine_env(hardware, run.cluster.memory_fraction, run.cluster.xla_flags)
    return (Launch(argv=argv, env=env, cwd=run_dir),)
