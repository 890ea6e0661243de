"""The commands of the documents: what README.md, docs/ and the help of the verbs tell people to type.

blocks()          every shell block, as (where, commands); console blocks have the lines that start with `$ `
inline()          every `bridge ...` between backquotes in running text
specs(page)       its YAML blocks: specs, or sections of one
split(block)      the commands of a block's text: comments off, continued lines joined, `&&` and `|` taken apart
"""

from __future__ import annotations

import importlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from bridge.cli import VERBS

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PLAIN = re.compile(r"[\w@%+=:,./~-]+")
SHELL = ("bash", "sh", "console")


@dataclass(frozen=True)
class Block:
    """The commands of one block, in order."""

    where: str
    commands: tuple[str, ...]


def blocks() -> list[Block]:
    """All blocks that have commands."""
    found = []
    for page in PAGES:
        for number, (language, text) in enumerate(FENCE.findall(read(page)), 1):
            if language in SHELL:
                found.append(Block(f"{page} block {number}", split(text, console=language == "console")))
    for verb in VERBS:
        epilog = importlib.import_module(f"bridge.commands.{verb}").command.epilog
        found.append(Block(f"bridge {verb} --help", split(epilog.partition("Examples:\n")[2])))
    return found


def read(page: str) -> str:
    """A page."""
    return (ROOT / page).read_text(encoding="utf-8")


def split(text: str, *, console: bool = False) -> tuple[str, ...]:
    """The commands of a text."""
    lines = text.replace("\\\n", " ").splitlines()
    if console:
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    commands = []
    for line in lines:
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        for word in [*lexer, "&&"]:
            if word not in ("&&", "|", ";"):
                words.append(word)
            elif words:
                commands.append(" ".join(word if PLAIN.fullmatch(word) else shlex.quote(word) for word in words))
                words = []
    return tuple(commands)


def specs(page: str) -> list[str]:
    """The YAML blocks of a page."""
    return [text for language, text in FENCE.findall(read(page)) if language == "yaml"]


def inline() -> list[tuple[str, str]]:
    """(page, command) of running text."""
    found = []
    for page in PAGES:
        text = FENCE.sub("", read(page))
        found += [(page, " ".join(code.split())) for code in re.findall(r"`(bridge\s[^`]+)`", text)]
    return found


def outside() -> list[str]:
    """Lines of indented blocks that look like commands: those would escape the tests."""
    program = r"^(?: {4}|\t)\$? ?(?:bridge|make|pip|hf|vllm|ollama) "
    return [
        f"{page}: {line}"
        for page in PAGES
        for line in FENCE.sub("", read(page)).splitlines()
        if re.match(program, line)
    ]
