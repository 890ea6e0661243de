"""Training checkpoints stored in chunks that an export decodes one after the other, whatever the model's size.

Orbax stores each device's share of an array as one chunk of up to 2 GB (orbax/checkpoint/_src/serialization/
tensorstore_utils.py, 0.12), and a compressed chunk is decoded whole. A single row of a Hugging Face tensor then takes
all layers on all devices: 7.5 GB of the MLP of Llama 3.1 8B in float32, 75 GB of 70B.
"""

from __future__ import annotations

import math
from typing import Any

from bridge.model_spec import ModelSpec

Shape = tuple[int, ...]

ROW_BYTES = 32 << 20
"""Of the chunks that make up whole rows of a Hugging Face tensor."""


def chunk_of(write_shape: Shape, global_shape: Shape, itemsize: int, layer_dim: int | None, cut_dim: int) -> Shape:
    """The chunk of a device's share: of one layer, and along the cut dimension about what makes up `ROW_BYTES`.

    Args:
        write_shape: the share.
        global_shape: of the whole array.
        itemsize: bytes of an element.
        layer_dim: where layers are stacked.
        cut_dim: the rows of the Hugging Face tensor, which is written by them.
    """
    chunk = list(write_shape)
    elements = math.prod(global_shape) // global_shape[cut_dim]
    if layer_dim is not None:
        chunk[layer_dim] = 1
        elements //= global_shape[layer_dim]
    share, limit = chunk[cut_dim], max(1, ROW_BYTES // (elements * itemsize))
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    below = [size for size in divisors if size <= limit]
    # Of a vocabulary with one token more, a prime, single rows would be a million chunks: then rather larger ones,
    # which an export unpacks.
    few = 4 * below[-1] >= min(limit, share)
    chunk[cut_dim] = below[-1] if few else divisors[len(below)]
    return tuple(chunk)


def layouts(model: ModelSpec, scanned: bool) -> dict[Shape, tuple[int | None, int]]:
    """(dimension of the layers, dimension that is a Hugging Face tensor's rows) of every matrix, by its shape.

    Both engines have the same matrices; MaxText's scanned layers are their second dimension.
    """
    embed, heads, kv, size, mlp = model.embed, model.heads, model.kv_heads, model.head_dim, model.mlp
    of_a_layer = {
        (embed, heads, size): 1,
        (embed, kv, size): 1,
        (heads, size, embed): 2,
        (embed, mlp): 1,
        (mlp, embed): 1,
    }
    known: dict[Shape, tuple[int | None, int]] = {(model.vocab, embed): (None, 0), (embed, model.vocab): (None, 1)}
    for shape, cut in of_a_layer.items():
        if scanned:
            known[(shape[0], model.layers, *shape[1:])] = (1, cut + 1)
        else:
            known[shape] = (None, cut)
    return known


def install(model: ModelSpec, scanned: bool) -> None:
    """Have Orbax store all matrices of a model, and of its optimizer's state, in such chunks, in this process.

    Raises:
        ImportError, AttributeError: this Orbax chooses its chunks elsewhere.
    """
    from orbax.checkpoint._src.arrays import subchunking

    known, theirs = layouts(model, scanned), subchunking.choose_chunk_shape

    def choose(global_shape: Shape, write_shape: Shape, dtype: Any, target_byte_size: int | None, **more: Any) -> Shape:
        found = known.get(tuple(global_shape))
        if found is None:
            chosen: Shape = theirs(global_shape, write_shape, dtype, target_byte_size, **more)
            return chosen
        return chunk_of(tuple(write_shape), tuple(global_shape), dtype.itemsize, *found)

    subchunking.choose_chunk_shape = choose
