"""Memory of a training step, from shapes alone: what a method holds on each device.

Arguments of the step are exact. What it holds meanwhile is fitted to what XLA says of the engines' own steps compiled
for a CPU (docs/parity.md, tests/parity/test_step_memory.py); a GPU's own figures have not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.mesh import Mesh, gathered_bytes
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

# Bytes a token of a batch that the step reads: int32 each but the loss mask; MaxText's step leaves one of six unread.
BATCH_BYTES = {"tunix": 13, "maxtext": 20}
SCALARS = {"tunix": (16, 28), "maxtext": (12, 20)}
"""Counts of the optimizer, its schedule and its steps, and in Tunix the learning rate; more where it accumulates."""
# Bytes an attention score and a logit: three float32 arrays; two, and the logits in the compute dtype.
SCORE_BYTES, LOGIT_BYTES = 12, 8


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. The first four are held between steps too, the rest comes and goes within one."""

    parameters: int
    reference: int
    """The frozen copy of dpo; it is no argument of the train step."""
    optimizer: int
    batch: int
    gradients: int
    """In the compute dtype; as the backward pass goes they take the place of the weights' copies in that dtype."""
    gathered: int
    """Weights on their way from other devices, for the layers at work."""
    unpacked: int
    """Matrices unpacked from NF4 for the layers at work; in MaxText the copy of the frozen base that its loop takes."""
    activations: int
    update: int
    """What the update of the weights takes beyond the four above, which are mostly free again by then."""

    @property
    def arguments(self) -> int:
        """What the step is given."""
        return self.parameters + self.optimizer + self.batch

    @property
    def temporary(self) -> int:
        """What it holds beside that at its peak."""
        return self.gradients + self.gathered + self.unpacked + self.activations + self.update

    @property
    def total(self) -> int:
        """All at once."""
        return self.arguments + self.reference + self.temporary


def estimate(model: ModelSpec, run: RunSpec, engine: str, method: str, shape: Mesh, length: int) -> Memory:
    """The memory of one step.

    Args:
        model: the facts.
        run: batch, dtypes, adapters and accumulation; its own method and length do not count.
        engine: `maxtext` or `tunix`.
        method: sft, lora, qlora or dpo.
        shape: the mesh; weights are cut along fsdp and tensor, rows along data and fsdp.
        length: tokens a row; of a preference pair, half of them are taken for the answer's.
    """
    train, shards = run.train, shape.fsdp * shape.tensor
    wide = 4 if train.dtype == "float32" else 2
    adapters = method in ("lora", "qlora")
    width = 4 if adapters or train.weight_dtype != "bfloat16" else 2
    trained = _weights_on_a_device(model, shape)
    if adapters:
        # MaxText has all of them on every device.
        trained = _adapters_on_a_device(model, run, shape) if engine == "tunix" else adapter_parameters(model, run)
    # Adam's first moment has the dtype of the weights, in MaxText that of the frozen ones too.
    moments = wide + width if adapters and engine == "maxtext" else 2 * width
    rows = train.batch_per_device * shape.tensor * (2 if method == "dpo" else 1)
    accumulates = train.gradient_accumulation > 1
    gradients = (width if adapters else wide) * trained
    gathered = gathered_bytes(model, shape, wide)
    unpacked = _unpacked(model, run, engine, method, wide) // shards if adapters else 0
    kept, layer, head = _activations(
        model, rows, length, wide, shape.tensor, length // 2 if method == "dpo" else length
    )
    update = (width if adapters else width + wide) * trained
    if accumulates and not adapters:
        # The new values are the result of a condition, and one matrix of them is worked on.
        one = model.embed * max(model.vocab, model.mlp * (model.layers if engine == "maxtext" else 1))
        update = 2 * width * trained + width * one // shards
    if engine == "maxtext" and not adapters:
        # Its layers are one loop: their gradients come out of it together, and only then become float32.
        update += wide * projections(model) // shards + layer
    standing = gradients + gathered + unpacked + kept + max(layer, head)
    return Memory(
        parameters=_held(model, run, method, shape) + (4 * trained if adapters else 0),
        reference=wide * _weights_on_a_device(model, shape) if method == "dpo" else 0,
        optimizer=(moments + (width if accumulates else 0)) * trained + SCALARS[engine][accumulates],
        batch=_pairs(rows, length) if method == "dpo" else BATCH_BYTES[engine] * rows * length,
        gradients=gradients,
        gathered=gathered,
        unpacked=unpacked,
        activations=kept + max(layer, head),
        update=max(0, update - standing),
    )


def adapter_parameters(model: ModelSpec, run: RunSpec) -> int:
    """Weights of the adapters: rank x (inputs + outputs) of every target in every layer."""
    return _adapters_on_a_device(model, run, Mesh(1, 1, 1))


def _adapters_on_a_device(model: ModelSpec, run: RunSpec, shape: Mesh) -> int:
    """Of each pair of matrices one has the width of embed, cut along fsdp; the other heads or mlp, cut along tensor."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    others = {"q": queries, "k": keys, "v": keys, "o": queries, "gate": model.mlp, "up": model.mlp, "down": model.mlp}
    each = [model.embed // shape.fsdp + others[target] // shape.tensor for target in run.lora.targets]
    return model.layers * run.lora.rank * sum(each)


def _weights_on_a_device(model: ModelSpec, shape: Mesh) -> int:
    """All weights; the norms are cut along tensor alone."""
    norms = (2 * model.layers + 1) * model.embed
    return (model.parameters - norms) // (shape.fsdp * shape.tensor) + norms // shape.tensor


def projections(model: ModelSpec) -> int:
    """Weights of the seven projections of all layers: what NF4 holds; the rest is embedding, head and norms."""
    attention = model.embed * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    return model.layers * (attention + 3 * model.embed * model.mlp)


def _held(model: ModelSpec, run: RunSpec, method: str, shape: Mesh) -> int:
    """The weights between steps, adapters and reference aside."""
    weights = _weights_on_a_device(model, shape)
    chosen = {"float32": 4, "bfloat16": 2}.get(run.train.weight_dtype)
    if method in ("sft", "dpo"):
        return (chosen or 4) * weights
    base = chosen or 2
    if method == "lora":
        return base * weights
    packed, tile, shards = projections(model), run.lora.tile_size, shape.fsdp * shape.tensor
    # The output projection is cut along head_dim, and all heads share its scales, which tensor cannot cut.
    output = model.layers * model.head_dim * model.embed
    scales = (packed - output * model.heads) // tile // shards + output // tile // shape.fsdp
    return packed // 2 // shards + base * scales + base * (weights - packed // shards)


def _unpacked(model: ModelSpec, run: RunSpec, engine: str, method: str, wide: int) -> int:
    """What is made of a frozen base within a step.

    In Tunix, of NF4: two matrices of an MLP, and one of the attention of every layer. XLA for the CPU drops the
    barriers that keep a layer's matrices packed until its turn before it decides upon the order, and then takes those
    early; for a GPU it drops them afterwards.

    In MaxText: all layers, and one matrix of each MLP once more, turned so that the loop over layers goes along their
    first axis. NF4 stays packed, in a byte a value on a CPU, with its scales.
    """
    if engine == "tunix":
        each = model.embed * (2 * model.mlp + model.layers * model.heads * model.head_dim)
        return wide * each if method == "qlora" else 0
    turned = projections(model) + model.layers * model.embed * model.mlp
    return turned + wide * projections(model) // run.lora.tile_size if method == "qlora" else wide * turned


def _pairs(rows: int, length: int) -> int:
    """Ids, positions, the attention mask (a byte a pair of tokens), the answers' mask and the reference's sums."""
    return rows * (8 * length + length * length + length // 2 + 4)


def _activations(
    model: ModelSpec, rows: int, length: int, wide: int, tensor: int, counted: int
) -> tuple[int, int, int]:
    """The inputs of all layers, which are kept; one layer, computed again; the logits. The last two come in turn.

    Args:
        model: the facts.
        rows, length: of the batch on one device.
        wide: bytes of a value in the compute dtype.
        tensor: devices that share heads, mlp and vocabulary.
        counted: tokens a row whose logits the loss takes.
    """
    tokens = rows * length
    queries = (model.heads + 2 * model.kv_heads) * model.head_dim
    layer = tokens * wide * (4 * model.embed + (2 * queries + 3 * model.mlp) // tensor)
    layer += SCORE_BYTES * rows * model.heads * length * length // tensor
    head = rows * (wide * length + LOGIT_BYTES * counted) * model.vocab // tensor
    return model.layers * tokens * model.embed * wide, layer, head
