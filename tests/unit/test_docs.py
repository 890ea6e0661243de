"""The pages of docs/: generated ones are current, messages exist, links lead somewhere.

Their commands are run by tests/functional/test_documents.py.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *(f"docs/{name}" for name in PAGES)])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []
    pages = {f"docs/{other}" for other in PAGES}
    if name == "README.md":
        assert pages <= set(links), "README leads to every page"
