"""Hub access against a hub on loopback: each refusal has its own text and next step, and no text has a token in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_hub
import fault_models
import pytest
from fake_hub import APPROVED, GOOD, SHA, WRONG, Hub

# huggingface_hub reads its environment when it is imported, so one process of its own asks for every model.
WORKER = """
import json, os, sys
from bridge import hub
from bridge.errors import AccessError
for line in sys.stdin:
    asked = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    os.environ.update(asked["env"])
    try:
        answer = {"folder": str(hub.resolve(asked["id"], asked["revision"], download=asked["download"]))}
    except AccessError as error:
        answer = {"error": str(error), "chained": repr(error.__cause__ or (not error.__suppress_context__))}
    print(json.dumps(answer), flush=True)
"""


@dataclass
class Asker:
    """A process that asks a hub."""

    hub: Hub
    home: Path
    process: subprocess.Popen[str]

    def __call__(
        self, name: str, token: str | None = None, revision: str | None = None, download: bool = True
    ) -> dict[str, Any]:
        env = {"HF_TOKEN": token} if token else {}
        asked = {"id": name, "revision": revision, "download": download, "env": env}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        text = json.dumps(answer)
        assert not [secret for secret in (GOOD, WRONG, APPROVED) if secret in text]
        return answer

    def error(self, name: str, token: str | None = None, revision: str | None = None, **options: Any) -> str:
        answer = self(name, token, revision, **options)
        assert "error" in answer, answer
        assert answer["chained"] == "False", "a traceback would show the request"
        return str(answer["error"])


def environment(home: Path, url: str, **more: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return env | {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_models.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ask(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    files |= {"original/consolidated.00.pth": b"pickle", "pytorch_model.bin": b"pickle"}
    home = tmp_path_factory.mktemp("home")
    with fake_hub.serve(files) as hub, (home / "stderr").open("w") as log:
        command = [sys.executable, "-c", WORKER]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        with subprocess.Popen(command, env=environment(home, hub.url), **pipes) as process:
            yield Asker(hub, home, process)
            assert process.stdin is not None
            process.stdin.close()
        assert process.returncode == 0
    logged = (home / "stderr").read_text()
    assert not [secret for secret in (GOOD, WRONG, APPROVED) if secret in logged]


def test_a_model_is_downloaded_whole_and_without_pickles(ask: Asker, model: Path) -> None:
    folder = Path(ask("team/open")["folder"])
    assert folder.name == SHA
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in model.iterdir()
    }
    assert ask.home in folder.parents, "HF_HOME is respected"


def test_what_is_cached_is_not_fetched_again(ask: Asker) -> None:
    ask("team/open")
    before = len([line for line in ask.hub.requests if line.startswith("GET /team/open/")])
    assert Path(ask("team/open")["folder"]).name == SHA
    assert Path(ask("team/open", download=False)["folder"]).name == SHA
    assert len([line for line in ask.hub.requests if line.startswith("GET /team/open/")]) == before


@pytest.mark.parametrize(
    ("name", "token", "revision", "says", "hint"),
    [
        (
            "team/gated",
            None,
            None,
            "gated and you are not logged in",
            "request access at {page}, then run: hf auth login",
        ),
        ("team/gated", GOOD, None, "gated and your account has no access yet", "request access at {page}"),
        ("team/unseen", WRONG, None, "refused your login", "run: hf auth login"),
        ("team/private", None, None, "does not exist, or is private and you are not logged in", "run: hf auth login"),
        ("team/missing", GOOD, None, "team/missing does not exist on the hub", "check the spelling"),
        ("team/open", None, "nope", "has no revision 'nope'", "{page}/commits/main"),
        ("team/forbidden", GOOD, None, "no permission to read", "settings/tokens"),
        ("team/down", None, None, "the hub answered 500", "try again later"),
        ("team/a--b", None, None, "no name the hub knows", "organisation/name"),
    ],
)
def test_each_refusal_has_its_own_text(
    name: str, token: str | None, revision: str | None, says: str, hint: str, ask: Asker
) -> None:
    text = ask.error(name, token, revision)
    assert says in text
    assert hint.format(page=f"{ask.hub.url}/{name}") in text


def test_an_approved_login_gets_what_is_gated_and_private(ask: Asker) -> None:
    for name in ("team/gated", "team/private"):
        assert Path(ask(name, APPROVED)["folder"]).name == SHA


def test_a_download_that_breaks_off_goes_on_where_it_stopped(ask: Asker, model: Path) -> None:
    ask.hub.broken.add("cut")
    text = ask.error("team/cut")
    assert "the download of team/cut broke off" in text
    assert "run it again" in text
    assert "could not be found" not in text
    ask.hub.broken.clear()
    folder = Path(ask("team/cut")["folder"])
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_what_is_not_cached_is_said_without_asking_the_hub(ask: Asker) -> None:
    before = len(ask.hub.requests)
    assert "team/other is not in the cache" in ask.error("team/other", download=False)
    assert len(ask.hub.requests) == before


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_no_network_and_offline_differ_and_the_cache_still_serves(
    variables: dict[str, str], says: str, ask: Asker, tmp_path: Path
) -> None:
    ask("team/open")
    lines = [
        {"id": name, "revision": None, "download": True, "env": {"HF_TOKEN": GOOD}} for name in ("team/x", "team/open")
    ]
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        input="".join(json.dumps(line) + "\n" for line in lines),
        env=environment(ask.home, "http://127.0.0.1:9", **variables),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=120,
    )
    missing, cached = (json.loads(line) for line in done.stdout.splitlines())
    assert says in missing["error"]
    assert Path(cached["folder"]).name == SHA
    assert GOOD not in done.stdout + done.stderr


def test_the_command_says_it_in_one_sentence(ask: Asker, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bridge", "convert", "team/gated", "--to", "maxtext", "--out", str(tmp_path / "out")],
        env=environment(tmp_path, ask.hub.url, HF_TOKEN=GOOD),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("bridge: error: team/gated is gated and your account has no access yet\n  hint: ")
    assert "Traceback" not in done.stderr
    assert GOOD not in done.stdout + done.stderr
    assert not (tmp_path / "out").exists()
