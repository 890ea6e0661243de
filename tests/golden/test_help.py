"""What the command line says, to the letter."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
from golden_types import Golden

from bridge.cli import VERBS


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The help of every verb, from a process of its own: click remembers how a command was first called."""
    program = (
        "import json; from click.testing import CliRunner; from bridge.cli import VERBS, cli\n"
        "ask = lambda *argv: CliRunner().invoke(cli, [*argv, '--help'], prog_name='bridge').output\n"
        "print(json.dumps({'bridge': ask(), **{verb: ask(verb) for verb in VERBS}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("verb", ["bridge", *VERBS])
def test_help(verb: str, helps: dict[str, str], golden: Golden) -> None:
    golden(f"help/{verb}.txt", helps[verb])


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_ends_with_examples(verb: str) -> None:
    command = importlib.import_module(f"bridge.commands.{verb}").command
    assert command.epilog.startswith("\b\nExamples:\n  bridge ")


def test_mistyped_verb_is_a_usage_error_with_a_suggestion() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bridge", "convrt"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "Did you mean 'convert'?" in done.stderr
    assert done.stdout == ""


def test_errors_go_to_stderr_with_exit_code_1() -> None:
    argv = [sys.executable, "-m", "bridge", "inspect", "/nonexistent/folder"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "bridge: error: /nonexistent/folder does not exist\n"
