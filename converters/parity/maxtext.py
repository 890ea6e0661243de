"""Logits of a checkpoint from the real MaxText model, in f32 on the CPU, with bridge's corrections."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from bridge import engine_fixes
from bridge.converters.parity.compare import Forward, Logits, Probe


def logits(config: str, item: Path, inputs: tuple[Probe, ...], frequencies: tuple[float, ...]) -> list[Logits]:
    """f32 logits (n, vocab) of every probe.

    Args:
        config: the YAML that training uses; dtypes, lengths and the checkpoint are overridden here.
        item: the tree to load, as `load_parameters_path` takes it.
        inputs: token ids and positions.
        frequencies: `head_dim / 2` inverse RoPE frequencies.
    """
    longest = max(len(probe.ids) for probe in inputs)
    with forward_pass(config, item, longest, frequencies) as forward:
        return [forward(probe.ids, probe.positions) for probe in inputs]


@contextlib.contextmanager
def forward_pass(
    config: str,
    item: Path,
    longest: int,
    frequencies: tuple[float, ...],
    adapter: Path | None = None,
    quantized_in: str = "float32",
) -> Iterator[Forward]:
    """A function from ids and positions, (n,) each, to f32 logits (n, vocab); at most `longest` tokens.

    Args:
        config, item, frequencies: as `logits`.
        longest: tokens of the longest input.
        adapter: the tree of a trained adapter, for a config that enables them.
        quantized_in: the dtype in which training quantized the base, for a config of QLoRA.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    import jax
    import jax.numpy as jnp
    from flax import nnx

    # MaxText's modules print as they are imported, and stdout is for results.
    with contextlib.redirect_stdout(io.StringIO()):
        engine_fixes.apply("maxtext", frequencies)
        if adapter is None:
            model, mesh, _ = _loaded(config, item, longest, "float32")
        elif quantized_in == "float32":
            model, mesh = _adapted(config, item, longest, "float32")
        else:
            # In an f32 model MaxText would make the scales f32, and with them other weights than it trained on.
            values = _dequantized(_adapted(config, item, longest, quantized_in)[0])
            model, mesh = _adapted(_unquantized(config), item, longest, "float32")
            _replace(model, values)
        if adapter is not None:
            _restore(model, adapter)

    def step(model: Any, ids: Any, positions: Any) -> Any:
        return model(
            decoder_input_tokens=ids[None],
            decoder_positions=positions[None],
            decoder_segment_ids=jnp.ones((1, len(ids)), jnp.int32),
            enable_dropout=False,
        )[0]

    compiled = nnx.jit(step)

    def forward(ids: NDArray[np.int32], positions: NDArray[np.int32]) -> Logits:
        with jax.set_mesh(mesh):
            return np.asarray(compiled(model, jnp.asarray(ids), jnp.asarray(positions)), dtype=np.float32)

    yield forward


def _loaded(config: str, item: Path, longest: int, dtype: str) -> tuple[Any, Any, Any]:
    """MaxText's model with the weights of `item`, its mesh, and the settings."""
    from maxtext.configs import pyconfig
    from maxtext.utils import model_creation_utils

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yml"
        path.write_text(config, encoding="utf-8")
        settings = pyconfig.initialize_pydantic(
            ["", str(path)],
            load_parameters_path=str(item),
            dtype=dtype,
            weight_dtype=dtype,
            attention="dot_product",
            matmul_precision="highest",
            float32_logits=True,
            per_device_batch_size=1,
            max_target_length=longest,
            enable_tensorboard=False,
        )
        return *model_creation_utils.from_pretrained(settings), settings


def _adapted(config: str, item: Path, longest: int, dtype: str) -> tuple[Any, Any]:
    """The model with the adapters that MaxText's trainer would give it, its base quantized as there."""
    import jax
    from flax.core.spmd import logical_axis_rules
    from maxtext.utils import lora_utils

    model, mesh, settings = _loaded(config, item, longest, dtype)
    with jax.set_mesh(mesh), logical_axis_rules(settings.logical_axis_rules):
        return lora_utils.apply_lora_to_model(model, mesh, settings), mesh


def _restore(model: Any, adapter: Path) -> None:
    """Give the model's adapters their trained values."""
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    state = nnx.state(model, nnx.LoRAParam)
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(model, checkpointer.restore(adapter, target=target))


def _unquantized(config: str) -> str:
    """The config of a QLoRA run, for adapters on a base that is not quantized."""
    values = yaml.safe_load(config)
    kept = {key: value for key, value in values["lora"].items() if key not in ("lora_weight_qtype", "lora_tile_size")}
    return yaml.safe_dump({**values, "lora": kept})


def _dequantized(model: Any) -> dict[tuple[Any, ...], Any]:
    """Path -> values of every quantized weight, by qwix outside jit, which keeps the rounding of each step."""
    from flax import nnx
    from qwix._src.core import qarray

    parts = {path: leaf.get_raw_value() for path, leaf in nnx.to_flat_state(nnx.state(model)) if "array" in path}
    weights = dict.fromkeys(path[: path.index("array")] for path in parts)
    return {
        path: qarray.dequantize(
            qarray.QArray(qvalue=parts[*path, "array", "qvalue"], scale=parts[*path, "array", "scale"], qtype="nf4")
        )
        for path in weights
    }


def _replace(model: Any, values: dict[tuple[Any, ...], Any]) -> None:
    """Put values in the place of weights, in the dtype of these."""
    from flax import nnx

    flat = nnx.to_flat_state(nnx.state(model))
    missing = values.keys() - {path for path, _ in flat}
    if missing:
        raise KeyError(f"MaxText's model has no {missing}")
    nnx.update(
        model,
        nnx.from_flat_state(
            [
                (path, leaf.replace(values[path].astype(leaf.get_raw_value().dtype)) if path in values else leaf)
                for path, leaf in flat
            ]
        ),
    )
