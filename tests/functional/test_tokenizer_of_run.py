"""A run with another model's tokenizer exports with that one: its chat template, its end tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import run
from conftest import Tiny
from transformers import AutoTokenizer, GenerationConfig

from bridge.commands import launch


def test_the_export_has_the_tokenizer_that_was_trained_with(
    tiny: Tiny, llama_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Llama base model is trained with the instruct model's tokenizer, since it has no template of its own."""
    monkeypatch.chdir(tmp_path)
    base = shutil.copytree(tiny("tied", tokenizer="llama"), tmp_path / "base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|end_of_text|>"}))
    generation = json.loads((base / "generation_config.json").read_text())
    end, *_ = generation["eos_token_id"]
    (base / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": end}))
    (tmp_path / "train.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "bridge.yaml").write_text(
        f"model: {{source: base, tokenizer: {llama_tokenizer}}}\ndata: {{train: train.jsonl}}\n"
    )
    run("convert", "--to", "maxtext")
    monkeypatch.setattr(launch, "follow", lambda *_: None)
    run("launch", "sft")
    step = tmp_path / "runs" / "maxtext-sft" / "checkpoints" / "5"
    shutil.copytree(tmp_path / "checkpoints" / "maxtext" / "0", step)
    told = run("export", "--to", "hf").stderr
    assert "warning" not in told
    export = tmp_path / "export" / "hf"
    chat = [{"role": "user", "content": "planks?"}, {"role": "assistant", "content": "seven"}]
    trained, exported = (AutoTokenizer.from_pretrained(folder) for folder in (llama_tokenizer, export))
    assert exported.apply_chat_template(chat, tokenize=False) == trained.apply_chat_template(chat, tokenize=False)
    stops = GenerationConfig.from_pretrained(export).eos_token_id
    assert exported.convert_tokens_to_ids("<|eot_id|>") in stops
    assert end in stops
    with pytest.raises(ValueError, match="chat_template"):
        AutoTokenizer.from_pretrained(base).apply_chat_template(chat, tokenize=False)
