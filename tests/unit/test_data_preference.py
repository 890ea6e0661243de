"""Preference pairs: prompt + answer is the whole conversation, and what Tunix's trainer makes of the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_oracles import by_hand, engine_ids, turn

from bridge.errors import SpecError
from bridge.launchers.chat import ChatTemplate
from bridge.launchers.data import load_tokenizer
from bridge.launchers.preference import Pairs, encode_pair
from bridge.launchers.rows import shuffled

ASK, GOOD, BAD = turn("user", "Who built it?"), turn("assistant", "Twelve men."), turn("assistant", "No.")
BEFORE = [turn("system", "Be brief."), turn("user", "Hi"), turn("assistant", "Hi."), ASK]


def template(folder: Path) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(folder))


FORMS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "strings": ({"prompt": "Who built it?", "chosen": "Twelve men.", "rejected": "No."}, [ASK]),
    "messages": ({"prompt": BEFORE, "chosen": [GOOD], "rejected": [BAD]}, BEFORE),
    "messages and strings": ({"prompt": BEFORE, "chosen": "Twelve men.", "rejected": "No."}, BEFORE),
    "whole conversations": ({"chosen": [*BEFORE, GOOD], "rejected": [*BEFORE, BAD]}, BEFORE),
    "whole conversations and a prompt": (
        {"prompt": "Who built it?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        [ASK],
    ),
}


@pytest.mark.parametrize("kind", ["chatml_tokenizer", "llama_tokenizer"])
@pytest.mark.parametrize("form", FORMS)
def test_prompt_and_answer_are_the_conversation(form: str, kind: str, request: pytest.FixtureRequest) -> None:
    record, before = FORMS[form]
    chat = template(request.getfixturevalue(kind))
    pair = encode_pair(chat, record)
    prompt = chat.tokenizer.apply_chat_template(before, add_generation_prompt=True)["input_ids"]
    assert pair.prompt.ids.tolist() == prompt
    end = "<|im_end|>" if kind == "chatml_tokenizer" else "<|eot_id|>"
    for answer, message in ((pair.chosen, GOOD), (pair.rejected, BAD)):
        assert prompt + answer.ids.tolist() == engine_ids(chat.tokenizer, [*before, message])
        assert chat.tokenizer.decode(answer.ids[answer.loss]) == message["content"] + end
        assert answer.loss[: answer.loss.sum()].all()  # no hole: the engine attends by the same mask


def test_text_without_a_template(llama_tokenizer: Path) -> None:
    chat = template(llama_tokenizer)
    chat.tokenizer.chat_template = None
    pair = encode_pair(chat, {"prompt": "The capital is", "chosen": " Paris", "rejected": " a river"})
    ids, _ = by_hand(chat.tokenizer, [("<|begin_of_text|>The capital is", False)])
    assert pair.prompt.ids.tolist() == ids
    for answer, text in ((pair.chosen, " Paris<|eot_id|>"), (pair.rejected, " a river<|eot_id|>")):
        assert answer.ids.tolist() == by_hand(chat.tokenizer, [(text, True)])[0]
        assert answer.loss.all()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": [ASK], "chosen": [GOOD, ASK], "rejected": [BAD]}, "chosen must end with an assistant message"),
        ({"chosen": [ASK, GOOD], "rejected": [turn("user", "What?"), BAD]}, "differ in their last message only"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "there is no prompt"),
        ({"chosen": "a", "rejected": "b"}, "there is no prompt"),
        ({"prompt": [ASK], "chosen": 3, "rejected": [BAD]}, "non-empty list"),
        ({"prompt": "\ud800", "chosen": "a", "rejected": "b"}, "prompt must be text"),
    ],
)
def test_pairs_that_are_none(record: dict[str, Any], said: str, llama_tokenizer: Path) -> None:
    with pytest.raises(SpecError, match=said):
        encode_pair(template(llama_tokenizer), record)


def pairs(folder: Path, rows: int = 4) -> Pairs:
    chat = template(folder)
    records = [{"prompt": f"Question {9**n}?", "chosen": "Yes. " * (n + 1), "rejected": f"No {n}"} for n in range(6)]
    return Pairs.of((encode_pair(chat, record) for record in records), 256, 3, rows, 7)


def test_batches_are_padded_and_sliced(chatml_tokenizer: Path) -> None:
    data = pairs(chatml_tokenizer)
    assert data.prompt_width % 64 == 0
    assert data.prompt_width - 64 < data.prompts.lengths.max() <= data.prompt_width
    order = np.concatenate([shuffled(6, 3, epoch) for epoch in range(2)])
    for step in range(3):
        batch = data.preference_batch(step)
        assert all(array.dtype == np.int32 for array in batch.values())
        for row, index in enumerate(order[4 * step : 4 * step + 4].tolist()):
            prompt = data.prompts[index].ids.tolist()
            left = [7] * (data.prompt_width - len(prompt))
            assert batch["prompt_ids"][row].tolist() == left + prompt
            assert batch["prompt_mask"][row].tolist() == [0] * len(left) + [1] * len(prompt)
            for name, answers in (("chosen", data.chosen), ("rejected", data.rejected)):
                answer = answers[index]
                right = data.answer_width - len(answer.ids)
                assert batch[f"{name}_ids"][row].tolist() == answer.ids.tolist() + [7] * right
                assert batch[f"{name}_mask"][row].tolist() == answer.loss.astype(int).tolist() + [0] * right
        halves = [data.preference_batch(step, process, 2) for process in range(2)]
        for name, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), array)


def test_evaluation_fills_up_with_real_pairs(chatml_tokenizer: Path) -> None:
    data = pairs(chatml_tokenizer)
    batches = list(data.eval_batches())
    asked = [data.prompts[index % 6].ids.tolist() for index in range(8)]
    rows = [
        (ids, mask) for batch in batches for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]
    assert [ids[mask == 1].tolist() for ids, mask in rows] == asked
    assert all(batch["chosen_mask"].any(axis=1).all() for batch in batches)  # a pair without tokens would count log 2


def test_tunix_reads_the_pairs(llama_tokenizer: Path) -> None:
    """Tunix's own preparation of a batch gives positions from 0 at the prompt, and counts the answers' tokens only."""
    from tunix.sft.dpo import dpo_trainer

    data = pairs(llama_tokenizer)
    batch = data.preference_batch(0)
    trainer = object.__new__(dpo_trainer.DPOTrainer)
    trainer.model, trainer._ref_model_exists = object(), False
    example = trainer._prepare_inputs(batch)
    index = int(shuffled(6, 3, 0)[0])
    whole = [*data.prompts[index].ids, *data.chosen[index].ids]
    start = data.prompt_width - len(data.prompts[index].ids)
    here = slice(start, start + len(whole))
    assert np.asarray(example.input_ids)[0, here].tolist() == whole
    assert np.asarray(example.positions)[0, here].tolist() == list(range(len(whole)))
    assert int(np.asarray(example.completion_mask)[0].sum()) == int(data.chosen[index].loss.sum())
    attention = np.asarray(example.attention_mask)[0]
    assert not attention[:, :start].any()  # nobody attends to the padding on the left
    assert attention[start + len(whole) - 1, here].all()
