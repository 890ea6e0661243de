"""NF4 on the host, one array at a time: the bf16 base never reaches the device.

The arithmetic is qwix's own, run on slices that do not share a scale, so the result is the same bit for bit. Whole, its
nearest-of-16 search takes 64 bytes a value (3.7 GB for one 14336 x 4096 matrix).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.errors import LaunchError
from bridge.places import orbax_path

SLICE_VALUES = 1 << 20


def host() -> Any:
    """The CPU as a JAX device, beside the accelerator.

    Raises:
        LaunchError: JAX was told to leave it out.
    """
    import jax

    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise LaunchError(
            "weights are prepared on the CPU, which JAX_PLATFORMS leaves out", hint="JAX_PLATFORMS=cuda,cpu"
        ) from error


def read(item: Path, path: tuple[str, ...], dtype: str) -> NDArray[Any]:
    """One array of a Tunix checkpoint item, in host memory, rounded once to `dtype`."""
    import orbax.checkpoint as ocp

    key = (*path, "value")
    target: Any = 0
    arguments: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    for part in reversed(key):
        target, arguments = {part: target}, {part: arguments}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            orbax_path(item), args=ocp.args.PyTreeRestore(item=target, restore_args=arguments, partial_restore=True)
        )
    for part in key:
        restored = restored[part]
    return np.asarray(restored).astype(np.dtype(_numpy_name(dtype)), copy=False)


def how(abstract: Any, path: tuple[str, ...]) -> Any:
    """How qwix quantizes a projection: which axes have their own scales, and which are cut into tiles."""
    node = abstract
    for part in path:
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node.how


def quantize(array: NDArray[Any], method: Any) -> dict[str, NDArray[Any]]:
    """`qvalue`, uint4 indices of the array's shape, and `scale`, of the array's dtype, one a tile.

    Args:
        array: in host memory.
        method: qwix's `HowToQuantize` for it.
    """
    import jax
    from qwix._src.core import qarray

    axis = max(method.channelwise_axes, key=lambda number: array.shape[number])
    columns = array.shape[axis]
    width = max(1, SLICE_VALUES * columns // array.size)
    parts: list[Any] = []
    with jax.default_device(host()):
        for start in range(0, columns, width):
            index = [slice(None)] * array.ndim
            index[axis] = slice(start, start + width)
            quantized = qarray.quantize(jax.numpy.asarray(np.ascontiguousarray(array[tuple(index)])), method)
            parts.append((np.asarray(quantized.qvalue), np.asarray(quantized.scale)))
    values, scales = zip(*parts, strict=True)
    return {"qvalue": np.concatenate(values, axis), "scale": np.concatenate(scales, axis)}


def _numpy_name(dtype: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
