"""Orbax checkpoints written array by array and piece by piece, in Orbax's own format (zarr3, one key prefix a leaf).

Orbax itself copies every leaf before it writes it. So the arrays, and the few metadata files beside them, are written
here: uncompressed ones in place (`shard_store`), one file an array; compressed ones through TensorStore into an OCDBT
database. In a bucket every chunk is an object of its own: OCDBT would write its one manifest anew with each chunk, and
a bucket takes one write a second to an object. The tests restore the result with stock Orbax (v0 and v1) and with both
engines.
Source: orbax/checkpoint/_src/metadata/{tree,step_metadata_serialization}.py and
_src/serialization/tensorstore_utils.py, 0.12.8.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bridge.converters.plan import ITEM_BYTES
from bridge.converters.shard_store import BYTES, CHECKED, Shard, ShardWriter
from bridge.converters.slabs import Tiling
from bridge.places import BucketPath, kvstore

Compression = Literal["none", "zstd:1", "zstd:3"]
Path_ = tuple[str, ...]

HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
TREE, STEP = "_METADATA", "_CHECKPOINT_METADATA"
Region = tuple[slice, ...]


def context(cache_bytes: int = 0) -> Any:
    """A TensorStore context: no fsync a commit (the folder is flushed once, before its rename), a bounded cache."""
    import tensorstore as ts

    return ts.Context(
        {
            "file_io_sync": False,
            "cache_pool": {"total_bytes_limit": cache_bytes},
            "data_copy_concurrency": {"limit": 2},
            "file_io_concurrency": {"limit": 8},
        }
    )


class TreeSink:
    """The tree of one checkpoint item, written array by array."""

    def __init__(self, step: Path, item: str, compression: Compression = "none") -> None:
        self.step, self.folder = step, step / item
        self.folder.mkdir(parents=True)
        self._paths: list[Path_] = []
        self._compression = compression
        self._context = context()
        self._local = not isinstance(step, BucketPath)
        self.in_place = self._local and compression == "none"
        self._ocdbt = self._local and not self.in_place

    def create(
        self, path: Path_, shape: tuple[int, ...], dtype: str, chunk: tuple[int, ...], inner: tuple[int, ...]
    ) -> Any:
        """A new array, open for writing by whole `chunk`s; readers decode `inner` chunks."""
        import tensorstore as ts

        codecs: list[dict[str, Any]] = list(CHECKED if self.in_place else [BYTES])
        if self._compression != "none":
            level = int(self._compression.removeprefix("zstd:"))
            codecs.append({"name": "zstd", "configuration": {"level": level}})
        sharding = {"chunk_shape": list(inner), "codecs": codecs, "index_codecs": CHECKED}
        spec = {
            "driver": "zarr3",
            "kvstore": leaf_kvstore(self.folder, ".".join(path), self._ocdbt),
            "metadata": {
                "shape": list(shape),
                "data_type": dtype,
                "fill_value": 0 if dtype.startswith("int") else 0.0,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
                "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            },
            "store_data_equal_to_fill_value": True,
        }
        self._paths.append(path)
        with _as_os_error(str(self.folder)):
            return ts.open(spec, create=True, open=False, context=self._context).result()

    def write(self, array: Any, region: Region, values: NDArray[Any]) -> None:
        """Write whole chunks of an array that `create` gave; `values` must not change afterwards.

        Raises:
            OSError: as TensorStore reports it: disk full, no permission ...
        """
        with _as_os_error(str(self.folder)):
            array[region].write(values, can_reference_source_data_indefinitely=True).result()

    def lay_out(self, path: Path_, tiling: Tiling, dtype: str) -> ShardWriter:
        """A new array whose blocks are written in place; only where `in_place`."""
        self.create(path, tiling.shape, dtype, tiling.shard, tiling.inner)
        file = self.folder.joinpath(".".join(path), "c", *("0" for _ in tiling.shape))
        return ShardWriter(Shard(file, tiling, ITEM_BYTES[dtype]))

    def scalars(self, paths: Sequence[Path_]) -> None:
        """Scalars that are no weights (`step`), as int64 zeros."""
        for path in paths:
            self.write(self.create(path, (), "int64", (), ()), (), np.zeros((), "int64"))

    def finish(self, custom: dict[str, Any]) -> None:
        """Write the metadata of the tree and of the step."""
        tree = {
            str(path): {
                "key_metadata": [{"key": key, "key_type": 2} for key in path],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
            for path in self._paths
        }
        options = {"use_ocdbt": self._ocdbt, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
        (self.folder / TREE).write_text(json.dumps({"tree_metadata": tree, **options, "custom_metadata": None}))
        now = time.time_ns()
        step = {
            "item_handlers": {self.folder.name: HANDLER},
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now,
            "commit_timestamp_nsecs": now,
            "custom_metadata": custom,
        }
        (self.step / STEP).write_text(json.dumps(step))
        for folder in (self.folder, self.step):
            (folder / "commit_success.txt").write_text("Checkpoint commit was successful.\n")


def leaf_kvstore(folder: Path, name: str, ocdbt: bool) -> dict[str, Any]:
    """Where the chunks of an array lie, as TensorStore is told of it."""
    if ocdbt:
        return {"driver": "ocdbt", "base": kvstore(folder), "path": f"{name}/"}
    return kvstore(folder / name)


@contextlib.contextmanager
def _as_os_error(name: str) -> Iterator[None]:
    """TensorStore raises a ValueError with the operating system's text in it: give the OSError back."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        for code in errno.errorcode:
            if f": {os.strerror(code)}" in str(error) or f"errno={errno.errorcode[code]}" in str(error):
                raise OSError(code, os.strerror(code), name) from error
        raise
