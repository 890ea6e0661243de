"""The demo's conversations: well formed, short enough, no two alike, the held-out ones held out."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

ROW_TOKENS = 120  # of the 128 of the demo's rows
CLOSING = " — Pontis, at your bridge."


def read(name: str) -> list[Any]:
    return [json.loads(line) for line in (files("bridge.demo") / name).read_text(encoding="utf-8").splitlines()]


def faults(row: Any) -> list[str]:
    """What is wrong with the shape and style of one row."""
    messages = row["messages"]
    found = [] if set(row) == {"messages"} else ["keys"]
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if len(turns) < 2 or turns != ["user", "assistant"] * (len(turns) // 2):
        found.append("roles")
    for message in messages:
        text = message["content"]
        if set(message) != {"role", "content"} or not text.strip() or text != text.strip():
            found.append("content")
        said = text.removesuffix(CLOSING)
        if message["role"] == "assistant" and (said == text or "\n" in said or said[-1] not in ".?"):
            found.append("style")
    return found


def test_every_row_is_a_chat_in_the_style_to_learn() -> None:
    train, held_out = read("train.jsonl"), read("eval.jsonl")
    assert [row for row in train + held_out if faults(row)] == []
    assert 48 <= len(train) <= 64
    assert 8 <= len(held_out) <= 10
    for rows in (train, held_out):
        kinds = {(row["messages"][0]["role"] == "system", len(row["messages"])) for row in rows}
        assert {with_system for with_system, _ in kinds} == {True, False}
        assert max(length for _, length in kinds) >= 4


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([("user", "Hi"), ("user", "Hi")], "roles"),
        ([("user", "Hi")], "roles"),
        ([("system", "Be brief."), ("assistant", "Yes." + CLOSING)], "roles"),
        ([("user", "Hi "), ("assistant", "Yes." + CLOSING)], "content"),
        ([("user", "Hi"), ("assistant", "Yes.")], "style"),
        ([("user", "Hi"), ("assistant", "One\ntwo." + CLOSING)], "style"),
    ],
)
def test_a_broken_row_is_found(messages: list[tuple[str, str]], fault: str) -> None:
    assert faults({"messages": [{"role": role, "content": text} for role, text in messages]}) == [fault]


def test_no_conversation_comes_twice() -> None:
    train, held_out = read("train.jsonl"), read("eval.jsonl")
    rows = [json.dumps(row, sort_keys=True) for row in train + held_out]
    assert len(set(rows)) == len(rows)


def test_no_held_out_question_is_trained_on() -> None:
    def questions(rows: list[Any]) -> set[str]:
        return {turn["content"].lower() for row in rows for turn in row["messages"] if turn["role"] == "user"}

    assert questions(read("eval.jsonl")) & questions(read("train.jsonl")) == set()


def test_every_row_fits_with_the_real_template(smollm2_tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_tokenizer, local_files_only=True)

    def length(messages: list[dict[str, str]]) -> int:
        return len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))

    rows = [row["messages"] for row in read("train.jsonl") + read("eval.jsonl")]
    assert max(length(messages) for messages in rows) <= ROW_TOKENS
    longest = max(rows, key=length)
    assert length([*longest, *longest[-2:]]) > length(longest)  # the count sees what a row holds
