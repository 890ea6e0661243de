"""Secrets stay secret, nothing from outside is run, and every name is quoted where it is written."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import fault_models
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import run_spec
from bridge.configs import maxtext as maxtext_config
from bridge.configs.render import yaml_section, yaml_value
from bridge.errors import BridgeError, CheckpointError, SpecError
from bridge.launchers.plan import Launch
from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_" + "DummyTokenOfATest" * 2
OTHER = "dummy-secret-of-another-form-0123456789"
NAMES = [
    "with space",
    'quote\'s "two"',
    "$(touch owned)",
    "`touch owned`",
    "line\nfeed",
    "a;touch owned",
    "-n",
    "été😀",
]
NAMES += ["${HOME}", "a\\b", "# no comment", "x: y", "*?[a]", "!important", "%s{0}", "a && touch owned | cat"]


def sources() -> Iterator[tuple[Path, ast.AST]]:
    for folder in ("bridge", "converters", "configs", "launchers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def forbidden(tree: ast.AST) -> list[str]:
    """What would run, or could be made to run, bytes from outside."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [
                name for name in names if name.split(".")[0] in ("pickle", "cPickle", "dill", "marshal", "shelve")
            ]
        if not isinstance(node, ast.Call):
            continue
        name, keywords = ast.unparse(node.func), {key.arg: key.value for key in node.keywords}
        on = [key for key, value in keywords.items() if isinstance(value, ast.Constant) and value.value is True]
        if name in ("eval", "exec", "os.system", "os.popen", "torch.load", "joblib.load", "tempfile.mktemp"):
            found.append(name)
        if name.startswith("yaml.") and "load" in name and name != "yaml.safe_load":
            found.append(name)
        if name in ("yaml.compose", "yaml.parse") and "SafeLoader" not in ast.unparse(node):
            found.append(name)
        found += [f"{name}({key}=True)" for key in on if key in ("shell", "trust_remote_code", "allow_pickle")]
    return found


def test_nothing_from_outside_is_run_or_unpickled() -> None:
    assert {str(path): found for path, tree in sources() if (found := forbidden(tree))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "yaml.load(x)",
        "yaml.unsafe_load(x)",
        "yaml.compose(x)",
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "torch.load(x)",
        "os.system(x)",
        "run(x, shell=True)",
        "np.load(x, allow_pickle=True)",
        "A.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_what_is_forbidden_is_found(line: str) -> None:
    assert forbidden(ast.parse(line))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    (hf / "model.safetensors").unlink()
    (hf / name).write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(CheckpointError, match="only pickled weights") as found:
        checkpoints.convert(hf, tmp_path / "ck")
    assert "safe_serialization=True" in str(found.value)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose user has two tokens in the environment and one in the file of `hf auth login`."""
    fault_models.write_model(tmp_path / "hf")
    (tmp_path / "data.jsonl").write_text("{}\n")
    (tmp_path / "bridge.yaml").write_text("model: {source: hf}\ndata: {train: data.jsonl}\n")
    home = tmp_path.with_name(f"{tmp_path.name}-home")
    home.mkdir()
    (home / "token").write_text(TOKEN)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", OTHER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leaks(texts: list[str], folder: Path) -> list[str]:
    """Where a token is to be found."""
    found = [text for text in texts if TOKEN in text or OTHER in text]
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if TOKEN in str(path) or TOKEN.encode() in content or OTHER.encode() in content:
            found.append(str(path))
    return found


def test_a_leak_would_be_found(project: Path) -> None:
    (project / "x").write_text(f"a{TOKEN}b")
    assert leaks([], project) == [str(project / "x")]
    assert leaks([OTHER], project.parent / "none") == [OTHER]


@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_no_verb_writes_a_token(engine: str, project: Path) -> None:
    texts = []
    for args in (
        ["convert", "--to", engine, "--dry-run"],
        ["convert", "--to", engine, "--check"],
        ["convert", "--to", engine],
        ["convert", "--to", engine, "--spec", TOKEN],
        ["config", "--engine", engine],
        ["config", "--engine", engine, "--out", "config.txt"],
        ["launch", "sft", "--engine", engine, "--dry-run"],
        ["launch", "sft", f"maxtext.hf_access_token={TOKEN}"],
        ["launch", "sft", f"train.steps={TOKEN}"],
        ["launch", "sft", f"{TOKEN}"],
        ["inspect", f"checkpoints/{engine}", "--json"],
        ["export", f"checkpoints/{engine}"],
        ["verify", f"checkpoints/{engine}", "--exact"],
        ["verify", "nowhere", "--exact"],
        ["convert", "team/tiny", "--to", engine, "--out", "x"],
    ):
        try:
            result = checkpoints.run(*args)
            texts += [result.stdout, result.stderr]
        except BridgeError as error:
            texts += [str(error), repr(error)]
    assert len(texts) == 30
    assert leaks(texts, project) == []
    assert (project / "export" / "hf" / "config.json").is_file()


def test_no_process_shows_a_token(project: Path) -> None:
    """The whole command as a process: its output, its traceback when it breaks, and what it starts."""
    broken = "import bridge.commands.convert as c; c._Job = None; from bridge.cli import main; main()"
    for command in (["-m", "bridge", "convert", "--to", "maxtext"], ["-c", broken, "convert", "--to", "tunix"]):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ)
        )
        assert leaks([done.stdout, done.stderr], project) == []
    assert "Traceback" in done.stderr
    from bridge.commands.launch import plan_launch
    from bridge.commands.prepared import prepare
    from bridge.commands.workspace import Workspace

    plan = plan_launch(prepare(Workspace.open(None), "maxtext", "sft", None))
    assert leaks([repr(plan), *(launch.as_shell() for launch in plan)], project) == []


def test_the_engines_process_forgets_tokens_before_maxtext_writes_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """MaxText writes HF_TOKEN in clear text into its TensorBoard file."""
    from bridge.launchers import maxtext_runtime

    monkeypatch.setattr(
        os, "environ", {"HF_TOKEN": TOKEN, "HUGGING_FACE_HUB_TOKEN": OTHER, "M_STEPS": "3", "HOME": "/h"}
    )
    maxtext_runtime._forget_tokens()
    assert dict(os.environ) == {"HOME": "/h"}


@pytest.mark.parametrize(
    "text",
    [
        f"model: {{source: x}}\nmaxtext: {{tokenizer_path: {TOKEN}}}",
        f"model: {{source: x}}\nmaxtext: {{hf_access_token: {TOKEN}}}",
        f"model: {{source: x, token: {TOKEN}}}",
        f"model: {{source: x}}\n{TOKEN}: 1",
        f"model: {{source: {TOKEN}: y}}",
        f"model: [{TOKEN}",
        f"model: {{source: x}}\ntrain: {{steps: {TOKEN}}}",
        f"workdir: '{TOKEN}'",
    ],
)
def test_a_token_in_a_spec_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(SpecError) as found:
        run_spec.parse(text)
    assert TOKEN not in str(found.value) + repr(found.value)
    assert found.value.__cause__ is None or TOKEN not in str(found.value.__cause__)


@pytest.mark.parametrize("name", NAMES)
def test_a_shell_gets_every_name_as_it_is(name: str, tmp_path: Path) -> None:
    place = tmp_path / name
    place.mkdir()
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['X'], os.getcwd()]))"
    launch = Launch((sys.executable, "-c", show, name, f"key={name}"), {"X": name}, str(place))
    done = subprocess.run(["sh", "-c", launch.as_shell()], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout) == [[name, f"key={name}"], name, str(place)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "${" not in text))
def test_yaml_gets_every_text_as_it_is(text: str) -> None:
    assert yaml.safe_load(yaml_value(text)) == text
    assert yaml.safe_load(yaml_section("title", {"a": text, "b": [text, 1e-5]})) == {"a": text, "b": [text, 1e-5]}


@pytest.mark.parametrize("name", NAMES)
def test_the_config_gets_every_name_as_it_is(name: str) -> None:
    model = ModelSpec.from_hf_config(fault_models.CONFIG)
    plain, strange = (
        maxtext_config.render(
            run_spec.RunSpec.model_validate({"model": {"source": "x"}}),
            model,
            Mesh(1, 1, 1),
            maxtext_config.Place(text, f"/runs/{text}", f"/ck/{text}", f"/hf/{text}", True, "cpu"),
        )
        for text in ("plain", name)
    )
    values: dict[str, Any] = yaml.safe_load(strange)
    assert values.keys() == yaml.safe_load(plain).keys()
    escaped = name.replace("${", "\\${")  # for OmegaConf, with which MaxText reads it
    assert values["run_name"] == escaped
    assert values["load_parameters_path"] == f"/ck/{escaped}"


@pytest.mark.parametrize("name", ["a\nb: 1", "x: y", "# a", "a b", "-a", "été", ""])
def test_a_raw_setting_has_a_plain_name(name: str) -> None:
    with pytest.raises(SpecError, match="is no name of a setting"):
        run_spec.parse(yaml.safe_dump({"model": {"source": "x"}, "maxtext": {name: 1}}))


@pytest.mark.parametrize("name", ["A;touch owned", "A B", "1A", "A=B", ""])
def test_an_environment_variable_has_a_plain_name(name: str) -> None:
    with pytest.raises(SpecError, match="is no name of an environment variable"):
        run_spec.parse(yaml.safe_dump({"model": {"source": "x"}, "cluster": {"env": {name: "1"}}}))


def test_a_model_that_lies_about_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    arrays = fault_models.arrays_of(hf)
    fault_models.write_tensors(hf, {**arrays, "\x1b[2J\x1b[1;1Hok: 0 errors\r": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError) as found:
        checkpoints.convert(hf, tmp_path / "ck")
    assert "\\x1b[2J" in str(found.value)
    assert not {"\x1b", "\r"} & set(str(found.value))
