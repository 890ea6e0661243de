"""Reports: what the page says is what the log holds, it is well-formed, loads nothing, and a browser draws it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from checkpoints import convert, run
from conftest import Tiny
from run_folders import curve, write_run

from bridge import charts
from bridge.charts import Chart, Series
from bridge.commands.report import read_run, write_run_report
from bridge.errors import CheckpointError, printable
from bridge.report import Run, Verified, runs_page, verify_page

NASTY = "<script>alert('x')</script>&\x1b[31m\" onload=\"x"
SVG = "{http://www.w3.org/2000/svg}"


def parsed(page: str) -> ET.Element:
    """The page as XML: stricter than any browser; nothing in it may point outside."""
    root = ET.fromstring(page.replace("<!DOCTYPE html>\n", ""))
    for element in root.iter():
        assert element.tag.removeprefix(SVG) not in ("script", "link", "img", "iframe", "image", "use"), element.tag
        assert not [name for name in element.attrib if name in ("src", "href") or name.startswith("on")]
    # The one address is the name of a namespace.
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", page)
    return root


def cells(root: ET.Element) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    rows = [[cell.text or "" for cell in row] for row in root.iter("tr")]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture
def two_runs(tiny: Tiny, tmp_path: Path) -> list[Path]:
    first = write_run(tmp_path / "runs" / "maxtext-sft", tiny("mha"), curve(40), steps=40)
    options = {"method": "lora", "learning_rate": 1e-4, "steps": 30}
    second = write_run(tmp_path / "runs" / "tunix-lora", tiny("mha"), curve(30, 6.0, 1e-4), "tunix", **options)
    return [first, second]


def test_one_run(two_runs: list[Path]) -> None:
    out = write_run_report(two_runs[0])
    assert out == two_runs[0].parents[1] / "reports" / "maxtext-sft.html"
    root = parsed(out.read_text())
    rows = cells(root)
    assert rows["steps"] == ["40"]
    assert rows["last loss"] == [f"{7 * math.exp(-1) + 0.2 * math.sin(40):.4g}"]
    assert rows["best eval loss"] == [f"{7 * math.exp(-1) + 0.1:.4g} at step 40"]
    assert rows["seconds a step"] == ["0.53 (median)"]
    assert rows["time"] == ["0:00:30"]
    assert rows["train.steps"] == ["40"]
    assert rows["version of maxtext"] == ["1.2.3"]
    charts = ["Loss", "Learning rate", "Step time", "Tokens per second", "Model FLOP utilisation"]
    assert [heading.text for heading in root.iter("h2")] == charts
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [40, 5, 40, 40, 40, 40]
    assert rows["tokens a second"] == [f"{1024 / 0.53:.4g} (median)"]
    assert rows["model FLOP utilisation"] == [f"{0.2 / 0.53:.4g} (median)"]


def test_a_mixture_is_shown_with_its_weights(tiny: Tiny, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "r", tiny("mha"), curve(3))
    values = json.loads((folder / "run.json").read_text())
    values["spec"]["data"]["train"] = [{"source": "a.jsonl", "weight": 3.0}, {"source": "org/b", "weight": 0.5}]
    (folder / "run.json").write_text(json.dumps(values))
    rows = cells(parsed(write_run_report(folder).read_text()))
    assert rows["data.train"] == ["source a.jsonl weight 3, source org/b weight 0.5"]


def test_two_runs_side_by_side(two_runs: list[Path], tmp_path: Path) -> None:
    result = run("report", *two_runs, "--out", tmp_path / "x" / "both.html")
    assert result.stdout == f"{tmp_path / 'x' / 'both.html'}\n"
    root = parsed((tmp_path / "x" / "both.html").read_text())
    rows = cells(root)
    assert rows["steps"] == ["40", "30"]
    differing = list(root.iter("table"))[1]
    assert {row[0].text for row in differing.iter("tr")} - {None} == {
        "engine",
        "train.method",
        "train.steps",
        "train.learning_rate",
    }
    colors = {line.attrib["stroke"] for line in root.iter(f"{SVG}polyline")}
    assert colors == set(charts.COLORS[:2])


def test_a_step_done_again_counts_once_and_a_gap_stays_a_gap(tiny: Tiny, tmp_path: Path) -> None:
    losses = [(1, 5.0), (2, 4.0), (3, 9.0), (3, 3.0), (4, math.nan), (5, 2.0)]
    folder = write_run(tmp_path / "runs" / "r", tiny("mha"), [{"step": s, "loss": v} for s, v in losses])
    loss = read_run(folder).loss
    assert loss[2] == (3.0, 3.0)
    assert len(loss) == 5
    root = parsed(write_run_report(folder).read_text())
    assert [len(line.attrib["points"].split()) for line in root.iter(f"{SVG}polyline")] == [3, 1]


def test_names_settings_and_answers_are_escaped(tiny: Tiny, tmp_path: Path) -> None:
    page = runs_page([Run(NASTY, {NASTY: NASTY}, {"x": NASTY}, loss=((1, 1.0), (2, 2.0)))])
    assert "&lt;script&gt;" in page
    parsed(page)
    parsed(verify_page(Verified(NASTY, NASTY, {"ok": False, "different": [NASTY]})))
    folder = write_run(tmp_path / "runs" / "r", tiny("mha"), curve(3))
    (folder / "answers.json").write_text(json.dumps({"prompts": [NASTY], "before": ["yes"], "after": ["no"]}))
    assert cells(parsed(write_run_report(folder).read_text()))[printable(NASTY)] == ["yes", "no"]
    (folder / "answers.json").write_text(json.dumps({"prompts": ["a", "b"], "before": ["yes"], "after": ["no"]}))
    with pytest.raises(CheckpointError, match="equally long"):
        write_run_report(folder)


def test_no_run_and_no_metrics(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no run"):
        run("report", tmp_path)
    page = write_run_report(write_run(tmp_path / "runs" / "empty", tiny("mha"), [])).read_text()
    parsed(page)
    assert "Loss: nothing was recorded" in page


def test_ticks_are_round_and_inside() -> None:
    assert charts.ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert charts.ticks(0.13, 0.41) == [0.15, 0.2, 0.25, 0.3, 0.35, 0.4]
    assert charts.ticks(-4.2, -1.1) == [-4, -3, -2]
    assert charts.ticks(2e-5, 2e-4) == [5e-5, 1e-4, 1.5e-4, 2e-4]
    assert [round(10**t, 3) for t in charts.log_ticks(math.log10(0.3), math.log10(9))] == [0.5, 1, 2, 5]
    assert charts.log_ticks(-9.5, -2) == [-9, -8, -7, -6, -5, -4, -3, -2]
    assert charts.log_ticks(0.01, 0.02) == charts.ticks(0.01, 0.02)


def test_a_line_lies_where_its_values_are() -> None:
    """The corners of the plot: least and most of both axes; a larger value is higher, which is a smaller y."""
    chart = Chart("t", "x", "y", (Series("s", ((0, 1.0), (5, 3.0), (10, 2.0))),))
    (line,) = ET.fromstring(charts.line_chart(chart)).iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    top, base = charts.TOP, charts.HEIGHT - charts.BOTTOM
    assert points[0] == (charts.LEFT, base)
    assert points[1] == ((charts.LEFT + charts.WIDTH - charts.RIGHT) / 2, top)
    assert points[2] == (charts.WIDTH - charts.RIGHT, (top + base) / 2)


def test_thinning_keeps_every_peak() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    kept = charts.thinned(points)
    assert len(kept) <= charts.MOST_POINTS
    assert points[77_777] in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_the_histogram_counts_every_token() -> None:
    root = ET.fromstring(charts.histogram("t", "nats", [0.0, 1e-9, 1e-6, 1e-6, 1e-3, math.nan]))
    counts = [int((bar[0].text or "").split(": ")[1]) for bar in root.iter(f"{SVG}rect")]
    assert (sum(counts), counts[0], counts[-1], len(counts)) == (5, 2, 1, 40)


def test_verify_writes_a_page(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("scaled")
    step = convert(source, tmp_path / "ckpt", engine="tunix")
    out = tmp_path / "reports" / "verify.html"
    result = run("verify", step, "--tokens", 16, "--report", out, "--json")
    found = json.loads(result.stdout)
    root = parsed(out.read_text())
    rows = cells(root)
    assert rows["tokens"] == [str(found["tokens"])]
    assert rows["max_abs"] == [f"{found['max_abs']:.4g}"]
    assert [heading.text for heading in root.iter("h2")] == ["|Δlogit| by position", "KL of every token"]
    counts = [int((bar[0].text or "").split(": ")[1]) for bar in root.iter(f"{SVG}rect")]
    assert sum(counts) == found["tokens"]
    assert any(element.attrib.get("class") == "ok" for element in root.iter("p"))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on PATH")
def test_a_browser_draws_it_without_a_word(two_runs: list[Path], tmp_path: Path) -> None:
    run("report", *two_runs, "--out", tmp_path / "both.html")
    picture = tmp_path / "both.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--window-size=1000,1600"]
    argv = ["chromium", *flags, f"--screenshot={picture}", (tmp_path / "both.html").as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
