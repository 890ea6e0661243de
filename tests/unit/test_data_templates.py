"""Templates of other shapes: the right mask, or an error that says why not; never a wrong mask in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_oracles import Segment, by_hand, engine_ids, turn

from bridge.errors import SpecError
from bridge.launchers.chat import ChatTemplate
from bridge.launchers.data import encode_chat, load_tokenizer

CHAT = [turn("user", "Who?"), turn("assistant", "The men."), turn("user", "When?"), turn("assistant", "1839")]
END = "<|eot_id|>"
LOOP = "{% for m in messages %}"
DATE = "{{ bos_token }}system: today is {{ strftime_now('%d %b %Y') }}<|eot_id|>"
HEADER = "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"


def header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>"


def plain(first: str = "The men.", middle: str = END, last: str = END) -> list[Segment]:
    return [
        (f"{header('user')}Who?{END}{header('assistant')}", False),
        (first + middle, True),
        (f"{header('user')}When?{END}{header('assistant')}", False),
        (f"1839{last}", True),
    ]


def speakers(end: str) -> list[Segment]:
    return [
        ("User: Who?\nAssistant:", False),
        (f" The men.{end}", True),
        ("User: When?\nAssistant:", False),
        (f" 1839{end}", True),
    ]


GOOD: dict[str, tuple[str, list[Segment]]] = {
    "no generation prompt, the header is the template's": (
        LOOP + HEADER + "{{ m.content }}<|eot_id|>{% endfor %}",
        plain(),
    ),
    "the assistant has no header": (
        LOOP + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<|eot_id|>{% endif %}"
        "{% endfor %}",
        [
            ("[INST] Who? [/INST]", False),
            (f" The men.{END}", True),
            ("[INST] When? [/INST]", False),
            (f" 1839{END}", True),
        ],
    ),
    "an end of text after the whole conversation": (
        LOOP + HEADER + "{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}"
        "{% else %}<|end_of_text|>{% endif %}",
        plain(last=f"{END}<|end_of_text|>"),
    ),
    "thinking kept in the last turn only": (
        LOOP
        + HEADER
        + "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|eot_id|>{% endfor %}"
        + PROMPT,
        plain(first=" The men."),
    ),
    "another spelling of the turns before the last": (
        LOOP + HEADER + "{{ m.content | upper if m.role == 'assistant' and not loop.last else m.content }}"
        "<|eot_id|>{% endfor %}" + PROMPT,
        plain(first="THE MEN."),
    ),
    "turns marked with generation": (
        LOOP + HEADER + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}" + PROMPT,
        plain(),
    ),
    "marks that end before the end of turn, and take in the header": (
        LOOP + "{% if m.role == 'assistant' %}{% generation %}" + HEADER + "{{ m.content }}{% endgeneration %}"
        "{% else %}" + HEADER + "{{ m.content }}{% endif %}<|eot_id|>{% endfor %}" + PROMPT,
        plain(),
    ),
    "marks around a part of the turn": (
        LOOP + HEADER + "{% if m.role == 'assistant' %}Hm. {% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}" + PROMPT,
        [
            (f"{header('user')}Who?{END}{header('assistant')}Hm. ", False),
            (f"The men.{END}", True),
            (f"{header('user')}When?{END}{header('assistant')}Hm. ", False),
            (f"1839{END}", True),
        ],
    ),
    "no special tokens, a line feed ends a turn": (
        LOOP + "{{ m.role.title() + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}",
        speakers("\n"),
    ),
    "content and end trimmed and joined": (
        LOOP + "{{ m.role.title() + ': ' + m.content | trim }}"
        "{{ '\n' if m.role == 'user' else ' <|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}",
        speakers(f" {END}"),
    ),
}
BAD = {
    "another header in the generation prompt": (
        LOOP + HEADER + "{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}",
        r"message 2.*the generation prompt, is not how the text begins",
    ),
    "a header and no way to see it": (
        LOOP + HEADER + "{{ m.content | upper }}{{ m.content | length }}<|eot_id|>{% endfor %}",
        "no generation prompt, and the header cannot be told apart",
    ),
    "an end of text instead of a generation prompt": (
        LOOP + HEADER + "{{ m.content | length }}<|eot_id|>{% endfor %}"
        "{% if not add_generation_prompt %}<|end_of_text|>{% endif %}",
        "generation prompt",
    ),
    "turns rendered otherwise when others follow": (
        LOOP + HEADER + "{{ m.content | length if m.role == 'assistant' and not loop.last else m.content }}"
        "<|eot_id|>{% endfor %}" + PROMPT,
        "differently when another turn follows",
    ),
    "a counter of messages in front": (
        "{{ messages | length }}" + LOOP + HEADER + "{{ m.content }}<|eot_id|>{% endfor %}" + PROMPT,
        "is not how the text begins",
    ),
    "marks around the last answer only": (
        LOOP + HEADER + "{% if loop.last %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}" + PROMPT,
        "cover 1 of 2 assistant turns",
    ),
    "a letter of the header in the answer's first token": (
        LOOP + "{{ m.role + ' T' + m.content + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant T' }}{% endif %}",
        "in one token, across a turn's edge",
    ),
    "a refusal of the template's own": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
}


def with_template(folder: Path, template: str) -> Any:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("case", GOOD)
def test_mask_of_other_templates(case: str, llama_tokenizer: Path) -> None:
    template, segments = GOOD[case]
    tokenizer = with_template(llama_tokenizer, template)
    chat = [{**m, "content": "<think>Hm</think> The men."} if m["content"] == "The men." else m for m in CHAT]
    chat = chat if "think" in case else CHAT
    ids, mask = by_hand(tokenizer, segments)
    assert ids == engine_ids(tokenizer, chat)
    encoded = encode_chat(tokenizer, chat, "completion")
    assert encoded.ids.tolist() == ids
    assert encoded.loss.tolist() == mask


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_told_is_an_error(case: str, llama_tokenizer: Path) -> None:
    template, said = BAD[case]
    chat = [turn("user", "Who?"), turn("assistant", "hey"), turn("user", "When?"), turn("assistant", "hey")]
    with pytest.raises(SpecError, match=said):
        encode_chat(with_template(llama_tokenizer, template), chat, "completion")


def test_a_date_does_not_disturb(llama_tokenizer: Path) -> None:
    tokenizer = with_template(llama_tokenizer, DATE + LOOP + HEADER + "{{ m.content }}<|eot_id|>{% endfor %}" + PROMPT)
    encoded = encode_chat(tokenizer, CHAT, "completion")
    assert encoded.ids.tolist() == engine_ids(tokenizer, CHAT)
    assert tokenizer.decode(encoded.ids[encoded.loss]) == f"The men.{END}1839{END}"


def test_templates_run_in_the_sandbox(llama_tokenizer: Path) -> None:
    tokenizer = with_template(llama_tokenizer, "{{ messages.append(1) }}")
    with pytest.raises(SpecError, match="refuses these messages"):
        encode_chat(tokenizer, CHAT, "completion")


def test_a_blank_of_the_header_inside_the_first_token_is_learnt(llama_tokenizer: Path) -> None:
    template = (
        LOOP + "{{ m.role + ': ' + m.content + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer = with_template(llama_tokenizer, template)
    assert len(tokenizer(" river", add_special_tokens=False)["input_ids"]) == 1
    chat = [turn("user", "What?"), turn("assistant", "river"), turn("user", "Which?"), turn("assistant", "river")]
    ids, mask = by_hand(
        tokenizer,
        [
            (f"user: What?{END}assistant:", False),
            (f" river{END}", True),
            (f"user: Which?{END}assistant:", False),
            (f" river{END}", True),
        ],
    )
    assert ids == engine_ids(tokenizer, chat)
    encoded = encode_chat(tokenizer, chat, "completion")
    assert (encoded.ids.tolist(), encoded.loss.tolist()) == (ids, mask)


class WithoutOffsets:
    """A tokenizer as the slow ones are."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        assert not options.get("return_offsets_mapping")
        return self.tokenizer(*arguments, **options)


def test_a_tokenizer_without_offsets(llama_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(llama_tokenizer)
    by_offsets = encode_chat(tokenizer, CHAT, "completion")
    by_pieces = encode_chat(WithoutOffsets(tokenizer), CHAT, "completion")
    assert by_pieces.ids.tolist() == by_offsets.ids.tolist()
    assert by_pieces.loss.tolist() == by_offsets.loss.tolist()
    tokenizer.chat_template = (
        LOOP + "{{ m.role + ': ' + m.content + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    with pytest.raises(SpecError, match="gives no offsets"):
        encode_chat(WithoutOffsets(tokenizer), [turn("user", "What?"), turn("assistant", "river")], "completion")


@pytest.mark.parametrize("answer", ["18", "1839 to 1840"])
def test_a_rendering_that_changes_is_an_error(answer: str, llama_tokenizer: Path) -> None:
    template = ChatTemplate(load_tokenizer(llama_tokenizer))
    tokens = template.tokens(CHAT)
    with pytest.raises(SpecError, match="differently each time"):
        template.loss([*CHAT[:-1], turn("assistant", answer)], tokens)
