"""`bridge download` from a hub on loopback: what is fetched, what is checked before, and how it goes on."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fake_hub
import fault_models
import pytest
from checkpoints import run
from fake_hub import APPROVED, GOOD, SHA, Hub

from bridge import hub_lock
from bridge.commands import common
from bridge.commands.download import check_disk, watched
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
    return bridge(hub, home, "download", *args, **more)


def bridge(hub: Hub, home: Path, *args: object, **more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.url} | more
    argv = [sys.executable, "-m", "bridge", *map(str, args)]
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


LATER = "fedcba9876543210fedcba9876543210fedcba98"


def lock(folder: Path) -> dict[str, object]:
    values: dict[str, object] = json.loads((folder / "bridge.json").read_text())
    assert values["kind"] == "lock"
    models = values["models"]
    assert isinstance(models, dict)
    return models


def test_the_lock_of_a_spec_is_kept_by_download_and_convert_until_update(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "bridge.yaml").write_text("model: {source: team/open}\n")
    assert download(hub, tmp_path, "--json").returncode == 0
    assert lock(tmp_path) == {"team/open": {"asked": None, "commit": SHA}}
    hub.move(LATER)
    done = download(hub, tmp_path, "--json")
    assert json.loads(done.stdout)["revision"] == SHA
    assert f"commit {SHA[:12]}, as bridge.json has it; main is at {LATER[:12]} now, --update takes it" in done.stderr
    done = bridge(hub, tmp_path, "convert", "--to", "maxtext")
    assert done.returncode == 0, done.stderr
    assert f"team/open: commit {SHA[:12]}, as bridge.json has it" in done.stderr
    facts = json.loads((tmp_path / "checkpoints" / "maxtext" / "bridge.json").read_text())
    assert (facts["source"]["origin"], facts["source"]["revision"]) == ("team/open", SHA)
    # The cache alone serves the pinned commit, and the lock is no checkpoint's sidecar to whoever looks for one.
    offline = {"HF_HUB_OFFLINE": "1"}
    assert json.loads(download(hub, tmp_path, "--json", **offline).stdout)["revision"] == SHA
    (tmp_path / "checkpoints" / "maxtext" / "bridge.json").unlink()
    done = bridge(hub, tmp_path, "export", "checkpoints/maxtext", "--out", "back", **offline)
    assert done.returncode == 0, done.stderr
    # Moving it is asked for.
    done = download(hub, tmp_path, "--update", "--json")
    assert json.loads(done.stdout)["revision"] == LATER
    assert lock(tmp_path) == {"team/open": {"asked": None, "commit": LATER}}
    # A commit that the hub lost is said so.
    hub.commits.discard(LATER)
    hub.head = SHA
    done = download(hub, tmp_path)
    assert done.returncode == 1
    assert f"no longer the commit {LATER}, to which bridge.json is pinned" in done.stderr
    assert "bridge download --update" in done.stderr


def test_convert_pins_what_it_downloads(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "bridge.yaml").write_text("model: {source: team/open}\n")
    assert bridge(hub, tmp_path, "convert", "--to", "tunix", "--dry-run").returncode == 0
    assert not (tmp_path / "bridge.json").exists()
    done = bridge(hub, tmp_path, "convert", "--to", "tunix")
    assert f"team/open: commit {SHA[:12]}\n" in done.stderr
    assert lock(tmp_path) == {"team/open": {"asked": None, "commit": SHA}}


def test_the_lock_lies_beside_a_folder_too_and_another_revision_is_not_the_pinned_one(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    assert download(hub, tmp_path, "team/open", "--out", "models/open").returncode == 0
    assert lock(tmp_path / "models") == {"team/open": {"asked": None, "commit": SHA}}
    assert contents(tmp_path / "models" / "open") == contents(model)
    hub.move(LATER)
    done = download(hub, tmp_path, "team/open", "--out", "models/open", "--json")
    assert json.loads(done.stdout)["revision"] == SHA
    done = download(hub, tmp_path, "team/open", "--revision", LATER, "--out", "models/other", "--json")
    assert json.loads(done.stdout)["revision"] == LATER
    done = download(hub, tmp_path, "team/open", "--json")
    assert json.loads(done.stdout)["revision"] == LATER, "nothing pins what is in the cache alone"


def test_a_tokenizer_of_another_model_comes_without_its_weights(hub: Hub, model: Path, tmp_path: Path) -> None:
    (tmp_path / "bridge.yaml").write_text("model: {source: team/open, tokenizer: team/other}\n")
    done = download(hub, tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    small = {name for name in contents(model) if "safetensors" not in name}
    assert contents(Path(found["tokenizer"]["folder"])).keys() == small
    assert lock(tmp_path).keys() == {"team/open", "team/other"}
    # A tokenizer that is not given out is said before the weights move.
    (tmp_path / "bridge.yaml").write_text("model: {source: team/more, tokenizer: team/gated}\n")
    done = download(hub, tmp_path, HF_TOKEN=GOOD)
    assert done.returncode == 1
    assert "team/gated is gated" in done.stderr
    assert not [line for line in hub.requests if "more/resolve" in line and line.startswith("GET")]


def test_plan_asks_for_the_small_files_alone(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "bridge.yaml").write_text("model: {source: team/open}\n")
    done = bridge(hub, tmp_path, "plan", "--devices", "1x24GB", "--json")
    assert done.returncode == 0, done.stderr
    assert not [line for line in hub.requests if line.startswith("GET") and line.endswith(".safetensors")]
    # What is there is no model yet, to nobody.
    done = bridge(hub, tmp_path, "convert", "--to", "tunix", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "team/open is not in the cache, and HF_HUB_OFFLINE is set" in done.stderr
    assert bridge(hub, tmp_path, "convert", "--to", "tunix").returncode == 0


@pytest.mark.parametrize("models", ["1", '{"a/b": {"asked": 1, "commit": "x"}}', '{"a/b": 3}', '{"a/b": {}}'])
def test_a_damaged_lock_is_refused(models: str, tmp_path: Path) -> None:
    (tmp_path / "bridge.json").write_text(f'{{"kind": "lock", "models": {models}}}')
    with pytest.raises(SpecError, match="damaged"):
        hub_lock.read(tmp_path)


def test_a_checkpoints_sidecar_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "bridge.json").write_text('{"format": 1}')
    assert hub_lock.read(tmp_path) == {}
    with pytest.raises(OutputError, match="belongs to a checkpoint"):
        hub_lock.write(tmp_path, "team/open", None, SHA)


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


def test_progress_where_no_terminal_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line each tenth and not oftener than every five seconds, by a clock that runs fast here."""
    ticks = itertools.count(0, 6)
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(ticks))
    (tmp_path / "whole").write_bytes(bytes(1_000_000))
    with watched("a model", 10_000_000, tmp_path, every=0.01):
        for share in range(1, 9):
            (tmp_path / "sub").mkdir(exist_ok=True)
            (tmp_path / "sub" / "x.incomplete").write_bytes(bytes(share * 1_000_000))
            time.sleep(0.05)
    lines = capsys.readouterr().err.splitlines()
    shown = [int(line.split()[2]) for line in lines[:-1]]
    assert shown == sorted(set(shown))
    assert len(shown) > 4
    assert set(shown) <= set(range(10, 90, 10))
    assert lines[0].endswith("% of 10.0 MB")
    assert lines[-1].startswith("a model: complete after")
    with pytest.raises(OSError, match="broken"), watched("a model", 10, tmp_path):
        raise OSError("broken")
    assert capsys.readouterr().err == ""


def test_the_disk_is_measured_where_the_model_goes(tmp_path: Path) -> None:
    check_disk(1 << 70, tmp_path / "not" / "yet", 1 << 70)
    with pytest.raises(OutputError, match=f"{tmp_path} has"):
        check_disk(1 << 70, tmp_path / "not" / "yet", 0)
