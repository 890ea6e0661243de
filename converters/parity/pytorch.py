"""Logits of a Hugging Face folder from PyTorch: the reference of every parity check."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.converters.parity.compare import Logits, Probe
from bridge.errors import CheckpointError, MissingDependency


def logits(folder: Path, inputs: tuple[Probe, ...], *, double: bool) -> tuple[list[Logits], list[NDArray[np.float64]]]:
    """f32 logits (n, vocab) of every probe, and with `double` the f64 ones too, from the same weights.

    Local files only; no remote code.

    Raises:
        MissingDependency: PyTorch or transformers is not installed.
        CheckpointError: a weight is missing or unexpected: it would be random, or dropped, in silence.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(package, "parity")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(
        os.fspath(folder),  # refused for a bucket, whose address transformers would take for a hub id
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    strange = {
        key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(key)
    }
    if strange:
        raise CheckpointError(
            f"{folder} does not load whole", details=[f"{key}: {names}" for key, names in strange.items()]
        )
    model.eval()
    single = [_forward(model, probe).astype(np.float32) for probe in inputs]
    return single, [_forward(model.double(), probe) for probe in inputs] if double else []


def _forward(model: Any, probe: Probe) -> NDArray[Any]:
    import torch

    ids = torch.from_numpy(probe.ids.astype(np.int64))[None]
    with torch.no_grad():
        # Without a mask, transformers 5 takes a jump in the positions for the start of another packed sequence.
        out = model(
            input_ids=ids,
            position_ids=torch.from_numpy(probe.positions.astype(np.int64))[None],
            attention_mask=torch.ones_like(ids),
            use_cache=False,
        )
    result: NDArray[Any] = out.logits[0].numpy()
    return result
