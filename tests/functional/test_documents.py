"""Every command of README.md, docs/ and the verbs' help: run on a small model, or parsed where it cannot run here.

The workspace that they run in: a tiny Llama in `model/`, also as `~/models/...`, conversations in `data/`, a
bridge.yaml of two steps, and what the commands of the README's own block, run as they stand, leave there: a
converted checkpoint, a run of MaxText, its export. Beside them an adapter run, made from a PEFT folder, and a hub on
loopback that has the model under Meta's names. Each block starts from a copy of it; what README's block ran is not run
again.

Of a command's own output, what is there already is removed before it; training beyond that one run is planned
(`--dry-run`): tests/functional and tests/parity train with every method.
"""

from __future__ import annotations

import configparser
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documents
import fake_hub
import pytest
import yaml
from adapter_cases import random_factors, write_peft
from checkpoints import run
from conftest import Tiny
from documents import ROOT, Block
from fake_hub import Hub
from fake_hub_writes import WRITER
from sft_folder import CHATS, Folder

from bridge import run_spec
from bridge.cli import VERBS

BLOCKS = documents.blocks()
# Commands that cannot run here are parsed, options and all. Why they cannot:
PARSED = {
    "bridge plan --devices auto --json": "counts the GPUs of this host",
    "bridge demo": "downloads a model of 135M from PyPI: `make demo`, tests/functional/test_demo_*.py",
    "bridge demo --out ~/bridge-demo": "the same",
}
# Programs of others: not run, and docs/serving.md says so.
FOREIGN = {
    "make": "of this Makefile",
    "pip": "an install of this package",
    "hf": "the hub's own login",
    "vllm": "needs a GPU",
    "python": "a script of llama.cpp",
    "llama-quantize": "of llama.cpp",
    "llama-server": "of llama.cpp",
    "ollama": "of Ollama",
    "curl": "asks a server",
    "echo": "writes a Modelfile",
    "eval": "of the shell: tests/functional/test_completion.py",
    "source": "the same",
}
ADAPTER = "tunix-lora"
DEMO = "README.md block 2"
"""What `make demo` shows, of its own model."""
SPEC = {
    "model": {"source": "model"},
    "data": {"train": "data/train.jsonl", "eval": "data/eval.jsonl"},
    "train": {"steps": 2, "sequence_length": 128, "batch_per_device": 2, "eval_every": 1, "save_every": 1, "keep": 1}
    | {"dtype": "float32", "learning_rate": 1e-3},
}
README = next(block for block in BLOCKS if "bridge data --show 2" in block.commands)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    """Before any command: the model, the data, the spec."""
    folder = tmp_path_factory.mktemp("documents")
    source = tiny("tied", tokenizer="llama")
    for name in ("model", "models/Llama-3.1-8B", "models/Llama-3.2-1B"):
        shutil.copytree(source, folder / name)
    (folder / "data").mkdir()
    for name in ("train", "eval"):
        (folder / f"data/{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    (folder / "bridge.yaml").write_text(yaml.safe_dump(SPEC))
    return folder


@pytest.fixture(scope="module")
def done(workspace: Path) -> Path:
    """After the README's block, every command as it stands, in order, each a process of its own; and an adapter run."""
    for command in README.commands:
        Folder(workspace).bridge(*shlex.split(command)[1:])
    assert (workspace / "export" / "hf" / "config.json").is_file()
    checkpoints = workspace / "runs" / "maxtext-sft" / "checkpoints"
    shutil.copytree(checkpoints / "2", checkpoints / "50")
    config = json.loads((workspace / "model" / "config.json").read_text())
    write_peft(workspace / "peft", random_factors(config, 4), 4, 8.0)
    base, out = workspace / "model", workspace / "runs" / ADAPTER
    run("convert", workspace / "peft", "--base", base, "--to", "tunix", "--out", out)
    shutil.rmtree(workspace / "peft")
    run("convert", base, "--to", "tunix", "--out", workspace / "runs" / "tunix-sft")
    for name in (ADAPTER, "tunix-sft"):  # as runs: a report needs their settings and metrics
        (workspace / "runs" / name / "checkpoints").mkdir()
        (workspace / "runs" / name / "0").rename(workspace / "runs" / name / "checkpoints" / "2")
        for file in ("run.json", "metrics.jsonl"):
            shutil.copy(workspace / "runs" / "maxtext-sft" / file, workspace / "runs" / name / file)
    os.utime(workspace / "runs" / "maxtext-sft" / "bridge.json")
    # As MaxText leaves it by itself: no bridge.json, no hf/ beside the steps.
    shutil.copytree(checkpoints / "2", workspace / "maxtext-run" / "checkpoints" / "1000")
    return workspace


@pytest.fixture(scope="module")
def hub(workspace: Path) -> Iterator[Hub]:
    with fake_hub.serve({path.name: path.read_bytes() for path in (workspace / "model").iterdir()}) as served:
        yield served


def verb_of(command: str) -> str | None:
    """The verb of a bridge command; None for other programs."""
    words = shlex.split(command)
    return words[1] if words[0] == "bridge" and len(words) > 1 else None


@pytest.mark.slow
def test_the_readmes_block_runs_as_it_stands(done: Path) -> None:
    verbs = [verb_of(command) for command in README.commands]
    assert verbs == ["data", "convert", "launch", "export", "verify"]
    assert (done / "runs" / "maxtext-sft" / "metrics.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where.replace(" ", "_"))
def test_block(block: Block, done: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = {*README.commands, *PARSED}
    commands = [command for command in block.commands if verb_of(command) and command not in ran]
    if not commands or block.where == DEMO:
        return
    folder = shutil.copytree(done, tmp_path / "work", symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    for command in commands:
        verb, *arguments = shlex.split(command)[1:]
        make_room(folder, verb, arguments)
        if verb == "launch" and "--dry-run" not in arguments:
            arguments.append("--dry-run")
        code, text = execute(folder, hub, verb, arguments)
        # A doctor finds what this machine lacks, a diff what differs; both say so by their exit code, and on stdout.
        assert code == 0 or (verb in ("doctor", "diff") and code == 1 and text), f"{command}: {text}"


def make_room(folder: Path, verb: str, arguments: list[str]) -> None:
    """What a command says it needs, and no more: its output is not there yet, a download has something to fetch."""
    options = dict(itertools.pairwise(arguments))
    if verb == "init" and not {"--list", "--schema"} & set(arguments):
        Path(options.get("--out", "bridge.yaml")).unlink(missing_ok=True)
    if verb == "convert" and "--out" not in arguments:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if verb == "export":
        shutil.rmtree(folder / "export", ignore_errors=True)
    if verb == "export" and options.get("--to") == "peft":
        os.utime(folder / "runs" / ADAPTER / "bridge.json")  # the newest run is an adapter's
    spec = folder / "bridge.yaml"
    if verb == "download" and yaml.safe_load(spec.read_text())["model"]["source"] == "model":
        spec.write_text("model: {source: meta-llama/Llama-3.1-8B-Instruct}\n")


def execute(folder: Path, hub: Hub, verb: str, arguments: list[str]) -> tuple[int, str]:
    """In this process; where the hub is asked in one of its own, since huggingface_hub reads its environment once."""
    spec = yaml.safe_load((folder / "bridge.yaml").read_text()) if (folder / "bridge.yaml").is_file() else {}
    source = str(spec.get("model", {}).get("source"))
    if source == "model" and verb != "download" and "--push" not in arguments:
        result = run(verb, *[os.path.expanduser(argument) for argument in arguments])
        return result.code, result.stdout + result.stderr
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub"), "HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": "1"}
    arguments = [argument.replace("your-name/", "ada/") for argument in arguments]  # the user of the hub on loopback
    argv = [sys.executable, "-m", "bridge", verb, *[os.path.expanduser(argument) for argument in arguments]]
    process = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120)
    return process.returncode, process.stdout + process.stderr


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where.replace(" ", "_"))
def test_every_command_is_understood(block: Block) -> None:
    check(block.commands)


def check(commands: tuple[str, ...]) -> None:
    """Each is parsed with every option, or of a program that is known not to run here."""
    for command in commands:
        verb = verb_of(command)
        if verb is not None:
            parsed(verb, shlex.split(command)[2:])
            continue
        program, *arguments = shlex.split(command)
        assert program in FOREIGN, f"{command}: neither bridge nor a program that is known"
        if program == "make":
            assert arguments[0] in makefile_targets(), command
        if program == "pip":
            check_install(arguments)


def parsed(verb: str, arguments: list[str]) -> Any:
    """A command of bridge, parsed as the command line does it; unknown verbs and options are errors."""
    assert verb in VERBS, verb
    command = importlib.import_module(f"bridge.commands.{verb}").command
    return command.make_context(verb, list(arguments))


def makefile_targets() -> set[str]:
    return set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check_install(arguments: list[str]) -> None:
    """An install of this package: its extras exist, and so does the file of constraints."""
    options = dict(itertools.pairwise(arguments))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = re.findall(r"\w+", options["-e"])
    assert set(extras) <= set(setup["options.extras_require"])
    assert (ROOT / options["-c"]).is_file()


def test_every_command_of_running_text_is_understood() -> None:
    for page, command in documents.inline():
        verb = command.split()[1]
        if verb in ("VERB", "launch") or not verb[0].isalpha():
            verb = "launch"
        assert verb in VERBS, f"{page}: {command}"
        known = {option for parameter in options_of(verb) for option in parameter}
        used = {word.partition("=")[0] for word in command.split() if word.startswith("--")} - {"--help"}
        assert used <= known, f"{page}: {command}"


def options_of(verb: str) -> list[list[str]]:
    command = importlib.import_module(f"bridge.commands.{verb}").command
    return [[*parameter.opts, *parameter.secondary_opts] for parameter in command.params]


def test_the_demos_transcript_is_what_it_runs(tmp_path: Path) -> None:
    """The commands that README shows of `make demo` are the demo's own steps."""
    from bridge.commands import demo
    from bridge.demo import flow

    flow.write_inputs(tmp_path, demo.PRESETS["maxtext"])
    steps = demo._steps(tmp_path, "maxtext", "sft", tmp_path / "runs" / "maxtext-sft")
    assert next(block.commands for block in BLOCKS if block.where == DEMO) == tuple(step.shown for step in steps)


@pytest.mark.parametrize("page", documents.PAGES)
def test_every_spec_is_one(page: str) -> None:
    """A whole spec, or sections of one."""
    for text in documents.specs(page):
        whole = text if re.search(r"^model:", text, re.MULTILINE) else f"model: {{source: m}}\n{text}"
        assert run_spec.parse(whole, where=page)


def test_no_command_escapes() -> None:
    assert documents.outside() == []
    assert len(BLOCKS) > len(VERBS) + 10
    known = {command for block in BLOCKS for command in block.commands}
    assert known >= PARSED.keys(), "the list of what is only parsed has grown old"


def test_a_wrong_command_is_found() -> None:
    (command,) = documents.split("bridge plan --device 8x80GB  # comment\n")
    import click

    with pytest.raises(click.UsageError, match="No such option"):
        parsed("plan", shlex.split(command)[2:])
    with pytest.raises(AssertionError, match="neither bridge"):
        check(("frobnicate --all",))
    assert documents.split("a \\\n  --b && c 'd # e' | f # g\n\n# h\n") == ("a --b", "c 'd # e'", "f")
    assert documents.split("$ a b\noutput\n$ c\n", console=True) == ("a b", "c")
