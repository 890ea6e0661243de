"""The pages of docs/: generated ones are current, messages exist, commands parse, links lead somewhere."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from bridge.cli import VERBS
from bridge.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def reference() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "reference.py"), run_name="reference")


@pytest.mark.parametrize("name", ["spec.md", "engines.md"])
def test_generated_pages_are_current(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    page: str = reference()["PAGES"][name]()
    assert text == page, "run: python scripts/reference.py"


def test_the_spec_page_has_every_key() -> None:
    text = (DOCS / "spec.md").read_text(encoding="utf-8")

    def keys(schema: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
        for name, value in schema.get("properties", {}).items():
            yield name
            for part in (value, *value.get("allOf", []), *value.get("anyOf", [])):
                if "$ref" in part:
                    yield from keys(whole["$defs"][part["$ref"].rsplit("/", 1)[1]], whole)

    schema = RunSpec.model_json_schema()
    missing = [key for key in keys(schema, schema) if f"| `{key}` |" not in text and f"## {key}" not in text]
    assert [key for key in missing if f".{key}\n" not in text] == []
    assert "| `learning_rate` | number | `2e-05` |" in text


def test_every_message_of_the_troubleshooting_page_is_said_somewhere() -> None:
    files = [
        path for folder in ("bridge", "converters", "configs", "launchers") for path in (ROOT / folder).rglob("*.py")
    ]
    said = " ".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in files)
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) > 20
    assert [heading for heading in headings if heading not in said] == []
    assert "this is a message that nobody says" not in said


def commands(text: str) -> list[list[str]]:
    """The bridge commands of a page's shell blocks."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(part)[1:] for part in parts if part.startswith("bridge ")]


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_understood(name: str) -> None:
    for verb, *arguments in commands((DOCS / name).read_text(encoding="utf-8")):
        assert verb in VERBS, verb
        command = importlib.import_module(f"bridge.commands.{verb}").command
        command.make_context(verb, list(arguments))


def test_a_wrong_command_is_found() -> None:
    ((verb, *arguments),) = commands("```sh\nbridge plan --device 8x80GB  # comment\n```")
    with pytest.raises(click.UsageError, match="No such option"):
        importlib.import_module(f"bridge.commands.{verb}").command.make_context(verb, arguments)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", (DOCS / name).read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (DOCS / link).exists()] == []
