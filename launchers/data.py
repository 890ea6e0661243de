"""The one data path of both engines: from the spec to batches.

    file or hub -> records -> ids and loss mask (chat, tokenizer) -> cut, dropped, counted -> rows (shuffled, packed)

Every process reads all examples and lays out all rows, the same everywhere; then each takes its slice. So the loss does
not depend on the number of processes, and batch k of a resumed run is batch k of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bridge.errors import SpecError
from bridge.launchers.batches import Batch, maxtext_batch, tunix_batch
from bridge.launchers.chat import ChatTemplate, encode_chat
from bridge.launchers.examples import Form, Record, find_form, read_records
from bridge.launchers.messages import clean_messages, is_text, short
from bridge.launchers.mixture import Mixture, Share
from bridge.launchers.preference import Pair, Pairs, encode_pair
from bridge.launchers.rows import Counts, Examples, Rows
from bridge.launchers.tokenizer import Encoded, encode_completion, load_tokenizer, require_template
from bridge.run_spec import RunSpec, WeightedSource

__all__ = [
    "Batch",
    "Counts",
    "Encoded",
    "Examples",
    "Mixture",
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


@dataclass(frozen=True)
class Part:
    """Sources that are read one after another, their weight in a mixture, and what became of their examples."""

    sources: tuple[str, ...]
    weight: float | None = None
    tally: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """The sources, with commas."""
        return ", ".join(self.sources)


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
    parts = parts_of(run, split)
    if not parts:
        raise SpecError(f"data.{split} names no data", hint="a .jsonl or .parquet file, or a hub data set id")
    length, seed = run.train.sequence_length, run.train.seed
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    template = ChatTemplate(tokenizer)
    records = _Records(base, run.data.split, progress)

    def mixture() -> Mixture | None:
        for part in parts:
            if not part.tally["kept"]:
                raise _nothing_left(part, length)
        return _mixture(parts, seed)

    if run.train.method in PREFERENCE_METHODS:
        pairs = (pair for part in parts for pair in _kept_pairs(records.of(part), run, template, part.tally))
        return Pairs.of(pairs, length, seed, global_rows, pad, lambda: _counts(parts), mixture)
    examples = Examples.of(
        example for part in parts for example in _kept_examples(records.of(part), run, template, part.tally)
    )
    return Rows(examples, length, run.data.packing, seed, global_rows, pad, _counts(parts), mixture())


def parts_of(run: RunSpec, split: Split) -> tuple[Part, ...]:
    """A mixture's sources each for itself, other sources as one; none where the spec names none."""
    if split == "eval":
        names = (run.data.eval,) if isinstance(run.data.eval, str) else tuple(run.data.eval or ())
        return (Part(names),) if names else ()
    value = run.data.train
    if isinstance(value, list) and any(isinstance(item, WeightedSource) for item in value):
        return tuple(Part((item.source,), item.weight) for item in value if isinstance(item, WeightedSource))
    return (Part(run.data.train_names),) if value else ()


def _counts(parts: Sequence[Part]) -> Counts:
    return Counts(**sum((part.tally for part in parts), Counter()))


def _mixture(parts: Sequence[Part], seed: int) -> Mixture | None:
    if parts[0].weight is None:
        return None
    shares = (Share(part.name, part.weight or 0.0, part.tally["kept"]) for part in parts)
    return Mixture(tuple(shares), seed)


@dataclass
class _Records:
    """Reads the records of parts, and says how many have been read so far."""

    base: Path
    split: str
    progress: Progress | None
    read: int = 0

    def of(self, part: Part) -> Iterator[Record]:
        """Those of one part."""
        for record in read_records(part.sources, self.base, self.split):
            yield record
            self.read += 1
            if self.progress:
                self.progress(self.read)


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


def _nothing_left(part: Part, length: int) -> SpecError:
    name, tally = part.name, part.tally
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
