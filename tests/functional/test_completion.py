"""`bridge completion`, by the shells themselves: those that are on this machine."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.cli import VERBS
from bridge.commands.init import presets

BASH = """
eval "$(bridge completion bash)"
complete -p bridge >&2
COMP_WORDS=({words}); COMP_CWORD={last}
_bridge_completion bridge
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
# zsh's own machinery would take the two arrays of the completion from here: they are printed in its place.
ZSH = """
autoload -Uz compinit; compinit -u -d {home}/zcompdump
eval "$(bridge completion zsh)"
print -u2 $_comps[bridge]
_describe() {{ print -rl -- ${{completions_with_descriptions%%:*}} }}
compadd() {{ print -rl -- $completions }}
words=({words}); CURRENT={last}
_bridge_completion
"""
FISH = """
bridge completion fish | source
complete -c bridge >&2
complete -C '{line}'
"""


def completed(shell: str, line: str, home: Path) -> list[str]:
    """What a shell offers at the end of a line; a word that is begun is its last, after a space there is none."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"there is no {shell} on this machine")
    words = line.split() + ([""] if line.endswith(" ") else [])
    quoted = " ".join(f"'{word}'" for word in words)
    last = len(words) - (0 if shell == "zsh" else 1)
    text = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell].format(words=quoted, last=last, line=line, home=home)
    bare = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(home)}
    done = subprocess.run(
        [path, *bare, "-c", text], capture_output=True, text=True, check=False, timeout=60, env=env, cwd=home
    )
    assert "bridge" in done.stderr, "the shell knows a completion of bridge"
    return [line.partition("\t")[0] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes(shell: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert set(completed(shell, "bridge con", tmp_path)) == {"convert", "config"}
    assert set(completed(shell, "bridge ", tmp_path)) == set(VERBS)
    assert set(completed(shell, "bridge init llama3.1-8b", tmp_path)) == {
        name for name in presets() if name.startswith("llama3.1-8b")
    }
    assert set(completed(shell, "bridge convert --to ", tmp_path)) == {"maxtext", "tunix"}
    assert "--merge-base" in completed(shell, "bridge export --me", tmp_path)
    assert completed(shell, "bridge export --to nothing", tmp_path) == []


def test_it_answers_at_once(tmp_path: Path) -> None:
    """A completion is a process of its own at every Tab. Its CPU time: other tests run meanwhile."""
    env = {**os.environ, "_BRIDGE_COMPLETE": "bash_complete", "COMP_WORDS": "bridge co", "COMP_CWORD": "1"}
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        bridge = Path(sys.executable).parent / "bridge"
        done = subprocess.run([bridge], capture_output=True, text=True, check=False, env=env, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.split() == ["plain,convert", "plain,config", "plain,completion"]
    assert min(seconds) < 0.6


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_names_the_shell_and_nothing_of_this_machine(shell: str) -> None:
    argv = [sys.executable, "-m", "bridge", "completion", shell]
    script = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert f"_BRIDGE_COMPLETE={shell}_complete" in script
    assert "python" not in script
    assert str(Path.home()) not in script
