"""Preference pairs: one prompt, a chosen and a rejected answer, tokenized here and not by the engine.

Tunix's own string path puts a BOS before each answer, adds no EOS and masks by id; it is given ids and masks instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bridge.errors import SpecError
from bridge.launchers.batches import Ints, process_rows
from bridge.launchers.chat import ChatTemplate
from bridge.launchers.messages import ASSISTANT, Message, clean_messages, is_text, short
from bridge.launchers.mixture import Indices, Mixture
from bridge.launchers.rows import Collector, Counts, Examples, Order
from bridge.launchers.tokenizer import Encoded, encode_completion

WIDTH_STEP = 64
"""Widths are rounded up to this many tokens, so that small changes of the data compile nothing new."""


@dataclass(frozen=True)
class Pair:
    """Ids of a prompt and two answers; prompt + answer is the conversation as the template gives it.

    `loss` of an answer ends with its closing token: what a template writes after it (a line feed) does not count.
    """

    prompt: Encoded
    chosen: Encoded
    rejected: Encoded

    @property
    def length(self) -> int:
        """Tokens of the prompt with the longer answer."""
        return len(self.prompt.ids) + max(len(self.chosen.ids), len(self.rejected.ids))


def encode_pair(template: ChatTemplate, record: Mapping[str, Any]) -> Pair:
    """The columns `prompt`, `chosen`, `rejected` as ids.

    Lists of messages: `chosen` and `rejected` are one assistant message each, or repeat the conversation before it.
    Strings: a user's and an assistant's turn where the tokenizer has a chat template, plain text where it has none.

    Raises:
        SpecError: other types; conversations that differ before the last turn, or do not end with the assistant.
    """
    prompt, chosen, rejected = (_checked(key, record.get(key)) for key in ("prompt", "chosen", "rejected"))
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        if not template.tokenizer.chat_template:
            return _text_pair(template.tokenizer, prompt, chosen, rejected)
        prompt, chosen, rejected = ([_turn("user", prompt)], [_turn(ASSISTANT, chosen)], [_turn(ASSISTANT, rejected)])
    return _chat_pair(template, *_conversations(prompt, chosen, rejected))


def _checked(column: str, value: object) -> Any:
    if isinstance(value, str) and not is_text(value):
        raise SpecError(f"{column} must be text, found {short(value)}")
    return value


def _conversations(prompt: Any, chosen: Any, rejected: Any) -> tuple[list[Message], Message, Message]:
    before = [_turn("user", prompt)] if isinstance(prompt, str) else [] if prompt is None else clean_messages(prompt)
    answers = []
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        messages = [_turn(ASSISTANT, value)] if isinstance(value, str) else clean_messages(value)
        if messages[-1]["role"] != ASSISTANT:
            raise SpecError(f"{name} must end with an assistant message, found the role {messages[-1]['role']}")
        if before and messages[: len(before)] == before:
            messages = messages[len(before) :]
        answers.append(messages)
    if answers[0][:-1] != answers[1][:-1]:
        raise SpecError("chosen and rejected must differ in their last message only, and share what stands before it")
    conversation = [*before, *answers[0][:-1]]
    if not conversation:
        raise SpecError("there is no prompt: neither a prompt column nor messages before the answer")
    return conversation, answers[0][-1], answers[1][-1]


def _chat_pair(template: ChatTemplate, prompt: Sequence[Message], chosen: Message, rejected: Message) -> Pair:
    encoded = []
    for answer in (chosen, rejected):
        messages = [*prompt, answer]
        tokens = template.tokens(messages)
        ids = tokens.ids
        start, stop = template.turns(messages, tokens)[-1]
        encoded.append((ids[:start], Encoded(ids[start:], np.arange(start, len(ids)) < stop)))
    if not np.array_equal(encoded[0][0], encoded[1][0]):
        raise SpecError(
            "the chat template gives chosen and rejected different prompts, so that they cannot be compared"
        )
    return Pair(_silent(encoded[0][0]), encoded[0][1], encoded[1][1])


def _text_pair(tokenizer: Any, prompt: str, chosen: str, rejected: str) -> Pair:
    answers = [encode_completion(tokenizer, prompt, answer, "completion") for answer in (chosen, rejected)]
    starts = [int(np.argmax(answer.loss)) for answer in answers]
    if not prompt or starts[0] != starts[1]:
        raise SpecError("the prompt must be text that chosen and rejected both continue")
    chosen_part, rejected_part = (
        Encoded(answer.ids[start:], answer.loss[start:]) for answer, start in zip(answers, starts, strict=True)
    )
    return Pair(_silent(answers[0].ids[: starts[0]]), chosen_part, rejected_part)


def _silent(ids: Ints) -> Encoded:
    return Encoded(ids, np.zeros(len(ids), np.bool_))


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@dataclass(frozen=True)
class Pairs:
    """The batches of a preference run; as `Rows`, with pairs for rows and no packing."""

    prompts: Examples
    chosen: Examples
    rejected: Examples
    sequence_length: int
    seed: int
    global_rows: int
    pad: int = 0
    counts: Counts = field(default_factory=Counts)
    mixture: Mixture | None = None
    _order: Order = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        order = Order(self.prompts.lengths, self.sequence_length, False, self.seed, self.mixture)
        object.__setattr__(self, "_order", order)

    @staticmethod
    def of(
        pairs: Iterable[Pair],
        sequence_length: int,
        seed: int,
        global_rows: int,
        pad: int,
        counts: Callable[[], Counts] = Counts,
        mixture: Callable[[], Mixture | None] = lambda: None,
    ) -> Pairs:
        """Collect pairs; `counts` and `mixture` are called when all are read."""
        prompts, chosen, rejected = Collector(), Collector(), Collector()
        for pair in pairs:
            prompts.append(pair.prompt)
            chosen.append(pair.chosen)
            rejected.append(pair.rejected)
        parts = (prompts.examples(), chosen.examples(), rejected.examples())
        return Pairs(*parts, sequence_length, seed, global_rows, pad, counts(), mixture())

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def rows_per_epoch(self) -> int:
        """Pairs."""
        return len(self)

    @property
    def row_length(self) -> int:
        """Positions of a prompt with an answer, as the model is given them."""
        return self.prompt_width + self.answer_width

    @property
    def tokens_per_batch(self) -> int:
        """Positions of a micro step that the model computes: both answers, each after the prompt, with padding."""
        return 2 * self.global_rows * self.row_length

    def rows_of(self, epochs: float) -> int:
        """Pairs of so many epochs, as `Order.rows_of`."""
        return self._order.rows_of(epochs)

    @property
    def prompt_width(self) -> int:
        """Columns of the prompts, the same in every batch."""
        return _round_up(int(self.prompts.lengths.max()))

    @property
    def answer_width(self) -> int:
        """Columns of the answers, the same in every batch."""
        return _round_up(int(max(self.chosen.lengths.max(), self.rejected.lengths.max())))

    def preference_batch(self, step: int, process_index: int = 0, process_count: int = 1) -> dict[str, Ints]:
        """What Tunix's DPOTrainer takes, int32, for micro step `step` from 0: see `_fill`.

        Raises:
            SpecError: the processes do not divide `global_rows`.
        """
        part = process_rows(self.global_rows, process_index, process_count)
        first = step * self.global_rows
        rows = [self._order.examples_of(first + row) for row in range(part.start, part.stop)]
        return self._fill(np.concatenate(rows))

    def eval_batches(self, process_index: int = 0, process_count: int = 1) -> Iterator[dict[str, Ints]]:
        """Every pair once, in the order of the file; the last batch is filled up from the beginning of the set.

        The engine's loss is a mean over pairs, in which an empty pair would be log 2 (DPO) or not a number (ORPO).
        """
        part = process_rows(self.global_rows, process_index, process_count)
        for first in range(0, len(self), self.global_rows):
            yield self._fill(np.arange(first + part.start, first + part.stop) % len(self))

    def _fill(self, rows: Indices) -> dict[str, Ints]:
        """`prompt_ids` padded on the left, `chosen_ids` and `rejected_ids` on the right, each with its mask."""
        batch: dict[str, Ints] = {}
        parts = (("prompt", self.prompts, self.prompt_width), ("chosen", self.chosen, self.answer_width))
        for name, examples, width in (*parts, ("rejected", self.rejected, self.answer_width)):
            ids = np.full((len(rows), width), self.pad, np.int32)
            mask = np.zeros((len(rows), width), np.int32)
            for row, index in enumerate(rows.tolist()):
                example = examples[index]
                length = len(example.ids)
                part = slice(width - length, width) if name == "prompt" else slice(0, length)
                ids[row, part] = example.ids
                mask[row, part] = 1 if name == "prompt" else example.loss
            batch |= {f"{name}_ids": ids, f"{name}_mask": mask}
        return batch


def _round_up(width: int) -> int:
    return -(-width // WIDTH_STEP) * WIDTH_STEP
