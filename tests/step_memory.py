"""What XLA says of a training step: the engines' own train steps, compiled for this machine from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llama_shapes import LLAMA_8B

from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

SMALL = replace(
    LLAMA_8B, layers=4, embed=512, heads=8, kv_heads=4, head_dim=64, mlp=1408, vocab=16000, rope_scaling=None
)
ONE = Mesh(1, 1, 1)


@dataclass(frozen=True)
class Measured:
    """Bytes on each device: the step's arguments, its results beside them, and what it holds meanwhile."""

    arguments: int
    new: int
    temporary: int


def spec(**train: Any) -> RunSpec:
    """A spec with some values of `train`."""
    return RunSpec.model_validate({"model": {"source": "x"}, "train": train})


def tunix_step(model: ModelSpec, run: RunSpec, shape: Mesh, length: int) -> Any:
    """The train step of a generated Tunix program, traced for the shapes of its arguments.

    Args:
        model: the facts.
        run: method, batch, accumulation, adapters.
        shape: fsdp and tensor; as many devices as this process has.
        length: tokens a row; in preference methods half of them are the answer's.
    """
    from bridge import fixes_memory

    trainer, batch = tunix_trainer(model, run, shape, length)
    step = fixes_memory.train_step(trainer)
    return step.jitted_fn.trace(*step.values(), batch)


def tunix_trainer(model: ModelSpec, run: RunSpec, shape: Mesh, length: int) -> tuple[Any, Any]:
    """What stands for Tunix's trainer, which itself would allocate the optimizer's state; and the shapes of a batch."""
    import optax
    from flax import nnx
    from tunix.sft import peft_trainer

    from bridge import rope
    from bridge.launchers import tunix_runtime

    tunix_runtime.correct(rope.inverse_frequencies(model))
    jax_mesh = _as_on_accelerators(shape) if shape.devices > 1 else None
    llama, trained = _tunix_model(model, run, jax_mesh)
    optimizer = tunix_runtime.adamw(run)
    if run.train.gradient_accumulation > 1:
        optimizer = optax.MultiSteps(optimizer, run.train.gradient_accumulation)
    state = nnx.eval_shape(lambda llama: nnx.Optimizer(llama, optimizer, wrt=trained), llama)
    trainer = SimpleNamespace(
        model=llama, optimizer=_laid_out(state, jax_mesh), _lora_enabled=trained is nnx.LoRAParam, _has_aux=False
    )
    batch = _tunix_batch(run, trainer, length, shape, jax_mesh)
    trainer.create_train_step_fn = lambda: lambda *given: peft_trainer.PeftTrainer._train_step(trainer, *given)
    return trainer, batch


def uncorrected_tunix_step(model: ModelSpec, run: RunSpec, length: int) -> Any:
    """The same on one device as Tunix's own trainer compiles it: `nnx.jit`, the optimizer donated."""
    from flax import nnx

    trainer, batch = tunix_trainer(model, run, ONE, length)
    step = nnx.jit(trainer.create_train_step_fn(), donate_argnums=(1,))
    return step.trace(trainer.model, trainer.optimizer, batch)


def _as_on_accelerators(shape: Mesh) -> Any:
    """The mesh. From now on Tunix lays activations out on it, which it leaves undone on a CPU."""
    import jax
    import numpy as np
    from tunix.models.llama3 import model as llama

    jax_mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(shape.fsdp, shape.tensor), ("fsdp", "tp"))

    def shard(array: Any, names: tuple[str | None, ...]) -> Any:
        return jax.lax.with_sharding_constraint(array, jax.sharding.NamedSharding(jax_mesh, jax.P(*names)))

    llama.shard = shard
    return jax_mesh


def _tunix_model(model: ModelSpec, run: RunSpec, jax_mesh: Any) -> tuple[Any, Any]:
    import jax
    from flax import nnx

    from bridge import tunix_llama
    from bridge.launchers import tunix_adapters, tunix_runtime

    if run.train.method in ("lora", "qlora"):
        adapters = tunix_runtime.adapters(run)
        llama, trained = tunix_adapters.abstract_model(model, "bfloat16", "decoder", adapters), nnx.LoRAParam
    else:
        llama, trained = tunix_llama.abstract_model(model, "decoder"), nnx.Param
    graph, own, rest = nnx.split(llama, trained, ...)
    own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), own)
    return _laid_out(nnx.merge(graph, own, rest), jax_mesh), trained


def _laid_out(node: Any, jax_mesh: Any) -> Any:
    """The node with shapes that say where each array lies, as its own annotations and `tunix_adapters` have it."""
    import jax
    from flax import nnx

    if jax_mesh is None:
        return node
    graph, state = nnx.split(node)
    specs = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda leaf: isinstance(leaf, jax.P))
    leaves, tree = jax.tree.flatten(state)
    placed = []
    for leaf, spec_ in zip(leaves, specs, strict=True):
        names = [*spec_, *[None] * (leaf.ndim - len(spec_))] if leaf.ndim else []
        fitting = [
            n if not n or size % jax_mesh.shape[n] == 0 else None for n, size in zip(names, leaf.shape, strict=True)
        ]
        sharding = jax.sharding.NamedSharding(jax_mesh, jax.P(*fitting))
        placed.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
    return nnx.merge(graph, jax.tree.unflatten(tree, placed))


def _tunix_batch(run: RunSpec, trainer: Any, length: int, shape: Mesh, jax_mesh: Any) -> Any:
    """The shapes of a global batch; tells the trainer how to make of it what its loss takes."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.sft.dpo import dpo_trainer

    from bridge.launchers import tunix_loss

    rows = run.train.batch_per_device * shape.devices

    def array(dtype: Any, width: int = length) -> Any:
        sharding = jax.sharding.NamedSharding(jax_mesh, jax.P("fsdp")) if jax_mesh else None
        return jax.ShapeDtypeStruct((rows, width), dtype, sharding=sharding)

    if run.train.method not in ("dpo", "orpo"):
        trainer.loss_fn, trainer.gen_model_input_fn = tunix_loss.row_loss(run.train.dtype), tunix_loss.row_inputs
        whole = array(jnp.int32)
        return {"input_tokens": whole, "input_mask": array(jnp.bool_), "positions": whole, "segments": whole}
    trainer.loss_fn, trainer._has_aux = tunix_loss.preference_loss(run.train.dtype), True
    trainer.gen_model_input_fn = lambda example: {"train_example": example, "algorithm": run.train.method}
    trainer._ref_model_exists = run.train.method == "dpo"
    half = length // 2
    ids, mask = array(jnp.int32, half), array(jnp.bool_, half)
    parts = {f"{name}_ids": ids for name in ("prompt", "chosen", "rejected")}
    parts |= {f"{name}_mask": mask for name in ("prompt", "chosen", "rejected")}
    graph, state = nnx.split(trainer.model)

    def prepared(state: Any, given: Any) -> Any:
        trainer.ref_model = nnx.merge(graph, state)
        return dpo_trainer.DPOTrainer._prepare_inputs(trainer, given)

    example = jax.eval_shape(prepared, state, parts)
    trainer.ref_model = None
    if jax_mesh is None:
        return example
    rows_first = jax.sharding.NamedSharding(jax_mesh, jax.P("fsdp"))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows_first), example)


def measured(traced: Any) -> Measured:
    """Compile a traced step and ask XLA."""
    said = traced.lower().compile().memory_analysis()
    new = said.output_size_in_bytes - said.alias_size_in_bytes
    return Measured(said.argument_size_in_bytes, new, said.temp_size_in_bytes)


def maxtext_step(model: ModelSpec, run: RunSpec, folder: Path) -> Any:
    """The train step of MaxText's SFT trainer on the rendered config and one device, traced for its arguments' shapes.

    Args:
        model: the facts.
        run: sft, lora or qlora; batch, length and accumulation.
        folder: takes the config.
    """
    import jax
    import optax
    from flax import nnx

    from bridge import engine_fixes, fixes_memory, rope
    from bridge.configs.maxtext import Place, render

    engine_fixes.apply("maxtext", rope.inverse_frequencies(model))
    from maxtext.configs import pyconfig
    from maxtext.optimizers import optimizers
    from maxtext.trainers.post_train.sft import train_sft
    from maxtext.utils import lora_utils, maxtext_utils, model_creation_utils

    program = folder / "maxtext.yml"
    place = Place("run", str(folder), str(folder), str(folder), True, "cpu")
    program.write_text(render(run, model, ONE, place), encoding="utf-8")
    config = pyconfig.initialize_pydantic(["", str(program)])
    jax_mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    llama = model_creation_utils.create_nnx_abstract_model(config, jax_mesh)[1]
    trained = nnx.Param
    if run.train.method in ("lora", "qlora"):
        trained = nnx.LoRAParam
        with jax.set_mesh(jax_mesh), train_sft.logical_axis_rules(config.logical_axis_rules):
            llama = nnx.eval_shape(lambda llama: lora_utils.apply_lora_to_model(llama, None, config), llama)
    rate = maxtext_utils.create_learning_rate_schedule(config)
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.gradient_clipping_threshold), optimizers.get_optimizer(config, rate, llama)
    )
    if run.train.gradient_accumulation > 1:
        optimizer = optax.MultiSteps(optimizer, run.train.gradient_accumulation)
    state = nnx.eval_shape(lambda llama: nnx.Optimizer(llama, optimizer, wrt=trained), llama)
    trainer: Any = SimpleNamespace(
        model=llama,
        optimizer=state,
        _lora_enabled=trained is nnx.LoRAParam,
        gen_model_input_fn=lambda batch: batch,
        config=train_sft.get_tunix_config(config),
    )

    def with_loss_fn(loss_fn: Any, has_aux: bool) -> Any:
        trainer.loss_fn, trainer._has_aux = loss_fn, has_aux
        return trainer

    trainer.with_loss_fn = with_loss_fn
    train_sft.use_maxtext_loss_function(trainer, config)
    trainer.create_train_step_fn = lambda: train_sft.MaxTextPeftTrainer.create_train_step_fn(trainer)
    with jax.set_mesh(jax_mesh), train_sft.logical_axis_rules(config.logical_axis_rules):
        step = fixes_memory.train_step(trainer)
        rows = jax.ShapeDtypeStruct((run.train.batch_per_device, run.train.sequence_length), "int32")
        names = [f"{side}{what}" for side in ("inputs", "targets") for what in ("", "_position", "_segmentation")]
        return step.jitted_fn.trace(*step.values(), dict.fromkeys(names, rows))
