"""Ids against `apply_chat_template`, masks against conversations cut by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_oracles import Segment, by_hand, engine_ids, turn

from bridge.errors import SpecError
from bridge.launchers.chat import ChatTemplate
from bridge.launchers.data import encode_chat, load_tokenizer
from bridge.launchers.tokenizer import encode_completion

CHAT = [
    turn("user", " Who built it?\n"),
    turn("assistant", "Über 12 men.\n\n"),
    turn("user", "When? <|im_end|> <|eot_id|>"),  # a user may type what looks like an end of turn
    turn("assistant", "1839"),
]
TINY_CHATML = "You are a careful assistant made for tests"
REAL_CHATML = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def chatml_by_hand(system: str) -> list[Segment]:
    return [
        (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n Who built it?\n<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        ("Über 12 men.\n\n<|im_end|>", True),
        ("\n<|im_start|>user\nWhen? <|im_end|> <|eot_id|><|im_end|>\n<|im_start|>assistant\n", False),
        ("1839<|im_end|>", True),
        ("\n", False),
    ]


LLAMA_BY_HAND: list[Segment] = [
    ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWho built it?<|eot_id|>", False),
    ("<|start_header_id|>assistant<|end_header_id|>\n\n", False),
    ("Über 12 men.<|eot_id|>", True),
    ("<|start_header_id|>user<|end_header_id|>\n\nWhen? <|im_end|> <|eot_id|><|eot_id|>", False),
    ("<|start_header_id|>assistant<|end_header_id|>\n\n", False),
    ("1839<|eot_id|>", True),
]


def check(tokenizer: Any, segments: list[Segment]) -> None:
    ids, mask = by_hand(tokenizer, segments)
    assert ids == engine_ids(tokenizer, CHAT)  # the hand has cut at token boundaries
    encoded = encode_chat(tokenizer, CHAT, "completion")
    assert (encoded.ids.dtype, encoded.loss.dtype) == (np.int32, np.bool_)
    assert encoded.ids.tolist() == ids
    assert encoded.loss.tolist() == mask
    learnt = tokenizer.decode(encoded.ids[encoded.loss])
    assert learnt.count(tokenizer.eos_token) == 2  # the closing token of both answers
    everything = encode_chat(tokenizer, CHAT, "all")
    assert everything.ids.tolist() == ids
    assert everything.loss.tolist() == [False] + [True] * (len(ids) - 1)


def test_chatml_where_pad_is_the_end_of_turn(chatml_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(chatml_tokenizer, chat=True)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    check(tokenizer, chatml_by_hand(TINY_CHATML))


def test_llama_turns_with_trimmed_content(llama_tokenizer: Path) -> None:
    check(load_tokenizer(llama_tokenizer, chat=True), LLAMA_BY_HAND)


def test_smollm2_itself(smollm2_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(smollm2_tokenizer, chat=True)
    check(tokenizer, chatml_by_hand(REAL_CHATML))


@pytest.mark.parametrize("kind", ["chatml_tokenizer", "llama_tokenizer"])
def test_prefix_with_generation_prompt_is_where_learning_starts(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer(request.getfixturevalue(kind))
    head = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)["input_ids"]
    encoded = encode_chat(tokenizer, CHAT, "completion")
    assert encoded.ids[: len(head)].tolist() == head
    assert int(np.argmax(encoded.loss)) == len(head)


def test_nothing_to_learn_without_an_assistant(llama_tokenizer: Path) -> None:
    assert not encode_chat(load_tokenizer(llama_tokenizer), CHAT[:1], "completion").loss.any()


def test_empty_answer_still_learns_to_end(llama_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(llama_tokenizer)
    encoded = encode_chat(tokenizer, [turn("user", "Hm"), turn("assistant", "")], "completion")
    assert tokenizer.decode(encoded.ids[encoded.loss]) == "<|eot_id|>"


def test_conversation_that_the_assistant_opens(llama_tokenizer: Path, chatml_tokenizer: Path) -> None:
    chat = [turn("assistant", "Hello."), turn("user", "Hi"), turn("assistant", "Well?")]
    for folder, end in ((llama_tokenizer, "<|eot_id|>"), (chatml_tokenizer, "<|im_end|>")):
        tokenizer = load_tokenizer(folder)
        encoded = encode_chat(tokenizer, chat, "completion")
        assert encoded.ids.tolist() == engine_ids(tokenizer, chat)
        assert tokenizer.decode(encoded.ids[encoded.loss]) == f"Hello.{end}Well?{end}"


def test_keys_without_a_value_are_not_there(llama_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(llama_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'name' in m %}{{ m.name + ': ' }}{% endif %}"
        "{{ m.role + ':' + m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    filled = [{**message, "name": None} for message in CHAT]
    assert encode_chat(tokenizer, filled, "completion").ids.tolist() == engine_ids(tokenizer, CHAT)


def test_cut_at_a_turn(llama_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(llama_tokenizer)
    template = ChatTemplate(tokenizer)
    first, whole = engine_ids(tokenizer, CHAT[:2]), engine_ids(tokenizer, CHAT)
    kept, cut = template.encode_within(CHAT, "completion", len(whole))
    assert kept is not None
    assert (kept.ids.tolist(), cut) == (whole, False)
    for limit in (len(whole) - 1, len(first)):
        kept, cut = template.encode_within(CHAT, "completion", limit)
        assert kept is not None
        assert (kept.ids.tolist(), cut) == (first, True)
        assert kept.loss.tolist() == encode_chat(tokenizer, CHAT[:2], "completion").loss.tolist()
    assert template.encode_within(CHAT, "completion", len(first) - 1) == (None, False)
    assert template.encode_within(CHAT[:1], "all", 3) == (None, False)  # no assistant to end with


def test_as_many_turns_as_fit_are_kept(llama_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(llama_tokenizer)
    chat = [*CHAT, turn("user", "Why?"), turn("assistant", "Ask.")]
    kept, cut = ChatTemplate(tokenizer).encode_within(chat, "completion", len(engine_ids(tokenizer, chat)) - 1)
    assert kept is not None
    assert (kept.ids.tolist(), cut) == (engine_ids(tokenizer, CHAT), True)


def test_nothing_predicts_the_first_token(llama_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(llama_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
    encoded = encode_chat(tokenizer, [turn("assistant", "Ask."), turn("user", "Why?")], "completion")
    learnt = len(by_hand(tokenizer, [("Ask.<|eot_id|>", True)])[0])
    assert encoded.loss.tolist() == [False] + [True] * (learnt - 1) + [False] * (len(encoded.ids) - learnt)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"from": "human", "value": "Hi"}], "ShareGPT"),
        ([turn("gpt", "Hi")], "'gpt' is none of system"),
        ([{"role": "user"}], "message 1: content must be text, found None"),
        ([turn("user", "a"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}], "message 2: content"),
        (["Hi"], "message 1 must have role and content"),
        ([], "non-empty list"),
        ([turn("user", "\ud800")], "content must be text"),
    ],
)
def test_messages_that_are_none(messages: list[Any], said: str, llama_tokenizer: Path) -> None:
    with pytest.raises(SpecError, match=said):
        encode_chat(load_tokenizer(llama_tokenizer), messages, "completion")


def test_tokenizers_that_are_none(llama_tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(SpecError, match="cannot be read"):
        load_tokenizer(tmp_path)
    tokenizer = load_tokenizer(llama_tokenizer)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    load_tokenizer(tmp_path)
    with pytest.raises(SpecError, match="has no chat template"):
        load_tokenizer(tmp_path, chat=True)
    with pytest.raises(SpecError, match="has no chat template"):
        encode_chat(tokenizer, CHAT, "completion")


def test_completion_without_a_template(llama_tokenizer: Path, chatml_tokenizer: Path) -> None:
    llama, chatml = load_tokenizer(llama_tokenizer), load_tokenizer(chatml_tokenizer)
    for tokenizer, bos, end in ((llama, "<|begin_of_text|>", "<|eot_id|>"), (chatml, "", "<|im_end|>")):
        ids, mask = by_hand(tokenizer, [(f"{bos}The capital is", False), (f" Paris{end}", True)])
        for prompt, completion in (("The capital is", " Paris"), ("The capital is", f" Paris{end}")):
            encoded = encode_completion(tokenizer, prompt, completion, "completion")
            assert (encoded.ids.tolist(), encoded.loss.tolist()) == (ids, mask)
        assert encode_completion(tokenizer, f"{bos}The capital is", " Paris", "completion").ids.tolist() == ids
        everything = encode_completion(tokenizer, "The capital is", " Paris", "all")
        assert everything.loss.tolist() == [False] + [True] * (len(ids) - 1)
    # " river" is one token, but serving sees the prompt alone: its ids stay
    ids, mask = by_hand(llama, [("<|begin_of_text|>over a ri", False), ("ver<|eot_id|>", True)])
    assert ids != [llama.bos_token_id, *by_hand(llama, [("over a river<|eot_id|>", True)])[0]]
    encoded = encode_completion(llama, "over a ri", "ver", "completion")
    assert (encoded.ids.tolist(), encoded.loss.tolist()) == (ids, mask)
