"""`bridge generate` against PyTorch's own greedy generation, token for token, on both engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapter_cases as cases
import pytest
from click.testing import CliRunner
from conftest import Tiny

from bridge.cli import cli

PROMPT, NEW = "How many planks has it?", 12


def by_pytorch(folder: Path, adapter: Path | None = None) -> str:
    """Greedy, with the chat template, special tokens left out; with PEFT's adapter on where one is given."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        load: Any = peft.PeftModel.from_pretrained
        model = load(model, adapter)
    turns = [{"role": "user", "content": PROMPT}]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**asked, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    return str(tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_equals_pytorch(engine: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("tied", tokenizer="llama")
    runner = CliRunner()
    checkpoint = tmp_path / "checkpoint"
    done = runner.invoke(cli, ["convert", str(folder), "--to", engine, "--out", str(checkpoint)])
    assert done.exit_code == 0, done.output
    argv = ["generate", str(checkpoint), "--prompt", PROMPT, "--max-new-tokens", str(NEW)]
    done = runner.invoke(cli, argv, catch_exceptions=False)
    expected = by_pytorch(folder)
    assert len(expected) > 10
    assert done.stdout == expected + "\n"
    assert f"{NEW} tokens" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_an_adapter_answers_on_its_base(engine: str, tiny: Tiny, tmp_path: Path) -> None:
    """A PEFT adapter converted; its base is converted for the occasion, as no run and no workspace names one."""
    base = tiny("tied", tokenizer="llama", dtype="float32")
    factors = cases.random_factors(json.loads((base / "config.json").read_text()), 4, targets=("q", "down"), size=0.6)
    adapter = cases.write_peft(tmp_path / "peft", factors, 4, 16.0)
    expected = by_pytorch(base, adapter)
    assert expected != by_pytorch(base)
    runner, checkpoint = CliRunner(), str(tmp_path / "adapter")
    done = runner.invoke(cli, ["convert", str(adapter), "--base", str(base), "--to", engine, "--out", checkpoint])
    assert done.exit_code == 0, done.output
    argv = ["generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", str(NEW)]
    done = runner.invoke(cli, argv, catch_exceptions=False)
    assert done.stdout == expected + "\n"
