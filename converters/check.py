"""Checks of contents: a source before it is converted, a checkpoint against the Hugging Face folder it belongs to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bridge.converters import bits, plan
from bridge.converters.hf_store import HfSource
from bridge.converters.layout import Table
from bridge.converters.orbax_source import TreeSource
from bridge.converters.plan import Move
from bridge.converters.pool import Progress, no_progress, run_bounded
from bridge.converters.transfer import Budget, Slab, stored_slabs
from bridge.errors import CheckpointError
from bridge.model_spec import ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def source(moves: tuple[Move, ...], hf: HfSource, table: Table, model: ModelSpec) -> list[str]:
    """Check a Hugging Face folder against its plan; returns the tensors that are left out on purpose.

    A tied model may carry an `lm_head.weight` if it equals the embedding; it is left out then.

    Raises:
        CheckpointError: names, shapes or dtypes differ, or a tied head differs from the embedding.
    """
    headers = dict(hf.headers)
    redundant = model.tied and HEAD in headers and EMBEDDING in headers
    head = headers.pop(HEAD) if redundant else None
    left_out = plan.check_hf(moves, headers, table, str(hf.folder))
    if head is None:
        return left_out
    with HfSource(hf.folder) as opened:
        same = head == headers[EMBEDDING] and opened.equals(opened, HEAD, EMBEDDING)
    if not same:
        raise CheckpointError(
            f"{hf.folder}: config.json says tie_word_embeddings true, but {HEAD} differs from {EMBEDDING}",
            hint="if the head was trained on its own, set tie_word_embeddings to false",
        )
    return [*left_out, HEAD]


def through_orbax(item: Path, moves: tuple[Move, ...]) -> None:
    """Ask stock Orbax what it sees in a checkpoint: the tree, and each array's shape.

    Raises:
        CheckpointError: a name or a shape differs from the plan.
    """
    import jax
    import orbax.checkpoint as ocp

    # The checkpoint's own step folder is named to Orbax, so that it does not warn of a missing one inside the tree.
    root = str(item.parent.parent)  # text: it may lie in a bucket, which Orbax has a path of its own for
    with ocp.CheckpointManager(root, item_handlers={item.name: ocp.PyTreeCheckpointHandler()}) as manager:
        tree = manager.item_metadata(int(item.parent.name))[item.name].tree
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = {".".join(str(key.key) for key in path): tuple(leaf.shape or ()) for path, leaf in flat}
    needed = {move.name: move.engine_shape for move in moves}
    problems = [
        f"{name}  Orbax sees {found.get(name)}, written {shape}"
        for name, shape in needed.items()
        if found.get(name) != shape
    ]
    if problems:
        raise CheckpointError(f"{item} read back through Orbax differs", details=problems)


def against_source(
    moves: tuple[Move, ...],
    model: ModelSpec,
    hf: HfSource,
    item: Path,
    budget: Budget = Budget(),  # noqa: B008 - frozen
    progress: Progress = no_progress,
) -> None:
    """Compare every value of a converted checkpoint with what its source converts to, bit by bit; refuse NaN and Inf.

    Raises:
        CheckpointError: a tensor differs, or is not finite.
    """
    different = set()

    def compare(slab: Slab, stored: bits.Array) -> None:
        wanted = slab.from_hf(hf, progress, finite=True)
        if not np.array_equal(stored.view(wanted.dtype), wanted):
            different.add(slab.move.name)

    through_orbax(item, moves)
    _each_slab(
        moves, model, TreeSource(item), {name: tensor.dtype for name, tensor in hf.headers.items()}, budget, compare
    )
    if different:
        raise CheckpointError(f"{item}: {len(different)} arrays differ from the source", details=sorted(different))


def against_export(
    moves: tuple[Move, ...],
    model: ModelSpec,
    tree: TreeSource,
    hf: HfSource,
    budget: Budget = Budget(),  # noqa: B008 - frozen
    progress: Progress = no_progress,
) -> list[str]:
    """The Hugging Face tensors that differ, by any bit, from the checkpoint's values rounded once."""
    different = set()
    kinds = {name: tensor.dtype for name, tensor in hf.headers.items()}

    def compare(slab: Slab, stored: bits.Array) -> None:
        for name, start, wanted in slab.to_hf(stored, kinds):
            if name not in different and not np.array_equal(hf.read(name, start, wanted.size), wanted.reshape(-1)):
                different.add(name)
            progress(wanted.nbytes)

    _each_slab(moves, model, tree, kinds, budget, compare)
    return sorted(different)


def _each_slab(
    moves: tuple[Move, ...],
    model: ModelSpec,
    tree: TreeSource,
    kinds: Mapping[str, str],
    budget: Budget,
    visit: Callable[[Slab, bits.Array], None],
) -> None:
    room = budget.room()

    def job(slab: Slab) -> None:
        with room.hold(slab.nbytes):
            visit(slab, slab.stored(tree))

    jobs: list[Callable[[], None]] = []
    for move in moves:
        for slab in stored_slabs(move, model, tree.leaves[move.engine], [kinds[name] for name in move.hf], budget):
            jobs.append(functools.partial(job, slab))
    run_bounded(jobs, budget.workers)
