"""`bridge download` from a hub on loopback: what is fetched, what is checked before, and how it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_hub
import fault_models
import pytest
from checkpoints import run
from fake_hub import APPROVED, GOOD, SHA, Hub

from bridge.commands.download import check_disk
from bridge.errors import OutputError, SpecError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_models.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    files |= {"original/consolidated.00.pth": b"pickle", "pytorch_model.bin": b"pickle", "README.md": b"text"}
    with fake_hub.serve(files) as served:
        yield served


def download(hub: Hub, home: Path, *args: object, **more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.url} | more
    argv = [sys.executable, "-m", "bridge", "download", *map(str, args)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=120, cwd=home)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_into_the_cache(hub: Hub, model: Path, tmp_path: Path) -> None:
    done = download(hub, tmp_path, "team/open", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["revision"]) == ("team/open", SHA)
    assert found["bytes"] == sum(len(data) for data in contents(model).values())
    assert contents(Path(found["folder"])) == contents(model)
    assert tmp_path in Path(found["folder"]).parents
    assert f"{len(contents(model))} files" in done.stderr
    offline = download(hub, tmp_path, "team/open", "--json", HF_HUB_OFFLINE="1")
    assert json.loads(offline.stdout) == found


def test_into_a_folder_named_by_the_spec_and_on_after_a_break(hub: Hub, model: Path, tmp_path: Path) -> None:
    (tmp_path / "bridge.yaml").write_text("model: {source: team/shaky}\n")
    hub.broken.add("shaky")
    done = download(hub, tmp_path, "--out", "model")
    assert (done.returncode, done.stdout) == (1, "")
    assert "broke off" in done.stderr
    hub.broken.clear()
    done = download(hub, tmp_path, "--out", "model")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"folder    {tmp_path / 'model'}\nrevision  {SHA}\n"
    assert contents(tmp_path / "model") == contents(model)


def test_access_is_checked_before_anything_moves(hub: Hub, tmp_path: Path) -> None:
    done = download(hub, tmp_path, "team/gated", HF_TOKEN=GOOD)
    assert (done.returncode, done.stdout) == (1, "")
    assert "gated and your account has no access yet" in done.stderr
    assert not [line for line in hub.requests if line.startswith("GET /team/gated/resolve")]
    assert GOOD not in done.stderr
    assert download(hub, tmp_path, "team/gated", HF_TOKEN=APPROVED).returncode == 0


def test_pickles_alone_are_refused(tmp_path: Path) -> None:
    with fake_hub.serve({"config.json": b"{}", "pytorch_model.bin": b"pickle"}) as hub:
        done = download(hub, tmp_path, "team/pickles")
    assert done.returncode == 1
    assert "team/pickles has no safetensors" in done.stderr


def test_what_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="which model"):
        run("download")
    with pytest.raises(SpecError, match="no hub id"):
        run("download", "Llama")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bridge.yaml").write_text("model: {source: ./folder}\n")
    with pytest.raises(SpecError, match="nothing to download"):
        run("download")


def test_the_disk_is_measured_where_the_model_goes(tmp_path: Path) -> None:
    check_disk(1 << 70, tmp_path / "not" / "yet", 1 << 70)
    with pytest.raises(OutputError, match=f"{tmp_path} has"):
        check_disk(1 << 70, tmp_path / "not" / "yet", 0)
