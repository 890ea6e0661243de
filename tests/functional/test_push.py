"""`bridge export --push` to a hub on loopback: asked before, one commit, a card, and no token anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_hub
import fault_models
import pytest
import yaml
from adapter_cases import random_factors, write_peft
from checkpoints import convert, run
from fake_hub import WRONG, Hub
from fake_hub_writes import COMMIT, READER, WRITER, Repository

from bridge import model_card
from bridge.errors import CheckpointError
from bridge.run_spec import RunSpec

BASE = "meta-llama/Llama-3.1-8B"
REVISION = "ab" * 20
SPEC = {
    "model": {"source": "hf"},
    "data": {"train": ["HuggingFaceH4/ultrachat_200k:train_sft", "private/jokes.jsonl"]},
    "train": {"steps": 40, "sequence_length": 128, "learning_rate": 1e-4},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a finished run: the weights of a converted model in the place of trained ones."""
    from bridge.launchers.run_file import RunFile
    from bridge.model_spec import ModelSpec

    folder = tmp_path_factory.mktemp("trained")
    source = fault_models.write_model(folder / "hf", dtype="bfloat16", shards=2)
    (folder / "bridge.yaml").write_text(yaml.safe_dump(SPEC))
    step = convert(source, folder / "checkpoints" / "maxtext")
    home = folder / "runs" / "maxtext-sft"
    shutil.copytree(step, home / "checkpoints" / "40")
    shutil.copytree(step.parent / "hf", home / "hf")
    facts = json.loads((step.parent / "bridge.json").read_text())
    facts |= {"method": "sft", "versions": {"maxtext": "0.2.5"}}
    facts["source"] |= {"origin": BASE, "revision": REVISION}
    (home / "bridge.json").write_text(json.dumps(facts))
    RunFile(
        engine="maxtext",
        program="config.yml",
        spec=RunSpec.model_validate(SPEC),
        base=str(folder),
        model=ModelSpec.from_folder(source),
        frequencies=(1.0,),
        tokenizer=str(home / "hf"),
        checkpoint=str(step),
    ).write(home)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "work")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with fake_hub.serve({}) as served:
        yield served


def export(hub: Hub, folder: Path, *args: str, token: str | None = WRITER) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    # Xet has a server and a protocol of its own: files go the older way here.
    env |= {"HF_HOME": str(folder / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_TOKEN": token} if token else {}
    argv = [sys.executable, "-m", "bridge", "export", *args]
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert not [secret for secret in (WRITER, READER, WRONG) if secret in done.stdout + done.stderr]
    assert "Traceback" not in done.stderr, done.stderr
    return done


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def metadata(card: str) -> dict[str, object]:
    values: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return values


def test_a_new_repository_is_private_and_has_the_export_and_a_card(hub: Hub, folder: Path) -> None:
    (folder / "export" / "hf").mkdir(parents=True)  # an empty folder is no export
    done = export(hub, folder, "--push", "ada/llama-mine")
    assert done.returncode == 0, done.stderr
    assert "%|" not in done.stderr, "bars are for terminals"
    assert done.stdout == f"{hub.url}/ada/llama-mine/commit/{COMMIT}\n"
    repository = hub.writes.repositories["ada/llama-mine"]
    assert repository.private
    assert repository.commits == ["sft, maxtext, step 40"]
    card = repository.files.pop("README.md").decode()
    assert repository.files == contents(folder / "export" / "hf")
    assert metadata(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": BASE,
        "base_model_relation": "finetune",
        "datasets": ["HuggingFaceH4/ultrachat_200k"],
        "tags": ["llama", "maxtext", "sft", "bridge-llama"],
    }
    for said in (
        f"| base | {BASE}, commit {REVISION[:12]} |",
        "| method | full fine-tuning |",
        "| data | HuggingFaceH4/ultrachat_200k, jokes.jsonl |",
        "| steps | 40 |",
        "| batch | 1 x 128 tokens a device and step |",
        "| engine | maxtext 0.2.5 |",
    ):
        assert said in card.splitlines()
    assert "private" not in card, "folders of data files are nobody's business"
    assert not (folder / "export" / "hf" / "README.md").exists()
    # The same again is compared, not exported, and sends nothing large twice.
    exported = (folder / "export" / "hf" / "config.json").stat().st_mtime_ns
    sent = len([line for line in hub.requests if line.startswith("PUT")])
    done = export(hub, folder, "--push", "ada/llama-mine")
    assert done.returncode == 0, done.stderr
    assert "compared with the checkpoint, not exported again" in done.stderr
    assert (folder / "export" / "hf" / "config.json").stat().st_mtime_ns == exported
    assert len([line for line in hub.requests if line.startswith("PUT")]) == sent


def test_an_earlier_push_is_replaced_whole_and_its_card_kept(hub: Hub, folder: Path) -> None:
    kept = {"README.md": b"mine", "notes.txt": b"mine", "a/b.safetensors": b""}
    hub.writes.repositories["team/llama"] = Repository(True, {"model-00001-of-00009.safetensors": b"old", **kept})
    done = export(hub, folder, "--push", "team/llama")
    assert done.returncode == 0, done.stderr
    files = hub.writes.repositories["team/llama"].files
    assert files.keys() == contents(folder / "export" / "hf").keys() | kept.keys()
    assert files["README.md"] == b"mine"
    assert len(hub.writes.repositories["team/llama"].commits) == 1


def test_public_must_be_said(hub: Hub, folder: Path) -> None:
    hub.writes.repositories["ada/shown"] = Repository(False)
    done = export(hub, folder, "--push", "ada/shown")
    assert done.returncode == 1
    assert "ada/shown exists and is public" in done.stderr
    assert not (folder / "export").exists()
    assert export(hub, folder, "--push", "ada/shown", "--public").returncode == 0
    assert export(hub, folder, "--push", "ada/new", "--public").returncode == 0
    assert not hub.writes.repositories["ada/new"].private
    done = export(hub, folder, "--public")
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("repository", "token", "says"),
    [
        ("ada/mine", None, "needs a login, and there is none"),
        ("ada/mine", READER, "your login may only read"),
        ("ada/mine", WRONG, "the hub refused your login"),
        ("lab/mine", WRITER, "your login, ada, may not make a repository under lab"),
        ("eve/mine", WRITER, "may not make a repository under eve"),
        ("ada/locked", WRITER, "your login may not write ada/locked"),
        ("mine", WRITER, "no name of a repository"),
    ],
)
def test_refused_before_anything_is_exported(
    repository: str, token: str | None, says: str, hub: Hub, folder: Path
) -> None:
    hub.writes.repositories["ada/locked"] = Repository(True)
    hub.writes.locked.add("ada/locked")
    done = export(hub, folder, "--push", repository, token=token)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert "hint:" in done.stderr
    assert not (folder / "export").exists()
    assert list(hub.writes.repositories) == ["ada/locked"]


@pytest.mark.parametrize(("fault", "says"), [("broken", "broke off"), ("full", "may not write")])
def test_a_failed_upload_leaves_the_export_and_says_how_to_go_on(fault: str, says: str, hub: Hub, folder: Path) -> None:
    hub.writes.repositories["ada/mine"] = Repository(True, {"notes.txt": b"mine"})
    setattr(hub.writes, fault, True)
    done = export(hub, folder, "--push", "ada/mine")
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert f"the export is whole: {folder / 'export' / 'hf'}" in done.stderr
    assert "the same command again pushes the export that is there" in done.stderr
    assert hub.writes.repositories["ada/mine"].files == {"notes.txt": b"mine"}
    setattr(hub.writes, fault, False)
    assert export(hub, folder, "--push", "ada/mine").returncode == 0
    assert len(hub.writes.repositories["ada/mine"].files) == len(contents(folder / "export" / "hf")) + 2


def test_another_export_is_not_pushed_under_this_name(hub: Hub, folder: Path) -> None:
    done = export(hub, folder, "--dry-run", "--push", "ada/mine")
    assert done.returncode == 0
    assert "would be pushed to ada/mine (private, new)" in done.stderr
    assert hub.writes.repositories == {}
    run("export", folder / "runs" / "maxtext-sft", "--out", folder / "export" / "hf", "--dtype", "float32")
    done = export(hub, folder, "--push", "ada/mine")
    assert done.returncode == 1
    assert "is not the export of" in done.stderr
    assert export(hub, folder, "--push", "ada/mine", "--overwrite").returncode == 0
    weights = max((folder / "export" / "hf").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = export(hub, folder, "--push", "ada/mine")
    assert done.returncode == 1
    assert "1 of 21 differ" in done.stderr


@pytest.fixture
def adapter(folder: Path) -> Path:
    """The run of an adapter, made from a PEFT folder."""
    config = json.loads((folder / "hf" / "config.json").read_text())
    write_peft(folder / "peft", random_factors(config, 4), 4, 8.0)
    out = folder / "runs" / "tunix-lora"
    run("convert", folder / "peft", "--base", folder / "hf", "--to", "tunix", "--out", out)
    return out


@pytest.mark.parametrize("form", ["peft", "hf"])
def test_adapters(form: str, hub: Hub, folder: Path, adapter: Path) -> None:
    args = (str(adapter), "--to", form, "--base", "hf", "--push", f"ada/{form}")
    done = export(hub, folder, *args)
    assert done.returncode == 0, done.stderr
    assert ("names its base as the folder" in done.stderr) == (form == "peft")
    files = hub.writes.repositories[f"ada/{form}"].files
    card = files["README.md"].decode()
    assert metadata(card)["library_name"] == {"peft": "peft", "hf": "transformers"}[form]
    assert "| adapter | rank 4, alpha 8, on q, k, v, o, gate, up, down |" in card.splitlines()
    assert "| base | hf |" in card.splitlines()
    assert str(folder) not in card
    again = export(hub, folder, *args)
    assert again.returncode == 0, again.stderr
    assert "not exported again" in again.stderr
    name = {"peft": "adapter_config.json", "hf": "model.safetensors"}[form]
    (folder / "export" / form / name).write_bytes(b"another")
    assert "is not the export of" in export(hub, folder, *args).stderr


def test_a_card_of_nothing_known() -> None:
    facts = model_card.CardFacts("x", "hf", "tunix", None, None, None, None, None, None, None)
    text = model_card.text(facts)
    assert metadata(text)["tags"] == ["llama", "tunix", "bridge-llama"]
    assert "Converted with tunix through bridge" in text
    assert "None" not in text


def test_require_same_needs_every_tensor(folder: Path) -> None:
    from bridge.commands import checkpoint, pushing
    from bridge.commands.export import target_tensors

    found = checkpoint.find(None, folder / "checkpoints" / "maxtext", None, None)
    tensors = target_tensors(found, "source")
    pushing.require_same(found, folder / "hf", lambda *_: None, tensors)
    tensors["model.norm.weight"] = tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match="1 of 21 differ"):
        pushing.require_same(found, folder / "hf", lambda *_: None, tensors)
