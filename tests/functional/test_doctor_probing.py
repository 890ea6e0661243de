"""The looks that `bridge doctor` takes: none hangs, none shows a token, each failure is understood."""

from __future__ import annotations

import json
from pathlib import Path

import fake_hub
import pytest
from checkpoints import run
from conftest import Tiny
from fake_hub import APPROVED, GOOD, WRONG

from bridge.commands import probing
from bridge.commands.workspace import Workspace


def program(folder: Path, body: str) -> str:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def spec(folder: Path, source: object) -> Path:
    path = folder / "bridge.yaml"
    path.write_text(f"model: {{source: {source}}}\n")
    return path


def test_the_whole_on_this_machine(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", GOOD)
    monkeypatch.setenv("M_STEPS", "7")
    monkeypatch.setenv("XLA_FLAGS", "--xla_is_not_a_flag=1")
    result = run("doctor", "--spec", spec(tmp_path, tiny("mha")), "--json")
    checks = {(check["name"], check["level"]): check for check in json.loads(result.stdout)["checks"]}
    assert result.code == 1
    assert "--xla_is_not_a_flag=1" in checks["variables", "error"]["text"]
    assert checks["variables", "warning"]["fix"] == "unset M_STEPS"
    assert checks["login", "ok"]
    assert checks["model", "ok"]["text"].endswith("a local folder")
    assert checks["maxtext", "ok"]["text"] == "maxtext 0.2.5"
    assert GOOD not in result.stdout + result.stderr


def test_a_wrong_spec_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "bridge.yaml").write_text("model: {source: x}\ntrain: {stepz: 1}\n")
    result = run("doctor", "--spec", tmp_path / "bridge.yaml")
    assert "did you mean steps?" in result.stdout
    assert result.code == 1


def test_jax_that_hangs_dies_or_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "SECONDS", 0.3)
    assert probing.jax_devices(program(tmp_path, "exec sleep 20")).error == "it did not answer within 0.3 s"
    monkeypatch.setattr(probing, "SECONDS", 20)
    assert probing.jax_devices(program(tmp_path, "kill -SEGV $$")).error == "its process ended with code -11"
    raised = probing.jax_devices(program(tmp_path, "echo Traceback >&2; echo 'RuntimeError: no cuda' >&2; exit 1"))
    assert raised.error == "RuntimeError: no cuda"
    good = probing.jax_devices(program(tmp_path, """echo noise; echo '["gpu", ["H100", "H100"]]'"""))
    assert (good.platform, good.devices, good.error) == ("gpu", ("H100", "H100"), None)


def test_nvidia_smi(tmp_path: Path) -> None:
    assert probing.nvidia("no-such-nvidia-smi") is None
    found = probing.nvidia(program(tmp_path, "echo '580.65.06, NVIDIA H200, 143771 MiB'"))
    assert found is not None
    assert (found.driver, found.devices, found.error) == ("580.65.06", ("NVIDIA H200 143771 MiB",), None)
    failed = probing.nvidia(program(tmp_path, "echo 'Driver/library version mismatch'; exit 18"))
    assert failed is not None
    assert failed.error == "Driver/library version mismatch"


@pytest.mark.parametrize(
    ("name", "token", "state"),
    [
        ("team/open", None, "ok"),
        ("team/gated", None, "gated"),
        ("team/gated", GOOD, "gated"),
        ("team/gated", APPROVED, "ok"),
        ("team/missing", GOOD, "not found"),
        ("team/open", WRONG, "refused"),
        ("team/down", None, "unreachable"),
    ],
)
def test_access_to_the_model(name: str, token: str | None, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with fake_hub.serve({"config.json": b"{}"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert probing.on_hub(name, None).state == state


def test_no_hub_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert probing.on_hub("team/open", None).state == "unreachable"


def test_offline_is_said_without_asking(tmp_path: Path) -> None:
    found = probing.model_of(Workspace.open(spec(tmp_path, "team/never-seen")))
    assert (found.place, found.state) == ("hub", "offline")


def test_damaged_and_missing_folders(tiny: Tiny, tmp_path: Path) -> None:
    found = probing.model_of(Workspace.open(spec(tmp_path, "./nothing")))
    assert (found.state, "there is no folder" in found.detail) == ("damaged", True)
    (tmp_path / "empty").mkdir()
    found = probing.model_of(Workspace.open(spec(tmp_path, "./empty")))
    assert (found.state, "config.json" in found.detail) == ("damaged", True)
    assert probing.model_of(Workspace.open(spec(tmp_path, tiny("mha")))).state == "ok"


def test_memory_and_names(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    2048 kB\n")
    assert probing.free_memory(tmp_path / "meminfo") == 2048 * 1024
    assert probing.free_memory(tmp_path / "none") > 1 << 28
    assert "127.0.0.1" in probing.addresses("localhost")
    assert probing.addresses("no-such-host.invalid", seconds=3) == ()


def test_requirements_of_a_package_that_is_there() -> None:
    found = {(need.extra, need.name): need for need in probing.requirements()}
    assert found["", "click"].satisfied
    assert found["maxtext", "google-tunix"].wanted == "==0.1.7"
    assert not [extra for extra, _ in found if extra in ("dev", "all")]
    assert probing.requirements("no-such-distribution") == ()
