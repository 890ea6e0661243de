"""Independent references for the data path: masks written by hand, slow and obvious."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Segment = tuple[str, bool]
"""A piece of a conversation's text, and whether it is learnt."""


def by_hand(tokenizer: Any, segments: Sequence[Segment]) -> tuple[list[int], list[bool]]:
    """Ids and mask of text cut by hand: each piece tokenized alone."""
    ids: list[int] = []
    mask: list[bool] = []
    for text, learnt in segments:
        part = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += part
        mask += [learnt] * len(part)
    return ids, mask


def engine_ids(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """What transformers says the conversation is."""
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    """One JSON value a line."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def turn(role: str, content: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": content}
