"""Answers before and after training, asked at the end of a run or by `report --answers`, against PyTorch's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import Tiny
from sft_folder import CHATS, Folder

from bridge.commands import answers, launch
from bridge.commands.answers import questions
from bridge.errors import SpecError
from bridge.launchers.data import load_tokenizer
from bridge.launchers.prompts import beginnings, last_turn
from bridge.launchers.run_file import RunFile
from bridge.model_spec import ModelSpec
from bridge.run_spec import parse

PROMPTS = ["How many planks?", "Why?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Folder:
    """A tiny model, seven conversations, a short run."""
    path = tmp_path_factory.mktemp("answers")
    shutil.copytree(tiny("tied", tokenizer="llama", dtype="float32"), path / "model")
    (path / "train.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    train = {
        "steps": 4,
        "sequence_length": 128,
        "batch_per_device": 2,
        "learning_rate": 1.0e-2,
        "schedule": {"kind": "constant", "warmup": 0.0},
        "eval_every": 0,
        "save_every": 4,
        "dtype": "float32",
    }
    spec = {"model": {"source": "model"}, "data": {"train": "train.jsonl"}, "train": train, "lora": {"rank": 4}}
    (path / "bridge.yaml").write_text(yaml.safe_dump(spec))
    return Folder(path)


def by_pytorch(folder: Path, conversations: list[list[dict[str, str]]]) -> list[str]:
    """Greedy, with the chat template, special tokens left out."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = []
    for turns in conversations:
        asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(**asked, do_sample=False, max_new_tokens=answers.NEW_TOKENS, pad_token_id=0)
        said.append(tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return said


def compare(folder: Folder, run: str, conversations: list[list[dict[str, str]]]) -> None:
    """The run's answers.json, PyTorch on the base and on the export, and the page."""
    found = json.loads((folder.path / "runs" / run / "answers.json").read_text())
    assert found["prompts"] == [turns[-1]["content"] for turns in conversations]
    assert found["step"] == 4
    folder.bridge("export", "--to", "hf", f"runs/{run}", "--out", f"out-{run}")
    assert found["before"] == by_pytorch(folder.path / "model", conversations)
    assert found["after"] == by_pytorch(folder.path / f"out-{run}", conversations)
    assert found["before"] != found["after"]
    page = (folder.path / "reports" / f"{run}.html").read_text()
    assert f"Answers, {run}" in page
    assert "<th>before</th><th>after</th>" in page


@pytest.mark.slow
def test_a_run_whose_spec_has_prompts_ends_with_answers(folder: Folder) -> None:
    """An adapter: the base is answered for without it."""
    folder.bridge("convert", "--to", "tunix")
    done = folder.bridge("launch", "lora", "--engine", "tunix", f"data.prompts={json.dumps(PROMPTS)}")
    assert "answers of" in done.stderr
    compare(folder, "tunix-lora", [[{"role": "user", "content": prompt}] for prompt in PROMPTS])


@pytest.mark.slow
def test_report_asks_when_it_is_told_to(folder: Folder) -> None:
    """Nothing is asked unasked; the prompts are the beginnings of the first three examples."""
    folder.bridge("convert", "--to", "maxtext")
    done = folder.bridge("launch", "sft", "--engine", "maxtext")
    assert "before and after answers: bridge report runs/maxtext-sft --answers" in done.stderr
    assert not (folder.path / "runs" / "maxtext-sft" / "answers.json").exists()
    folder.bridge("report", "runs/maxtext-sft", "--answers")
    compare(folder, "maxtext-sft", [chat[:1] for chat in CHATS[:3]])


def test_a_trained_run_is_not_lost_for_want_of_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(run_dir: Path, stored: Path) -> Path:
        assert stored == tmp_path / "stored"
        raise SpecError(f"{run_dir.name} says nothing")

    monkeypatch.setattr(answers, "write_answers", fail)
    monkeypatch.chdir(tmp_path)
    spec = parse("model: {source: m}\ndata: {prompts: ['Who?']}\n")
    asking: Any = SimpleNamespace(run=spec, run_dir=tmp_path / "r", stored=tmp_path / "stored")
    launch.ask(asking)
    assert capsys.readouterr().err == "no answers: r says nothing\n  later: bridge report r --answers\n"
    silent: Any = SimpleNamespace(run=parse("model: {source: m}\n"), run_dir=tmp_path / "r")
    launch.ask(silent)
    assert capsys.readouterr().err == "before and after answers: bridge report r --answers\n"


def run_file(folder: Path, tokenizer: Path, data: str, method: str = "sft") -> RunFile:
    spec = parse(f"model: {{source: m}}\ndata: {data}\ntrain: {{method: {method}}}\n")
    model = ModelSpec(1, 64, 4, 4, 16, 64, 384, True, 1e4, None, 1e-5, 512, "float32")
    return RunFile("tunix", "train.py", spec, str(folder), model, (1.0,), str(tokenizer), "c")


def test_beginnings_of_every_form(tmp_path: Path) -> None:
    """Up to the first answer, system turns with them; the same one only once; the evaluation set before the other."""
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}
    reply = {"role": "assistant", "content": "Men."}
    lines = {
        "chat": [{"messages": [system, user, reply, user, reply]}, {"messages": [system, user, reply]}],
        "text": [{"prompt": "The capital", "completion": " Paris"}],
        "pairs": [
            {"prompt": "Who?", "chosen": "Men.", "rejected": "No."},
            {"chosen": [system, user, reply], "rejected": [system, user, system]},
        ],
    }
    for name, records in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    chat = parse("model: {source: m}\ndata: {train: text.jsonl, eval: chat.jsonl}\n")
    assert list(beginnings(chat, tmp_path)) == [[system, user]]
    text = parse("model: {source: m}\ndata: {train: text.jsonl}\n")
    assert list(beginnings(text, tmp_path)) == ["The capital"]
    pairs = parse("model: {source: m}\ndata: {train: pairs.jsonl}\ntrain: {method: dpo}\n")
    assert list(beginnings(pairs, tmp_path)) == [[user], [system, user]]
    assert [last_turn("The capital"), last_turn([system, user])] == ["The capital", "Who?"]


def test_questions_are_few_and_fit(llama_tokenizer: Path, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "word " * count}, CHATS[0][1]] for count in (1, 99, 2, 3, 4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tokenizer = load_tokenizer(llama_tokenizer)
    asked = questions(run_file(tmp_path, llama_tokenizer, "{train: a.jsonl}"), tokenizer, 60)
    assert [question.text.count("word") for question in asked] == [1, 2, 3]
    templated = tokenizer.apply_chat_template(chats[0][:1], add_generation_prompt=True, return_dict=True)
    assert asked[0].ids == list(templated["input_ids"])
    with pytest.raises(SpecError, match="no example of the data begins with a prompt that fits"):
        questions(run_file(tmp_path, llama_tokenizer, "{train: a.jsonl}"), tokenizer, 3)
    given = run_file(tmp_path, llama_tokenizer, "{prompts: ['Who?']}")
    assert [question.text for question in questions(given, tokenizer, 60)] == ["Who?"]
    with pytest.raises(SpecError, match=r"data\.prompts: 'Who\?' has \d+ tokens, 3 fit"):
        questions(given, tokenizer, 3)
