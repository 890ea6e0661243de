"""What the command line says, to the letter."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from click.testing import CliRunner
from golden_types import Golden

from bridge.cli import VERBS, cli


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help(verb: str, golden: Golden) -> None:
    result = CliRunner().invoke(cli, [verb, "--help"] if verb else ["--help"], prog_name="bridge")
    assert result.exit_code == 0
    golden(f"help/{verb or 'bridge'}.txt", result.output)


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
