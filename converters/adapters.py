"""LoRA adapters in and out: an engine's checkpoint <-> a PEFT folder. Merging is in `merge.py`.

The two directions share one plan (`adapter_layout.plan_adapter`), and every factor moves bit for bit. One factor
needs help: MaxText folds 1/sqrt(head_dim) into the query, and dividing by it in float32 is not always undone by
multiplying. The differences, of one unit in the last place, lie in `bridge_rounding.safetensors` beside the adapter,
which nobody else reads, so that the way back gives the same bits.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bridge.converters.adapter_facts import TARGETS, AdapterFacts, facts_from_options, recorded_by_engine
from bridge.converters.adapter_layout import ITEMS, RANK, TRAINER_STATE, FactorArray, bare_name, measure, plan_adapter
from bridge.converters.bits import Array, bits_dtype, export_block, import_block, numpy_dtype
from bridge.converters.hf_store import SINGLE, HfSink, inside
from bridge.converters.layout import Axes, Block, axes_of
from bridge.converters.orbax_source import Leaf, TreeSource
from bridge.converters.orbax_store import TreeSink
from bridge.converters.peft_store import WEIGHTS, PeftSource, check_tensors, read_facts, with_recorded, write_config
from bridge.converters.plan import ITEM_BYTES, Tensor
from bridge.errors import CheckpointError
from bridge.model_spec import ModelSpec

__all__ = [
    "ITEMS",
    "TARGETS",
    "AdapterFacts",
    "export_peft",
    "facts_from_options",
    "import_peft",
    "measure_checkpoint",
    "plan_peft",
    "recorded_by_engine",
]

ROUNDING = "bridge_rounding.safetensors"
GROUP_BYTES = 64 << 20  # layers of a stacked array that are held at a time
NO_SHARDS = 1 << 62


def measure_checkpoint(
    checkpoint_item: Path, model: ModelSpec, engine: str, scanned: bool
) -> tuple[int, tuple[str, ...]]:
    """Rank and targets of a checkpoint, from its headers alone; raises as `adapter_layout.measure`."""
    source = TreeSource(checkpoint_item)
    return measure(_tensors(source), model, engine, scanned, str(checkpoint_item))


class AdapterSource:
    """An engine's adapter checkpoint, checked whole against its facts, read factor by factor in PEFT's layout."""

    def __init__(self, item: Path, facts: AdapterFacts, model: ModelSpec, engine: str, scanned: bool) -> None:
        """Check names, shapes, rank and targets; no value is read.

        Raises:
            CheckpointError: the checkpoint is not complete, or not what the facts say.
        """
        self._source = TreeSource(item)
        rank, targets = measure(_tensors(self._source), model, engine, scanned, str(item))
        facts_from_options(None, None, None, recorded=facts, measured=(rank, targets))
        self.arrays = plan_adapter(model, engine, scanned, facts.targets, facts.rank)
        self.axes = {**axes_of(model), RANK: facts.rank}
        leaves = self._source.leaves.items()
        self._leaves = {bare_name(path): leaf for path, leaf in leaves if path[0] not in TRAINER_STATE}

    def leaf(self, array: FactorArray) -> Leaf:
        """What the checkpoint says of an array."""
        return self._leaves[array.name]

    def layers(self, array: FactorArray) -> Iterator[tuple[int, Array]]:
        """Every layer of an array in the engine's order, as bits; few layers of a stacked array are held at once."""
        leaf = self.leaf(array)
        dim = array.factor.layer_dim
        for group in _groups(leaf, array):
            part = [slice(None)] * len(array.shape)
            if dim is not None:
                part[dim] = slice(group[0], group[-1] + 1)
            values = np.asarray(self._source.read(leaf.path, tuple(part))).view(bits_dtype(leaf.tensor.dtype))
            for index, layer in enumerate(group):
                one = values if dim is None else values.take(index, axis=dim)
                yield layer, np.ascontiguousarray(one)

    def to_peft(self, array: FactorArray, bits: Array) -> Array:
        """One layer in PEFT's order and dtype, flat."""
        dtype = self.leaf(array).tensor.dtype
        return export_block(bits, array.factor.block(self.axes), dtype, self.peft_dtype(array), array.factor.scale)

    def peft_dtype(self, array: FactorArray) -> str:
        """The array's own dtype, or float32 where undoing a scale needs more digits."""
        dtype = self.leaf(array).tensor.dtype
        return dtype if _is_power_of_two(array.factor.scale) else "float32"


def export_peft(
    checkpoint_item: Path, facts: AdapterFacts, model: ModelSpec, engine: str, scanned: bool, out: Path
) -> None:
    """Write a PEFT adapter folder from an engine's adapter checkpoint.

    Args:
        checkpoint_item: the folder of the tree, `<step>/model_params` (MaxText's own loop: `<step>/items`).
        facts: of the adapter; rank and targets must be what the arrays show.
        model: the base model.
        engine, scanned: how the checkpoint is laid out.
        out: exists and is empty.

    Raises:
        CheckpointError: as `AdapterSource`.
        UnsupportedError: the engine has no adapters here.
    """
    source = AdapterSource(checkpoint_item, facts, model, engine, scanned)
    tensors = {
        array.hf(layer): Tensor(array.factor.hf_shape(source.axes), source.peft_dtype(array))
        for array in source.arrays
        for layer in array.layers
    }
    rounding: dict[str, Array] = {}
    digests: dict[str, str] = {}
    with HfSink(out, tensors, NO_SHARDS) as sink:
        for array in source.arrays:
            for layer, bits in source.layers(array):
                name, moved = array.hf(layer), source.to_peft(array, bits)
                sink.write(name, 0, moved)
                lost = _lost(bits, moved, array, source)
                if lost is not None and lost.any():
                    rounding[name], digests[name] = lost, _digest(moved)
    os.rename(out / SINGLE, out / WEIGHTS)
    if rounding:
        from safetensors.numpy import save_file

        save_file(rounding, out / ROUNDING, metadata=digests)
    write_config(out, facts)


def import_peft(adapter: Path, model: ModelSpec, engine: str, scanned: bool, step_dir: Path) -> AdapterFacts:
    """Write an engine's adapter checkpoint, `<step_dir>/<ITEMS[engine]>`, from a PEFT adapter folder.

    Tunix's trainer restores it as its newest step; MaxText takes the item as `lora.lora_restore_path`, and refuses a
    rank or an alpha that is not the recorded one.

    Args:
        adapter: a PEFT adapter folder.
        model: the base model.
        engine, scanned: how the checkpoint shall be laid out.
        step_dir: the step's folder; its item must not exist.

    Returns:
        The facts for `bridge.json`: rank, alpha, targets and, where recorded, the quantization.

    Raises:
        UnsupportedError: the adapter does what the engine's adapters cannot express.
        CheckpointError: it is incomplete, damaged, or not of this model.
    """
    source = PeftSource(adapter)
    facts, arrays = _checked(source, adapter, model, engine, scanned)
    axes = {**axes_of(model), RANK: facts.rank}
    rounding = _read_rounding(adapter)
    sink = TreeSink(step_dir, ITEMS[engine])
    for array in arrays:
        _import_array(array, axes, source, sink, rounding)
    custom = {"lora": {"lora_rank": facts.rank, "lora_alpha": facts.alpha}, "scan_layers": scanned}
    sink.finish(custom if engine == "maxtext" else {})
    return facts


def plan_peft(adapter: Path, model: ModelSpec, engine: str, scanned: bool) -> tuple[AdapterFacts, dict[str, Tensor]]:
    """What `import_peft` would write: the facts, and shape and dtype of every array; nothing is written.

    Raises:
        UnsupportedError, CheckpointError: as `import_peft`.
    """
    source = PeftSource(adapter)
    facts, arrays = _checked(source, adapter, model, engine, scanned)
    axes = {**axes_of(model), RANK: facts.rank}
    kinds = {array.name: _engine_dtype(array, array.factor.block(axes), source) for array in arrays}
    return facts, {array.name: Tensor(array.shape, kinds[array.name]) for array in arrays}


def _checked(
    source: PeftSource, adapter: Path, model: ModelSpec, engine: str, scanned: bool
) -> tuple[AdapterFacts, tuple[FactorArray, ...]]:
    """The facts of a PEFT adapter and its arrays in the engine, compared with its tensors."""
    facts = with_recorded(adapter, read_facts(adapter, model, source.headers))
    arrays = plan_adapter(model, engine, scanned, facts.targets, facts.rank)
    check_tensors(arrays, source.headers, model, facts)
    return facts, arrays


def _import_array(
    array: FactorArray, axes: Axes, source: PeftSource, sink: TreeSink, rounding: Mapping[str, tuple[Array, str]]
) -> None:
    """Write one array of the engine, a few layers at a time."""
    block, dim, scale = array.factor.block(axes), array.factor.layer_dim, array.factor.scale
    target = _engine_dtype(array, block, source)
    per_layer = math.prod(block.engine_shape) * ITEM_BYTES[target]
    step = max(1, min(len(array.layers), GROUP_BYTES // per_layer))
    chunk = list(array.shape)
    if dim is not None:
        chunk[dim] = step
    stored = sink.create(array.path, array.shape, target, tuple(chunk), tuple(chunk))
    for start in range(0, len(array.layers), step):
        group = array.layers[start : start + step]
        layers = []
        for layer in group:
            name = array.hf(layer)
            bits = source.read(name)
            moved = import_block(bits, block, source.headers[name].dtype, target, scale)
            kept, digest = rounding.get(name, (None, ""))
            if kept is not None and kept.shape == moved.shape and target == "float32" and digest == _digest(bits):
                moved = (moved.view(np.int32) + kept).view(np.uint32)
            layers.append(moved.view(numpy_dtype(target)))
        part = [slice(None)] * len(array.shape)
        if dim is not None:
            part[dim] = slice(group[0], group[-1] + 1)
        stored[tuple(part)].write(layers[0] if dim is None else np.stack(layers, axis=dim)).result()


def _engine_dtype(array: FactorArray, block: Block, source: PeftSource) -> str:
    """The dtype of an engine's array: PEFT's own, the wider of several, and for a scaled B the dtype of its A if that
    holds every value (an adapter that came from there), else float32."""
    kinds = {source.headers[array.hf(layer)].dtype for layer in array.layers}
    if array.factor.scale == 1.0:
        return kinds.pop() if len(kinds) == 1 else "float32"
    narrow = {source.headers[array.hf(layer).replace("lora_B", "lora_A")].dtype for layer in array.layers}
    if len(narrow) > 1 or narrow == {"float32"}:
        return "float32"
    target = narrow.pop()
    for layer in array.layers:
        name = array.hf(layer)
        bits, dtype = source.read(name), source.headers[name].dtype
        there = import_block(bits, block, dtype, target, array.factor.scale)
        if not np.array_equal(export_block(there, block, target, dtype, array.factor.scale), bits):
            return "float32"
    return target


def _lost(bits: Array, moved: Array, array: FactorArray, source: AdapterSource) -> Array | None:
    """What the way back would miss, in units of the last place; None where the way is exact.

    Raises:
        CheckpointError: a value is so large that PEFT's layout cannot hold it.
    """
    if _is_power_of_two(array.factor.scale) or source.leaf(array).tensor.dtype != "float32":
        return None
    back = import_block(moved, array.factor.block(source.axes), "float32", "float32", array.factor.scale)
    difference = bits.view(np.int32).astype(np.int64) - back.view(np.int32)
    if np.abs(difference).max(initial=0) > 1:
        raise CheckpointError(f"{array.name} has values beyond float32 once MaxText's 1/sqrt(head_dim) is undone")
    return difference.astype(np.int8)


def _read_rounding(adapter: Path) -> dict[str, tuple[Array, str]]:
    """Differences and the digest of the tensor that each belongs to, by tensor name."""
    if not (adapter / ROUNDING).is_file():
        return {}
    import safetensors

    opened: Any = safetensors.safe_open
    try:
        with opened(inside(adapter, ROUNDING, where=adapter), framework="numpy") as file:
            digests = file.metadata() or {}
            return {name: (file.get_tensor(name), digests.get(name, "")) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{adapter / ROUNDING} cannot be read: {error}", hint="delete it to do without"
        ) from error


def _groups(leaf: Leaf, array: FactorArray) -> list[tuple[int, ...]]:
    """Runs of layers that are read at a time: whole chunks, as many as fit."""
    dim = array.factor.layer_dim
    if dim is None:
        return [array.layers]
    count = len(array.layers)
    chunk = max(1, leaf.chunk[dim])
    fitting = max(1, GROUP_BYTES * count // max(1, leaf.tensor.bytes))
    step = min(count, max(chunk, fitting // chunk * chunk))
    return [array.layers[start : start + step] for start in range(0, count, step)]


def _tensors(source: TreeSource) -> dict[tuple[str, ...], Tensor]:
    return {path: leaf.tensor for path, leaf in source.leaves.items()}


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


def _digest(bits: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(bits).tobytes()).hexdigest()
