"""Slabs: every element of an array in exactly one of them, none above its size, chunks that hold whole slabs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from llama_shapes import LLAMA_1B, LLAMA_8B, LLAMA_70B, LLAMA_405B

from bridge.converters.layout import axes_of
from bridge.converters.orbax_source import Leaf, TreeSource
from bridge.converters.plan import Move, Tensor, make_plan, tables
from bridge.converters.slabs import (
    BLOCK_BYTES,
    chunk_shape,
    cut,
    cut_stored,
    read_chunk_shape,
    region,
    unit_elements,
)
from bridge.converters.transfer import BASE_BYTES, COPIES, Budget, stored_slabs, unpack_large
from bridge.model_spec import ModelSpec

MODEL = ModelSpec(
    layers=5,
    embed=32,
    heads=6,
    kv_heads=3,
    head_dim=8,
    mlp=50,
    vocab=101,
    tied=False,
    rope_theta=5e5,
    rope_scaling=None,
    norm_eps=1e-5,
    context=64,
    dtype="float32",
)
PLANS = [
    pytest.param(make_plan(table, MODEL, scanned), id=f"{pair[1]}-{scanned}")
    for pair, table in tables().items()
    for scanned in (True, False)
]
SIZES = [1, 700, 5_000, 40_000, 1 << 30]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("plan", PLANS)
def test_slabs_cover_an_array_once_and_stay_below_their_size(plan: tuple[Move, ...], size: int) -> None:
    axes = axes_of(MODEL)
    for move in plan:
        cutting = cut(move, axes, 4, size)
        seen = np.zeros(move.engine_shape, np.int32)
        slabs = list(cutting.slabs())
        assert len(slabs) == cutting.count
        for layers, units in slabs:
            part = region(move, layers, units)
            seen[part] += 1
            one_unit = unit_elements(move, axes) * 4
            assert seen[part].nbytes <= max(size, one_unit), move.name
            blocks = list(cutting.blocks(units))
            assert [unit for block in blocks for unit in block] == list(units)
            assert all(len(block) * one_unit <= max(BLOCK_BYTES, one_unit) for block in blocks)
        assert (seen == 1).all(), move.name


@pytest.mark.parametrize("plan", PLANS)
def test_a_slab_is_one_write_chunk(plan: tuple[Move, ...]) -> None:
    for move in plan:
        cutting = cut(move, axes_of(MODEL), 4, 5_000)
        chunk = chunk_shape(move, cutting)
        for layers, units in cutting.slabs():
            for part, side, whole in zip(region(move, layers, units), chunk, move.engine_shape, strict=True):
                start, stop, _ = part.indices(whole)
                assert start % side == 0
                assert stop - start == min(side, whole - start)


def test_read_chunks_divide_write_chunks_along_the_embedding() -> None:
    plan = make_plan(tables()["llama", "maxtext"], MODEL)
    wide = (4096, 5, 6, 8)
    query = next(move for move in plan if "query" in move.name)
    assert read_chunk_shape(query, wide) == (256, 5, 6, 8)
    assert read_chunk_shape(query, (4104, 5, 6, 8)) == (513, 5, 6, 8), "8 parts: 16 do not divide 4104"
    assert read_chunk_shape(query, (32, 5, 6, 8)) == (32, 5, 6, 8), "too small to be split"
    out = next(move for move in plan if "out.kernel" in move.name)
    assert read_chunk_shape(out, (6, 5, 128, 4096)) == (6, 5, 128, 256)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunks", [(1, 1), (1, 4), (1, 64), (2, 3), (5, 7), (8, 64)])
def test_a_stored_array_is_cut_by_whole_chunks(chunks: tuple[int, int], size: int) -> None:
    """One row of chunks where that is more than a slab; never more than a slab where it is not."""
    axes = axes_of(MODEL)
    for move in make_plan(tables()["llama", "maxtext"], MODEL):
        cutting = cut_stored(move, axes, 4, size, *chunks)
        layers, units = min(chunks[0], cutting.total_layers), min(chunks[1], cutting.total_units)
        seen = np.zeros((cutting.total_layers, cutting.total_units), np.int32)
        for some_layers, some_units in cutting.slabs():
            seen[some_layers.start : some_layers.stop, some_units.start : some_units.stop] += 1
            assert some_layers.start % layers == 0, "a chunk that two slabs share is decoded twice"
            assert some_units.start % units == 0, "a chunk that two slabs share is decoded twice"
            one = unit_elements(move, axes) * 4
            assert len(some_layers) * len(some_units) * one <= max(size, layers * units * one), move.name
        assert (seen == 1).all(), move.name


def test_the_budget_bounds_all_slabs_at_once() -> None:
    for memory in (512 << 20, 1 << 30, 4 << 30):
        budget = Budget(memory)
        assert BASE_BYTES + budget.slab_bytes * budget.workers * COPIES <= memory
    assert Budget(1).slab_bytes == 1 << 20


@pytest.mark.parametrize("devices", [1, 4, 8, 16, 64, 256])
@pytest.mark.parametrize(("engine", "scanned"), [("maxtext", True), ("maxtext", False), ("tunix", False)])
@pytest.mark.parametrize("model", [LLAMA_1B, LLAMA_8B, LLAMA_70B, LLAMA_405B], ids=["1b", "8b", "70b", "405b"])
def test_what_engines_store_by_themselves_makes_no_larger_slabs(
    model: ModelSpec, engine: str, scanned: bool, devices: int
) -> None:
    """Float32, all layers of a device's share of the embedding as one chunk: a row of them is the whole array."""
    plan = make_plan(tables()["llama", engine], model, scanned)
    source = object.__new__(TreeSource)
    source.leaves = {}
    for move in plan:
        groups = zip(move.rule.engine_groups, move.engine_shape, strict=True)
        chunk = tuple(-(-size // devices) if group == ("embed",) else size for group, size in groups)
        source.leaves[move.engine] = Leaf(move.engine, Tensor(move.engine_shape, "float32"), None, chunk)
    budget = Budget()
    unpack_large(source, plan, model, budget)
    for move in plan:
        leaf = source.leaves[move.engine]
        slabs = stored_slabs(move, model, leaf, ["bfloat16"], budget)
        assert all(slab.nbytes <= budget.whole_bytes for slab in itertools.islice(slabs, 20)), move.name
        assert not leaf.unpacked or leaf.tensor.bytes > budget.whole_bytes, move.name


def test_memory_does_not_depend_on_the_model() -> None:
    """An embedding of Llama 3.1 405B (4.2 GB), and its stacked MLP (109 GB), in slabs of 64 MiB."""
    axes = axes_of(LLAMA_405B)
    for move in make_plan(tables()["llama", "maxtext"], LLAMA_405B):
        cutting = cut(move, axes, 2, 64 << 20)
        slab = math.prod(chunk_shape(move, cutting)) * 2
        assert slab <= 64 << 20
        assert slab * cutting.count >= math.prod(move.engine_shape) * 2
