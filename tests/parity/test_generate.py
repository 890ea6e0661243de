"""`bridge generate` against PyTorch's own greedy generation, token for token, on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Tiny

from bridge.cli import cli

PROMPT, NEW = "How many planks has it?", 12


def by_pytorch(folder: Path) -> str:
    """Greedy, with the chat template, special tokens left out."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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
