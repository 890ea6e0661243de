"""LoRA dropout on Tunix: what goes into the adapters is thinned out in training steps, and never anywhere else.

qwix drops in evaluation and sampling, too, once its rule says so. Here the rule holds only in a copy of the model that
the training loss makes for itself; evaluation, checks and the sampler see a model that cannot drop. What is dropped
follows from the seed, the number of the step and the module's name: a resumed run drops what the whole one did.
Source: qwix/_src/providers/lora.py, 0.1.8; as PEFT does, the input of A is dropped and the rest scaled up.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any


def follow_steps(model: Any, seed: int) -> Any:
    """The model with a place for the number of the step, which `dropping` reads; returned for convenience."""
    import numpy as np
    from flax import nnx

    model.dropout_seed = seed
    model.dropout_step = nnx.Variable(np.uint32(0))
    return model


def at_step(model: Any, step: int) -> None:
    """Say which micro step comes next; nothing for a model without dropout."""
    import numpy as np

    if hasattr(model, "dropout_step"):
        model.dropout_step.set_value(np.uint32(step))


def dropping(model: Any) -> Any:
    """A copy of the model that drops as is due in its step; the model itself where it has no dropout."""
    import jax
    from flax import nnx

    if not hasattr(model, "dropout_step"):
        return model
    key = jax.random.fold_in(jax.random.key(model.dropout_seed), model.dropout_step.get_value())
    copy = nnx.merge(*nnx.split(model))
    for path, module in list(nnx.iter_modules(copy)):
        if any(isinstance(value, nnx.LoRAParam) for value in vars(module).values()):
            name = "/".join(map(str, path))
            # Where qwix looks; part of the module, so it goes through remat, and tells compiled functions apart.
            module.qwix_rngs = nnx.Rngs(dropout=jax.random.fold_in(key, zlib.crc32(name.encode())))
    return copy


def only_in_training(trainer: Any) -> Any:
    """Tunix's trainer with a training loss that drops; its evaluation loss stays as it is."""
    loss = trainer.loss_fn

    @functools.wraps(loss)
    def dropped(model: Any, *arguments: Any) -> Any:
        return loss(dropping(model), *arguments)

    trainer.loss_fn = dropped
    return trainer


def rule_here(rule: Any) -> Any:
    """A qwix rule as it holds in the module being traced: without its dropout where `dropping` gave no key."""
    from qwix._src.utils import flax_util

    if not getattr(rule, "dropout", 0.0) or getattr(flax_util.get_current_module(), "qwix_rngs", None) is not None:
        return rule
    return dataclasses.replace(rule, dropout=0.0)
