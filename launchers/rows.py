"""Examples laid out in rows, shuffled and packed once for all processes: batch k is a pure function of k."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from threading import RLock
from typing import Any

import numpy as np

from bridge.launchers.batches import Batch, Bools, Ints, process_rows
from bridge.launchers.mixture import Indices, Mixture
from bridge.launchers.tokenizer import Encoded


@dataclass(frozen=True)
class Counts:
    """What became of the examples: read = kept + dropped_long + dropped_empty; those cut are among the kept."""

    read: int = 0
    kept: int = 0
    cut: int = 0
    dropped_long: int = 0
    dropped_empty: int = 0


@dataclass(frozen=True)
class Examples:
    """Encoded examples end to end: ids and loss `(tokens,)`, example i at `offsets[i]:offsets[i + 1]`."""

    ids: Ints
    loss: Bools
    offsets: Indices

    @staticmethod
    def of(examples: Iterable[Encoded]) -> Examples:
        """Collect examples."""
        collector = Collector()
        for example in examples:
            collector.append(example)
        return collector.examples()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Encoded:
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Encoded(self.ids[part], self.loss[part])

    @property
    def lengths(self) -> Indices:
        """Tokens of each example."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Collector:
    """Examples as they come, in five bytes a token."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    loss: bytearray = field(default_factory=bytearray)
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))

    def append(self, example: Encoded) -> None:
        """Take a copy of an example."""
        self.ids.frombytes(example.ids.astype(np.int32).tobytes())
        self.loss.extend(example.loss.tobytes())
        self.offsets.append(len(self.ids))

    def examples(self) -> Examples:
        """All that was appended; nothing may be appended afterwards."""
        loss = np.frombuffer(self.loss, np.bool_)
        return Examples(np.frombuffer(self.ids, np.int32), loss, np.frombuffer(self.offsets, np.int64))


@dataclass(frozen=True)
class Layout:
    """Which examples a row holds: row r has `order[bounds[r]:bounds[r + 1]]`."""

    order: Indices
    bounds: Indices

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, index: int) -> Indices:
        """The examples of a row, in order."""
        return self.order[self.bounds[index] : self.bounds[index + 1]]


def shuffled(count: int, seed: int, epoch: int) -> Indices:
    """The order of an epoch: the same on every machine and for any number of processes."""
    return np.random.Generator(np.random.PCG64(seed + epoch)).permutation(count)


def lay_out(order: Indices, lengths: Indices, sequence_length: int, packing: bool) -> Layout:
    """One example a row, or as many whole ones as fit."""
    if not packing:
        return Layout(order, np.arange(len(order) + 1))
    rows = np.asarray(first_fit(lengths[order].tolist(), sequence_length), np.int64)
    return Layout(
        order[np.argsort(rows, kind="stable")], np.concatenate(([0], np.cumsum(np.bincount(rows)))).astype(np.int64)
    )


def first_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """The row of each example: the first with room left, in order; O(n log n) by a tree of the room in each row."""
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    rows = []
    for length in lengths:
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < length
        rows.append(node - leaves)
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return rows


@dataclass(frozen=True)
class Order:
    """The endless sequence of rows over the epochs, each newly shuffled and laid out.

    An epoch has as many examples as there are: each once, or each source's share of a mixture.
    """

    lengths: Indices
    sequence_length: int
    packing: bool
    seed: int
    mixture: Mixture | None = None
    _layouts: dict[int, Layout] = field(default_factory=dict, init=False, repr=False, compare=False)
    _starts: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)
    _lock: Any = field(default_factory=RLock, init=False, repr=False, compare=False)  # engines read ahead in threads

    def layout(self, epoch: int) -> Layout:
        """The rows of an epoch."""
        if epoch not in self._layouts:
            while len(self._layouts) > 1:  # a batch spans two epochs at most, unless the data set is tiny
                del self._layouts[min(self._layouts)]
            mixture = self.mixture
            order = mixture.order(epoch) if mixture else shuffled(len(self.lengths), self.seed, epoch)
            self._layouts[epoch] = lay_out(order, self.lengths, self.sequence_length, self.packing)
        return self._layouts[epoch]

    def rows_of(self, epochs: float) -> int:
        """Rows of so many epochs, from the first; of a part of one, the rows rounded up."""
        whole, part = divmod(Fraction(str(epochs)), 1)
        with self._lock:
            rows = len(self.lengths) * whole if not self.packing else sum(len(self.layout(e)) for e in range(whole))
            return rows + (ceil(part * len(self.layout(whole))) if part else 0)

    def examples_of(self, row: int) -> Indices:
        """The examples of a row, counted from the beginning of the first epoch."""
        with self._lock:
            if not self.packing:
                epoch, index = divmod(row, len(self.lengths))
                return self.layout(epoch).row(index)
            while self._starts[-1] <= row:
                self._starts.append(self._starts[-1] + len(self.layout(len(self._starts) - 1)))
            epoch = bisect_right(self._starts, row) - 1
            return self.layout(epoch).row(row - self._starts[epoch])


@dataclass(frozen=True)
class Rows:
    """The batches of a run.

    `global_rows` rows of `sequence_length` tokens in each micro step, over all processes. A resumed run asks for
    `batch(k)` with k the micro steps done.
    """

    examples: Examples
    sequence_length: int
    packing: bool
    seed: int
    global_rows: int
    pad: int = 0
    counts: Counts = field(default_factory=Counts)
    mixture: Mixture | None = None
    _order: Order = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        order = Order(self.examples.lengths, self.sequence_length, self.packing, self.seed, self.mixture)
        object.__setattr__(self, "_order", order)

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the first epoch; with packing, later ones may differ by a few."""
        return len(self._order.layout(0))

    @property
    def row_length(self) -> int:
        """Positions of a row, as the model is given it."""
        return self.sequence_length

    @property
    def tokens_per_batch(self) -> int:
        """Positions of a micro step that the model computes, over all processes, padding among them."""
        return self.global_rows * self.row_length

    def rows_of(self, epochs: float) -> int:
        """As `Order.rows_of`."""
        return self._order.rows_of(epochs)

    def batch(self, step: int, process_index: int = 0, process_count: int = 1) -> Batch:
        """One process's rows of micro step `step`, from 0: `(global_rows / process_count, sequence_length)`.

        The processes' batches one after another are the batch of one process.

        Raises:
            SpecError: the processes do not divide `global_rows`.
        """
        part = process_rows(self.global_rows, process_index, process_count)
        first = step * self.global_rows
        return self._fill([self._order.examples_of(first + row) for row in range(part.start, part.stop)])

    def eval_batches(self, process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
        """Every example once, in the order of the file; all processes get the same number of batches.

        The last batch is filled up with a row that is there already and carries no loss: a row of padding alone would
        have nothing to attend to.
        """
        part = process_rows(self.global_rows, process_index, process_count)
        layout = self.eval_layout()
        for first in range(0, len(layout), self.global_rows):
            rows = range(first + part.start, first + part.stop)
            batch = self._fill([layout.row(row if row < len(layout) else 0) for row in rows])
            batch.loss[[row >= len(layout) for row in rows]] = False
            yield batch

    def eval_layout(self) -> Layout:
        """The rows that `eval_batches` goes through."""
        return lay_out(np.arange(len(self.examples)), self.examples.lengths, self.sequence_length, self.packing)

    def _fill(self, rows: Sequence[Indices]) -> Batch:
        shape = (len(rows), self.sequence_length)
        tokens = np.full(shape, self.pad, np.int32)
        positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        loss = np.zeros(shape, np.bool_)
        for row, examples in enumerate(rows):
            start = 0
            for segment, index in enumerate(examples.tolist(), 1):
                example = self.examples[index]
                stop = start + len(example.ids)
                tokens[row, start:stop] = example.ids
                positions[row, start:stop] = np.arange(stop - start)
                segments[row, start:stop] = segment
                loss[row, start + 1 : stop] = example.loss[1:]
                start = stop
        return Batch(tokens, positions, segments, loss)
