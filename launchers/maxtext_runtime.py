"""MaxText's SFT trainer with bridge's data path, corrections, checkpoint policy and metrics.

Source: maxtext/trainers/post_train/sft/train_sft.py and trainers/post_train/hooks.py, 0.2.5. MaxText's data hooks turn
any error into an early end with exit code 0; these let it through, and count the steps.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bridge import engine_fixes
from bridge.errors import CheckpointError, LaunchError
from bridge.launchers import data
from bridge.launchers.batches import Batch, maxtext_batch
from bridge.launchers.keep import checkpoint_options
from bridge.launchers.metrics import MetricsLog
from bridge.launchers.progress import StepClock, say
from bridge.launchers.run_file import RunFile


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
    if not isinstance(train_rows, data.Rows) or isinstance(eval_rows, data.Pairs):
        raise LaunchError(f"{run.train.method} is not a method of this runtime")
    _forget_tokens()

    from maxtext.configs import pyconfig
    from maxtext.trainers.post_train.sft import train_sft

    config = pyconfig.initialize_pydantic(["", str(run_dir / run_file.program)])
    if config.micro_batch_size_to_train_on != rows:
        raise LaunchError(f"maxtext trains on {config.micro_batch_size_to_train_on} rows a step, {rows} were laid out")
    check_shapes(config)
    metrics = MetricsLog(run_dir, writes=jax.process_index() == 0)
    _install(train_sft, run_file, train_rows, eval_rows, metrics)
    devices, length = jax.device_count(), run.train.sequence_length
    say(f"training {run.train.steps} steps of {rows} x {length} tokens on {devices} device(s)")
    trainer, _ = train_sft.train(config)
    if trainer.train_steps < run.train.steps:
        raise LaunchError(f"trained {trainer.train_steps} of {run.train.steps} steps")


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


def _install(train_sft: Any, run_file: RunFile, train_rows: Any, eval_rows: Any, metrics: MetricsLog) -> None:
    """Put bridge's data, metrics and checkpoint policy where the trainer takes its own from."""
    run = run_file.spec
    options = checkpoint_options(run.train.save_every, run.train.keep, metrics)
    engine_config = train_sft.get_tunix_config

    def tunix_config(config: Any) -> Any:
        made = engine_config(config)
        made.checkpointing_options = options
        return made

    tokens = train_rows.global_rows * run.train.sequence_length * run.train.gradient_accumulation
    clock = StepClock(run.train.steps, tokens)
    train_sft.get_tunix_config = tunix_config
    train_sft.hooks.SFTDataHooks = data_hooks(train_rows, eval_rows)
    train_sft.hooks.SFTTrainingHooks = training_hooks(train_sft.hooks.SFTTrainingHooks, metrics, clock)


def data_hooks(train_rows: Any, eval_rows: Any) -> type[Any]:
    """A class in the place of MaxText's `SFTDataHooks`, feeding the rows of bridge's data path."""
    import jax
    from maxtext.utils.sharding import get_input_data_sharding
    from tunix.sft.hooks import DataHooks

    class BridgeDataHooks(DataHooks):  # type: ignore[misc]
        """Batch k is asked for by its number, so a resumed run goes on at the right example."""

        def __init__(self, config: Any, mesh: Any, goodput_recorder: Any) -> None:
            del goodput_recorder
            self._sharding = get_input_data_sharding(config, mesh)
            self._limit = config.eval_steps
            self._eval: Iterator[Batch] | None = None
            self._eval_count = 0
            self.train_data_iterator: Any = ()
            # The trainer only asks whether there is one, and that it can be iterated.
            self.eval_data_iterator = None if eval_rows is None else (eval_rows,)
            self.train_batch: Any = None
            self.eval_batch: Any = None

        def load_next_train_batch(self, train_ctx: Any) -> Any:
            self.train_batch = self._place(train_rows.batch(train_ctx.iter_steps))
            return self.train_batch

        def load_next_eval_batch(self, train_ctx: Any) -> Any:
            del train_ctx
            if self._eval is None:
                self._eval, self._eval_count = eval_rows.eval_batches(), 0
            batch = None if 0 < self._limit <= self._eval_count else next(self._eval, None)
            if batch is None:
                self._eval = None
            self._eval_count += 1
            self.eval_batch = None if batch is None else self._place(batch)
            return self.eval_batch

        def _place(self, batch: Batch) -> dict[str, Any]:
            """Every process has the global batch; each device takes its rows of it."""
            arrays = maxtext_batch(batch)
            place = functools.partial(jax.make_array_from_callback, sharding=self._sharding)
            return {name: place(array.shape, data_callback=array.__getitem__) for name, array in arrays.items()}

    return BridgeDataHooks


def training_hooks(base: type[Any], metrics: MetricsLog, clock: StepClock) -> type[Any]:
    """MaxText's training hooks, which also write `metrics.jsonl` and say each step."""

    class BridgeTrainingHooks(base):  # type: ignore[misc]
        """One line a step."""

        def on_train_step_start(self, train_ctx: Any) -> None:
            clock.begin(train_ctx.train_steps + 1)
            super().on_train_step_start(train_ctx)

        def on_train_end(self, train_ctx: Any) -> None:
            clock.end(train_ctx.train_steps)
            super().on_train_end(train_ctx)

        def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float, step_time: float = 0.0) -> None:
            super().on_train_step_end(train_ctx, train_step, train_loss, step_time)
            loss = float(np.asarray(train_loss))
            metrics.train(train_step, loss, **clock.report(train_step, loss))

        def on_eval_step_start(self, train_ctx: Any) -> None:
            clock.end(train_ctx.train_steps)
            super().on_eval_step_start(train_ctx)

        def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
            count = self.eval_metadata["eval_step_count"]
            super().on_eval_step_end(train_ctx, eval_loss)
            loss = float(np.asarray(eval_loss)) / count
            metrics.eval(train_ctx.train_steps, loss)
            say(f"step {train_ctx.train_steps}  eval loss {loss:.4f}")

    return BridgeTrainingHooks
