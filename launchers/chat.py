"""From messages to ids and a loss mask, with the tokenizer's own chat template.

The ids are exactly what `tokenizer.apply_chat_template(messages)` gives, called once on the whole conversation. The
mask goes by position, never by id: the closing end-of-turn token of every assistant turn is learnt even where pad, eos
and end-of-turn are one id (SmolLM2), and a special token that a user typed is not.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.errors import SpecError
from bridge.launchers.messages import ASSISTANT, Message, clean_messages
from bridge.launchers.tokenizer import Encoded, LossOn, all_but_first, decode, require_template
from bridge.launchers.turns import assistant_turns, common_prefix

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it


@dataclass(frozen=True)
class Tokens:
    """Ids `(n,)` of a conversation, and where each lies in its text, where the tokenizer tells."""

    ids: NDArray[np.int32]
    offsets: Sequence[tuple[int, int]] | None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, asked many times."""

    tokenizer: Any

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.tokenizer.added_tokens_decoder) | frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def _marks_generation(self) -> bool:
        return bool(GENERATION.search(self.tokenizer.get_chat_template()))

    def tokens(self, messages: Sequence[Message]) -> Tokens:
        """What `apply_chat_template(messages)` gives."""
        found = self._apply(messages, tokenizer_kwargs={"return_offsets_mapping": self.tokenizer.is_fast})
        return Tokens(np.asarray(found["input_ids"], np.int32), found.get("offset_mapping"))

    def text(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """The rendered conversation."""
        text: str = self._apply(messages, tokenize=False, add_generation_prompt=generation_prompt)
        return text

    def encode(self, messages: Sequence[Message], loss_on: LossOn) -> Encoded:
        """Ids and mask of one conversation, see `encode_chat`."""
        return self._encoded(messages, self.tokens(messages), loss_on)

    def encode_within(self, messages: Sequence[Message], loss_on: LossOn, limit: int) -> tuple[Encoded | None, bool]:
        """As `encode`, of at most `limit` tokens, and whether turns were cut.

        Whole turns are dropped from the end until the rest fits and ends with the assistant; it is rendered anew.
        None: not even the first assistant turn fits.
        """
        tokens = self.tokens(messages)
        if len(tokens) <= limit:
            return self._encoded(messages, tokens, loss_on), False
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1]["role"] == ASSISTANT and len(self.tokens(messages[:length])) <= limit:
                return self.encode(messages[:length], loss_on), True
        return None, False

    def loss(self, messages: Sequence[Message], tokens: Tokens) -> NDArray[np.bool_]:
        """Every assistant turn's content and closing token; `tokens` are those of `messages`."""
        loss = np.zeros(len(tokens), bool)
        if self._marks_generation:
            loss[:] = self._marked(messages, tokens)
        else:
            for start, stop in self.turns(messages, tokens):
                loss[start:stop] = True
        loss[:1] = False  # nothing stands before the first token to predict it from
        return loss

    def turns(self, messages: Sequence[Message], tokens: Tokens) -> list[tuple[int, int]]:
        """Assistant turns as tokens [start, stop), from the first of the content through the closing token."""
        if not any(message["role"] == ASSISTANT for message in messages):
            return []
        text = self.text(messages)
        turns = assistant_turns(self.text, messages, text, self._common_closing)
        cuts = [edge for turn in turns for edge in (turn.start, turn.end)]
        bounds = iter(self._token_bounds(text, tokens, cuts))
        return [(start, self._closing(tokens.ids, start, stop)) for start, stop in zip(bounds, bounds, strict=True)]

    def _encoded(self, messages: Sequence[Message], tokens: Tokens, loss_on: LossOn) -> Encoded:
        loss = self.loss(messages, tokens) if loss_on == "completion" else all_but_first(len(tokens))
        return Encoded(tokens.ids, loss)

    def _marked(self, messages: Sequence[Message], tokens: Tokens) -> NDArray[np.bool_]:
        """What the template marks with `{% generation %}` inside the turns, through the closing token in any case."""
        marked = np.asarray(self._apply(messages, return_assistant_tokens_mask=True)["assistant_masks"], bool)
        edges = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0)).reshape(-1, 2).tolist()
        spoken = sum(message["role"] == ASSISTANT and bool(message.get("content")) for message in messages)
        if len(edges) < spoken:
            raise SpecError(
                f"the chat template's {{% generation %}} marks cover {len(edges)} of {spoken} assistant turns",
                hint="put every assistant turn, through its end-of-turn token, inside the block",
            )
        try:
            turns = self.turns(messages, tokens)
        except SpecError:
            turns = [(start, self._closing(tokens.ids, start, stop)) for start, stop in edges]
            if any(int(tokens.ids[stop - 1]) not in self._added for _, stop in turns):
                raise
        loss = np.zeros(len(tokens), bool)
        for start, stop in turns:
            inside = start + np.flatnonzero(marked[start:stop])
            loss[inside] = True
            if len(inside):
                loss[inside[-1] : stop] = True
        return loss

    def _closing(self, ids: NDArray[np.int32], start: int, stop: int) -> int:
        """Where learning ends: at the last special token if only blanks follow it in the turn, as in ChatML."""
        for end in range(stop, start, -1):
            if int(ids[end - 1]) in self._added:
                return end
            if decode(self.tokenizer, ids[end - 1 : stop]).strip():
                return stop
        return stop

    def _token_bounds(self, text: str, tokens: Tokens, cuts: Sequence[int]) -> list[int]:
        """Token index of each character cut (ascending), by the offsets, else by tokenizing the pieces apart."""
        if tokens.offsets is None:
            pieces = [text[left:right] for left, right in pairwise([0, *cuts, len(text)])]
            parts = self.tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
            if [token for part in parts for token in part] != tokens.ids.tolist():
                raise SpecError("a turn's edge lies inside a token, and this tokenizer gives no offsets to find it by")
            return [int(bound) for bound in np.cumsum([len(part) for part in parts])[:-1]]
        ends = [end for _, end in tokens.offsets]
        if ends[-1] > len(text) or text[ends[-1] :].strip():
            raise SpecError("the chat template renders the same messages differently each time")
        return [self._bound(text, tokens.offsets, ends, cut) for cut in cuts]

    def _bound(self, text: str, offsets: Sequence[tuple[int, int]], ends: Sequence[int], cut: int) -> int:
        """The first token that reaches beyond `cut`; of what lies before it may only hold blanks."""
        bound = bisect_right(ends, cut)
        before = text[offsets[bound][0] : cut] if bound < len(offsets) else ""
        if before.strip():
            raise SpecError(
                f"the chat template joins {before!r} with what follows in one token, across a turn's edge",
                hint="a template that sets special tokens or blanks around turns avoids it",
            )
        return bound

    def _common_closing(self, first: str, second: str) -> int:
        tokens, others = self.tokenizer([first, second], add_special_tokens=False, verbose=False)["input_ids"]
        return common_prefix(first, decode(self.tokenizer, tokens[: common_prefix(tokens, others)]))

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        from jinja2 import TemplateError

        if options.get("tokenize", True):
            options["tokenizer_kwargs"] = {"verbose": False, **options.get("tokenizer_kwargs", {})}
        try:
            return self.tokenizer.apply_chat_template(list(messages), **options)
        except (TemplateError, TypeError) as error:
            raise SpecError(f"the chat template refuses these messages: {error}") from error


def encode_chat(tokenizer: Any, messages: Sequence[Message], loss_on: LossOn) -> Encoded:
    """Ids of a conversation, equal to `apply_chat_template(messages)`, and what of it is learnt.

    `completion`: every assistant turn's content and its closing end-of-turn token; nothing of other turns or headers.
    `all`: every token but the first.

    Raises:
        SpecError: no chat template, messages that it or we do not take, or turns that cannot be told apart.
    """
    require_template(tokenizer)
    return ChatTemplate(tokenizer).encode(clean_messages(list(messages)), loss_on)
