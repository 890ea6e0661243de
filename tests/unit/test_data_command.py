"""`bridge data`: the text with what is learnt in brackets, ids, masks and counts, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from data_oracles import engine_ids, turn, write_jsonl

from bridge.commands.data import command
from bridge.errors import SpecError
from bridge.launchers.data import encode_chat, load_tokenizer

CHATS = [
    [turn("user", "Who [built] it?"), turn("assistant", "Über 12 men.")],
    [turn("user", "When?"), turn("assistant", "1839")],
    [turn("user", "Hm")],
]


@pytest.fixture
def spec(tmp_path: Path, chatml_tokenizer: Path) -> Path:
    write_jsonl(tmp_path / "train.jsonl", [{"messages": chat} for chat in CHATS])
    path = tmp_path / "bridge.yaml"
    path.write_text(
        f"model: {{source: {chatml_tokenizer}}}\ndata: {{train: train.jsonl}}\ntrain: {{sequence_length: 128}}\n"
    )
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_what_is_learnt_stands_in_brackets(spec: Path, chatml_tokenizer: Path) -> None:
    out = run("--spec", str(spec), "--show", "1")
    assert "<|im_start|>user\nWho [built] it?<|im_end|>\n<|im_start|>assistant\n⟦Über 12 men.<|im_end|>⟧\n" in out
    assert "1839" not in out
    ids = engine_ids(load_tokenizer(chatml_tokenizer), CHATS[0])
    assert "ids  " + " ".join(map(str, ids)) + "\n" in out
    assert "train: 2 of 3 examples kept (0 cut at a turn), dropped: 0 too long, 1 with nothing to learn" in out


def test_json(spec: Path, chatml_tokenizer: Path) -> None:
    spec.write_text(spec.read_text().replace("train.jsonl", "train.jsonl, eval: train.jsonl, packing: true"))
    report = json.loads(run("--spec", str(spec), "--show", "9", "--json"))
    tokenizer = load_tokenizer(chatml_tokenizer)
    encoded = [encode_chat(tokenizer, chat, "completion") for chat in CHATS[:2]]
    assert list(report) == ["train", "eval"]
    for part in report.values():
        assert part["counts"] == {"read": 3, "kept": 2, "cut": 0, "dropped_long": 0, "dropped_empty": 1}
        assert part["tokens"] == sum(len(example.ids) for example in encoded)
        assert part["trained_tokens"] == sum(int(example.loss.sum()) for example in encoded)
        assert (part["rows"], part["sequence_length"]) == (1, 128)  # packed
        for shown, example in zip(part["examples"], encoded, strict=True):
            assert shown["ids"] == example.ids.tolist()
            assert shown["mask"] == example.loss.astype(int).tolist()
            assert shown["text"] == tokenizer.decode(example.ids)


def test_pairs(spec: Path) -> None:
    write_jsonl(spec.parent / "train.jsonl", [{"prompt": "Who?", "chosen": "Men.", "rejected": "No."}])
    spec.write_text(spec.read_text().replace("train: {", "train: {method: dpo, "))
    out = run("--spec", str(spec))
    assert "train 1 chosen" in out
    assert "⟦Men.<|im_end|>⟧" in out
    assert "⟦No.<|im_end|>⟧" in out
    shown = json.loads(run("--spec", str(spec), "--json"))["train"]["examples"][0]
    assert list(shown) == ["prompt", "chosen", "rejected"]
    assert not any(shown["prompt"]["mask"])


def test_default_spec_and_no_spec(spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(spec.parent)
    assert "train: 2 of 3 examples kept" in run()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(SpecError, match="there is no bridge"):
        run()
