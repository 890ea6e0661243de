"""What a conversation is: a list of messages with role and content, checked before a template sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.errors import SpecError

Message = Mapping[str, Any]
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "ipython", "function")


def clean_messages(value: object) -> list[dict[str, Any]]:
    """Messages as a template takes them: keys without a value (Arrow fills them in) are dropped.

    Raises:
        SpecError: no list of role and content; another convention (from/value); a role that no template knows.
    """
    if not isinstance(value, list | tuple) or not value:
        raise SpecError(f"messages must be a non-empty list of role and content, found {short(value)}")
    return [_clean(number, message) for number, message in enumerate(value, 1)]


def _clean(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise SpecError(f"message {number} must have role and content, found {short(message)}")
    kept = {key: value for key, value in message.items() if value is not None}
    if "role" not in kept and "from" in kept:
        raise SpecError(
            f"message {number} has the keys from and value (ShareGPT), which are not understood",
            hint="rename them to role and content, and the roles human and gpt to user and assistant",
        )
    if kept.get("role") not in ROLES:
        raise SpecError(f"message {number}: role {short(kept.get('role'))} is none of {', '.join(ROLES)}")
    if not is_text(kept.get("content")) and not (kept.get("tool_calls") and "content" not in kept):
        raise SpecError(f"message {number}: content must be text, found {short(kept.get('content'))}")
    return kept


def is_text(value: object) -> bool:
    """A string that a tokenizer takes: JSON can hold half a surrogate pair, UTF-8 cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def short(value: object) -> str:
    """A value in an error text."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
