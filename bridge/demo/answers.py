"""What a model answers: greedy, with PyTorch on the CPU, from a local Hugging Face folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge.errors import CheckpointError, MissingDependency


def answer(folder: Path, prompts: Sequence[str], max_new_tokens: int = 64) -> list[str]:
    """One answer a prompt, each prompt a conversation of its own: chat template, greedy, bfloat16 weights in float32.

    Greedy means that the same folder gives the same text every time: the folder's generation_config supplies nothing
    but the ids that end a turn. Local files only, and no code out of the folder is run.

    Raises:
        MissingDependency: torch or transformers is not installed.
        CheckpointError: `folder` has no config.json or no chat template.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(package, "parity")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a Hugging Face folder: it has no config.json")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    # Any: transformers types these as unions over every kind of input, of which one applies here.
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise CheckpointError(f"{folder} has no chat template", hint="answers need an instruct model's tokenizer")
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    model.eval()
    ends = model.generation_config.eos_token_id
    pad = tokenizer.pad_token_id
    settings: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": ends,
        "pad_token_id": pad if pad is not None else (ends[0] if isinstance(ends, list) else ends),
    }
    greedy: Any = GenerationConfig.from_dict(settings)
    texts: list[str] = []
    with torch.inference_mode():
        for prompt in prompts:
            turns = [{"role": "user", "content": prompt}]
            asked = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            output = model.generate(**asked, generation_config=greedy)
            new = output[0, asked["input_ids"].shape[1] :]
            texts.append(tokenizer.decode(new, skip_special_tokens=True).strip())
    return texts
