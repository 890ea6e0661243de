"""The tokenizer's size, read from `tokenizer.json` alone: ids beyond the embedding would be looked up in silence."""

from __future__ import annotations

import json
from pathlib import Path

from bridge.errors import CheckpointError

MAX_BYTES = 256 << 20


def check(folder: Path, vocab: int) -> None:
    """Compare the largest token id with the vocabulary of the weights. A smaller tokenizer is fine.

    Raises:
        CheckpointError: `tokenizer.json` is damaged, or has an id that the embedding has no row for.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    if path.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    try:
        values = json.loads(path.read_bytes())
        added = [token["id"] for token in values.get("added_tokens") or []]
        model = values["model"]["vocab"]
        ids = list(model.values()) if isinstance(model, dict) else [len(model) - 1]
        largest = max([*added, *ids, -1])
        largest_is_known = type(largest) is int
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not largest_is_known or largest >= vocab:
        raise CheckpointError(
            f"{path} has token id {largest}, the embedding has {vocab} rows",
            hint="resize the model's embedding, or use the tokenizer it was trained with",
        )
