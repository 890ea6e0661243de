"""The mesh: devices along named axes, checked before anything is loaded, and what each engine calls the axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bridge.errors import SpecError
from bridge.model_spec import ModelSpec
from bridge.run_spec import MeshShape


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


def resolve(shape: MeshShape | str, devices: int) -> Mesh:
    """Fill in a mesh for a number of devices; `auto` is fsdp over all of them.

    Raises:
        SpecError: the shape does not make up the devices.
    """
    if isinstance(shape, str):
        return Mesh(data=1, fsdp=devices, tensor=1)
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


def check(mesh: Mesh, model: ModelSpec) -> None:
    """Check that the model's axes can be divided as both engines shard them.

    Raises:
        SpecError: an axis is not divisible, all listed.
    """
    rules = (
        (
            "tensor",
            mesh.tensor,
            {"heads": model.heads, "kv_heads": model.kv_heads, "mlp": model.mlp, "vocab": model.vocab},
        ),
        ("fsdp", mesh.fsdp, {"embed": model.embed}),
    )
    problems = [
        f"{axis} {size} does not divide {name} {value}"
        for axis, size, sizes in rules
        for name, value in sizes.items()
        if value % size
    ]
    if problems:
        raise SpecError("the mesh does not fit the model", details=problems)
