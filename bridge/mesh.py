"""The mesh: devices along named axes, checked before anything is loaded, and what each engine calls the axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bridge.errors import SpecError
from bridge.model_spec import ModelSpec
from bridge.run_spec import MeshShape, RunSpec

GATHERED_BYTES = 4_000_000_000
"""With fsdp alone a device holds two whole layers and the embedding for a while; above this, `auto` cuts them too."""


@dataclass(frozen=True)
class Mesh:
    """Devices along each axis; their product is the number of devices of all processes."""

    data: int
    fsdp: int
    tensor: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.data * self.fsdp * self.tensor


def for_run(run: RunSpec, model: ModelSpec, devices: int) -> Mesh:
    """The mesh of a run, filled in and checked.

    Raises:
        SpecError: it does not make up the devices, or does not divide the model.
    """
    mesh = resolve(run.mesh, devices, model, run.lora.tile_size if run.train.method == "qlora" else 1)
    check(mesh, model)
    return mesh


def resolve(shape: MeshShape | str, devices: int, model: ModelSpec, tile: int = 1) -> Mesh:
    """Fill in a mesh for a number of devices; `auto` is the one of `automatic`.

    Raises:
        SpecError: the shape does not make up the devices.
    """
    if isinstance(shape, str):
        return automatic(devices, model, tile)
    sizes = {"data": shape.data, "fsdp": shape.fsdp, "tensor": shape.tensor}
    wrong = [
        f"mesh.{axis}: {size} (a positive number, or -1)" for axis, size in sizes.items() if size < 1 and size != -1
    ]
    free = [axis for axis, size in sizes.items() if size == -1]
    if wrong or len(free) > 1:
        raise SpecError(
            "the mesh is not valid", details=wrong or [f"-1 stands for what is left, once: {', '.join(free)}"]
        )
    known = math.prod(size for size in sizes.values() if size != -1)
    if free and devices % known == 0:
        sizes[free[0]] = devices // known
    mesh = Mesh(**sizes) if not free or devices % known == 0 else None
    if mesh is None or mesh.devices != devices:
        raise SpecError(
            f"mesh data {shape.data} x fsdp {shape.fsdp} x tensor {shape.tensor} does not make up {devices} device(s)"
        )
    return mesh


def automatic(devices: int, model: ModelSpec, tile: int = 1) -> Mesh:
    """As much fsdp as the model's embed can be divided by, the rest tensor; fsdp alone where that is no valid mesh.

    Tensor parallelism divides heads, kv_heads, mlp, vocab and embed, so it is at most kv_heads. Of the meshes that fit,
    the one with the least of it is taken that keeps what a device gathers within `GATHERED_BYTES`, or else the one with
    the most: fsdp moves weights once a layer, tensor all activations, so fsdp is the cheaper one where both will do.

    Args:
        devices: of all processes; those next to each other share tensor.
        model: the facts.
        tile: values that share a scale in NF4, which fsdp must not cut; 1 without quantization.
    """
    fitting = [
        mesh
        for tensor in range(1, min(devices, model.kv_heads) + 1)
        if devices % tensor == 0
        and not problems(mesh := Mesh(1, devices // tensor, tensor), model)
        and model.embed % tensor == 0
        and model.embed // tile % mesh.fsdp == 0
    ]
    small = [mesh for mesh in fitting if gathered_bytes(model, mesh) <= GATHERED_BYTES]
    return (small or fitting[::-1] or [Mesh(1, devices, 1)])[0]


def gathered_bytes(model: ModelSpec, mesh: Mesh, width: int = 2) -> int:
    """What a device holds of weights that lie on others: two layers on the way, and the embedding or the head.

    Args:
        model: the facts.
        mesh: with one device, nothing is gathered.
        width: bytes of a value in the compute dtype.
    """
    if mesh.fsdp == 1:
        return 0
    attention = model.embed * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    layer = attention + 3 * model.embed * model.mlp
    return width * (2 * layer + model.vocab * model.embed) // mesh.tensor


def problems(mesh: Mesh, model: ModelSpec) -> list[str]:
    """What the mesh does not divide, in words."""
    tensor = {"heads": model.heads, "kv_heads": model.kv_heads, "mlp": model.mlp, "vocab": model.vocab}
    rules = (("tensor", mesh.tensor, tensor), ("fsdp", mesh.fsdp, {"embed": model.embed}))
    return [
        f"{axis} {size} does not divide {name} {value}"
        for axis, size, sizes in rules
        for name, value in sizes.items()
        if value % size
    ]


def check(mesh: Mesh, model: ModelSpec) -> None:
    """Check that the model's axes can be divided as both engines shard them.

    Raises:
        SpecError: an axis is not divisible, all listed.
    """
    found = problems(mesh, model)
    if found:
        raise SpecError("the mesh does not fit the model", details=found)
