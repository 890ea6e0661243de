"""Small real tokenizers as Hugging Face folders: Llama 3.1's kind and ChatML's kind, trained here in a moment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Llama 3.1's special tokens, in the order of ids 128000 ... 128010.
LLAMA_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
# Llama 3.1's split of text into words, before byte pairs are merged (tokenizer.json of the original).
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The turns of Llama 3.1: header, two newlines, trimmed content, <|eot_id|>.
LLAMA_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>")
CHATML_SYSTEM = "You are a careful assistant made for tests"
# ChatML as SmolLM2 writes it: a default system turn, content untrimmed, a newline after each turn.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\n" + CHATML_SYSTEM + "<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = (
    "system\n\nYou are a helpful assistant.\n\nuser\n\nWhat is the capital of France?\n\nassistant\n\n"
    "The capital of France is Paris, a city on the river Seine.\n\n"
    "A bridge carries a road over a river; an arch carries its load to both banks. Who built it, and when?\n"
    "It was built in 1839 and widened in 1902, 24 metres longer than the one before.\n\n"
    "The quick brown fox jumps over the lazy dog. Don't they're we'll I've it's.\n"
    "def mean(values):\n    return sum(values) / len(values)\n\n"
    "Über den Fluß führt eine Brücke. El puente cruza el río. Мост через реку. 橋を渡る。\n"
)


@dataclass(frozen=True)
class TokenIds:
    """What a tokenizer tells a model's config: the number of ids, and the special ones."""

    size: int
    bos: int
    eos: tuple[int, ...]
    pad: int | None


def write_bpe_tokenizer(folder: Path) -> TokenIds:
    """Write a byte-level BPE of Llama 3.1's kind; the template lies in tokenizer_config.json, as in the original.

    Encoding with special tokens puts one <|begin_of_text|> in front, no pad token is named, and
    generation_config.json lists three end tokens (128001, 128008 and 128009 in the original), all as Llama 3.1 does.
    """
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=360, show_progress=False, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(list(LLAMA_SPECIALS))
    bos = LLAMA_SPECIALS[0]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
            ),
        ]
    )
    named = {"bos_token": bos, "eos_token": "<|eot_id|>"}
    _write(folder, tokenizer, LLAMA_SPECIALS, named, {"chat_template": LLAMA_TEMPLATE})
    ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    ids = TokenIds(
        size=tokenizer.get_vocab_size(),
        bos=tokenizer.token_to_id(bos),
        eos=tuple(tokenizer.token_to_id(end) for end in ends),
        pad=None,
    )
    write_generation_config(folder, ids)
    return ids


def write_chatml_tokenizer(folder: Path) -> TokenIds:
    """Write a byte-level BPE of SmolLM2's kind; the template lies in chat_template.jinja, as newer models have it.

    <|im_start|> is bos and opens every turn, <|im_end|> is both eos and pad, encoding adds nothing in front.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<|endoftext|>"))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        special_tokens=list(CHATML_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    named = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    _write(folder, tokenizer, CHATML_SPECIALS, named, {})
    (folder / "chat_template.jinja").write_text(CHATML_TEMPLATE, encoding="utf-8")
    bos, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    ids = TokenIds(size=tokenizer.get_vocab_size(), bos=bos, eos=(end,), pad=end)
    write_generation_config(folder, ids)
    return ids


def write_generation_config(folder: Path, ids: TokenIds) -> None:
    """Write a generation_config.json as Llama 3.1's: a list of end tokens where there are several, and sampling."""
    values: dict[str, Any] = {
        "bos_token_id": ids.bos,
        "do_sample": True,
        "eos_token_id": eos_value(ids),
        "temperature": 0.6,
        "top_p": 0.9,
        "transformers_version": "4.42.3",
    }
    if ids.pad is not None:
        values["pad_token_id"] = ids.pad
    write_json(folder / "generation_config.json", values)


def eos_value(ids: TokenIds) -> int | list[int]:
    """What config.json says of the end tokens: a number where there is one, else a list."""
    return ids.eos[0] if len(ids.eos) == 1 else list(ids.eos)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON as Hugging Face does: two spaces, a newline at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write(
    folder: Path, tokenizer: Any, specials: tuple[str, ...], named: dict[str, str], more: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "added_tokens_decoder": {str(tokenizer.token_to_id(token)): {"content": token, **flags} for token in specials},
        **named,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **more,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", dict(named))
