"""Training checkpoints stored in chunks that an export decodes one after the other, whatever the model's size.

Orbax stores each device's share of an array as one chunk of up to 2 GB (orbax/checkpoint/_src/serialization/
tensorstore_utils.py, 0.12), and a compressed chunk is decoded whole. A single row of a Hugging Face tensor then takes
all layers on all devices: 7.5 GB of the MLP of Llama 3.1 8B in float32, 75 GB of 70B.
"""

from __future__ import annotations

from typing import Any

from bridge.converters.layout import axes_of
from bridge.converters.plan import make_plan, table_for
from bridge.converters.slabs import unit_elements
from bridge.model_spec import ModelSpec

Shape = tuple[int, ...]

ROW_BYTES = 32 << 20
"""Of the chunks that make up whole rows of a Hugging Face tensor."""


def chunk_of(write_shape: Shape, itemsize: int, layer_dim: int | None, cut_dim: int, unit: int) -> Shape:
    """The chunk of a device's share: of one layer, and along the cut dimension what makes up `ROW_BYTES`.

    Args:
        write_shape: the share.
        itemsize: bytes of an element.
        layer_dim: where layers are stacked.
        cut_dim: along which a Hugging Face tensor is written in pieces.
        unit: elements of the whole array, of one layer, in a step along `cut_dim`.
    """
    chunk = list(write_shape)
    if layer_dim is not None:
        chunk[layer_dim] = 1
    limit = max(1, ROW_BYTES // (unit * itemsize))
    chunk[cut_dim] = next(size for size in range(min(limit, chunk[cut_dim]), 0, -1) if chunk[cut_dim] % size == 0)
    return tuple(chunk)


def install(engine: str, model: ModelSpec, scanned: bool = True) -> None:
    """Have Orbax store all arrays of a model's shapes, of the optimizer's too, in such chunks, in this process.

    Raises:
        ImportError, AttributeError: this Orbax chooses its chunks elsewhere.
    """
    from orbax.checkpoint._src.arrays import subchunking

    axes = axes_of(model)
    known = {
        move.engine_shape: (move.rule.engine_layer_dim, move.rule.engine_cut_dim, unit_elements(move, axes))
        for move in make_plan(table_for(model, engine), model, scanned)
    }
    theirs = subchunking.choose_chunk_shape

    def choose(global_shape: Shape, write_shape: Shape, dtype: Any, target_byte_size: int | None, **more: Any) -> Shape:
        found = known.get(tuple(global_shape))
        if found is None:
            chosen: Shape = theirs(global_shape, write_shape, dtype, target_byte_size, **more)
            return chosen
        return chunk_of(tuple(write_shape), dtype.itemsize, *found)

    subchunking.choose_chunk_shape = choose
