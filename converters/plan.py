"""Plans: a table and a model become the list of arrays to move, checked against headers before a byte moves."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.converters.layout import Rule, Table, axes_of
from bridge.errors import CheckpointError, UnsupportedError
from bridge.model_spec import ModelSpec

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHAPE_OR_DTYPE = "{name}  file has {found}, this config needs {needed}"


@dataclass(frozen=True)
class Tensor:
    """What a header says of one tensor: its shape and dtype name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 4)


@dataclass(frozen=True)
class Move:
    """One engine array <-> its Hugging Face tensors: one a layer where the array stacks them, else one."""

    rule: Rule
    engine: tuple[str, ...]
    engine_shape: tuple[int, ...]
    hf: tuple[str, ...]
    hf_shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The engine array's name as Orbax writes it."""
        return ".".join(self.engine)


def tables() -> dict[tuple[str, str], Table]:
    """Every table in `converters/tables`, by (family, engine): the support matrix."""
    found = {}
    for path in sorted(Path(__file__).with_name("tables").glob("[a-z]*_*.py")):
        table: Table = importlib.import_module(f"bridge.converters.tables.{path.stem}").TABLE
        found[table.family, table.engine] = table
    return found


def table_for(model: ModelSpec, engine: str) -> Table:
    """The table of a family on an engine.

    Raises:
        UnsupportedError: there is none.
    """
    known = tables()
    if (model.family, engine) not in known:
        pairs = ", ".join(f"{family} on {name}" for family, name in known)
        raise UnsupportedError(f"{model.family} on {engine} is not supported", details=[f"supported: {pairs}"])
    return known[model.family, engine]


def make_plan(table: Table, model: ModelSpec, scanned: bool = True) -> tuple[Move, ...]:
    """All moves of a model, in the order of the table, then of the layers."""
    axes = axes_of(model)
    moves = []
    for rule in table.rules_for(model, scanned):
        layers = [rule.hf.format(layer=layer) for layer in range(model.layers)] if rule.per_layer else [rule.hf]
        hf_shape, engine_shape = rule.hf_shape(axes), rule.engine_shape(axes)
        if rule.stacked or not rule.per_layer:
            moves.append(Move(rule, table.engine_path(rule, None), engine_shape, tuple(layers), hf_shape))
        else:
            for layer, name in enumerate(layers):
                moves.append(Move(rule, table.engine_path(rule, layer), engine_shape, (name,), hf_shape))
    return tuple(moves)


def check_hf(plan: tuple[Move, ...], headers: Mapping[str, Tensor], table: Table, where: str) -> list[str]:
    """Compare a plan with the headers of a Hugging Face folder, names both ways.

    Returns the names of the tensors that are left out on purpose.

    Raises:
        CheckpointError: missing, unexpected, wrongly shaped or unsupported tensors, all listed.
    """
    needed = {name: move.hf_shape for move in plan for name in move.hf}
    left_out = [
        name for name in headers if name not in needed and any(re.fullmatch(pattern, name) for pattern in table.ignored)
    ]
    problems = _compare(needed, {k: v for k, v in headers.items() if k not in left_out})
    problems += _kinds(needed, headers)
    _raise(problems, f"{where} does not match its config.json", len(needed))
    return left_out


def check_engine(plan: tuple[Move, ...], headers: Mapping[tuple[str, ...], Tensor], where: str) -> None:
    """Compare a plan with the arrays of an engine checkpoint, names both ways.

    Raises:
        CheckpointError: missing, unexpected, wrongly shaped or unsupported arrays, all listed.
    """
    needed = {move.name: move.engine_shape for move in plan}
    found = {".".join(path): tensor for path, tensor in headers.items()}
    _raise([*_compare(needed, found), *_kinds(needed, found)], f"{where} does not match the model", len(needed))


def _compare(needed: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor]) -> list[str]:
    problems = [f"missing      {name}  {shape}" for name, shape in needed.items() if name not in found]
    problems += [f"unexpected   {name}  {tensor.shape}" for name, tensor in found.items() if name not in needed]
    problems += [
        "shape        " + SHAPE_OR_DTYPE.format(name=name, found=found[name].shape, needed=shape)
        for name, shape in needed.items()
        if name in found and found[name].shape != shape
    ]
    return problems


def _kinds(needed: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor]) -> list[str]:
    return [
        f"dtype        {name}  {found[name].dtype} (supported: {', '.join(ITEM_BYTES)})"
        for name in needed
        if name in found and found[name].dtype not in ITEM_BYTES
    ]


def _raise(problems: list[str], text: str, total: int) -> None:
    if not problems:
        return
    hint = None
    joined = " ".join(problems)
    if "lm_head.weight" in joined and "missing" in joined:
        hint = "config.json says tie_word_embeddings false; a tied model has no lm_head.weight"
    elif "(" in joined and ("embed_tokens" in joined or "lm_head" in joined) and "shape" in joined:
        hint = "vocab_size in config.json and the embedding differ; was the tokenizer resized?"
    raise CheckpointError(f"{text}: {len(problems)} of {total} tensors", details=problems, hint=hint)
