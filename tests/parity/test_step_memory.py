"""The memory of the engines' real train steps, as XLA gives it: the corrections hold, and the plan's estimate is right.

The corrections change memory alone: losses, gradients and trained weights are those of the engine without them.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from llama_shapes import LLAMA_8B
from step_memory import ONE, SMALL, Measured, maxtext_step, measured, spec, tunix_step, uncorrected_tunix_step
from tunix_checkpoints import convert

from bridge import engine_fixes, fixes_memory, memory
from bridge.launchers import tunix_adapters
from bridge.launchers.tunix_adapters import Adapters
from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec
from bridge.rope import inverse_frequencies

pytestmark = pytest.mark.slow
DEEP = replace(SMALL, layers=5, vocab=1024)
SEVEN = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture
def unpacking_early() -> Iterator[None]:
    """qwix as it is without the correction, for one test."""
    from qwix._src.core import dot_general as core

    fixes_memory.unpacking([])
    corrected = core._slow_dot_general
    core._slow_dot_general = corrected.__wrapped__
    yield
    core._slow_dot_general = corrected


@functools.cache
def beside_lora() -> int:
    return measured(tunix_step(DEEP, spec(method="lora"), ONE, 128)).temporary


def unpacked_layers() -> float:
    """What QLoRA holds within a step beside what LoRA does, counted in layers of bfloat16 matrices, of five."""
    layer = 2 * memory.projections(DEEP) / DEEP.layers
    return (measured(tunix_step(DEEP, spec(method="qlora"), ONE, 128)).temporary - beside_lora()) / layer


def test_nf4_is_unpacked_a_layer_at_a_time() -> None:
    assert unpacked_layers() < 2


@pytest.mark.usefixtures("unpacking_early")
def test_without_the_correction_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes_memory, "FIXES", [fix for fix in fixes_memory.FIXES if "nf4" not in fix.name])
    assert unpacked_layers() > 2.5


def test_a_frozen_base_is_no_result_of_the_step() -> None:
    model = replace(DEEP, layers=2)
    base = 2 * model.parameters
    assert measured(tunix_step(model, spec(method="lora"), ONE, 128)).new < 10_000
    assert measured(uncorrected_tunix_step(model, spec(method="lora"), 128)).new > base


@pytest.mark.usefixtures("unpacking_early")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unpacking_late_changes_no_number(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Loss, logits and gradients of every adapter, through remat and jit, bit for bit."""
    from qwix._src.core import dot_general as core

    folder = tiny("tied", dtype=dtype, layers=2, seed=3)
    model = ModelSpec.from_folder(folder)
    monkeypatch.setattr(fixes_memory, "FIXES", [fix for fix in fixes_memory.FIXES if "nf4" not in fix.name])
    engine_fixes.apply("tunix", inverse_frequencies(model))
    llama = tunix_adapters.load(
        model, convert(folder, tmp_path / "c"), dtype, None, "decoder", Adapters(4, 8.0, SEVEN, 32)
    )
    with_values(llama)
    early = loss_logits_gradients(llama)
    fixes_memory.unpacking([])
    assert core._slow_dot_general.corrected
    late = loss_logits_gradients(llama)
    assert np.abs(early[0]) > 1
    assert len(early) == len(late) == 2 + 2 * 7 * 2
    for one, other in zip(early, late, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(np.abs(gradient).max() > 0 for gradient in late[2:])


def with_values(llama: Any) -> None:
    """Adapters that are not 0, so that A has a gradient."""
    import jax
    from flax import nnx

    state = nnx.state(llama, nnx.LoRAParam)
    key = jax.random.key(5)
    nnx.update(llama, jax.tree.map(lambda leaf: 0.05 * jax.random.normal(key, leaf.shape, leaf.dtype), state))


def loss_logits_gradients(llama: Any) -> list[Any]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    graph, own, rest = nnx.split(llama, nnx.LoRAParam, ...)
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 300)
    positions, mask = jnp.broadcast_to(jnp.arange(24), (2, 24)), jnp.tril(jnp.ones((2, 24, 24), bool))

    def loss(llama: Any) -> Any:
        logits = llama(tokens, positions, None, mask)[0].astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 7]), logits

    @jax.jit
    def everything(own: Any, rest: Any) -> Any:
        wanted = nnx.DiffState(0, nnx.LoRAParam)
        return nnx.value_and_grad(loss, argnums=wanted, has_aux=True)(nnx.merge(graph, own, rest))

    (value, logits), gradients = everything(own, rest)
    return [np.asarray(leaf) for leaf in (value, logits, *jax.tree.leaves(gradients))]


@pytest.mark.parametrize("method", ["sft", "lora", "dpo"])
def test_the_compiled_step_trains_as_tunixs_own(tiny: Tiny, tmp_path: Path, method: str) -> None:
    """Two steps each, from the same weights: losses and weights bit for bit; frozen arrays are the very same after."""
    import jax
    from flax import nnx

    folder = tiny("tied", dtype="float32", layers=2, seed=3)
    model = ModelSpec.from_folder(folder)
    engine_fixes.apply("tunix", inverse_frequencies(model))
    item = convert(folder, tmp_path / "c")
    ours, theirs = (small_trainer(model, item, method) for _ in range(2))
    before = jax.tree.leaves(nnx.state(ours.model, nnx.Not(ours.trained)))
    step = fixes_memory.train_step(ours)
    stock = nnx.jit(theirs.create_train_step_fn(), donate_argnums=(1,))
    for _ in range(2):
        one, other = step(ours.batch), stock(theirs.model, theirs.optimizer, theirs.batch)
        np.testing.assert_array_equal(np.asarray(one[0]), np.asarray(other[0]))
    weights = [jax.tree.leaves(nnx.state(trainer.model, trainer.trained)) for trainer in (ours, theirs)]
    assert len(weights[0]) > 10
    for mine, his in zip(*weights, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(his))
    after = jax.tree.leaves(nnx.state(ours.model, nnx.Not(ours.trained)))
    assert all(old is new for old, new in zip(before, after, strict=True))


def small_trainer(model: ModelSpec, item: Path, method: str) -> Any:
    """As `step_memory.tunix_trainer`, with a loaded model; DPO's reference shares the policy's arrays, as MaxText's."""
    from types import SimpleNamespace

    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.sft import peft_trainer
    from tunix.sft.dpo import dpo_trainer

    from bridge import tunix_llama
    from bridge.launchers import tunix_loss, tunix_runtime

    run = spec(method=method, learning_rate=1e-2, dtype="float32")
    lora = Adapters(4, 8.0, SEVEN)
    llama = tunix_llama.load(model, item, "float32", None, "decoder")
    if method == "lora":
        llama = tunix_adapters.load(model, item, "float32", None, "decoder", lora, llama)
    trained = nnx.LoRAParam if method == "lora" else nnx.Param
    trainer: Any = SimpleNamespace(model=llama, trained=trained, _lora_enabled=method == "lora", _has_aux=False)
    trainer.optimizer = nnx.Optimizer(llama, tunix_runtime.adamw(run), wrt=trained)
    ids = jax.random.randint(jax.random.key(2), (2, 16), 0, 300)
    whole = jnp.broadcast_to(jnp.arange(16), (2, 16))
    trainer.loss_fn, trainer.gen_model_input_fn = tunix_loss.row_loss("float32"), tunix_loss.row_inputs
    trainer.batch = {"input_tokens": ids, "input_mask": whole > 3, "positions": whole, "segments": whole * 0 + 1}
    if method == "dpo":
        trainer.ref_model, trainer._ref_model_exists = nnx.clone(llama), True
        trainer.loss_fn, trainer._has_aux = tunix_loss.preference_loss("float32"), True
        trainer.gen_model_input_fn = lambda example: {"train_example": example}
        half, ones = ids[:, :8], jnp.ones((2, 8), bool)
        parts = {"prompt_ids": half, "chosen_ids": ids[:, 8:], "rejected_ids": half + 1}
        parts |= {name.replace("_ids", "_mask"): ones for name in parts}
        trainer.batch = dpo_trainer.DPOTrainer._prepare_inputs(trainer, parts)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(trainer.ref_model)))
    trainer.create_train_step_fn = lambda: lambda *given: peft_trainer.PeftTrainer._train_step(trainer, *given)
    return trainer


def compare(found: Measured, model: ModelSpec, engine: str, shape: Mesh, length: int, **train: Any) -> None:
    """Arguments to the byte; what comes and goes within 15 %."""
    method = train.get("method", "sft")
    estimated = memory.estimate(model, spec(**train), engine, method, shape, length)
    assert estimated.arguments == found.arguments
    assert found.new < 0.001 * found.arguments  # new values lie where the old ones did
    assert estimated.temporary == pytest.approx(found.temporary, rel=0.15)


TUNIX: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "head": ({"vocab": 32000}, 1024, {}),
    "scores": ({"heads": 16, "vocab": 8000}, 1024, {}),
    "update": ({"vocab": 1024}, 128, {}),
    "accumulation": ({}, 256, {"gradient_accumulation": 2}),
    "lora": ({}, 1024, {"method": "lora"}),
    "qlora": ({}, 1024, {"method": "qlora"}),
    "dpo": ({}, 512, {"method": "dpo"}),
}


@pytest.mark.parametrize("name", TUNIX)
def test_the_plan_against_a_tunix_step(name: str) -> None:
    change, length, train = TUNIX[name]
    model = replace(SMALL, **{"layers": 2, **change})
    found = measured(tunix_step(model, spec(**train), ONE, length))
    compare(found, model, "tunix", ONE, length, **train)


@pytest.mark.parametrize(
    ("model", "train"),
    [
        (SMALL, {}),
        (LLAMA_8B, {}),
        (LLAMA_8B, {"gradient_accumulation": 2}),
        (LLAMA_8B, {"method": "lora"}),
        (LLAMA_8B, {"method": "qlora"}),
    ],
    ids=["small", "8b", "8b-accumulation", "8b-lora", "8b-qlora"],
)
def test_the_plan_against_a_maxtext_step(tmp_path: Path, model: ModelSpec, train: dict[str, Any]) -> None:
    found = measured(maxtext_step(model, spec(sequence_length=1024, **train), tmp_path))
    compare(found, model, "maxtext", ONE, 1024, **train)


ON_FOUR = """
import contextlib, json, sys
from dataclasses import asdict
from step_memory import *
found = []
with contextlib.redirect_stdout(sys.stderr):
    for fsdp, tensor, method in json.loads(sys.argv[1]):
        shape = Mesh(1, fsdp, tensor)
        found.append(asdict(measured(tunix_step(replace(SMALL, layers=2), spec(method=method), shape, 512))))
print(json.dumps(found))
"""


def test_the_plan_against_steps_on_four_devices() -> None:
    """With Tunix's sharding of activations, which it leaves out on a CPU."""
    cases = [(4, 1, "sft"), (2, 2, "sft"), (4, 1, "qlora")]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    env = {**os.environ, **flags, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "-c", ON_FOUR, json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for (fsdp, tensor, method), values in zip(cases, json.loads(done.stdout), strict=True):
        compare(Measured(**values), replace(SMALL, layers=2), "tunix", Mesh(1, fsdp, tensor), 512, method=method)


def test_the_comparison_fails_on_another_shape() -> None:
    good = memory.estimate(SMALL, spec(), "tunix", "sft", ONE, 512)
    found = Measured(good.arguments, 0, good.temporary)
    compare(found, SMALL, "tunix", ONE, 512)
    for broken in (
        replace(found, arguments=found.arguments + 1),
        replace(found, temporary=int(1.2 * found.temporary)),
        replace(found, new=found.arguments // 100),
    ):
        assert asdict(broken) != asdict(found)
        with pytest.raises(AssertionError):
            compare(broken, SMALL, "tunix", ONE, 512)
