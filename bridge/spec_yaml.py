"""The text of a spec, read with bounds: any bytes give values, or a SpecError that repeats no secret.

Also what lies between values and the model: overrides, types that YAML does not have, problems in words.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

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


def override(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Put `KEY=VALUE` settings, such as `train.steps=5`, into the values of a spec.

    `train.steps=5` wins over `epochs` in the file as well, and `train.epochs=2` over `steps`.

    Raises:
        SpecError: no KEY=VALUE, no YAML, or a key within what is no section.
    """
    for setting in overrides:
        _override(values, setting)
    overridden, train = {setting.partition("=")[0] for setting in overrides}, values.get("train")
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if f"train.{key}" in overridden and f"train.{other}" not in overridden and isinstance(train, dict):
            train[other] = None if train.get(key) is not None else train.get(other)


def _override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise SpecError(f"{override!r} is not KEY=VALUE", hint="for example train.steps=5")
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.get(parent)
        if inner is None:
            inner = values[parent] = {}
        if not isinstance(inner, dict):
            raise SpecError(f"{key}: {parent} has no keys of its own")
        values = inner
    values[last] = read_values(text, key)
    if isinstance(values[last], str):  # YAML 1.1 reads 1e-5 as text
        with contextlib.suppress(ValueError):
            values[last] = float(text)


def typed(values: Any) -> Any:
    """YAML lists become tuples where the spec is frozen; YAML 1.1's `1e-5` becomes a number."""
    if isinstance(values, dict):
        out = {key: typed(value) for key, value in values.items()}
        for key in ("targets", "xla_flags", "hosts", "ssh_options", "options", "setup"):
            if isinstance(out.get(key), list):
                out[key] = tuple(out[key])
        for key in ("learning_rate", "beta", "lambda_orpo", "alpha", "weight_decay"):
            if isinstance(out.get(key), str):
                with contextlib.suppress(ValueError):
                    out[key] = float(out[key])
        return out
    return values


def explain(
    error: ValidationError, known_at: Callable[[tuple[int | str, ...]], list[str]], union_tags: Sequence[str]
) -> list[str]:
    """Every problem with its path, and what an unknown key may have meant.

    Args:
        error: of the model.
        known_at: the keys of the section at a place.
        union_tags: parts of a place that are pydantic's own, not the user's.
    """
    lines = []
    for problem in error.errors():
        location = [part for part in problem["loc"] if part not in union_tags]
        path = ".".join(map(str, location))
        if problem["type"] == "extra_forbidden":
            known = known_at(problem["loc"][:-1])
            close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
            text = f"unknown key (did you mean {close[0]}?)" if close else f"unknown key (known: {', '.join(known)})"
        else:
            text = problem["msg"].removeprefix("Value error, ")
            if problem["type"] not in ("missing", "value_error"):
                text += f", found {problem['input']!r}"
        lines.append(f"{path}: {text}")
    return lines
