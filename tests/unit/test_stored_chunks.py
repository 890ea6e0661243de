"""The chunks of training checkpoints: whole divisions of a device's share, rows of them below a bound, at any size."""

from __future__ import annotations

import math

import numpy as np
import pytest
from llama_shapes import LLAMA_1B, LLAMA_8B, LLAMA_70B, LLAMA_405B

from bridge.converters.layout import axes_of
from bridge.converters.plan import make_plan, tables
from bridge.converters.slabs import cut_stored, unit_elements
from bridge.converters.transfer import Budget
from bridge.launchers import stored_chunks

MODELS = {"1b": LLAMA_1B, "8b": LLAMA_8B, "70b": LLAMA_70B, "405b": LLAMA_405B}


@pytest.mark.parametrize("devices", [1, 8, 64])
@pytest.mark.parametrize(("engine", "scanned"), [("maxtext", True), ("maxtext", False), ("tunix", False)])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_decoded_at_once_is_bounded(name: str, engine: str, scanned: bool, devices: int) -> None:
    """Float32, the embedding divided over the devices as both engines' fsdp does it; by the converter's own table."""
    model = MODELS[name]
    axes, known = axes_of(model), stored_chunks.layouts(model, scanned)
    for move in make_plan(tables()["llama", engine], model, scanned):
        rule = move.rule
        if math.prod(move.hf_shape) == model.embed:  # a norm
            assert move.engine_shape not in known
            continue
        assert known[move.engine_shape] == (rule.engine_layer_dim, rule.engine_cut_dim), move.name
        embed = next(dim for dim, group in enumerate(rule.engine_groups) if group == ("embed",))
        share = tuple(size // devices if dim == embed else size for dim, size in enumerate(move.engine_shape))
        unit = unit_elements(move, axes)
        chunk = stored_chunks.chunk_of(share, move.engine_shape, 4, *known[move.engine_shape])
        assert all(size % side == 0 for size, side in zip(share, chunk, strict=True)), "Orbax writes whole chunks only"
        layer_chunk = chunk[rule.engine_layer_dim] if rule.engine_layer_dim is not None else 1
        assert layer_chunk == 1
        budget = Budget()
        cutting = cut_stored(move, axes, 4, budget.slab_bytes, layer_chunk, chunk[rule.engine_cut_dim])
        assert cutting.layers * cutting.units * unit * 4 <= budget.slab_bytes, move.name
        large = math.prod(share) * 4 > 256 << 20
        assert not large or math.prod(chunk) * 4 > 64 << 10, f"{move.name}: chunks of {chunk} are too many"


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("vocab", [128256, 128257, 128258, 128264, 128320, 32001, 32003, 49152])
def test_a_vocabulary_with_few_divisors_does_not_end_in_single_rows(vocab: int, devices: int) -> None:
    """Llama 3 with a pad token has 128257, a prime: neither a million chunks nor any that is no whole division."""
    for shape, dim, embed in (((vocab, 4096), 0, 1), ((4096, vocab), 1, 0)):
        share = tuple(size // devices if at == embed else size for at, size in enumerate(shape))
        chunk = stored_chunks.chunk_of(share, shape, 4, None, dim)
        assert chunk[embed] == share[embed]
        assert share[dim] % chunk[dim] == 0
        if vocab in (128256, 128320, 49152):  # there is a good one
            assert chunk[dim] * 4096 * 4 <= stored_chunks.ROW_BYTES
        assert share[dim] // chunk[dim] <= 4 * vocab * 4096 * 4 // stored_chunks.ROW_BYTES + 1


def test_other_arrays_are_stored_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from orbax.checkpoint._src.arrays import subchunking

    theirs = subchunking.choose_chunk_shape
    monkeypatch.setattr(subchunking, "choose_chunk_shape", theirs)
    stored_chunks.install(LLAMA_8B, scanned=True)
    kind = np.dtype("float32")
    for shape in ((4096, 16), (7,), (4096, 32, 8, 16)):
        assert subchunking.choose_chunk_shape(shape, shape, kind, None) == shape
        small = subchunking.choose_chunk_shape(shape, shape, kind, 64)
        assert small == theirs(shape, shape, kind, 64)
        assert math.prod(small) <= 16
    assert subchunking.choose_chunk_shape((4096, 32, 14336), (512, 32, 14336), kind, 2 << 30)[1] == 1
