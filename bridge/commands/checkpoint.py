"""A checkpoint as export, verify and inspect see it: its tree, its facts, its plan, whoever wrote it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import places, sidecar
from bridge.commands.workspace import Chosen, Workspace, at_hand, find_checkpoint
from bridge.errors import CheckpointError
from bridge.model_spec import ModelSpec

if TYPE_CHECKING:
    from bridge.converters.engine_tree import EngineTree
    from bridge.converters.layout import Table
    from bridge.converters.orbax_source import TreeSource
    from bridge.converters.plan import Move


@dataclass(frozen=True)
class Checkpoint:
    """An engine checkpoint and all that is known about it."""

    chosen: Chosen
    tree: EngineTree
    model: ModelSpec
    facts: sidecar.Sidecar | None
    hf: Path
    """The folder with config.json, the tokenizer and the other small files."""

    @property
    def engine(self) -> str:
        """maxtext or tunix."""
        return self.tree.engine

    @property
    def trained(self) -> bool:
        """Whether it comes from training; unknown ones count as trained."""
        return self.facts is None or self.facts.method is not None

    @property
    def table(self) -> Table:
        """Its mapping table."""
        from bridge.converters.plan import table_for

        return table_for(self.model, self.engine)

    @property
    def plan(self) -> tuple[Move, ...]:
        """Its moves."""
        from bridge.converters.plan import make_plan

        return make_plan(self.table, self.model, self.tree.scanned or self.engine != "maxtext")

    def open(self, cache_bytes: int = 0, memory: int = 1 << 30) -> TreeSource:
        """Its weights, compared with the plan by name and shape.

        Args:
            cache_bytes: decoded chunks that are kept.
            memory: what is to be held at most; an array whose chunks take more is unpacked first.

        Raises:
            CheckpointError: a leaf is missing, unexpected or of another shape.
        """
        from bridge.converters.engine_tree import open_weights
        from bridge.converters.plan import check_engine
        from bridge.converters.transfer import Budget, unpack_large

        source = open_weights(self.chosen.item, self.tree, self.table, cache_bytes)
        check_engine(self.plan, source.headers, str(self.chosen.item))
        unpack_large(source, self.plan, self.model, Budget(memory))
        beside = places.scratch(self.chosen.home)
        if beside is not None and os.access(beside, os.W_OK):
            source.scratch = beside
        return source


def find(
    workspace: Workspace | None, path: Path | None, base: Path | None, step: int | None, engine: str | None = None
) -> Checkpoint:
    """The checkpoint that a command means, with its facts.

    Facts come from `bridge.json`; a checkpoint without one is read with `--base`, or with the spec's model.

    Raises:
        CheckpointError: not found, not understood, or nothing says what model it is.
    """
    from bridge.converters.engine_tree import recognise

    chosen = find_checkpoint(workspace, path, step, engine)
    facts = sidecar.read(chosen.home)
    tree = recognise(chosen.item)
    if facts is not None:
        if facts.engine != tree.engine:
            raise CheckpointError(f"{chosen.home / sidecar.FILE} says {facts.engine}, the tree is {tree.engine}'s")
        if tree.engine == "maxtext" and facts.scanned != tree.scanned:
            raise CheckpointError(f"{chosen.home / sidecar.FILE} says scanned {facts.scanned}, the tree is not so")
        return Checkpoint(chosen, tree, facts.model, facts, at_hand(base or chosen.home / sidecar.HF))
    folder = base
    if folder is None and workspace is not None:
        folder = workspace.model_folder(download=False)
    if folder is None:
        raise CheckpointError(
            f"{chosen.item} has no {sidecar.FILE} beside it: nothing says what model it is",
            hint="--base DIR names the Hugging Face folder it was trained from",
        )
    return Checkpoint(chosen, tree, ModelSpec.from_folder(folder), None, at_hand(folder))
