"""Mixtures and epochs: against an order written by hand, step by step, and what must not depend on processes."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_oracles import turn, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import run_spec
from bridge.errors import SpecError
from bridge.launchers.data import Pairs, Rows, load_tokenizer, prepare
from bridge.launchers.mixture import Mixture, Share, largest_remainder
from bridge.launchers.rows import Examples
from bridge.launchers.tokenizer import Encoded

SIZES, WEIGHTS, SEED, LENGTH = (5, 3, 12), (3.0, 2.0, 5.0), 7, 8
QUOTAS = (6, 4, 10)  # of 20 examples: 3, 2 and 5 tenths


def shuffle(count: int, *seed: int) -> list[int]:
    return [int(value) for value in np.random.Generator(np.random.PCG64(list(seed))).permutation(count)]


def slow_order(epochs: int) -> list[list[int]]:
    """Each source is a pile of cards, shuffled anew whenever it is used up; an epoch's cards are shuffled together."""
    piles: list[list[int]] = [[] for _ in SIZES]
    passes = [0] * len(SIZES)
    made = []
    for epoch in range(epochs):
        hand = []
        for source, quota in enumerate(QUOTAS):
            for _ in range(quota):
                if not piles[source]:
                    piles[source] = shuffle(SIZES[source], SEED, source, passes[source])
                    passes[source] += 1
                hand.append(sum(SIZES[:source]) + piles[source].pop(0))
        made.append([hand[place] for place in shuffle(len(hand), SEED, len(SIZES), epoch)])
    return made


def mixture() -> Mixture:
    return Mixture(tuple(Share(f"s{i}", w, n) for i, (w, n) in enumerate(zip(WEIGHTS, SIZES, strict=True))), SEED)


def rows(packing: bool, global_rows: int = 4) -> Rows:
    """Example i holds the ids 100 i, 100 i + 1, ...; lengths between two and five."""
    lengths = [2 + index % 4 for index in range(sum(SIZES))]
    examples = [
        Encoded(np.arange(100 * i, 100 * i + length, dtype=np.int32), np.arange(length) > 0)
        for i, length in enumerate(lengths)
    ]
    return Rows(Examples.of(examples), LENGTH, packing, SEED, global_rows, mixture=mixture())


def taken(batch: Any) -> list[int]:
    """The examples of a batch, row by row."""
    return [int(token) // 100 for row in batch.tokens for token in row if token % 100 == 0 and token // 100 < 20]


def test_the_order_is_that_of_piles_of_cards() -> None:
    made = mixture()
    assert made.quotas == QUOTAS
    expected = slow_order(7)
    for epoch in (6, 0, 3, 1, 2, 4, 5):  # a resumed run begins anywhere
        assert made.order(epoch).tolist() == expected[epoch]
    drawn = Counter(index for epoch in expected for index in epoch)
    assert max(drawn[i] for i in range(5)) - min(drawn[i] for i in range(5)) <= 1
    assert expected[0] != expected[1]
    other = Mixture(made.shares, SEED + 1)
    assert other.order(0).tolist() != expected[0]


def test_batches_follow_that_order() -> None:
    data = rows(packing=False)
    batches = [data.batch(step) for step in range(15)]
    firsts = [int(row[0]) // 100 for batch in batches for row in batch.tokens]
    assert firsts == [index for epoch in slow_order(3) for index in epoch]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_have_parts_of_the_same_batches(packing: bool, processes: int) -> None:
    whole, again = rows(packing), rows(packing)
    for step in (9, 0, 4):
        parts = [again.batch(step, index, processes) for index in range(processes)]
        for name in ("tokens", "positions", "segments", "loss"):
            joined = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(joined, getattr(whole.batch(step), name))


def test_packed_rows_hold_every_example_of_an_epoch() -> None:
    data = rows(packing=True, global_rows=1)
    first = data.rows_per_epoch
    assert first < 20
    found = [index for step in range(first) for index in taken(data.batch(step))]
    zero = slow_order(1)[0].count(0)  # example 0's id 0 is the padding's as well: counted by its segment instead
    assert Counter(index for index in found if index) == Counter(index for index in slow_order(1)[0] if index)
    assert zero == sum(
        int(((batch.tokens[0] == 1) & (batch.segments[0] > 0)).sum()) for batch in map(data.batch, range(first))
    )


@given(st.integers(1, 500), st.lists(st.integers(1, 50), min_size=1, max_size=6))
@settings(deadline=None)
def test_largest_remainder(total: int, weights: list[int]) -> None:
    found = largest_remainder(total, [float(weight) for weight in weights])
    assert sum(found) == total
    for share, weight in zip(found, weights, strict=True):
        assert abs(share - Fraction(total * weight, sum(weights))) < 1


def test_a_source_without_a_share_is_refused() -> None:
    with pytest.raises(SpecError, match=r"an epoch of 4 examples has none of 1 source") as found:
        Mixture((Share("big.jsonl", 1000.0, 3), Share("small.jsonl", 1.0, 1)), 0)
    assert found.value.details == ("small.jsonl: weight 1",)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("epochs", [1, 2, 0.5, 1.1, 2.75])
def test_rows_of_epochs(packing: bool, epochs: float) -> None:
    """Counted by hand: the rows of whole epochs one after another, and of the last one the part, rounded up."""
    data, by_epoch = rows(packing), []
    for epoch in range(math.ceil(epochs)):
        room: list[int] = []
        for index in slow_order(epoch + 1)[epoch]:
            length = 2 + index % 4
            row = next((i for i, left in enumerate(room) if left >= length), None) if packing else None
            if row is None:
                room.append(LENGTH - length)
            else:
                room[row] -= length
        by_epoch.append(len(room))
    whole = int(epochs)
    part = math.ceil(Fraction(str(epochs)) % 1 * by_epoch[whole]) if epochs > whole else 0
    assert data.rows_of(epochs) == sum(by_epoch[:whole]) + part


CHAT = [turn("user", "Who?"), turn("assistant", "Men.")]


def spec(text: str) -> run_spec.RunSpec:
    return run_spec.parse(f"model: {{source: unused}}\n{text}\n")


def test_sources_of_a_spec_become_a_mixture(llama_tokenizer: Path, tmp_path: Path) -> None:
    """Each source may have its own form; counts are those of all, the last example of one is next to the other's."""
    write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}] * 2 + [{"messages": CHAT[:1]}])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "The capital is", "completion": " Paris"}] * 6)
    run = spec("data: {train: [{source: a.jsonl, weight: 3}, {source: b.jsonl}]}\ntrain: {seed: 4}")
    seen: list[int] = []
    data = prepare(run, tmp_path, load_tokenizer(llama_tokenizer), "train", 1, seen.append)
    assert isinstance(data, Rows)
    assert data.mixture == Mixture((Share("a.jsonl", 3.0, 2), Share("b.jsonl", 1.0, 6)), 4)
    assert (data.counts.read, data.counts.kept, data.counts.dropped_empty) == (9, 8, 1)
    assert seen == list(range(1, 10))
    ids = [data.batch(step).tokens.tolist() for step in range(8)]
    chat = data.examples[0].ids.tolist()
    assert sum(row[0][: len(chat)] == chat for row in ids) == 6  # three quarters of eight
    plain = prepare(spec("data: {train: [a.jsonl]}"), tmp_path, load_tokenizer(llama_tokenizer), "train", 1)
    assert isinstance(plain, Rows)
    assert plain.mixture is None


def test_a_source_with_nothing_left_is_named(llama_tokenizer: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    write_jsonl(tmp_path / "b.jsonl", [{"messages": CHAT[:1]}])
    run = spec("data: {train: [{source: a.jsonl}, {source: b.jsonl}]}")
    with pytest.raises(SpecError, match=r"nothing to train on is left of the 1 example\(s\) in b.jsonl"):
        prepare(run, tmp_path, load_tokenizer(llama_tokenizer), "train", 1)


def test_pairs_are_mixed_too(llama_tokenizer: Path, tmp_path: Path) -> None:
    for name, count in (("a", 1), ("b", 3)):
        lines = [{"prompt": f"{name}{i}?", "chosen": "Yes.", "rejected": "No."} for i in range(count)]
        write_jsonl(tmp_path / f"{name}.jsonl", lines)
    run = spec("data: {train: [{source: a.jsonl}, {source: b.jsonl}]}\ntrain: {method: dpo, sequence_length: 99}")
    data = prepare(run, tmp_path, load_tokenizer(llama_tokenizer), "train", 2)
    assert isinstance(data, Pairs)
    assert data.rows_of(2.5) == 10
    prompt = data.prompts[0].ids.tolist()
    for first in (0, 2, 4):  # an epoch is two steps of two pairs: a's only pair is half of each epoch
        batches = [data.preference_batch(step)["prompt_ids"] for step in (first, first + 1)]
        assert sum(row[-len(prompt) :].tolist() == prompt for batch in batches for row in batch) == 2
    assert data.tokens_per_batch == 2 * 2 * (data.prompt_width + data.answer_width)
