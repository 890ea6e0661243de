"""Two sets of weights side by side, whatever their formats: names, shapes, dtypes and values, in bounded memory.

Every side is read as the Hugging Face tensors it stands for. An engine's array is read slab by slab, by whole stored
chunks; its partner is read in the same pieces.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bridge.converters import bits
from bridge.converters.hf_store import PIECE, HfSource
from bridge.converters.layout import axes_of, scale_of
from bridge.converters.orbax_source import TreeSource
from bridge.converters.plan import ITEM_BYTES, Move, Tensor
from bridge.converters.pool import Progress, no_progress, run_bounded
from bridge.converters.slabs import Cutting, unit_elements
from bridge.converters.transfer import Budget, Slab, stored_slabs
from bridge.errors import CheckpointError
from bridge.model_spec import ModelSpec

Values = NDArray[np.float32]
CACHE_BYTES = 256 << 20
"""Decoded chunks kept, for a partner whose chunks span more than a piece."""


@dataclass(frozen=True)
class Form:
    """How a stored value stands for a weight: it is `weight x scale`, rounded to `dtype`."""

    dtype: str
    scale: float = 1.0


@dataclass(frozen=True)
class Difference:
    """What differs between A and B, by Hugging Face name; `value` is max |A - B|, nan where one side is not finite."""

    compared: int
    only_in_a: list[str]
    only_in_b: list[str]
    shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    dtype: dict[str, tuple[str, str]]
    value: dict[str, float] = field(default_factory=dict)


class Side(Protocol):
    """One set of weights under Hugging Face names."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Hugging Face shape, and the dtype that is stored, of every tensor."""

    def form(self, name: str) -> Form:
        """How its values are stored."""

    def read(self, name: str, start: int, count: int) -> Values:
        """`count` stored values from element `start` in Hugging Face's order, shape (count,)."""


class FolderSide:
    """An open Hugging Face folder without the tensors that carry nothing of their own."""

    def __init__(self, source: HfSource, left_out: frozenset[str] = frozenset()) -> None:
        self._source = source
        self.tensors: dict[str, Tensor] = {k: v for k, v in source.headers.items() if k not in left_out}

    def form(self, name: str) -> Form:
        """As it stands in the file."""
        return Form(self.tensors[name].dtype)

    def read(self, name: str, start: int, count: int) -> Values:
        """Values from the file."""
        return bits.to_float32(self._source.read(name, start, count), self.tensors[name].dtype)


class EngineSide:
    """An engine's checkpoint, compared with its plan before."""

    def __init__(self, tree: TreeSource, moves: tuple[Move, ...], model: ModelSpec) -> None:
        self.tree, self.moves, self.model = tree, moves, model
        self._place = {name: (move, layer) for move in moves for layer, name in enumerate(move.hf)}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Shapes of the plan, dtypes of the stored arrays."""
        leaves = self.tree.leaves
        return {
            name: Tensor(move.hf_shape, leaves[move.engine].tensor.dtype) for name, (move, _) in self._place.items()
        }

    def form(self, name: str) -> Form:
        """With the scale that the engine folds in."""
        move, _ = self._place[name]
        return Form(self.tree.leaves[move.engine].tensor.dtype, scale_of(move.rule, self.model))

    def read(self, name: str, start: int, count: int) -> Values:
        """The units that cover the range are read from the array, and no others."""
        move, layer = self._place[name]
        axes = axes_of(self.model)
        unit = unit_elements(move, axes)
        units = range(start // unit, -(-(start + count) // unit))
        cutting = Cutting(1, len(units), len(units), len(move.hf), axes[move.rule.cut_axis])
        dtype = self.tree.leaves[move.engine].tensor.dtype
        slab = Slab(move, self.model, cutting, range(layer, layer + 1), units, dtype)
        ((_, first, values),) = self.pieces(slab)
        return values[start - first : start - first + count]

    def slabs(self, move: Move, budget: Budget) -> Iterator[Slab]:
        """An array in pieces, by whole stored chunks."""
        return stored_slabs(move, self.model, self.tree.leaves[move.engine], ["float32"], budget)

    def has(self, move: Move) -> bool:
        """Whether an array of another checkpoint lies here in the same way."""
        return move in self.moves

    def pieces(self, slab: Slab) -> Iterator[tuple[str, int, Values]]:
        """(tensor, first element, stored values in Hugging Face's order) of every block of a slab."""
        move, dtype = slab.move, self.tree.leaves[slab.move.engine].tensor.dtype
        stored = slab.stored(self.tree).view(bits.bits_dtype(dtype))
        unit = unit_elements(move, axes_of(self.model))
        for name, units, block, place in slab.pieces():
            raw = bits.export_block(np.ascontiguousarray(stored[place]), block, dtype, "float32", 1.0)
            yield name, units.start * unit, raw.reshape(-1).view(np.float32)


def compare(
    a: Side,
    b: Side,
    budget: Budget = Budget(),  # noqa: B008 - frozen
    progress: Progress = no_progress,
) -> Difference:
    """Compare two sides; values only where the shapes agree.

    Args:
        a, b: open.
        budget: bounds the memory; a stored chunk larger than a slab is decoded whole.
        progress: called with 4 bytes a compared value.

    Raises:
        CheckpointError: a dtype that cannot be compared, or damaged files.
    """
    ours, theirs = a.tensors, b.tensors
    both = [name for name in ours if name in theirs]
    shape = {n: (ours[n].shape, theirs[n].shape) for n in both if ours[n].shape != theirs[n].shape}
    same = [name for name in both if name not in shape]
    _check_kinds({name: {ours[name].dtype, theirs[name].dtype} for name in same})
    worst: dict[str, float] = {}
    lock = threading.Lock()

    def note(name: str, x: Values, y: Values) -> None:
        found = max_difference(x, y, a.form(name), b.form(name))
        with lock:
            # nan must win, and max() of Python lets it win or lose by the order.
            worst[name] = found if math.isnan(found) else max(worst.get(name, 0.0), found)
        progress(4 * x.size)

    run_bounded(_jobs(a, b, frozenset(same), note, budget), budget.workers)
    return Difference(
        compared=len(same),
        only_in_a=[name for name in ours if name not in theirs],
        only_in_b=[name for name in theirs if name not in ours],
        shape=shape,
        dtype={n: (ours[n].dtype, theirs[n].dtype) for n in both if ours[n].dtype != theirs[n].dtype},
        value={name: worst[name] for name in same if worst.get(name, 0.0) != 0.0},
    )


def max_difference(x: Values, y: Values, of_x: Form, of_y: Form) -> float:
    """max |weight of x - weight of y|; 0 where one is what the other converts to; nan for NaN or Inf on one side.

    A folded scale costs a rounding: where one side has it and the other has not, a value counts as equal when it is
    the other's, scaled and rounded to its own dtype.
    """
    if of_x.scale == 1.0 and of_y.scale != 1.0:
        return max_difference(y, x, of_y, of_x)
    equal = (x == y) | (np.isnan(x) & np.isnan(y))
    if of_x.scale != 1.0 and of_y.scale == 1.0:
        with np.errstate(over="ignore"):
            wanted = bits.to_float32(bits.from_float32(y * np.float32(of_x.scale), of_x.dtype), of_x.dtype)
        equal = (x == wanted) | (np.isnan(x) & np.isnan(wanted))
    if equal.all():
        return 0.0
    apart, other = x[~equal].astype(np.float64) / of_x.scale, y[~equal].astype(np.float64) / of_y.scale
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(apart - other).max())
    return largest if math.isfinite(largest) else math.nan


def _jobs(
    a: Side, b: Side, names: frozenset[str], note: Callable[[str, Values, Values], None], budget: Budget
) -> list[Callable[[], None]]:
    """The comparison in pieces; an engine's side leads, the one with stacked layers before the other."""
    if isinstance(a, EngineSide) and (not isinstance(b, EngineSide) or len(a.moves) <= len(b.moves)):
        return _led(a, b, names, note, budget)
    if isinstance(b, EngineSide):
        return _led(b, a, names, lambda name, mine, other: note(name, other, mine), budget)

    def read(name: str, start: int, count: int) -> None:
        note(name, a.read(name, start, count), b.read(name, start, count))

    # Of each piece there are two in float32, their comparison, and the bytes of the files.
    piece = max(1, min(PIECE, budget.slab_bytes // 4))
    counts = {name: math.prod(a.tensors[name].shape) for name in a.tensors if name in names}
    return [
        functools.partial(read, name, start, min(piece, count - start))
        for name, count in counts.items()
        for start in range(0, count, piece)
    ]


def _led(
    leader: EngineSide,
    partner: Side,
    names: frozenset[str],
    note: Callable[[str, Values, Values], None],
    budget: Budget,
) -> list[Callable[[], None]]:
    room = budget.room()

    def visit(slab: Slab) -> None:
        with room.hold(slab.nbytes):
            for name, mine, other in _pairs(leader, partner, slab, names):
                note(name, mine, other)

    moves = [move for move in leader.moves if names & set(move.hf)]
    return [functools.partial(visit, slab) for move in moves for slab in leader.slabs(move, budget)]


def _pairs(
    leader: EngineSide, partner: Side, slab: Slab, names: frozenset[str]
) -> Iterator[tuple[str, Values, Values]]:
    pieces = leader.pieces(slab)
    if isinstance(partner, EngineSide) and partner.has(slab.move):
        for (name, _, mine), (_, _, other) in zip(pieces, partner.pieces(slab), strict=True):
            if name in names:
                yield name, mine, other
        return
    for name, start, mine in pieces:
        if name in names:
            yield name, mine, partner.read(name, start, mine.size)


def _check_kinds(kinds: Mapping[str, set[str]]) -> None:
    wrong = [f"{name}  {', '.join(sorted(found))}" for name, found in kinds.items() if found - ITEM_BYTES.keys()]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors have a dtype whose values cannot be compared",
            details=wrong,
            hint=f"supported: {', '.join(ITEM_BYTES)}",
        )
