"""`bridge plan`: sizes against sums by hand, against XLA's own analysis of a training step, and the texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run

import models
from bridge import memory
from bridge.errors import BridgeError
from bridge.memory import Devices
from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec, RopeScaling
from bridge.run_spec import RunSpec

LLAMA_8B = ModelSpec(
    layers=32,
    embed=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    vocab=128256,
    tied=False,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    norm_eps=1e-5,
    context=131072,
    dtype="bfloat16",
)
SMALL = replace(
    LLAMA_8B, layers=4, embed=512, heads=8, kv_heads=4, head_dim=64, mlp=1408, vocab=16000, rope_scaling=None
)
WEIGHTS_8B = 8_030_261_248  # what the model's page on the hub says
ONE = Mesh(1, 1, 1)
GB = 10**9


def spec(**train: Any) -> RunSpec:
    return RunSpec.model_validate({"model": {"source": "x"}, "train": train})


def test_full_training_of_8b_by_hand() -> None:
    found = memory.estimate(LLAMA_8B, spec(), "maxtext", "sft", Mesh(1, 8, 1), 1024)
    assert found.parameters == WEIGHTS_8B * 4 // 8
    assert found.optimizer == WEIGHTS_8B * 8 // 8 + 12
    assert found.updated == WEIGHTS_8B * 4 // 8
    assert found.gradients == WEIGHTS_8B * 2 // 8
    assert found.batch == 1024 * 13
    # The head is the peak: two f32 arrays and one of bf16 of the logits; the rest lies where new weights will.
    assert found.activations == 1024 * 128256 * 10
    longer = memory.estimate(LLAMA_8B, spec(), "maxtext", "sft", Mesh(1, 8, 1), 1280)
    assert longer.activations == 1280 * 128256 * 10 + 32 * 1280 * 4096 * 2


def test_adapters_of_8b_are_those_that_peft_counts() -> None:
    """41,943,040 trainable parameters at rank 16 on all seven projections is PEFT's own figure for Llama 3.1 8B."""
    assert memory.adapter_parameters(LLAMA_8B, spec()) == 41_943_040
    lora = memory.estimate(LLAMA_8B, spec(), "tunix", "lora", ONE, 1024)
    assert lora.parameters == 2 * WEIGHTS_8B + 4 * 41_943_040
    assert lora.optimizer == 8 * 41_943_040 + 12
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
    assert total(gradient_accumulation=4) - total() == 4 * WEIGHTS_8B
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
    assert memory.parse_devices(text) == devices


@pytest.mark.parametrize("text", ["", "80GB", "0x80GB", "8x0GB", "8*80GB", "8x80", "axb", "1x2x3x4GB"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(BridgeError, match="which devices"):
        memory.parse_devices(text)


@pytest.mark.parametrize(
    ("devices", "method"),
    [("1x16GB", None), ("1x24GB", "lora"), ("1x80GB", "lora"), ("8x80GB", "sft"), ("2x8x80GB", "sft")],
)
def test_what_is_recommended_for_8b(devices: str, method: str | None) -> None:
    there = memory.parse_devices(devices)
    chosen = memory.recommend(memory.options(LLAMA_8B, spec(), there), there)
    assert (chosen.method if chosen else None) == method


def test_the_longest_rows_fit_and_the_next_do_not() -> None:
    usable = int(24 * GB * memory.MOST_FRACTION)
    for option in memory.options(LLAMA_8B, spec(), Devices(1, 1, 24 * GB)):
        if option.longest:
            sizes = [
                memory.estimate(LLAMA_8B, spec(), option.engine, option.method, ONE, option.longest + more).total
                for more in (0, memory.LENGTH_STEP)
            ]
            assert sizes[0] <= usable < sizes[1]


def test_rules_of_the_engines() -> None:
    found = {o.method: o for o in memory.options(LLAMA_8B, spec(), Devices(1, 7, 80 * GB)) if o.engine == "tunix"}
    assert not found["sft"].fits
    assert "fsdp 7 does not divide embed 4096; 4 of the 7 devices" in found["sft"].reason
    narrow = replace(SMALL, embed=480)
    found = {o.method: o for o in memory.options(narrow, spec(), Devices(1, 32, 80 * GB)) if o.engine == "tunix"}
    assert found["lora"].fits
    assert "does not divide the 15 NF4 tiles" in found["qlora"].reason
    uneven = RunSpec.model_validate({"model": {"source": "x"}, "mesh": {"data": 2, "fsdp": 4, "tensor": 1}})
    by_engine = {(o.engine, o.method): o for o in memory.options(LLAMA_8B, uneven, Devices(1, 8, 80 * GB))}
    assert by_engine["maxtext", "sft"].fits
    assert "no data axis" in by_engine["tunix", "sft"].reason


def test_the_command(tmp_path: Path) -> None:
    source = models.make_preset(tmp_path / "m", "llama3")
    (tmp_path / "bridge.yaml").write_text(f"model: {{source: {source}}}\ntrain: {{sequence_length: 256}}\n")
    found = json.loads(run("plan", "--spec", tmp_path / "bridge.yaml", "--devices", "1x16GB", "--json").stdout)
    assert [(m["engine"], m["method"]) for m in found["methods"]] == list(memory.METHODS)
    assert found["recommended"]["method"] == "lora"
    sft = found["methods"][0]
    assert sft["bytes_per_device"] == sum(sft["parts"].values())
    assert sft["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}
    text = run("plan", "--spec", tmp_path / "bridge.yaml", "--devices", "1x16GB").stdout.splitlines()
    assert text[-1].startswith("recommended: tunix lora, mesh data 1 x fsdp 1 x tensor 1: adapters on a frozen base")


def test_8b_against_what_xla_said() -> None:
    """Recorded from `analysis` and `adapter_analysis`, which compile for minutes: jax 0.12.0.1, CPU, one device."""
    found = memory.estimate(LLAMA_8B, spec(), "tunix", "sft", ONE, 1024)
    assert found.arguments == 96_363_148_300
    assert found.updated == pytest.approx(96_363_142_020 - 64_242_089_996, abs=16384)
    assert found.gradients + found.compute + found.activations == pytest.approx(16_488_361_408, rel=0.15)
    found = memory.estimate(LLAMA_8B, spec(), "tunix", "lora", ONE, 1024)
    assert (found.arguments, found.updated) == (16_563_852_300, 4 * 41_943_040)
    assert found.gradients + found.compute + found.activations == pytest.approx(1_775_589_444, rel=0.15)
    found = memory.estimate(LLAMA_8B, spec(), "tunix", "qlora", ONE, 512)
    assert (found.arguments, found.updated) == (6_498_564_620, 4 * 41_943_040)
    assert found.gradients + found.compute + found.activations == pytest.approx(14_139_654_212, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"vocab": 32000}, {"heads": 16}, {"layers": 8, "length": 512}], ids=["head", "scores", "in place"]
)
def test_against_what_xla_says_of_a_tunix_step(change: dict[str, int]) -> None:
    """Arguments to the byte; what comes and goes within 15 %."""
    length = change.get("length", 1024)
    model = replace(SMALL, **{key: value for key, value in change.items() if key != "length"})
    found = memory.estimate(model, spec(), "tunix", "sft", ONE, length)
    arguments, new, temporary = analysis(model, length)
    assert found.arguments == arguments
    assert found.updated == pytest.approx(new, abs=4096)
    assert found.gradients + found.compute + found.activations == pytest.approx(temporary, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_against_what_xla_says_of_an_adapter_step(method: str) -> None:
    """Arguments to the byte; what comes and goes within 15 %."""
    found = memory.estimate(SMALL, spec(), "tunix", method, ONE, 1024)
    arguments, new, temporary = adapter_analysis(SMALL, method, 1024)
    assert found.arguments == arguments
    assert found.updated == pytest.approx(new, abs=4096)
    assert found.gradients + found.compute + found.activations == pytest.approx(temporary, rel=0.15)


def adapter_analysis(model: ModelSpec, method: str, length: int) -> tuple[int, int, int]:
    """As `analysis`, with adapters on a frozen base."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from bridge import rope
    from bridge.launchers import tunix_adapters, tunix_loss, tunix_runtime

    tunix_runtime.correct(rope.inverse_frequencies(model))
    adapters = tunix_runtime.adapters(spec(method=method))
    abstract = tunix_adapters.abstract_model(model, "bfloat16", "decoder", adapters)
    graph, trained, frozen = nnx.split(abstract, nnx.LoRAParam, ...)
    trained = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trained)
    optimizer = tunix_runtime.adamw(spec())
    moments = jax.eval_shape(optimizer.init, trained)
    loss = tunix_loss.row_loss("bfloat16")

    def step(trained: Any, frozen: Any, moments: Any, batch: Any) -> Any:
        model = nnx.merge(graph, trained, frozen)
        wanted = nnx.DiffState(0, nnx.LoRAParam)
        inputs = tunix_loss.row_inputs(batch)
        value, gradients = nnx.value_and_grad(lambda llama: loss(llama, **inputs), argnums=wanted)(model)
        updates, moments = optimizer.update(gradients, moments, trained)
        return optax.apply_updates(trained, updates), moments, value

    compiled = jax.jit(step, donate_argnums=(2,)).lower(trained, frozen, moments, batch_of(length)).compile()
    return sizes_of(compiled.memory_analysis())


def analysis(model: ModelSpec, length: int) -> tuple[int, int, int]:
    """Bytes of arguments, of new outputs, and of temporaries of Tunix's loss and update, compiled from shapes alone.

    As Tunix's trainer does, the optimizer's state is donated and the weights are not.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from bridge import rope, tunix_llama
    from bridge.launchers import tunix_loss, tunix_runtime

    tunix_runtime.correct(rope.inverse_frequencies(model))
    graph, state = nnx.split(tunix_llama.abstract_model(model, "decoder"))
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), state)
    optimizer = tunix_runtime.adamw(spec())
    moments = jax.eval_shape(optimizer.init, state)
    loss = tunix_loss.row_loss("bfloat16")

    def step(state: Any, moments: Any, batch: Any) -> Any:
        def loss_of(values: Any) -> Any:
            return loss(nnx.merge(graph, values), **tunix_loss.row_inputs(batch))

        value, gradients = jax.value_and_grad(loss_of)(state)
        updates, moments = optimizer.update(gradients, moments, state)
        return optax.apply_updates(state, updates), moments, value

    return sizes_of(
        jax.jit(step, donate_argnums=(1,)).lower(state, moments, batch_of(length)).compile().memory_analysis()
    )


def batch_of(length: int) -> dict[str, Any]:
    """The shapes of a batch of one row."""
    import jax
    import jax.numpy as jnp

    whole = jax.ShapeDtypeStruct((1, length), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, length), jnp.bool_)
    return {"input_tokens": whole, "input_mask": mask, "positions": whole, "segments": whole}


def sizes_of(said: Any) -> tuple[int, int, int]:
    """Arguments, new outputs, temporaries."""
    new = said.output_size_in_bytes - said.alias_size_in_bytes
    return said.argument_size_in_bytes, new, said.temp_size_in_bytes
