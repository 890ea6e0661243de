"""The mesh of a run: `auto` by table, explicit shapes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llama_shapes import LLAMA_3B, LLAMA_8B, LLAMA_70B, LLAMA_405B
from step_memory import SMALL

from bridge import mesh
from bridge.errors import SpecError
from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

# embed has 32 as its largest power of two.
ODD = replace(SMALL, embed=96, heads=8, kv_heads=4, mlp=192, vocab=384)


@pytest.mark.parametrize(
    ("model", "devices", "tile", "fsdp", "tensor"),
    [
        (LLAMA_8B, 1, 1, 1, 1),
        (LLAMA_8B, 8, 1, 8, 1),
        (LLAMA_8B, 16, 1, 16, 1),
        (LLAMA_3B, 6, 1, 6, 1),
        (LLAMA_3B, 24, 1, 24, 1),
        # Two layers and the embedding of 70B are 5.5 GB in bfloat16, those of 405B 17 GB.
        (LLAMA_70B, 16, 1, 8, 2),
        (LLAMA_405B, 64, 1, 8, 8),
        (LLAMA_405B, 8, 1, 1, 8),
        # fsdp cannot divide embed any further: the rest is tensor, at most kv_heads.
        (ODD, 32, 1, 32, 1),
        (ODD, 64, 1, 32, 2),
        (ODD, 128, 1, 32, 4),
        # The 3 tiles of 32 that NF4 cuts 96 into are not divided by 2.
        (ODD, 2, 1, 2, 1),
        (ODD, 2, 32, 1, 2),
        (LLAMA_8B, 256, 32, 128, 2),
        (LLAMA_8B, 256, 1, 256, 1),
        # No mesh fits: fsdp, which is then refused.
        (LLAMA_8B, 7, 1, 7, 1),
        (ODD, 256, 1, 256, 1),
    ],
)
def test_auto(model: ModelSpec, devices: int, tile: int, fsdp: int, tensor: int) -> None:
    assert mesh.resolve("auto", devices, model, tile) == Mesh(1, fsdp, tensor)


def test_every_mesh_of_auto_is_valid_where_one_is() -> None:
    """Against all factorizations, tried one by one."""
    for model in (LLAMA_8B, LLAMA_3B, LLAMA_70B, ODD):
        for devices in range(1, 70):
            valid = [
                (devices // tensor, tensor)
                for tensor in range(1, devices + 1)
                if devices % tensor == 0
                and model.embed % (devices // tensor) == 0
                and all(size % tensor == 0 for size in (model.heads, model.kv_heads, model.mlp, model.vocab))
                and model.embed % tensor == 0
            ]
            found = mesh.resolve("auto", devices, model)
            assert found.data == 1
            assert ((found.fsdp, found.tensor) in valid) == bool(valid), (model.embed, devices)


def test_a_run_is_filled_in_and_checked() -> None:
    def run(method: str, shape: object = "auto") -> RunSpec:
        return RunSpec.model_validate({"model": {"source": "x"}, "train": {"method": method}, "mesh": shape})

    assert mesh.for_run(run("sft"), ODD, 2) == Mesh(1, 2, 1)
    assert mesh.for_run(run("qlora"), ODD, 2) == Mesh(1, 1, 2)
    assert mesh.for_run(run("sft", {"fsdp": 2, "tensor": 2}), LLAMA_8B, 4) == Mesh(1, 2, 2)
    assert mesh.for_run(run("sft", {"data": 2, "fsdp": -1}), LLAMA_8B, 8) == Mesh(2, 4, 1)
    with pytest.raises(SpecError, match="does not fit the model") as error:
        mesh.for_run(run("sft", {"fsdp": 1, "tensor": 16}), LLAMA_8B, 16)
    assert error.value.details == ("tensor 16 does not divide kv_heads 8",)
    with pytest.raises(SpecError, match="does not fit the model") as error:
        mesh.for_run(run("sft"), LLAMA_8B, 7)
    assert error.value.details == ("fsdp 7 does not divide embed 4096",)
    with pytest.raises(SpecError, match="does not make up 8 device"):
        mesh.for_run(run("sft", {"fsdp": 4}), LLAMA_8B, 8)


def test_what_is_gathered() -> None:
    """Two layers and the embedding, bfloat16; nothing where every device has whole rows of each."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert mesh.gathered_bytes(LLAMA_8B, Mesh(1, 8, 1)) == 2 * (2 * layer + 128256 * 4096)
    assert mesh.gathered_bytes(LLAMA_8B, Mesh(1, 4, 2)) == 2 * layer + 128256 * 4096
    assert mesh.gathered_bytes(LLAMA_8B, Mesh(1, 1, 8)) == 0
