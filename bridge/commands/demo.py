"""`bridge demo`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import click

from bridge.commands import common
from bridge.demo import flow
from bridge.demo.flow import Step
from bridge.errors import BridgeError

PRESETS = {"maxtext": "smollm2-135m", "tunix": "smollm2-135m-qlora"}
ANSWERS = "answers.json"


@click.command(epilog=common.examples("bridge demo", "bridge demo --out ~/bridge-demo"))
@click.option("--engine", type=click.Choice(sorted(PRESETS)), default="maxtext", show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Default: demo, or demo-tunix.")
def command(engine: str, out: Path | None) -> None:
    """The whole way on a real small model, on a CPU: convert, train, export, verify.

    The model is SmolLM2-135M-Instruct (Llama architecture, Apache-2.0), out of a PyPI package. The steps are the
    commands that you would type for Llama 3.1 8B: full SFT with maxtext, QLoRA with tunix. What is already there is
    reused.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # the demo says itself how far it is
    from bridge.demo.model import ensure_model

    common.on_cpu()
    begun = time.monotonic()
    out = (out or Path("demo" if engine == "maxtext" else f"demo-{engine}")).absolute()
    ensure_model(out / "model")
    flow.write_inputs(out, PRESETS[engine])
    from bridge import run_spec

    method = run_spec.load(out / "bridge.yaml").train.method
    run_dir = out / "runs" / f"{engine}-{method}"
    answers = _answers(out, "before", out / "model")
    for step in _steps(out, engine, method, run_dir):
        if step.done is not None and step.done.exists():
            common.say(f"\n$ {step.shown}\n(done before: {step.done.relative_to(out)})")
            continue
        common.say(f"\n$ {step.shown}")
        output = flow.run(step, out)
        if step.argv[0] == "verify":
            click.echo(output, nl=False)
    answers = _answers(out, "after", out / "export" / "hf")
    _show(out, run_dir, answers)
    common.say(f"\n{time.monotonic() - begun:.0f} s in all. Everything lies in {out}:")
    common.say(f"  bridge.yaml             the spec: edit it, then `bridge launch {method} --run second`")
    common.say("  checkpoints/, runs/     the converted checkpoint; config, logs, metrics and checkpoints of the run")
    common.say("  reports/                one HTML page of the run's curves")
    common.say("  export/hf/              a Hugging Face folder: AutoModelForCausalLM.from_pretrained loads it")
    common.say(f"  tensorboard --logdir {run_dir.relative_to(out)}/tensorboard")


def _steps(out: Path, engine: str, method: str, run_dir: Path) -> tuple[Step, ...]:
    resume = ("--resume",) if (run_dir / "bridge.json").exists() else ()
    return (
        Step(("convert", "--to", engine, "--check"), out / "checkpoints" / engine / "bridge.json"),
        Step(("launch", method, "--engine", engine, *resume), _finished(out, run_dir)),
        Step(("export", "--to", "hf"), out / "export" / "hf" / "config.json"),
        Step(("verify",)),
    )


def _finished(out: Path, run_dir: Path) -> Path:
    """The folder of the run's last checkpoint."""
    from bridge import run_spec

    return run_dir / "checkpoints" / str(run_spec.load(out / "bridge.yaml").train.steps) / "commit_success.txt"


def _answers(out: Path, when: str, folder: Path) -> dict[str, list[str]]:
    """The answers before and after, kept in a file so that a second run need not generate them again."""
    from bridge.demo.answers import answer

    path = out / ANSWERS
    known: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if when not in known or when == "after":
        common.say(f"\nanswers {when} training (PyTorch, greedy) ...")
        known[when] = answer(folder, flow.PROMPTS, max_new_tokens=40)
        path.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return known


def _show(out: Path, run_dir: Path, answers: dict[str, list[str]]) -> None:
    lines = flow.curve(run_dir)
    if not lines:
        raise BridgeError(f"{run_dir} has no metrics", hint=f"remove {out} and run the demo again")
    click.echo("\nstep  loss")
    for line in lines:
        click.echo(line)
    for prompt, before, after in zip(flow.PROMPTS, answers["before"], answers["after"], strict=True):
        click.echo(
            f"\n> {prompt}\n  before: {' '.join(before.split())[:240]}\n  after:  {' '.join(after.split())[:240]}"
        )
