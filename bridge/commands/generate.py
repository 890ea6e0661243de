"""`bridge generate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from bridge.commands import checkpoint as checkpoints
from bridge.commands import common
from bridge.commands.forward import forward_pass
from bridge.errors import SpecError, UnsupportedError
from bridge.model_spec import read_json


@click.command(epilog=common.examples('bridge generate --prompt "Who are you?"'))
@click.argument("checkpoint", required=False, type=common.place_type)
@click.option("--prompt", required=True, help="The user's turn; without a chat template, the text to go on with.")
@common.engine_option
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--step", type=int, help="Default: the best by eval loss, else the newest.")
@common.spec_option
def command(
    checkpoint: Path | None, prompt: str, engine: str | None, max_new_tokens: int, step: int | None, spec: Path | None
) -> None:
    """Answer a prompt with the engine's own model: greedy, in f32 on the CPU, without a cache.

    A look at a checkpoint before it is exported; to serve it, export it. CHECKPOINT as for `bridge export`.
    """
    common.on_cpu()
    found = checkpoints.find(common.maybe_workspace(spec), checkpoint, None, step, engine)
    if found.tree.adapters:
        raise UnsupportedError(f"{found.chosen.item} holds adapters", hint="merge them first: bridge export --to hf")
    common.say(f"generating with {found.chosen.item} ({found.chosen.reason})")
    from bridge.launchers.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(found.hf)
    ids = prompt_ids(tokenizer, prompt)
    if len(ids) + max_new_tokens > found.model.context:
        raise SpecError(f"{len(ids)} + {max_new_tokens} tokens exceed the model's {found.model.context} positions")
    from bridge.converters.parity.greedy import generate

    with forward_pass(found, found.chosen.item, len(ids) + max_new_tokens) as forward:
        times: list[float] = []
        ends = end_ids(found.hf, tokenizer)
        made = generate(forward, ids, ends, max_new_tokens, lambda _: times.append(time.monotonic()))
    click.echo(tokenizer.decode(made, skip_special_tokens=True))
    if len(times) > 1:
        rate = (len(times) - 1) / max(times[-1] - times[0], 1e-9)
        common.say(f"{len(made)} tokens, {rate:.1f} a second after the first")


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt as a user's turn where the tokenizer has a chat template, else as text."""
    if not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    turns = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"])


def end_ids(folder: Path, tokenizer: Any) -> list[int]:
    """The ids that end an answer: all of generation_config.json's, else the tokenizer's."""
    path = folder / "generation_config.json"
    ends = read_json(path).get("eos_token_id") if path.is_file() else None
    if ends is None:
        ends = tokenizer.eos_token_id
    return [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
