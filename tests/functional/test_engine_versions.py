"""Faked versions of the engines: tested ones run, later patches are warned of, all others are refused."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import checkpoints
import fault_models
import pytest

from bridge import engine_fixes
from bridge.errors import MissingDependency, UnsupportedError

FAKES = [
    ("maxtext", "0.2.5", "tested"),
    ("maxtext", "0.2.6", "untested"),
    ("maxtext", "0.2.5.post1", "broken"),
    ("maxtext", "0.2.10", "untested"),
    ("maxtext", "0.2.4", "broken"),
    ("maxtext", "0.3.0", "broken"),
    ("maxtext", "1.2.6", "broken"),
    ("maxtext", "0.2.6rc1", "broken"),
    ("maxtext", "nonsense", "broken"),
    ("tunix", "0.1.7", "tested"),
    ("tunix", "0.1.8", "untested"),
    ("tunix", "0.1.5", "broken"),
    ("tunix", "0.2.0", "broken"),
]


@pytest.mark.parametrize(("engine", "version", "standing"), FAKES)
def test_each_version_has_its_standing(
    engine: str, version: str, standing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    package, tested = engine_fixes.PACKAGES[engine], engine_fixes.TESTED[engine][-1]
    assert engine_fixes.standing(engine, version) == standing
    if standing == "broken":
        with pytest.raises(UnsupportedError, match=f"{package} {version} is installed") as found:
            engine_fixes.require_tested(engine)
        assert f"pip install '{package}=={tested}'" in str(found.value)
        return
    assert engine_fixes.require_tested(engine) == version
    said = capsys.readouterr().err
    assert said == "" if standing == "tested" else f"{package} {version} is untested, {tested} is tested" in said


@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_an_engine_that_is_not_there(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(MissingDependency, match=f"package {engine_fixes.PACKAGES[engine]}") as found:
        engine_fixes.require_tested(engine)
    assert f"bridge-llama[{engine}]" in str(found.value)


@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_a_launch_on_a_broken_version_is_refused_before_anything_is_written(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    checkpoints.convert(hf, tmp_path / "checkpoints" / engine, engine=engine)
    (tmp_path / "data.jsonl").write_text("{}\n")
    (tmp_path / "bridge.yaml").write_text("model: {source: hf}\ndata: {train: data.jsonl}\ntrain: {steps: 1}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_fixes, "engine_version", lambda _: "0.9.9")
    with pytest.raises(UnsupportedError, match=r"0\.9\.9 is installed"):
        checkpoints.run("launch", "sft", "--engine", engine)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("missing", [AttributeError("no attribute"), ImportError("no module")])
def test_a_correction_that_finds_nothing_to_correct_stops_the_run(
    missing: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untested engine is tried, but never run without one of its corrections."""

    def install(_: engine_fixes.Frequencies) -> None:
        raise missing

    fix = engine_fixes.Fix("rope", "maxtext", "hard-coded constants", "tests", install)
    monkeypatch.setattr(engine_fixes, "fixes", lambda: (fix,))
    monkeypatch.setattr(engine_fixes, "engine_version", lambda _: "0.2.6")
    with pytest.raises(UnsupportedError, match=r"the correction rope does not fit maxtext 0\.2\.6"):
        engine_fixes.apply("maxtext", (1.0,))
