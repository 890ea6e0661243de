"""`bridge report`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bridge import report as pages
from bridge import sidecar
from bridge.commands import common
from bridge.errors import CheckpointError, OutputError
from bridge.model_spec import read_json
from bridge.report import Answer, Run

ANSWERS = "answers.json"
LEFT_OUT = ("model.tokenizer", "workdir")
"""Settings that say where, not what."""


@click.command(
    epilog=common.examples(
        "bridge report runs/maxtext-sft --answers",
        "bridge report runs/maxtext-sft runs/tunix-lora --out reports/both.html",
    )
)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Default: reports/<run>.html beside runs/."
)
@click.option(
    "--answers", "ask", is_flag=True, help="Ask base and trained model first: data.prompts, or the data's first three."
)
def command(runs: tuple[Path, ...], out: Path | None, ask: bool) -> None:
    """Write an HTML page of one run, or of several side by side: curves, outcomes, settings that differ, answers.

    The page is one file, with nothing to load. Answers before and after training are shown where they were asked for:
    the engine's own model gives them, greedily, in float32 on the CPU.
    """
    if ask:
        from bridge.commands.answers import write_answers

        for folder in runs:
            require_run(folder)
            write_answers(folder.absolute())
    found = unique_names([read_run(folder) for folder in runs], runs)
    out = out or default_out(runs)
    write_page(out, pages.runs_page(found))
    click.echo(str(out))


def write_run_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of one run; returns its file, `<workdir>/reports/<run>.html` unless `out` names another.

    Raises:
        CheckpointError: the folder is no run.
        OutputError: the page cannot be written.
    """
    out = out or default_out((run_dir,))
    write_page(out, pages.runs_page([read_run(run_dir)]))
    return out


def default_out(runs: tuple[Path, ...]) -> Path:
    """`reports/` beside `runs/`."""
    name = "-".join(dict.fromkeys(folder.resolve().name for folder in runs))
    return runs[0].resolve().parents[1] / "reports" / f"{name[:120]}.html"


def write_page(out: Path, page: str) -> None:
    """Write a page, with its folder.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error


def read_run(folder: Path) -> Run:
    """A run's folder as a report needs it.

    Raises:
        CheckpointError: it is no run, or damaged.
    """
    from bridge.launchers import metrics

    values = read_json(require_run(folder))
    facts = sidecar.read(folder)
    entries = list(metrics.read(folder))
    times = [entry["time"] for entry in entries if isinstance(entry.get("time"), int | float)]
    spec = values.get("spec")
    return Run(
        name=folder.resolve().name,
        settings={k: v for k, v in flat(spec if isinstance(spec, dict) else {}).items() if k not in LEFT_OUT},
        facts=facts_of(values, facts),
        loss=points(entries, "loss"),
        eval_loss=points(entries, "eval_loss"),
        learning_rate=points(entries, "learning_rate"),
        step_time=points(entries, "step_time"),
        tokens_per_second=points(entries, "tokens_per_second"),
        mfu=points(entries, "mfu"),
        seconds=max(times) - min(times) if times else None,
        answers=answers(folder / ANSWERS),
    )


def require_run(folder: Path) -> Path:
    """The file that makes a folder a run.

    Raises:
        CheckpointError: there is none.
    """
    from bridge.launchers.run_file import FILE

    if not (folder / FILE).is_file():
        raise CheckpointError(f"{folder} is no run: it has no {FILE}", hint="runs lie in runs/<engine>-<method>")
    return folder / FILE


def points(entries: Iterable[Mapping[str, Any]], key: str) -> tuple[tuple[float, float], ...]:
    """(step, value) of every entry that has the key, by step; a step that was done again counts as the last time."""
    found = {e["step"]: float(e[key]) for e in entries if isinstance(e.get(key), int | float)}
    return tuple((float(step), found[step]) for step in sorted(found))


def facts_of(values: Mapping[str, Any], facts: sidecar.Sidecar | None) -> dict[str, Any]:
    """Where a run comes from and what it ran on."""
    model = values.get("model")
    found: dict[str, Any] = {"engine": values.get("engine"), "epochs": values.get("epochs")}
    if facts is not None:
        found |= {"method": facts.method, "base": facts.source.get("origin"), "revision": facts.source.get("revision")}
        found |= {"parameters": f"{facts.model.parameters:,}"}
        found |= {f"version of {name}": version for name, version in facts.versions.items()}
    return found | flat({"model facts": model} if isinstance(model, dict) else {})


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings with dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def answers(path: Path) -> tuple[Answer, ...]:
    """`answers.json` of a run where there is one: lists `prompts`, `before`, `after` of equal length.

    Raises:
        CheckpointError: it is something else.
    """
    if not path.is_file():
        return ()
    values = read_json(path)
    lists = [values.get(key) for key in ("prompts", "before", "after")]
    columns = [part for part in lists if isinstance(part, list) and all(isinstance(line, str) for line in part)]
    if len(columns) != 3 or len(set(map(len, columns))) != 1:
        raise CheckpointError(f"{path} must hold prompts, before and after: lists of texts, equally long")
    return tuple(Answer(*line) for line in zip(*columns, strict=True))


def unique_names(runs: list[Run], folders: tuple[Path, ...]) -> list[Run]:
    """Runs of the same name in other workdirs are told apart by their paths."""
    names = [run.name for run in runs]
    return [
        replace(run, name=str(folder)) if names.count(run.name) > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]
