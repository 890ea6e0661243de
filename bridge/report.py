"""Reports one can look at: one self-contained HTML page, rendered from values. No script, no font, no request."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import bridge
from bridge.charts import Chart, Point, Series, histogram, line_chart, number, text

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --faint: #6a7076; --line: #d9dde1; --paper: #fff; --bar: #0b62c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --faint: #9aa1a8; --line: #3a4046; --paper: #16181b; --bar: #5aa2f0; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
svg { width: 100%; height: auto; display: block; } svg.key { width: 24px; height: 12px; display: inline-block; }
.grid { stroke: var(--line); } .axis { stroke: var(--faint); } .limit { stroke: #d1480f; stroke-dasharray: 3 3; }
.bar { fill: var(--bar); } .tick, .label { fill: var(--faint); font-size: 12px; }
.legend span { margin-right: 1.2rem; } .none, footer { color: var(--faint); }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
.ok { color: #2a8a3e; font-weight: 600; } .failed { color: #d1480f; font-weight: 600; }
""".strip()


@dataclass(frozen=True)
class Answer:
    """What the model said to a prompt before and after training."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class Run:
    """A run as a report needs it: points are (step, value), `settings` are the spec's with dotted names."""

    name: str
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    loss: tuple[Point, ...] = ()
    eval_loss: tuple[Point, ...] = ()
    learning_rate: tuple[Point, ...] = ()
    step_time: tuple[Point, ...] = ()
    tokens_per_second: tuple[Point, ...] = ()
    mfu: tuple[Point, ...] = ()
    """Model FLOP utilisation, from 0 to 1; empty where the device's peak is not known."""
    seconds: float | None = None
    """From the first to the last entry of the log."""
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class Verified:
    """What `bridge verify` found; points are (position, max |Δlogit|), `kl` is nats, one value a token."""

    checkpoint: str
    reference: str
    result: Mapping[str, Any]
    difference: tuple[Point, ...] = ()
    kl: tuple[float, ...] = field(default=(), repr=False)


def runs_page(runs: Sequence[Run]) -> str:
    """One run, or several side by side: curves on shared axes, outcomes, the settings that differ, facts."""
    names = ", ".join(run.name for run in runs)
    parts = [f"<h1>{text(names)}</h1>", _table(("", *(run.name for run in runs)), _outcomes(runs))]
    parts += [f"<h2>{text(chart.title)}</h2>{line_chart(chart)}" for chart in _charts(runs)]
    if len(runs) > 1:
        differing = _differing([run.settings for run in runs])
        parts.append("<h2>Settings that differ</h2>")
        parts.append(_table(("", *(run.name for run in runs)), differing) if differing else "<p>None.</p>")
    for run in runs:
        if run.answers:
            said = [(answer.prompt, answer.before, answer.after) for answer in run.answers]
            parts.append(f"<h2>Answers, {text(run.name)}</h2>{_table(('prompt', 'before', 'after'), said)}")
    for run in runs:
        rows = [(key, _shown(value)) for key, value in {**run.facts, **run.settings}.items()]
        parts.append(f"<details><summary>Facts and settings of {text(run.name)}</summary>{_table((), rows)}</details>")
    return page(names, parts)


def verify_page(found: Verified) -> str:
    """A verification: the verdict and its numbers, |Δlogit| by position, the KL of every token."""
    ok = bool(found.result.get("ok"))
    verdict = f'<p class="{"ok" if ok else "failed"}">{"ok" if ok else "FAILED"}</p>'
    rows = [("checkpoint", found.checkpoint), ("reference", found.reference)]
    rows += [(key, _shown(value)) for key, value in found.result.items() if key not in ("ok", "different")]
    parts = ["<h1>bridge verify</h1>", verdict, _table((), rows)]
    if "different" in found.result:
        names = [(name,) for name in found.result["different"]]
        parts += ["<h2>Tensors that differ</h2>", _table((), names) if names else "<p>None.</p>"]
        return page("bridge verify", parts)
    limit = found.result.get("tolerance")
    line = Series("max |Δlogit|", tuple(sorted(found.difference)))
    chart = Chart("|Δlogit| by position", "position", "max |Δlogit|", (line,), log_y=True, limit=limit)
    parts.append(f"<h2>{text(chart.title)}</h2>{line_chart(chart)}")
    if limit is not None:
        parts.append(f'<p class="none">Dashed: the tolerance, {text(number(limit))}.</p>')
    parts.append(f"<h2>KL of every token</h2>{histogram('KL of every token', 'nats', found.kl)}")
    return page("bridge verify", parts)


def page(title: str, parts: Sequence[str]) -> str:
    """A whole document; well-formed as XML too."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n<body>"
        + "\n".join(parts)
        + f"\n<footer><p>bridge {text(bridge.__version__)}</p></footer></body></html>\n"
    )


def _charts(runs: Sequence[Run]) -> list[Chart]:
    several = len(runs) > 1

    def lines(kind: str, label: str, **style: bool) -> list[Series]:
        found = [(run, getattr(run, kind)) for run in runs]
        return [
            Series(f"{run.name} {label}" if several else label, points, color=runs.index(run), **style)
            for run, points in found
            if points
        ]

    loss = [*lines("loss", "loss"), *lines("eval_loss", "eval loss", dashed=True, dots=True)]
    charts = [
        Chart("Loss", "step", "nats a token", tuple(loss)),
        Chart("Learning rate", "step", "learning rate", tuple(lines("learning_rate", "learning rate"))),
        Chart("Step time", "step", "seconds", tuple(lines("step_time", "step time")), log_y=True),
        Chart("Tokens per second", "step", "tokens/s", tuple(lines("tokens_per_second", "tokens per second"))),
        Chart("Model FLOP utilisation", "step", "of the devices' peak", tuple(lines("mfu", "MFU"))),
    ]
    return [chart for chart in charts if chart.series or chart.title == "Loss"]


def _outcomes(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    rows = {
        "steps": [str(int(run.loss[-1][0])) if run.loss else "0" for run in runs],
        "last loss": [number(run.loss[-1][1]) if run.loss else "-" for run in runs],
        "first eval loss": [number(run.eval_loss[0][1]) if run.eval_loss else "-" for run in runs],
        "best eval loss": [_best(run) for run in runs],
        "seconds a step": [_median(run.step_time) for run in runs],
        "tokens a second": [_median(run.tokens_per_second) for run in runs],
        "model FLOP utilisation": [_median(run.mfu) for run in runs],
        "time": ["-" if run.seconds is None else _duration(run.seconds) for run in runs],
    }
    return [(key, *values) for key, values in rows.items()]


def _best(run: Run) -> str:
    finite = [point for point in run.eval_loss if math.isfinite(point[1])]
    if not finite:
        return "-"
    step, loss = min(finite, key=lambda point: (point[1], point[0]))
    return f"{number(loss)} at step {int(step)}"


def _median(points: tuple[Point, ...]) -> str:
    """Without the first step, which compiles."""
    times = [seconds for _, seconds in points[1:] or points]
    return f"{number(statistics.median(times))} (median)" if times else "-"


def _duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    names = list(dict.fromkeys(name for values in settings for name in values))
    rows = [(name, *(_shown(values.get(name)) for values in settings)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_shown(part)}" for key, part in value.items())
    return "-" if value is None else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = f"<tr>{''.join(f'<th>{text(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{top}{body}</table>"
