"""Write the pages of docs/ that follow from the code: spec.md from the spec's model, engines.md from the corrections.

python scripts/reference.py            writes both
python scripts/reference.py --check    fails when one is not current
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Any

from bridge import engine_fixes
from bridge.run_spec import RunSpec, Section

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTICE = "<!-- Written by scripts/reference.py: change the code it follows from, not this page. -->"


def spec_page() -> str:
    """Every key of bridge.yaml: type, default, meaning."""
    parts = [
        "# The spec: bridge.yaml",
        NOTICE,
        "One file says what to train, on what, and how. Only `model.source` has no default. Unknown keys are refused, "
        "with a suggestion, and all problems are reported at once. Relative paths start at the spec's folder.",
        "`bridge launch sft train.steps=5` overrides keys for one run; `bridge init --schema` prints the JSON Schema "
        "that editors complete from.",
        "A smallest one:",
        "```yaml\nmodel:\n  source: meta-llama/Llama-3.1-8B\ndata:\n  train: data/train.jsonl\n```",
    ]
    plain = [name for name, field in RunSpec.model_fields.items() if section_of(field.annotation) is None]
    parts += ["## At the top", table(RunSpec, plain)]
    for name, field in RunSpec.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            parts += section_parts(name, section)
    return "\n\n".join(parts) + "\n"


def section_parts(path: str, section: type[Section]) -> list[str]:
    """A section of the spec, then those inside it."""
    inner = {name: section_of(field.annotation) for name, field in section.model_fields.items()}
    parts = [f"## {path}", (section.__doc__ or "").strip()]
    parts.append(table(section, [name for name, found in inner.items() if found is None]))
    for name, found in inner.items():
        if found is not None:
            parts += section_parts(f"{path}.{name}", found)
    return parts


def table(section: type[Section], names: list[str]) -> str:
    """A row a key."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name in names:
        field = section.model_fields[name]
        default = "required" if field.is_required() else f"`{shown(field.default)}`"
        rows.append(f"| `{name}` | {kind(field.annotation)} | {default} | {field.description or ''} |")
    return "\n".join(rows)


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a key holds, alone or beside other types."""
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def kind(annotation: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is typing.Annotated:
        return kind(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind(arg) for arg in args)
    if origin in (list, tuple):
        return f"list of {kind(args[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"`{{{', '.join(annotation.model_fields)}}}`"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
    return names.get(annotation, str(getattr(annotation, "__name__", annotation)))


def shown(value: Any) -> str:
    """A default as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


def engines_page() -> str:
    """The corrections of both engines, and how they are applied."""
    parts = [
        "# The engines and their corrections",
        NOTICE,
        "Stock MaxText and Tunix compute something else than PyTorch in a few places. bridge corrects them in the "
        "engine's own process, before a model is built, for training, sampling and checks alike. The engine's files "
        "stay as they are. A correction is written for the versions below; with another version nothing runs, "
        "because a model trained under other mathematics looks fine until it is served.",
    ]
    for engine, package in engine_fixes.PACKAGES.items():
        parts.append(f"## {engine}: {package} {' or '.join(engine_fixes.TESTED[engine])}")
        for fix in engine_fixes.fixes():
            if fix.engine == engine:
                parts += [f"### {fix.name}", f"{fix.reason}.", f"Shown by `{fix.proof}`."]
    return "\n\n".join(parts) + "\n"


PAGES = {"spec.md": spec_page, "engines.md": engines_page}


def main() -> int:
    """Write the pages, or compare them with `--check`."""
    stale = [name for name, page in PAGES.items() if not same(DOCS / name, page())]
    if "--check" in sys.argv[1:]:
        print("\n".join(f"docs/{name} is not current: python scripts/reference.py" for name in stale))
        return 1 if stale else 0
    DOCS.mkdir(exist_ok=True)
    for name in stale:
        (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
    return 0


def same(path: Path, text: str) -> bool:
    """Whether a file has exactly this text."""
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
