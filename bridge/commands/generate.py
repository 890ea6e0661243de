"""`bridge generate`."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge.commands import adapter as adapters
from bridge.commands import checkpoint as checkpoints
from bridge.commands import common, verify_adapter
from bridge.commands.forward import adapted_pass, forward_pass
from bridge.errors import SpecError
from bridge.model_spec import read_json

if TYPE_CHECKING:
    from bridge.commands.checkpoint import Checkpoint
    from bridge.commands.workspace import Workspace
    from bridge.converters.parity.compare import Forward


@click.command(epilog=common.examples('bridge generate --prompt "Who are you?"'))
@click.argument("checkpoint", required=False, type=common.place_type)
@click.option("--prompt", required=True, help="The user's turn; without a chat template, the text to go on with.")
@common.engine_option
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--step", type=int, help="Default: the best by eval loss, else the newest.")
@click.option("--base", type=common.folder_type, help="HF folder of the base, for a checkpoint without bridge.json.")
@adapters.options
@common.spec_option
def command(
    checkpoint: Path | None,
    prompt: str,
    engine: str | None,
    max_new_tokens: int,
    step: int | None,
    base: Path | None,
    spec: Path | None,
    about: adapters.Options,
) -> None:
    """Answer a prompt with the engine's own model: greedy, in f32 on the CPU, without a cache.

    A look at a checkpoint before it is exported; to serve it, export it. CHECKPOINT as for `bridge export`.
    """
    common.on_cpu()
    workspace = common.maybe_workspace(spec)
    found = checkpoints.find(workspace, checkpoint, base, step, engine)
    common.say(f"generating with {found.chosen.item} ({found.chosen.reason})")
    from bridge.launchers.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(found.hf)
    ids = prompt_ids(tokenizer, prompt)
    if len(ids) + max_new_tokens > found.model.context:
        raise SpecError(f"{len(ids)} + {max_new_tokens} tokens exceed the model's {found.model.context} positions")
    from bridge.converters.parity.greedy import generate

    with model_of(found, about, base, workspace, len(ids) + max_new_tokens) as forward:
        times: list[float] = []
        ends = end_ids(found.hf, tokenizer)
        made = generate(forward, ids, ends, max_new_tokens, lambda _: times.append(time.monotonic()))
    click.echo(tokenizer.decode(made, skip_special_tokens=True))
    if len(times) > 1:
        rate = (len(times) - 1) / max(times[-1] - times[0], 1e-9)
        common.say(f"{len(made)} tokens, {rate:.1f} a second after the first")


@contextlib.contextmanager
def model_of(
    found: Checkpoint, about: adapters.Options, base: Path | None, workspace: Workspace | None, longest: int
) -> Iterator[Forward]:
    """The engine's forward pass of a full checkpoint, or of an adapter's on its base."""
    if not found.tree.adapters:
        with forward_pass(found, found.chosen.item, longest) as forward:
            yield forward
        return
    facts = about.facts(found)
    folder = adapters.base_folder(found, facts, base, workspace)
    with tempfile.TemporaryDirectory(prefix="bridge-generate-") as temporary:
        tree = verify_adapter.base_tree(found, folder, workspace, Path(temporary))
        with adapted_pass(found, facts, tree, longest) as forward:
            yield forward


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
