"""Where examples come from: .jsonl and .parquet files, and data sets of the hub, one record at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bridge.errors import AccessError, MissingDependency, SpecError

Form = Literal["chat", "completion", "preference"]
FORMS = (
    "chat: a column of messages (data.column), each with role and content",
    "text: prompt and completion",
    "preference (dpo, orpo): prompt, chosen and rejected",
)
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.\[\]:%-]+)?")
PARQUET_ROWS = 1024
"""Rows read at a time."""


@dataclass(frozen=True)
class Record:
    """One example as it was read, and where: a file and line (row, in parquet), or a data set and row."""

    where: str
    values: Mapping[str, Any]


def read_records(sources: str | Sequence[str], base: Path, split: str) -> Iterator[Record]:
    """The examples of one or several sources, in order.

    A source is a .jsonl or .parquet file, relative to `base`, or a hub data set id, of which `split` is read unless
    the id ends in `:OTHER_SPLIT`.

    Raises:
        SpecError: no such file, another kind of file, a line that is no JSON object (file and line are named).
        AccessError: the hub does not have or does not give the data set.
        MissingDependency: pyarrow or datasets.
    """
    for source in [sources] if isinstance(sources, str) else sources:
        path = base / source
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path)
        elif path.suffix == ".parquet":
            yield from _read_parquet(path)
        elif path.exists() or not HUB_ID.fullmatch(source) or path.suffix in (".json", ".csv", ".txt", ".gz"):
            found = "a folder" if path.is_dir() else "a file of another kind" if path.exists() else "nothing there"
            raise SpecError(
                f"{source}: data must be .jsonl or .parquet files, or a hub data set id; found {found}",
                hint='one JSON object a line, for example {"messages": [...]}',
            )
        else:
            yield from _read_hub(source, split)


def find_form(columns: Sequence[str], column: str | None, preference: bool) -> Form:
    """How the columns are to be read; `column` is the chat column, `preference` whether pairs are needed.

    Raises:
        SpecError: none of the forms fits; the columns found and the forms understood are listed.
    """
    if preference:
        if {"chosen", "rejected"} <= set(columns):
            return "preference"
    elif column is not None and column in columns:
        return "chat"
    elif {"prompt", "completion"} <= set(columns):
        return "completion"
    wanted = "chosen and rejected" if preference else f"{column} (data.column), or prompt and completion"
    raise SpecError(
        f"the data has the columns {', '.join(columns)}; needed: {wanted}",
        details=FORMS,
        hint="set data.column to the column of messages" if not preference else None,
    )


def _read_jsonl(path: Path) -> Iterator[Record]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path} line {number}"
                    yield Record(where, _parse(line, where))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(values, dict) or not values:
        raise SpecError(f"{where} must be a JSON object with columns for keys, found {str(values)[:60]}")
    return values


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingDependency("pyarrow", "maxtext") from error
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            for part in file.iter_batches(batch_size=PARQUET_ROWS):
                for values in part.to_pylist():
                    row += 1
                    yield Record(f"{path} row {row}", values)
    except (OSError, ArrowException) as error:
        raise SpecError(f"{path} cannot be read: {error}") from error


def _read_hub(source: str, split: str) -> Iterator[Record]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependency("datasets", "maxtext") from error
    name, _, other = source.partition(":")
    split = other or split
    try:
        rows = load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise AccessError(
            f"the data set {name}, split {split}, cannot be read: {reason}",
            hint="a file needs its ending, .jsonl or .parquet; for a gated data set log in and accept its terms",
        ) from error
    for row, values in enumerate(rows, 1):
        yield Record(f"{name} {split} row {row}", values)
