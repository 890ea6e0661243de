"""The one data path of both engines: from the spec to batches.

    file or hub -> records -> ids and loss mask (chat, tokenizer) -> cut, dropped, counted -> rows (shuffled, packed)

Every process reads all examples and lays out all rows, the same everywhere; then each takes its slice. So the loss does
not depend on the number of processes, and batch k of a resumed run is batch k of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from bridge.errors import SpecError
from bridge.launchers.batches import Batch, maxtext_batch, tunix_batch
from bridge.launchers.chat import ChatTemplate, encode_chat
from bridge.launchers.examples import Form, Record, find_form, read_records
from bridge.launchers.messages import clean_messages, is_text, short
from bridge.launchers.preference import Pair, Pairs, encode_pair
from bridge.launchers.rows import Counts, Examples, Rows
from bridge.launchers.tokenizer import Encoded, encode_completion, load_tokenizer, require_template
from bridge.run_spec import RunSpec

__all__ = [
    "Batch",
    "Counts",
    "Encoded",
    "Examples",
    "Pairs",
    "Rows",
    "encode_chat",
    "load_tokenizer",
    "maxtext_batch",
    "prepare",
    "tunix_batch",
]
PREFERENCE_METHODS = ("dpo", "orpo")
Split = Literal["train", "eval"]
Progress = Callable[[int], None]


def prepare(
    run: RunSpec,
    base: Path,
    tokenizer: Any,
    split: Split,
    global_rows: int,
    progress: Progress | None = None,
) -> Rows | Pairs:
    """Read, tokenize and lay out the data of a run: `Pairs` for dpo and orpo, else `Rows`; both have `counts`.

    `base` is the spec's folder, `global_rows` the rows of one micro step over all processes, `progress` is called with
    the number of examples read so far.

    Raises:
        SpecError: no data named, unreadable, in no form that is understood, or nothing left to train on.
        AccessError: the hub does not give the data set.
    """
    sources = run.data.train if split == "train" else run.data.eval
    if not sources:
        raise SpecError(f"data.{split} names no data", hint="a .jsonl or .parquet file, or a hub data set id")
    records = _watched(read_records(sources, base, run.data.split), progress)
    tally: Counter[str] = Counter()
    length, seed = run.train.sequence_length, run.train.seed
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    data: Rows | Pairs
    if run.train.method in PREFERENCE_METHODS:
        pairs = _kept_pairs(records, run, ChatTemplate(tokenizer), tally)
        data = Pairs.of(pairs, length, seed, global_rows, pad, lambda: Counts(**tally))
    else:
        examples = Examples.of(_kept_examples(records, run, ChatTemplate(tokenizer), tally))
        data = Rows(examples, length, run.data.packing, seed, global_rows, pad, Counts(**tally))
    if not tally["kept"]:
        raise _nothing_left(sources, tally, length)
    return data


def _kept_examples(
    records: Iterator[Record], run: RunSpec, template: ChatTemplate, tally: Counter[str]
) -> Iterator[Encoded]:
    form: Form | None = None
    for record in records:
        if form is None:
            form = find_form(tuple(record.values), run.data.column, preference=False)
            if form == "chat":
                require_template(template.tokenizer)
        tally["read"] += 1
        with _naming(record):
            example, cut = _encode(record, form, run, template)
        if example is None:
            tally["dropped_long"] += 1
        elif not example.loss.any():
            tally["dropped_empty"] += 1
        else:
            tally["kept"] += 1
            tally["cut"] += cut
            yield example


def _encode(record: Record, form: Form, run: RunSpec, template: ChatTemplate) -> tuple[Encoded | None, bool]:
    """An example, or None where it is too long, and whether turns were cut."""
    limit, loss_on = run.train.sequence_length, run.data.loss_on
    if form == "chat":
        column = run.data.column or ""
        return template.encode_within(clean_messages(_column(record, column)), loss_on, limit)
    prompt, completion = (_text(record, column) for column in ("prompt", "completion"))
    example = encode_completion(template.tokenizer, prompt, completion, loss_on)
    return (example if len(example.ids) <= limit else None), False


def _kept_pairs(records: Iterator[Record], run: RunSpec, template: ChatTemplate, tally: Counter[str]) -> Iterator[Pair]:
    for record in records:
        if not tally["read"]:
            find_form(tuple(record.values), run.data.column, preference=True)
        tally["read"] += 1
        with _naming(record):
            _column(record, "chosen"), _column(record, "rejected")
            pair = encode_pair(template, record.values)
        if pair.length > run.train.sequence_length:
            tally["dropped_long"] += 1
        elif not (pair.chosen.loss.any() and pair.rejected.loss.any()):
            tally["dropped_empty"] += 1
        else:
            tally["kept"] += 1
            yield pair


def _column(record: Record, column: str) -> Any:
    if record.values.get(column) is None:
        raise SpecError(f"the column {column} is missing; found: {', '.join(record.values)}")
    return record.values[column]


def _text(record: Record, column: str) -> str:
    value = _column(record, column)
    if not is_text(value):
        raise SpecError(f"{column} must be text, found {short(value)}")
    return str(value)


@contextmanager
def _naming(record: Record) -> Iterator[None]:
    """Puts the place of a record before the text of an error about it."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"{record.where}: {error.message}", details=error.details, hint=error.hint) from error


def _watched(records: Iterator[Record], progress: Progress | None) -> Iterator[Record]:
    for number, record in enumerate(records, 1):
        yield record
        if progress:
            progress(number)


def _nothing_left(sources: str | list[str], tally: Counter[str], length: int) -> SpecError:
    name = sources if isinstance(sources, str) else ", ".join(sources)
    if not tally["read"]:
        return SpecError(f"{name} has no examples")
    return SpecError(
        f"nothing to train on is left of the {tally['read']} example(s) in {name}",
        details=(
            f"{tally['dropped_long']} do not fit train.sequence_length {length}, not even up to the first answer",
            f"{tally['dropped_empty']} have no token to learn",
        ),
        hint="raise train.sequence_length, or look at the roles: with data.loss_on: completion the assistant is learnt",
    )
