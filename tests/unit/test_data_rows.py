"""Rows and batches: packing against a first fit written by hand, slices, epochs, resume, evaluation."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import SpecError
from bridge.launchers.batches import Batch, process_rows
from bridge.launchers.rows import Examples, Rows, first_fit, shuffled
from bridge.launchers.tokenizer import Encoded

PAD = 7
LENGTHS = [3, 5, 2, 8, 1 + 1, 4, 6, 2, 3]


def examples(lengths: list[int]) -> Examples:
    """Example i holds the ids 100 i, 100 i + 1, ...; its even tokens are learnt (but never the first)."""
    encoded = []
    for index, length in enumerate(lengths):
        loss = np.arange(length) % 2 == 0
        loss[0] = False
        encoded.append(Encoded(np.arange(100 * index, 100 * index + length, dtype=np.int32), loss))
    return Examples.of(encoded)


def make(packing: bool, rows: int = 4, seed: int = 3, lengths: list[int] = LENGTHS) -> Rows:
    return Rows(examples(lengths), 8, packing, seed, rows, PAD)


def contents(batch: Batch) -> list[list[int]]:
    """The examples of each row, read off the ids; everything else of the row is checked on the way."""
    found = []
    for tokens, positions, segments, loss in zip(
        batch.tokens, batch.positions, batch.segments, batch.loss, strict=True
    ):
        row, at = [], 0
        while at < len(tokens) and segments[at] != 0:
            index = int(tokens[at]) // 100
            length = LENGTHS[index]
            here = slice(at, at + length)
            assert tokens[here].tolist() == list(range(100 * index, 100 * index + length))
            assert positions[here].tolist() == list(range(length))
            assert segments[here].tolist() == [len(row) + 1] * length
            assert loss[here].tolist() == [i > 0 and i % 2 == 0 for i in range(length)]
            row.append(index)
            at += length
        assert tokens[at:].tolist() == [PAD] * (len(tokens) - at)
        assert not positions[at:].any()
        assert not segments[at:].any()
        assert not loss[at:].any()
        found.append(row)
    return found


def slow_first_fit(lengths: list[int], capacity: int) -> list[int]:
    room: list[int] = []
    rows = []
    for length in lengths:
        row = next((i for i, left in enumerate(room) if left >= length), len(room))
        if row == len(room):
            room.append(capacity)
        room[row] -= length
        rows.append(row)
    return rows


@given(st.lists(st.integers(1, 16), max_size=60))
@settings(deadline=None)
def test_first_fit_is_first_fit(lengths: list[int]) -> None:
    assert first_fit(lengths, 16) == slow_first_fit(lengths, 16)


def test_first_fit_of_many_examples() -> None:
    lengths = np.random.default_rng(0).integers(1, 1025, 3000).tolist()
    assert first_fit(lengths, 1024) == slow_first_fit(lengths, 1024)


def test_shuffling_is_pcg64_of_seed_and_epoch() -> None:
    assert shuffled(9, 3, 2).tolist() == np.random.Generator(np.random.PCG64(5)).permutation(9).tolist()


def test_without_packing_an_epoch_has_every_example_once() -> None:
    rows = make(packing=False, rows=3)
    assert rows.rows_per_epoch == len(LENGTHS)
    order = [index for step in range(6) for row in contents(rows.batch(step)) for index in row]
    assert order == shuffled(9, 3, 0).tolist() + shuffled(9, 3, 1).tolist()
    assert order[:9] != order[9:]


def test_packed_rows_are_first_fit_in_shuffled_order() -> None:
    rows = make(packing=True, rows=1)
    expected: list[list[int]] = []
    for epoch in range(3):
        order = shuffled(9, 3, epoch).tolist()
        fit = slow_first_fit([LENGTHS[index] for index in order], 8)
        expected += [[i for i, row in zip(order, fit, strict=True) if row == number] for number in range(max(fit) + 1)]
    assert [contents(rows.batch(step))[0] for step in range(len(expected))] == expected
    assert rows.rows_per_epoch < len(LENGTHS)


@pytest.mark.parametrize("packing", [False, True])
def test_batches_span_epochs_and_are_functions_of_the_step(packing: bool) -> None:
    rows, again = make(packing), make(packing)
    batches = [rows.batch(step) for step in range(12)]
    for step in (11, 0, 5):  # a resumed run starts anywhere
        for name in ("tokens", "positions", "segments", "loss"):
            np.testing.assert_array_equal(getattr(batches[step], name), getattr(again.batch(step), name))
    single = make(packing, rows=1)
    flat = [row for batch in batches for row in contents(batch)]
    assert flat == [contents(single.batch(step))[0] for step in range(48)]
    counts = Counter(index for row in flat for index in row)
    assert min(counts.values()) >= 48 // len(LENGTHS) - 1
    assert contents(make(packing, seed=4).batch(0)) != contents(batches[0])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_slices_in_order_are_the_batch_of_one_process(packing: bool, processes: int) -> None:
    rows = make(packing)
    for step in (0, 2, 7):
        whole = rows.batch(step)
        parts = [rows.batch(step, index, processes) for index in range(processes)]
        for name, dtype in (("tokens", "int32"), ("positions", "int32"), ("segments", "int32"), ("loss", "bool")):
            assert all(getattr(part, name).shape == (4 // processes, 8) for part in parts)
            joined = np.concatenate([getattr(part, name) for part in parts])
            assert joined.dtype == dtype
            np.testing.assert_array_equal(joined, getattr(whole, name))


def test_more_rows_than_examples() -> None:
    rows = make(packing=False, rows=20)
    assert Counter(index for row in contents(rows.batch(0)) for index in row).total() == 20


def test_the_first_token_of_an_example_is_never_a_target() -> None:
    everything = Examples.of([Encoded(np.arange(4, dtype=np.int32), np.ones(4, bool))] * 2)
    batch = Rows(everything, 8, True, 0, 1).batch(0)
    assert batch.loss.tolist() == [[False, True, True, True, False, True, True, True]]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_sees_every_example_once(packing: bool, processes: int) -> None:
    rows = make(packing)
    parts = [list(rows.eval_batches(index, processes)) for index in range(processes)]
    assert len({len(part) for part in parts}) == 1
    seen: list[int] = []
    learnt = 0
    for step in range(len(parts[0])):
        for part in parts:
            batch = part[step]
            learnt += int(batch.loss.sum())
            real = batch.loss.any(axis=1)
            assert (batch.segments[~real] > 0).any(axis=1).all()  # filled up with a row, not with padding alone
            for row in batch.tokens[real]:
                seen += [int(token) // 100 for token in row if token % 100 == 0]
    assert learnt == sum((length - 1) // 2 for length in LENGTHS)
    trained = [index for index, length in enumerate(LENGTHS) if length > 2]  # two tokens: nothing learnt in `examples`
    assert sorted(set(seen) & set(trained)) == trained
    assert max(Counter(seen).values()) == 1


def test_processes_that_do_not_divide_a_batch() -> None:
    with pytest.raises(SpecError, match="4 rows cannot be divided among 3"):
        make(packing=False).batch(0, 0, 3)
    with pytest.raises(SpecError, match="4 rows cannot be divided among 3"):
        next(make(packing=False).eval_batches(0, 3))
    with pytest.raises(SpecError, match="process 2 of 2"):
        process_rows(4, 2, 2)


def test_flat_storage_gives_back_what_went_in() -> None:
    stored = examples(LENGTHS)
    assert (stored.ids.dtype, stored.loss.dtype, stored.offsets.dtype) == (np.int32, np.bool_, np.int64)
    assert len(stored) == len(LENGTHS)
    assert stored.lengths.tolist() == LENGTHS
    assert stored[3].ids.tolist() == list(range(300, 308))
    assert stored[3].loss.tolist() == [False, False, True, False, True, False, True, False]
