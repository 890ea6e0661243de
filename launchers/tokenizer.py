"""The tokenizer of a local folder, and the text form of an example: prompt and completion, without a template."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bridge.errors import SpecError

LossOn = Literal["completion", "all"]


@dataclass(frozen=True)
class Encoded:
    """Ids `(n,)` int32, and `loss` `(n,)`: whether token i is to be predicted, from the tokens before it."""

    ids: NDArray[np.int32]
    loss: NDArray[np.bool_]


def load_tokenizer(folder: Path, *, chat: bool = False) -> Any:
    """The tokenizer in a local Hugging Face folder; no download, no code from the folder.

    Raises:
        SpecError: no such folder, no tokenizer in it, or `chat` and it has no chat template.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise SpecError(f"there is no folder {folder} to read a tokenizer from")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpecError(
            f"the tokenizer in {folder} cannot be read: {reason}", hint="tokenizer.json is needed beside config.json"
        ) from error
    if chat:
        require_template(tokenizer)
    return tokenizer


def require_template(tokenizer: Any) -> None:
    """Raises SpecError unless the tokenizer has a chat template (of several: a default one)."""
    try:
        tokenizer.get_chat_template()
    except ValueError as error:
        raise SpecError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template, which chat messages need",
            hint="base models have none: set model.tokenizer to the instruct model's, or use prompt and completion",
        ) from error


def encode_completion(tokenizer: Any, prompt: str, completion: str, loss_on: LossOn) -> Encoded:
    """Prompt and completion without a template: BOS once if the tokenizer adds one, EOS at the end, which is learnt.

    The prompt's ids are those that serving will have; where the joined text would merge the two they are encoded apart.

    Raises:
        SpecError: the tokenizer has no EOS.
    """
    if tokenizer.eos_token_id is None:
        raise SpecError(f"the tokenizer {tokenizer.name_or_path} has no EOS token to end a completion with")

    def plain(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    head, whole = plain(prompt), plain(prompt + completion)
    if whole[: len(head)] != head:
        whole = head + plain(completion)
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("")["input_ids"][:1] == [bos] and whole[:1] != [bos]:
        head, whole = [bos, *head], [bos, *whole]
    if len(whole) == len(head) or whole[-1] != tokenizer.eos_token_id:
        whole = [*whole, tokenizer.eos_token_id]
    loss = all_but_first(len(whole))
    if loss_on == "completion":
        loss[: len(head)] = False
    return Encoded(np.asarray(whole, np.int32), loss)


def decode(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of ids, special tokens and blanks kept as they are."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def all_but_first(length: int) -> NDArray[np.bool_]:
    loss = np.ones(length, bool)
    loss[:1] = False
    return loss
