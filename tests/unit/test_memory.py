"""`bridge plan`: sizes against sums by hand, against XLA's own analysis of a training step, and the texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run
from llama_shapes import LLAMA_8B
from step_memory import ONE, SMALL, spec

import models
from bridge import memory, options
from bridge.errors import BridgeError
from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec
from bridge.options import Devices
from bridge.run_spec import RunSpec

WEIGHTS_8B = 8_030_261_248  # what the model's page on the hub says
GB = 10**9


def test_full_training_of_8b_by_hand() -> None:
    found = memory.estimate(LLAMA_8B, spec(), "tunix", "sft", Mesh(1, 8, 1), 1024)
    norms = 65 * 4096  # which fsdp does not cut
    weights = (WEIGHTS_8B - norms) // 8 + norms
    assert found.parameters == 4 * weights
    assert found.optimizer == 8 * weights + 16
    assert found.gradients == 2 * weights
    assert found.batch == 1024 * 13
    # Two layers and the embedding on their way, in bfloat16.
    assert found.gathered == 2 * (2 * 218_103_808 + 128256 * 4096)
    # The inputs of all layers, and of the logits two f32 arrays and one of bf16.
    assert found.activations == 32 * 1024 * 4096 * 2 + 1024 * 128256 * 10
    assert found.update == max(0, 6 * weights - found.gradients - found.gathered - found.activations)
    assert found.total == found.arguments + found.temporary


def test_adapters_of_8b_are_those_that_peft_counts() -> None:
    """41,943,040 trainable parameters at rank 16 on all seven projections is PEFT's own figure for Llama 3.1 8B."""
    assert memory.adapter_parameters(LLAMA_8B, spec()) == 41_943_040
    lora = memory.estimate(LLAMA_8B, spec(), "tunix", "lora", ONE, 1024)
    assert lora.parameters == 2 * WEIGHTS_8B + 4 * 41_943_040
    assert lora.optimizer == 8 * 41_943_040 + 16
    qlora = memory.estimate(LLAMA_8B, spec(), "tunix", "qlora", ONE, 1024)
    packed = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    scales = (packed - 32 * 4096 * 4096 + 32 * 4096 * 128) // 32
    assert qlora.parameters == packed // 2 + scales * 2 + 2 * (WEIGHTS_8B - packed) + 4 * 41_943_040


def test_peft_counts_the_same(tmp_path: Path) -> None:
    import peft
    import transformers

    folder = models.make_preset(tmp_path / "m", "head_dim_96")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=targets))
    trainable = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert memory.adapter_parameters(ModelSpec.from_folder(folder), spec()) == trainable


def test_more_of_anything_takes_more() -> None:
    def total(length: int = 1024, mesh: Mesh = ONE, method: str = "sft", **train: Any) -> int:
        return memory.estimate(LLAMA_8B, spec(**train), "tunix", method, mesh, length).total

    assert total(2048) > total()
    assert total(batch_per_device=2) > total()
    # The accumulated gradients, and new values beside the gradients and the largest matrix, not in their place.
    more = 4 * WEIGHTS_8B + 12 + 2 * WEIGHTS_8B + 4 * 128256 * 4096
    assert total(gradient_accumulation=4) - total() == more
    assert total(mesh=Mesh(1, 8, 1)) < total()
    assert total(dtype="float32") > total()
    assert total(weight_dtype="bfloat16") < total()
    assert total(method="lora") < total() < total(method="dpo")


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("1x24GB", Devices(1, 1, 24 * GB)),
        ("8x80GB", Devices(1, 8, 80 * GB)),
        ("2x8x80GB", Devices(2, 8, 80 * GB)),
        ("4x16GiB", Devices(1, 4, 16 << 30)),
    ],
)
def test_devices_are_read(text: str, devices: Devices) -> None:
    assert options.parse_devices(text) == devices


@pytest.mark.parametrize("text", ["", "80GB", "0x80GB", "8x0GB", "8*80GB", "8x80", "axb", "1x2x3x4GB"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(BridgeError, match="which devices"):
        options.parse_devices(text)


@pytest.mark.parametrize(
    ("devices", "method"),
    [
        ("1x8GB", None),
        ("1x16GB", "qlora"),
        ("1x24GB", "lora"),
        ("1x80GB", "lora"),
        ("4x80GB", "lora"),
        ("8x80GB", "sft"),
        ("2x8x80GB", "sft"),
    ],
)
def test_what_is_recommended_for_8b(devices: str, method: str | None) -> None:
    there = options.parse_devices(devices)
    chosen = options.recommend(options.options(LLAMA_8B, spec(), there), there)
    assert (chosen.method if chosen else None) == method


def test_the_longest_rows_fit_and_the_next_do_not() -> None:
    usable = int(24 * GB * options.MOST_FRACTION)
    for option in options.options(LLAMA_8B, spec(), Devices(1, 1, 24 * GB)):
        if option.longest:
            sizes = [
                memory.estimate(LLAMA_8B, spec(), option.engine, option.method, ONE, option.longest + more).total
                for more in (0, options.LENGTH_STEP)
            ]
            assert sizes[0] <= usable < sizes[1]


def test_rules_of_the_engines() -> None:
    found = {o.method: o for o in options.options(LLAMA_8B, spec(), Devices(1, 7, 80 * GB)) if o.engine == "tunix"}
    assert not found["sft"].fits
    assert "fsdp 7 does not divide embed 4096; 4 of the 7 devices" in found["sft"].reason
    narrow = replace(SMALL, embed=480)
    found = {o.method: o for o in options.options(narrow, spec(), Devices(1, 32, 80 * GB)) if o.engine == "tunix"}
    assert found["lora"].fits
    assert "does not divide the 15 NF4 tiles" in found["qlora"].reason
    uneven = RunSpec.model_validate({"model": {"source": "x"}, "mesh": {"data": 2, "fsdp": 4, "tensor": 1}})
    by_engine = {(o.engine, o.method): o for o in options.options(LLAMA_8B, uneven, Devices(1, 8, 80 * GB))}
    assert by_engine["maxtext", "sft"].fits
    assert "no data axis" in by_engine["tunix", "sft"].reason


def test_the_command(tmp_path: Path) -> None:
    source = models.make_preset(tmp_path / "m", "llama3")
    (tmp_path / "bridge.yaml").write_text(f"model: {{source: {source}}}\ntrain: {{sequence_length: 256}}\n")
    found = json.loads(run("plan", "--spec", tmp_path / "bridge.yaml", "--devices", "1x16GB", "--json").stdout)
    assert [(m["engine"], m["method"]) for m in found["methods"]] == list(options.METHODS)
    assert found["recommended"]["method"] == "lora"
    sft = found["methods"][0]
    assert sft["bytes_per_device"] == sum(sft["parts"].values())
    assert sft["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}
    text = run("plan", "--spec", tmp_path / "bridge.yaml", "--devices", "1x16GB").stdout.splitlines()
    assert text[-1].startswith("recommended: tunix lora, mesh data 1 x fsdp 1 x tensor 1: adapters on a frozen base")


RECORDED = [
    ("tunix", "sft", 1, 1024, 96_363_148_304, 48_181_567_556),
    ("tunix", "lora", 1, 1024, 16_563_852_304, 1_615_501_380),
    ("tunix", "qlora", 1, 1024, 6_498_571_280, 3_016_622_148),
    ("tunix", "qlora", 2, 512, 6_498_571_280, 3_016_097_860),
    ("maxtext", "sft", 1, 1024, 96_363_155_468, 62_140_744_272),
    ("maxtext", "lora", 1, 1024, 16_479_973_388, 18_395_169_448),
    ("maxtext", "qlora", 1, 1024, 6_414_692_364, 10_126_099_360),
]


@pytest.mark.parametrize(("engine", "method", "rows", "length", "arguments", "temporary"), RECORDED)
def test_8b_against_what_xla_said(
    engine: str, method: str, rows: int, length: int, arguments: int, temporary: int
) -> None:
    """Recorded from the steps of `step_memory`, Tunix's compile for minutes: jax 0.12.0.1, CPU, one device."""
    found = memory.estimate(LLAMA_8B, spec(batch_per_device=rows), engine, method, ONE, length)
    assert found.arguments == arguments
    assert found.temporary == pytest.approx(temporary, rel=0.15)
