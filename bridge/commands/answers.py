"""Answers before and after training, for the report: greedy, by the engine's own model, from the run's folder alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import places
from bridge.commands import adapter as adapters
from bridge.commands import checkpoint as checkpoints
from bridge.commands import common, forward, generate
from bridge.commands.report import ANSWERS
from bridge.errors import SpecError

if TYPE_CHECKING:
    from bridge.commands.checkpoint import Checkpoint
    from bridge.converters.parity.compare import Forward
    from bridge.launchers.run_file import RunFile

ASKED = 3
"""Prompts taken from the data where the spec gives none."""
NEW_TOKENS = 48


@dataclass(frozen=True)
class Question:
    """A prompt as the report shows it, and as the model is given it."""

    text: str
    ids: list[int]


def write_answers(run_dir: Path, stored: Path | None = None) -> Path:
    """Ask the base and the trained model the same, and write `answers.json` into the run's folder.

    The prompts are `data.prompts` of the run's spec, else the first of its evaluation (or training) set; the trained
    model is the one that `export` takes, out of `stored` where the run's checkpoints do not lie in its folder. In
    float32 on the CPU, a forward pass a token: four bytes a weight of memory.

    Raises:
        SpecError: no prompt that fits, or data that cannot be read.
        CheckpointError: the run or its base has no finished checkpoint.
        UnsupportedError, MissingDependency: the engine cannot run here.
    """
    from bridge.launchers.run_file import RunFile
    from bridge.launchers.tokenizer import load_tokenizer

    common.on_cpu()
    run_file = RunFile.read(run_dir)
    trained = checkpoints.find(None, stored or run_dir, None, None)
    base = checkpoints.find(None, places.place(run_file.checkpoint), None, None)
    own = Path(run_file.tokenizer)
    tokenizer = load_tokenizer(own if own.is_dir() else trained.hf)
    asked = questions(run_file, tokenizer, trained.model.context - NEW_TOKENS)
    longest = max(len(question.ids) for question in asked) + NEW_TOKENS
    ends = generate.end_ids(trained.hf, tokenizer)
    common.say(f"answers of {base.chosen.item} ...")
    with forward.forward_pass(base, base.chosen.item, longest) as model:
        before = answers(model, asked, tokenizer, ends, longest)
    common.say(f"answers of {trained.chosen.item} ({trained.chosen.reason}) ...")
    with _trained_pass(trained, base.chosen.item, longest) as model:
        after = answers(model, asked, tokenizer, ends, longest)
    values = {"prompts": [question.text for question in asked], "before": before, "after": after}
    path = run_dir / ANSWERS
    text = json.dumps(values | {"step": trained.chosen.step}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def questions(run_file: RunFile, tokenizer: Any, longest: int) -> list[Question]:
    """The prompts of a run; of those from the data, the first that have `longest` tokens at most.

    Raises:
        SpecError: a prompt of the spec is longer, or none of the data's fits.
    """
    from bridge.launchers.prompts import beginnings, last_turn

    run = run_file.spec
    if run.data.prompts:
        given = [Question(text, generate.prompt_ids(tokenizer, text)) for text in run.data.prompts]
        for question in given:
            if len(question.ids) > longest:
                said = f"{question.text[:40]!r} has {len(question.ids)} tokens"
                raise SpecError(f"data.prompts: {said}, {longest} fit")
        return given
    taken: list[Question] = []
    for beginning in beginnings(run, Path(run_file.base)):
        if isinstance(beginning, str):
            ids = list(tokenizer(beginning)["input_ids"])
        else:
            ids = list(
                tokenizer.apply_chat_template(beginning, add_generation_prompt=True, return_dict=True)["input_ids"]
            )
        if len(ids) <= min(longest, run.train.sequence_length):
            taken.append(Question(last_turn(beginning), ids))
        if len(taken) == ASKED:
            break
    if not taken:
        raise SpecError("no example of the data begins with a prompt that fits", hint="give some in data.prompts")
    return taken


def answers(model: Forward, asked: Sequence[Question], tokenizer: Any, ends: Sequence[int], longest: int) -> list[str]:
    """What a model says. All inputs are filled up to `longest` tokens, so that one shape is compiled.

    Attention is causal: what fills up lies behind and changes nothing.
    """
    import numpy as np

    from bridge.converters.parity import greedy

    def padded(ids: Any, positions: Any) -> Any:
        filled = np.zeros(longest, np.int32)
        filled[: len(ids)] = ids
        return model(filled, np.arange(longest, dtype=np.int32))[: len(positions)]

    texts = []
    for question in asked:
        made = greedy.generate(padded, question.ids, ends, NEW_TOKENS)
        texts.append(str(tokenizer.decode(made, skip_special_tokens=True)).strip())
    return texts


@contextlib.contextmanager
def _trained_pass(found: Checkpoint, base: Path, longest: int) -> Iterator[Forward]:
    if not found.tree.adapters:
        with forward.forward_pass(found, found.chosen.item, longest) as model:
            yield model
        return
    facts = adapters.Options().facts(found)
    with forward.adapted_pass(found, facts, base, longest) as model:
        yield model
