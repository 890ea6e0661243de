"""MaxText's post-training trainers with bridge's data path, corrections, checkpoint policy and metrics.

Source: maxtext/trainers/post_train/sft/train_sft.py and dpo/train_dpo.py, 0.2.5.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from pathlib import Path
from typing import Any

from bridge import engine_fixes
from bridge.errors import CheckpointError, LaunchError
from bridge.launchers import data, stored_chunks
from bridge.launchers.keep import checkpoint_options
from bridge.launchers.maxtext_hooks import data_hooks, training_hooks
from bridge.launchers.metrics import MetricsLog
from bridge.launchers.progress import clock_of, say
from bridge.launchers.run_file import RunFile
from bridge.places import in_bucket


def train(run_dir: Path, run_file: RunFile) -> None:
    """Train the run of `run_dir` to its last step.

    Raises:
        LaunchError: fewer steps than asked were trained.
        SpecError, CheckpointError, UnsupportedError: data, checkpoint or engine are not what they must be.
    """
    import jax

    run = run_file.spec
    applied = engine_fixes.apply("maxtext", run_file.frequencies)
    say(f"corrections applied to maxtext: {', '.join(applied)}")
    tokenizer = data.load_tokenizer(Path(run_file.tokenizer))
    rows = run.train.batch_per_device * jax.device_count()
    train_rows = data.prepare(run, Path(run_file.base), tokenizer, "train", rows)
    eval_rows = None
    if run.data.eval and run.train.eval_every:
        eval_rows = data.prepare(run, Path(run_file.base), tokenizer, "eval", rows)
    _forget_tokens()

    from maxtext.configs import pyconfig

    trainers = _trainers(run.train.method)

    config = pyconfig.initialize_pydantic(["", str(run_dir / run_file.program)])
    if config.micro_batch_size_to_train_on != rows:
        raise LaunchError(f"maxtext trains on {config.micro_batch_size_to_train_on} rows a step, {rows} were laid out")
    check_shapes(config)
    metrics = MetricsLog(run_dir, writes=jax.process_index() == 0)
    _install(trainers, run_file, train_rows, eval_rows, metrics)
    stored_chunks.install(run_file.model, config.scan_layers)
    devices, length = jax.device_count(), run.train.sequence_length
    steps = run.train.total_steps
    say(f"training {steps} steps of {rows} x {length} tokens on {devices} device(s)")
    trainer, _ = trainers.train(config)
    if trainer.train_steps < steps:
        raise LaunchError(f"trained {trainer.train_steps} of {steps} steps")


def _trainers(method: str) -> Any:
    """MaxText's module of a method: its SFT trainer, which does LoRA too, or its DPO trainer."""
    if method not in ("dpo", "orpo"):
        from maxtext.trainers.post_train.sft import train_sft

        return train_sft
    from maxtext.integration.tunix import tunix_adapter
    from maxtext.trainers.post_train.dpo import train_dpo

    # The adapter looks up how vLLM would name the weights, by the model's name, though no vLLM takes part here.
    tunix_adapter.VllmWeightMapping = lambda *_: None
    tunix_adapter.HF_MODEL_CONFIGS = collections.defaultdict(_NoConfig)
    return train_dpo


class _NoConfig:
    """Stands for the Hugging Face config that nothing asks anything of."""

    def to_dict(self) -> dict[str, Any]:
        """No keys."""
        return {}


def _forget_tokens() -> None:
    """Drop what would change a run, or leak: MaxText writes HF_TOKEN in clear text into its TensorBoard file."""
    for name in list(os.environ):
        if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") or name.startswith("M_"):
            del os.environ[name]


def check_shapes(config: Any) -> None:
    """Compare the checkpoint's shapes with the model's before MaxText does: its restore pads mismatches in silence.

    Raises:
        CheckpointError: a leaf is missing or has another shape, all listed.
    """
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx
    from maxtext.utils import maxtext_utils, model_creation_utils

    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    _, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh)
    needed = {
        ".".join(map(str, path)): tuple(leaf.get_value().shape)
        for path, leaf in nnx.to_flat_state(nnx.state(abstract, nnx.Param))
    }
    tree = ocp.PyTreeCheckpointer().metadata(config.load_parameters_path).item_metadata.tree
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = {".".join(str(key.key) for key in path): tuple(leaf.shape or ()) for path, leaf in flat}
    found = {name.removeprefix("params.params.").removesuffix(".value"): shape for name, shape in found.items()}
    problems = [
        f"{name}  checkpoint has {found.get(name, 'nothing')}, the model needs {shape}"
        for name, shape in needed.items()
        if found.get(name) != shape
    ]
    if problems:
        raise CheckpointError(f"{config.load_parameters_path} does not fit the config", details=problems)


def _install(trainers: Any, run_file: RunFile, train_rows: Any, eval_rows: Any, metrics: MetricsLog) -> None:
    """Put bridge's data, metrics and checkpoint policy where the trainer takes its own from."""
    run = run_file.spec
    options = checkpoint_options(run.train.save_every, run.train.keep, metrics)
    engine_config = trainers.get_tunix_config

    def tunix_config(config: Any) -> Any:
        made = engine_config(config)
        made.checkpointing_options = options
        if in_bucket(config.tensorboard_dir):  # what is appended to stays on this host
            board = str(metrics.path.parent / "tensorboard")
            made.metrics_logging_options = dataclasses.replace(made.metrics_logging_options, log_dir=board)
        if made.gradient_accumulation_steps == 1:
            made.gradient_accumulation_steps = None
        return made

    clock = clock_of(run, run_file.model, train_rows, run.train.method in ("lora", "qlora"))
    trainers.get_tunix_config = tunix_config
    kind = "DPO" if run.train.method in ("dpo", "orpo") else "SFT"
    reporting = training_hooks(getattr(trainers.hooks, f"{kind}TrainingHooks"), metrics, clock)
    setattr(trainers.hooks, f"{kind}TrainingHooks", reporting)
    setattr(trainers.hooks, f"{kind}DataHooks", data_hooks(train_rows, eval_rows))
