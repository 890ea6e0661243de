"""The small files of a tokenizer, read without any tokenizer library: ids without a row, turns that would never end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bridge.errors import CheckpointError, printable
from bridge.model_spec import read_json

MAX_BYTES = 256 << 20
# What closes a turn in the chat templates of Llama 3, ChatML, Gemma and Phi.
CLOSING = ("<|eot_id|>", "<|eot|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


def check(folder: Path, vocab: int) -> None:
    """Compare the largest token id with the vocabulary of the weights. A smaller tokenizer is fine.

    Raises:
        CheckpointError: `tokenizer.json` is damaged, or has an id that the embedding has no row for.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    values = _read(path)
    try:
        added = [token["id"] for token in values.get("added_tokens") or []]
        model = values["model"]["vocab"]
        ids = list(model.values()) if isinstance(model, dict) else [len(model) - 1]
        largest = max([*added, *ids, -1])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if type(largest) is not int or largest >= vocab:
        raise CheckpointError(
            f"{path} has token id {largest}, the embedding has {vocab} rows",
            hint="resize the model's embedding, or use the tokenizer it was trained with",
        )


def never_stops(folder: Path) -> str | None:
    """Why generation would run on after an answer, if it would: the token that closes a turn is no end token.

    A base model with a chat template is like that: its template ends turns with `<|eot_id|>`, its generation_config
    knows `<|end_of_text|>` only.

    Raises:
        CheckpointError: a file is damaged.
    """
    template = _template(folder)
    if not template or not (folder / "tokenizer.json").is_file():
        return None
    added = _read(folder / "tokenizer.json").get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    ids = {str(token.get("content")): token.get("id") for token in tokens}
    closing = {name: ids[name] for name in CLOSING if name in template and name in ids}
    for name in ("generation_config.json", "config.json"):
        ends = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if ends is not None:
            ends = ends if isinstance(ends, list) else [ends]
            if not closing or any(value in ends for value in closing.values()):
                return None
            said = ", ".join(f"{token} ({value})" for token, value in closing.items())
            return printable(f"the chat template closes a turn with {said}, eos_token_id of {name} is {ends}")
    return None


def _template(folder: Path) -> str:
    """Every chat template of a folder, joined."""
    found = []
    if (folder / "chat_template.jinja").is_file() and (folder / "chat_template.jinja").stat().st_size < MAX_BYTES:
        found.append((folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace"))
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (folder / name).is_file():
            found.append(json.dumps(read_json(folder / name).get("chat_template"), ensure_ascii=False))
    return "\n".join(found)


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it is no JSON object")
    return values
