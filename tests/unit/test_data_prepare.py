"""From files to rows: reading, the forms of columns, cutting, dropping, counting, and the errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_oracles import engine_ids, turn, write_jsonl

from bridge import run_spec
from bridge.errors import AccessError, SpecError
from bridge.launchers.data import Counts, Pairs, Rows, load_tokenizer, prepare
from bridge.launchers.examples import find_form, read_records
from bridge.run_spec import RunSpec

SHORT = [turn("user", "Who?"), turn("assistant", "Men.")]
LONG = [*SHORT, turn("user", "When was it built, and by whom? " * 9), turn("assistant", "1839")]
TOO_LONG = [turn("user", "word " * 200), turn("assistant", "Yes")]
SILENT = [turn("user", "Who?")]


def spec(**values: Any) -> RunSpec:
    lines = [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
    return run_spec.parse("model: {source: unused}", tuple(lines))


def prepared(tokenizer: Any, base: Path, **values: Any) -> Rows:
    rows = prepare(spec(data__train="train.jsonl", **values), base, tokenizer, "train", 1)
    assert isinstance(rows, Rows)
    return rows


def test_counts_of_kept_cut_and_dropped(llama_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(llama_tokenizer)
    chats = [LONG, TOO_LONG, SHORT, SILENT]
    write_jsonl(tmp_path / "train.jsonl", [{"id": i, "messages": chat} for i, chat in enumerate(chats)])
    rows = prepared(tokenizer, tmp_path, train__sequence_length=100)
    assert rows.counts == Counts(read=4, kept=2, cut=1, dropped_long=1, dropped_empty=1)
    assert [rows.examples[i].ids.tolist() for i in range(len(rows.examples))] == [engine_ids(tokenizer, SHORT)] * 2
    everything = prepared(tokenizer, tmp_path, train__sequence_length=100, data__loss_on="all")
    assert everything.counts == Counts(read=4, kept=3, cut=1, dropped_long=1, dropped_empty=0)
    whole = prepared(tokenizer, tmp_path, train__sequence_length=2000)
    assert whole.counts == Counts(read=4, kept=3, cut=0, dropped_long=0, dropped_empty=1)
    assert whole.examples[0].ids.tolist() == engine_ids(tokenizer, LONG)


def test_rows_have_what_the_spec_says(chatml_tokenizer: Path, llama_tokenizer: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"talk": SHORT}] * 5)
    values = {"data__column": "talk", "data__packing": "true", "train__seed": 5, "train__sequence_length": 128}
    seen: list[int] = []
    run = spec(data__train="train.jsonl", data__eval="train.jsonl", **values)
    rows = prepare(run, tmp_path, load_tokenizer(chatml_tokenizer), "eval", 8, seen.append)
    assert isinstance(rows, Rows)
    assert (rows.sequence_length, rows.packing, rows.seed, rows.global_rows) == (128, True, 5, 8)
    assert seen == [1, 2, 3, 4, 5]
    assert rows.pad == 2  # <|im_end|>, which is the end of turn as well
    assert prepared(load_tokenizer(llama_tokenizer), tmp_path, **values).pad == 0


def test_prompt_and_completion(llama_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(llama_tokenizer)
    tokenizer.chat_template = None  # base models have none
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "The capital is", "completion": " Paris"}])
    example = prepared(tokenizer, tmp_path).examples[0]
    assert tokenizer.decode(example.ids) == "<|begin_of_text|>The capital is Paris<|eot_id|>"
    assert tokenizer.decode(example.ids[example.loss]) == " Paris<|eot_id|>"
    write_jsonl(tmp_path / "train.jsonl", [{"messages": SHORT}])
    with pytest.raises(SpecError, match="no chat template"):
        prepared(tokenizer, tmp_path)


def test_parquet_and_several_files(llama_tokenizer: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    with_name = [{**message, "name": None} for message in LONG]
    # Arrow gives every message every key that any message has
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": with_name}] * 3), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "b.jsonl", [{"messages": SHORT}])
    tokenizer = load_tokenizer(llama_tokenizer)
    run = spec(data__train=f"[a.parquet, {tmp_path / 'b.jsonl'}]", train__sequence_length=500)
    rows = prepare(run, tmp_path, tokenizer, "train", 1)
    assert isinstance(rows, Rows)
    ids = [rows.examples[i].ids.tolist() for i in range(4)]
    assert ids == [engine_ids(tokenizer, LONG)] * 3 + [engine_ids(tokenizer, SHORT)]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"a": 2}')
    records = list(read_records("a.jsonl", tmp_path, "train"))
    assert [record.values for record in records] == [{"a": 1}, {"a": 2}]
    assert records[1].where.endswith("a.jsonl line 4")


def test_hub_data_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    asked = []

    def load(name: str, split: str) -> Any:
        asked.append((name, split))
        if name == "org/gone":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'org/gone' doesn't exist on the Hub")
        return datasets.Dataset.from_list([{"messages": SHORT}] * 2)

    monkeypatch.setattr(datasets, "load_dataset", load)
    records = list(read_records(["org/chats", "org/chats:test[:10]"], tmp_path, "train_sft"))
    assert asked == [("org/chats", "train_sft"), ("org/chats", "test[:10]")]
    assert [record.values["messages"] for record in records] == [SHORT] * 4
    assert records[1].where == "org/chats train_sft row 2"
    with pytest.raises(AccessError, match=r"org/gone, split train, cannot be read: Dataset 'org/gone'"):
        list(read_records("org/gone", tmp_path, "train"))


def test_forms() -> None:
    assert find_form(["prompt", "messages", "completion"], "messages", False) == "chat"
    assert find_form(["prompt", "completion"], "messages", False) == "completion"
    assert find_form(["messages", "completion", "prompt"], None, False) == "completion"
    assert find_form(["prompt", "chosen", "rejected", "messages"], "messages", True) == "preference"


@pytest.mark.parametrize(
    ("method", "record", "said"),
    [
        (
            "sft",
            {"question": "a", "answer": "b"},
            r"columns question, answer; needed: messages \(data.column\), or prompt",
        ),
        ("sft", {"prompt": "a", "chosen": "b", "rejected": "c"}, r"columns prompt, chosen, rejected; needed: messages"),
        ("dpo", {"messages": SHORT}, "needed: chosen and rejected"),
        ("sft", {"messages": [{"from": "human", "value": "Hi"}]}, r"train.jsonl line 1: message 1 has .* \(ShareGPT\)"),
        ("sft", {"prompt": "a", "completion": 3}, "line 1: completion must be text, found 3"),
        ("sft", {"prompt": "a", "completion": "\ud800"}, "line 1: completion must be text"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": None}, "line 1: the column rejected is missing"),
    ],
)
def test_columns_that_are_not_understood(
    method: str, record: dict[str, Any], said: str, llama_tokenizer: Path, tmp_path: Path
) -> None:
    import json

    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    run = spec(data__train="train.jsonl", train__method=method)
    with pytest.raises(SpecError, match=said) as raised:
        prepare(run, tmp_path, load_tokenizer(llama_tokenizer), "train", 1)
    if "needed" in said:
        assert len(raised.value.details) == 3  # the forms understood


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"messages": [', "line 2 is not valid JSON"),
        (b"[1, 2]", r"line 2 must be a JSON object .* found \[1, 2\]"),
        (b'{"a": "\xff"}', "line 2 is not valid JSON: 'utf-8'"),
        (b"[" * 100_000, "line 2 is not valid JSON"),
    ],
)
def test_lines_that_are_no_examples(line: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"messages": []}\n' + line + b"\n")
    with pytest.raises(SpecError, match=r"bad\.jsonl " + said):
        list(read_records("bad.jsonl", tmp_path, "train"))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "chats.csv").touch()
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    for source, said in (
        ("absent.jsonl", r"absent\.jsonl cannot be read: No such file"),
        ("folder", "found a folder"),
        ("chats.csv", "found a file of another kind"),
        ("data/in/deep", "found nothing there"),
        ("torn.parquet", r"torn\.parquet cannot be read"),
    ):
        with pytest.raises(SpecError, match=said):
            list(read_records(source, tmp_path, "train"))


def test_nothing_left_is_an_error(llama_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(llama_tokenizer)
    write_jsonl(tmp_path / "train.jsonl", [{"messages": TOO_LONG}, {"messages": SILENT}])
    with pytest.raises(SpecError, match=r"nothing to train on is left of the 2 example\(s\) in train.jsonl") as raised:
        prepared(tokenizer, tmp_path, train__sequence_length=100)
    assert [detail.split()[0] for detail in raised.value.details] == ["1", "1"]
    write_jsonl(tmp_path / "train.jsonl", [])
    with pytest.raises(SpecError, match="has no examples"):
        prepared(tokenizer, tmp_path)
    with pytest.raises(SpecError, match=r"data\.eval names no data"):
        prepare(spec(data__train="train.jsonl"), tmp_path, tokenizer, "eval", 1)
    pair = {"prompt": "word " * 99, "chosen": "a", "rejected": "b"}
    write_jsonl(tmp_path / "train.jsonl", [pair, {**pair, "prompt": "Who?"}])
    run = spec(data__train="train.jsonl", train__method="orpo", train__sequence_length=60)
    pairs = prepare(run, tmp_path, tokenizer, "train", 1)
    assert isinstance(pairs, Pairs)
    assert pairs.counts == Counts(read=2, kept=1, dropped_long=1)
