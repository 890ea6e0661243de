"""The text of a spec, read with bounds: any bytes give values, or a SpecError that repeats no secret."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bridge.errors import TOKEN, SpecError

MAX_CHARACTERS = 256 << 10
MAX_DEPTH = 40
OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
# PyYAML's constructors let these out for values such as `!!int ''`, `!!bool x` or `!!timestamp y`.
FAULTS = (yaml.YAMLError, RecursionError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


def read_text(path: Path) -> str:
    """The text of a spec; never more than the longest that is understood, so a device or a pipe may be named too.

    Raises:
        SpecError: missing, unreadable or too long.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError as error:
        raise SpecError(f"there is no {path}", hint="`bridge init` writes one, `--spec FILE` names another") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from error
    return text


def read_values(text: str, where: str) -> Any:
    """The values of a YAML text: only what JSON could hold, without aliases.

    An alias may stand for itself or grow without bounds (`a: [*b, *b]`, thirty levels of it).

    Raises:
        SpecError: no YAML, too long, too deep, an alias, a value that is no plain one, or a token in it.
    """
    if len(text) > MAX_CHARACTERS:
        raise SpecError(f"{where} is longer than {MAX_CHARACTERS} characters, that is no spec")
    try:
        _check_tokens(text, where)
        twice = list(_twice(yaml.compose(text, Loader=yaml.SafeLoader)))
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        # Its own text repeats the line, which may hold a secret.
        place = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SpecError(f"{where} is not valid YAML{place}: {error.problem}") from None
    except FAULTS as error:
        raise SpecError(f"{where} is not valid YAML: {type(error).__name__}") from None
    problems = [f"{key}: stands there twice, in line {line} again" for key, line in twice]
    _check(values, "", problems)
    if problems:
        raise SpecError(f"{where}: {len(problems)} problem(s)", details=problems)
    return values


def _check_tokens(text: str, where: str) -> None:
    """Refuse aliases and deep nesting, for which PyYAML needs time that grows with the square of the length."""
    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken):
            raise SpecError(f"{where} uses a YAML alias (*name)", hint="write the value out in each place")
        depth += isinstance(token, OPENING) - isinstance(token, CLOSING)
        if depth > MAX_DEPTH:
            raise SpecError(f"{where} is nested too deeply", hint=f"{MAX_DEPTH} levels are understood")


def _twice(node: yaml.Node | None) -> Iterator[tuple[str, int]]:
    """Keys that a mapping has twice, with the line of the second: YAML would take the last in silence."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    yield key.value, key.start_mark.line + 1
                seen.add(key.value)
            yield from _twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _twice(value)


def _check(value: Any, path: str, problems: list[str]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str) and TOKEN.search(key):
                problems.append(f"{path}: a token does not belong in a spec, set HF_TOKEN or log in")
            elif isinstance(key, str):
                _check(inner, f"{path}.{key}".removeprefix("."), problems)
            else:
                problems.append(f"{path}.{key}: a key must be text".removeprefix("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check(inner, f"{path}.{number}", problems)
    elif isinstance(value, str):
        if TOKEN.search(value):
            problems.append(f"{path}: a token does not belong in a spec, set HF_TOKEN or log in")
        if "\0" in value:
            problems.append(f"{path}: a text with a NUL in it")
    elif not isinstance(value, bool | int | float | None):
        problems.append(f"{path}: {type(value).__name__} is no plain value; put it in quotes")
    elif isinstance(value, int) and value.bit_length() > 64:
        problems.append(f"{path}: a number of {value.bit_length()} bits")
    elif isinstance(value, float) and not math.isfinite(value) and path.partition(".")[0] in ("maxtext", "tunix"):
        problems.append(f"{path}: {value} is no finite number")
