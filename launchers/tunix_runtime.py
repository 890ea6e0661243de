"""What a generated Tunix program calls: settings, mesh, model, data, optimizer, trainer, and the run itself.

Tunix's trainer does the training. Around it: bridge's data path, corrections, checkpoint policy and metrics. Source:
tunix/sft/peft_trainer.py and tunix/sft/dpo/dpo_trainer.py, 0.1.7.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge import engine_fixes, mesh, run_spec, tunix_llama
from bridge.errors import BridgeError, LaunchError, SpecError, UnsupportedError
from bridge.launchers import data, stored_chunks, tunix_adapters, tunix_dropout, tunix_loss
from bridge.launchers.keep import checkpoint_options
from bridge.launchers.metrics import MetricsLog
from bridge.launchers.progress import clock_of, learning_rates
from bridge.launchers.tunix_hooks import Feed, Watch, say
from bridge.model_spec import ModelSpec, RopeScaling
from bridge.places import in_bucket, place
from bridge.run_spec import RunSpec

PREFERENCE_METHODS = ("dpo", "orpo")
Adapters = tunix_adapters.Adapters


@dataclass(frozen=True)
class Model:
    """A policy to train, and for dpo the frozen reference beside it."""

    policy: Any
    reference: Any = None


def settings(**sections: Mapping[str, Any]) -> RunSpec:
    """A spec from its sections, checked as `bridge.yaml` is.

    Raises:
        SpecError: unknown keys or impossible values, all at once.
    """
    return run_spec.parse(json.dumps({"model": {"source": "."}, "engine": "tunix", **sections}), where="the program")


def model_facts(rope_scaling: Mapping[str, float] | None = None, **facts: Any) -> ModelSpec:
    """The facts of a model, as the keys of `ModelSpec`."""
    scaling = None
    if rope_scaling is not None:
        numbers = dict(rope_scaling)
        scaling = RopeScaling(original_context=int(numbers.pop("original_context")), **numbers)
    return ModelSpec(rope_scaling=scaling, **facts)


def correct(frequencies: Sequence[float]) -> None:
    """Install the corrections of Tunix's faults, before any model is built.

    Raises:
        UnsupportedError: they do not fit the installed Tunix; nothing runs then.
    """
    for name in engine_fixes.apply("tunix", frequencies):
        say(f"correction applied: {name}")


def make_mesh(run: RunSpec, model: ModelSpec) -> Any:
    """The JAX mesh (fsdp, tp) over the devices of all processes. Enter it with `with`: Tunix sees no other kind.

    Raises:
        SpecError: it does not make up the devices, or does not divide the model.
        UnsupportedError: a data axis, which Tunix's Llama does not have.
    """
    import jax
    import numpy as np

    shape = mesh.for_run(run, model, jax.device_count())
    if shape.data != 1:
        raise UnsupportedError(f"mesh.data {shape.data}: Tunix's Llama has no data axis", hint="use mesh.fsdp instead")
    if model.embed % shape.tensor:
        raise SpecError(f"tensor {shape.tensor} does not divide embed {model.embed}: Tunix shards the norms along it")
    # Its advice, jax.set_mesh, would make Tunix shard nothing, in silence.
    warnings.filterwarnings("ignore", message="`with mesh:`", category=DeprecationWarning)
    devices = np.asarray(jax.devices()).reshape(shape.fsdp, shape.tensor)
    say(f"mesh: fsdp {shape.fsdp} x tensor {shape.tensor} on {jax.process_count()} process(es)")
    return jax.sharding.Mesh(devices, tunix_llama.AXES)


def check(run: RunSpec, model: ModelSpec, checkpoint: str, adapters: Adapters | None = None) -> None:
    """Compare settings, model and the checkpoint's headers before anything is loaded.

    Raises:
        SpecError, UnsupportedError, CheckpointError: targets, tiles or checkpoint do not fit the model.
    """
    from flax import nnx

    del run  # what it says of adapters is in `adapters`
    if adapters is not None:
        tunix_adapters.check(model, adapters)
    shapes = tunix_llama.leaves(nnx.state(tunix_llama.abstract_model(model)))
    tunix_llama.check(absolute(checkpoint), {path: leaf.shape for path, leaf in shapes.items()})


def adapters(run: RunSpec) -> Adapters:
    """The adapters of a spec; the base is NF4 for qlora."""
    tile = run.lora.tile_size if run.train.method == "qlora" else None
    return Adapters(run.lora.rank, run.lora.alpha, run.lora.targets, tile, run.train.seed, run.lora.dropout)


def full_model(run: RunSpec, model: ModelSpec, checkpoint: str, jax_mesh: Any, remat: Any) -> Model:
    """All weights trained, f32 unless the spec says otherwise; the reference of dpo is a copy in the compute dtype.

    Raises:
        CheckpointError: the checkpoint is not the model's.
    """
    policy = tunix_llama.load(model, absolute(checkpoint), _weights(run, "float32"), jax_mesh, remat)
    reference = None
    if run.train.method == "dpo":
        reference = tunix_llama.load(model, absolute(checkpoint), run.train.dtype, jax_mesh)
    return Model(policy, reference)


def adapted_model(
    run: RunSpec, model: ModelSpec, checkpoint: str, jax_mesh: Any, remat: Any, adapters: Adapters
) -> Model:
    """Adapters trained in f32, the base frozen in bf16 (or NF4); the base itself is the reference of dpo, at no cost.

    Raises:
        SpecError, UnsupportedError, CheckpointError: targets, tiles or checkpoint do not fit the model.
    """
    tunix_adapters.check(model, adapters)
    item, base, weights = absolute(checkpoint), None, _weights(run, "bfloat16")
    if adapters.tile_size is None:
        base = tunix_llama.load(model, item, weights, jax_mesh, remat)
    policy = tunix_adapters.load(model, item, weights, jax_mesh, remat, adapters, base)
    reference = tunix_loss.in_dtype(base, run.train.dtype) if run.train.method == "dpo" else None
    return Model(policy, reference)


def read_data(run: RunSpec, folder: str, tokenizer: str) -> tuple[Any, Any]:
    """The training rows (or pairs), and those for evaluation or None.

    Raises:
        SpecError, AccessError: as `data.prepare`.
    """
    import jax

    loaded, rows = data.load_tokenizer(absolute(tokenizer)), run.train.batch_per_device * jax.device_count()
    train_rows = data.prepare(run, absolute(folder), loaded, "train", rows)
    counts = train_rows.counts
    say(f"data: {counts.kept} of {counts.read} examples, {counts.cut} cut, {rows} rows a step")
    if not (run.data.eval and run.train.eval_every):
        return train_rows, None
    return train_rows, data.prepare(run, absolute(folder), loaded, "eval", rows)


def adamw(run: RunSpec, b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8, clip: float = 1.0) -> Any:
    """AdamW after clipping the global norm, with the schedule of the spec: MaxText's defaults, so both engines agree.

    Source: maxtext/configs/base.yml and maxtext/utils/maxtext_utils.py (`create_learning_rate_schedule`), 0.2.5.
    """
    import optax

    def make(learning_rate: Any) -> Any:
        decay = run.train.weight_decay
        return optax.chain(
            optax.clip_by_global_norm(clip), optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=decay)
        )

    # On the outside, where Tunix's trainer finds the learning rate to log it.
    return optax.inject_hyperparams(make)(learning_rate=schedule(run))


def schedule(run: RunSpec) -> Any:
    """Learning rate of optimizer step k (from 0): a line up from 0, then a cosine to the final fraction, or level."""
    import optax

    peak, shape, steps = run.train.learning_rate, run.train.schedule, run.train.total_steps
    warmup = int(steps * shape.warmup)
    after = optax.constant_schedule(peak)
    if shape.kind == "cosine" and steps > warmup:
        # MaxText's cosine: the last step has the final rate. A single step is at once the last.
        falling = steps - warmup - 1
        last = optax.constant_schedule(peak * shape.final)
        after = optax.cosine_decay_schedule(peak, falling, alpha=shape.final) if falling else last
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def make_trainer(run: RunSpec, model: Model, optimizer: Any, run_dir: str, metrics: MetricsLog) -> Any:
    """Tunix's trainer for the method. It restores the newest checkpoint of the run by itself.

    Raises:
        LaunchError: the run's checkpoint belongs to another model or other adapters.
    """
    from tunix.sft import metrics_logger, peft_trainer
    from tunix.sft.dpo import dpo_trainer

    board = str(on_this_host(run_dir) / "tensorboard")
    checkpoints = absolute(run_dir) / "checkpoints"
    common: dict[str, Any] = {
        "max_steps": run.train.total_steps,
        "eval_every_n_steps": run.train.eval_every or run.train.total_steps,
        "gradient_accumulation_steps": run.train.gradient_accumulation if run.train.gradient_accumulation > 1 else None,
        "checkpoint_root_directory": str(checkpoints),
        "checkpointing_options": checkpoint_options(run.train.save_every, run.train.keep, metrics),
        # Given by name: Tunix would also log in to Weights & Biases wherever that is installed.
        "metrics_logging_options": metrics_logger.MetricsLoggerOptions(
            log_dir=board,
            backend_kwargs={"custom_backend": [lambda: metrics_logger.TensorboardBackend(log_dir=board)]},
        ),
    }
    try:
        if run.train.method in PREFERENCE_METHODS:
            config = dpo_trainer.DPOTrainingConfig(
                algorithm=run.train.method,
                beta=run.preference.beta,
                lambda_orpo=run.preference.lambda_orpo,
                label_smoothing=run.preference.label_smoothing,
                **common,
            )
            trainer = dpo_trainer.DPOTrainer(model.policy, model.reference, optimizer, config)
            trainer.with_loss_fn(tunix_loss.preference_loss(run.train.dtype), has_aux=True)
            return tunix_dropout.only_in_training(trainer)
        trainer = peft_trainer.PeftTrainer(model.policy, optimizer, peft_trainer.TrainingConfig(**common))
    except ValueError as error:
        raise LaunchError(
            f"the newest checkpoint in {checkpoints} does not fit this run: {str(error).splitlines()[0]}",
            hint="a changed model, rank or target list needs another run (--run NAME)",
        ) from error
    trainer.with_loss_fn(tunix_loss.row_loss(run.train.dtype))
    return tunix_dropout.only_in_training(trainer.with_gen_model_input_fn(tunix_loss.row_inputs))


def train(
    run: RunSpec, model: ModelSpec, trainer: Any, rows: Any, eval_rows: Any, jax_mesh: Any, metrics: MetricsLog
) -> None:
    """Train to the last step, from where the run's newest checkpoint stands.

    Raises:
        LaunchError: fewer steps than asked were trained, or the loss is not a number.
    """
    steps = run.train.total_steps
    clock = clock_of(run, model, rows, trainer._lora_enabled)
    trainer.with_data_hooks(Feed(rows, eval_rows, jax_mesh, steps))
    trainer.with_training_hooks(Watch(metrics, clock, learning_rates(schedule(run), steps)))
    stored_chunks.install(model, scanned=False)
    if trainer.train_steps:
        say(f"resumed after step {trainer.train_steps}")
    say(f"training {steps} steps of {rows.global_rows * run.train.gradient_accumulation} rows")
    trainer.train((), ("eval",) if eval_rows is not None else None)
    if trainer.train_steps < steps:
        raise LaunchError(f"trained {trainer.train_steps} of {steps} steps")
    say(f"trained {trainer.train_steps} steps")


def run_program(main: Callable[[], None]) -> None:
    """Run a program; an error that bridge explains is shown without its traceback, with exit code 1."""
    try:
        main()
    except BridgeError as error:
        print(f"bridge: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


def open_metrics(run_dir: str) -> MetricsLog:
    """`metrics.jsonl` of the run, written by process 0; makes the run's folder."""
    import jax

    root = on_this_host(run_dir)
    root.mkdir(parents=True, exist_ok=True)
    return MetricsLog(root, writes=jax.process_index() == 0)


def _weights(run: RunSpec, automatic: str) -> str:
    return automatic if run.train.weight_dtype == "auto" else run.train.weight_dtype


def absolute(path: str) -> Path:
    """Orbax takes absolute paths only; a path in a bucket is one."""
    return place(path).expanduser().absolute()


def on_this_host(run_dir: str) -> Path:
    """Where what is appended to lies: the run's folder, or, where that is in a bucket, the current one."""
    return Path.cwd() if in_bucket(run_dir) else absolute(run_dir)
