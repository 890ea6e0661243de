"""Restoring a checkpoint with stock Orbax onto 8 simulated devices, sharded as MaxText's fsdp shards it.

    python benchmarks/restore.py ITEM   restores <step>/items once and prints {"wall", "cpu", "decoded", "arrays"}

`decoded` is the bytes of all stored chunks that any device's share touches, counted once for each device: what a
reader has to decode at the least.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

DEVICES = 8


def embed_dim(name: str, rank: int) -> int | None:
    """The dimension that fsdp shards: MaxText's logical axis `embed` of each kernel (configs/base.yml)."""
    if "out.kernel" in name or "wo.kernel" in name:
        return rank - 1
    if "token_embedder" in name:
        return 1
    return None if rank == 0 else 0


def decoded(item: Path, name: str, shape: tuple[int, ...], dim: int, metadata: dict[str, Any]) -> int:
    """Bytes of the chunks under each device's share, summed over the devices."""
    import math

    import tensorstore

    store: dict[str, Any] = {"driver": "file", "path": f"{item / name}/"}
    if (item / "manifest.ocdbt").exists():
        store = {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{name}/"}
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    array = tensorstore.open({"driver": driver, "kvstore": store}, open=True).result()
    chunk = tuple(array.chunk_layout.read_chunk.shape)
    each = math.prod(chunk) * array.dtype.numpy_dtype.itemsize
    share, total = shape[dim] // DEVICES, 0
    for device in range(DEVICES):
        counts = [math.ceil(size / side) for size, side in zip(shape, chunk, strict=True)]
        first, last = device * share // chunk[dim], ((device + 1) * share - 1) // chunk[dim]
        counts[dim] = last - first + 1
        total += math.prod(counts) * each
    return total


def main(item: Path) -> None:
    """Restore, measure, print one line of JSON."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    metadata = json.loads((item / "_METADATA").read_text())
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        found = checkpointer.metadata(item)
        tree = getattr(getattr(found, "item_metadata", found), "tree", found)
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
        chunks = 0

        def target(path: Any, leaf: Any) -> Any:
            nonlocal chunks
            name = ".".join(str(key.key) for key in path)
            dim = embed_dim(name, len(leaf.shape))
            spec = [None] * len(leaf.shape)
            if dim is not None and leaf.shape[dim] % DEVICES == 0:
                spec[dim] = "fsdp"  # type: ignore[call-overload]
                chunks += decoded(item, name, tuple(leaf.shape), dim, metadata)
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        targets = jax.tree_util.tree_map_with_path(target, tree)
        arguments = ocp.checkpoint_utils.construct_restore_args(targets)
        begun, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        restored = checkpointer.restore(item, args=ocp.args.PyTreeRestore(targets, restore_args=arguments))
        jax.block_until_ready(restored)
        wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(restored) if hasattr(leaf, "nbytes"))
    print(json.dumps({"wall": wall, "cpu": cpu, "decoded": chunks, "arrays": arrays}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
