"""Where the assistant's turns lie in a rendered conversation: characters, found by rendering, never by looking for ids.

A chat template is a program, so its turns cannot be read off. They are found by rendering the same conversation in
parts (up to a turn, with and without the generation prompt) and comparing texts. Wherever two renderings disagree in a
way that leaves a boundary open, a `SpecError` says so: a wrong loss mask would train the wrong tokens in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge.errors import SpecError
from bridge.launchers.messages import ASSISTANT, Message

Render = Callable[[Sequence[Message], bool], str]
"""(messages, add_generation_prompt) -> text"""


@dataclass(frozen=True)
class Turn:
    """One assistant turn as characters [start, end) of the text: content and closing, without the header."""

    start: int
    end: int


def assistant_turns(
    render: Render, messages: Sequence[Message], text: str, common_closing: Callable[[str, str], int]
) -> tuple[Turn, ...]:
    """The assistant turns of `text`, which is `render(messages, False)`, in order.

    `common_closing(a, b)` gives the length, in characters and at a token boundary of `a`, of what both start with.

    Raises:
        SpecError: the template renders a turn differently alone than inside the conversation, so that the start or the
            end of the turn cannot be told.
    """
    return tuple(
        _turn(render, messages, index, text, common_closing)
        for index, message in enumerate(messages)
        if message["role"] == ASSISTANT
    )


def _turn(
    render: Render,
    messages: Sequence[Message],
    index: int,
    text: str,
    common_closing: Callable[[str, str], int],
) -> Turn:
    start = _start(render, messages, index, text)
    if index == len(messages) - 1:
        return Turn(start, len(text))
    alone = render(messages[: index + 1], False)
    if len(alone) >= start and text.startswith(alone):
        return Turn(start, len(alone))
    # The last turn is rendered differently (an end token, thinking kept): compare what follows the content instead.
    here = _content_edge(render, messages, index, text, after=True)
    there = _content_edge(render, messages[: index + 1], index, alone, after=True)
    if here is None or there is None or here < start:
        raise _unclear(index, "it renders the turn differently when another turn follows")
    return Turn(start, here + common_closing(text[here:], alone[there:]))


def _start(render: Render, messages: Sequence[Message], index: int, text: str) -> int:
    """Where the model begins to speak: the end of the generation prompt, which is what it sees when it is served."""
    if index == 0:
        edge = _content_edge(render, messages, index, text, after=False)
        if edge is None:
            raise _unclear(index, "the conversation begins with the assistant, and its header cannot be told apart")
        return edge
    before = messages[:index]
    head, plain = render(before, True), render(before, False)
    if not text.startswith(head):
        raise _unclear(index, "the conversation up to the turn, with the generation prompt, is not how the text begins")
    if head != plain and head.startswith(plain):
        return len(head)
    # The prompt adds nothing: either the assistant has no header ([INST] templates), or the template ignores the flag.
    edge = _content_edge(render, messages, index, text, after=False)
    if edge is None or edge < len(head):
        raise _unclear(index, "it has no generation prompt, and the header cannot be told apart")
    return edge if text[len(head) : edge].strip() else len(head)


def _content_edge(render: Render, messages: Sequence[Message], index: int, text: str, *, after: bool) -> int | None:
    """Where the content of a message begins or ends in `text`: where a mark beside it appears, all else the same."""
    mark = _unused(text)
    content = messages[index].get("content") or ""
    for candidate in dict.fromkeys((content, content.rstrip() if after else content.lstrip(), content.strip())):
        marked = {**messages[index], "content": candidate + mark if after else mark + candidate}
        probe = render([*messages[:index], marked, *messages[index + 1 :]], False)
        edge = probe.find(mark)
        if edge >= 0 and probe[:edge] + probe[edge + len(mark) :] == text:
            return edge
    return None


def _unused(text: str) -> str:
    """A private-use character that the text does not have; templates neither trim nor interpret it."""
    return next(mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in text)


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """How many characters, or tokens, both start with."""
    different = (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    return next(different, min(len(first), len(second)))


def _unclear(index: int, reason: str) -> SpecError:
    return SpecError(
        f"the chat template does not show where the assistant's turn (message {index + 1}) begins and ends: {reason}",
        hint="mark the turns with {% generation %} ... {% endgeneration %} in the template, or set data.loss_on: all",
    )
