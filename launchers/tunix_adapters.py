"""LoRA and QLoRA on Tunix's Llama: an abstract model first, then every weight put in its place, one at a time.

Adapters are f32 while the frozen base is bf16 or NF4, and activations keep the dtype of the base. Source:
qwix/_src/providers/{lora,ptq}.py, 0.1.8; it would give the adapters the base's dtype, in which small updates are lost.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge import lora_provider, tunix_llama
from bridge.errors import SpecError
from bridge.launchers import tunix_dropout, tunix_loss, tunix_quantize
from bridge.model_spec import ModelSpec
from bridge.tunix_llama import Remat

MODULES = {
    "q": "attn/q_proj",
    "k": "attn/k_proj",
    "v": "attn/v_proj",
    "o": "attn/o_proj",
    "gate": "mlp/gate_proj",
    "up": "mlp/up_proj",
    "down": "mlp/down_proj",
}
Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters: W + (A B) alpha / rank on each target.

    With a `tile_size` the base's seven projections are NF4, whatever the targets; that many values share a scale.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(MODULES)
    tile_size: int | None = None
    seed: int = 0
    dropout: float = 0.0
    """The share of the adapters' inputs that a training step leaves out; see `tunix_dropout`."""


def check(model: ModelSpec, adapters: Adapters) -> None:
    """What can be said before anything is loaded.

    Raises:
        SpecError: a target that matches nothing.
        UnsupportedError: a projection cannot be cut into tiles.
    """
    unknown = [target for target in adapters.targets if target not in MODULES]
    if unknown or not adapters.targets:
        raise SpecError(
            f"lora.targets: {', '.join(unknown) or 'an empty list'} matches nothing in the model",
            hint=f"the targets are {', '.join(MODULES)}",
        )
    if adapters.tile_size is not None:
        tunix_llama.check_tiles(model, adapters.tile_size)


def load(
    model: ModelSpec, item: Path, dtype: str, mesh: Any, remat: Remat, adapters: Adapters, base: Any = None
) -> Any:
    """The model with fresh adapters on a frozen base.

    Args:
        model, item, dtype, mesh, remat: as `tunix_llama.load`.
        adapters: where, how large, and whether the base is NF4.
        base: the loaded base model, whose arrays are then shared; None: read from `item`.

    Raises:
        SpecError, UnsupportedError: see `check`.
        CheckpointError: the checkpoint is not the model's.
    """
    from flax import nnx

    check(model, adapters)
    abstract = abstract_model(model, dtype, remat, adapters)
    graph, state = nnx.split(abstract)
    shapes = tunix_llama.leaves(state)
    _require_adapters(shapes, adapters)
    shardings = tunix_llama.leaves(tunix_llama.named_shardings(state, mesh))
    place = functools.partial(_place, shardings=shardings, mesh=mesh)
    if base is None and adapters.tile_size is None:
        base = tunix_llama.load(model, item, dtype, mesh, remat)
    values: dict[Path_, Any] = {}
    if base is not None:
        frozen = tunix_llama.leaves(nnx.state(base))
        values = {path: frozen[path] for path in shapes if not is_adapter(path)}
    else:
        tunix_llama.check(item, {p: leaf.shape for p, leaf in base_shapes(shapes).items()})
        for path in base_shapes(shapes):
            array = tunix_quantize.read(item, path, dtype)
            if (*path, "array", "qvalue") in shapes:
                how = tunix_quantize.how(abstract, path)
                for name, part in tunix_quantize.quantize(array, how).items():
                    values[*path, "array", name] = place((*path, "array", name), part)
            else:
                values[path] = place(path, array)
            del array
    for path, leaf in shapes.items():
        if is_adapter(path):
            values[path] = place(path, initial(path, leaf.shape, adapters.seed))
    llama = nnx.merge(graph, tunix_llama.fill(state, values))
    return tunix_dropout.follow_steps(llama, adapters.seed) if adapters.dropout else llama


def load_trained(model: ModelSpec, base: Path, trained: Path, adapters: Adapters, dtype: str = "bfloat16") -> Any:
    """A trained model for checks: its base in `dtype` or NF4, the adapters of a run, everything computed in f32.

    Args:
        model: the facts.
        base: absolute item of the base checkpoint, `<checkpoint>/<step>/model_params`.
        trained: absolute item of the run's checkpoint, which holds adapters alone.
        adapters: as they were trained.
        dtype: of the base's weights in training.

    Raises:
        SpecError, UnsupportedError, CheckpointError: base, adapters and facts do not belong together.
    """
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    llama = load(model, base, dtype, None, "none", adapters)
    state = nnx.state(llama, nnx.LoRAParam)
    tunix_llama.check(trained, {path: leaf.shape for path, leaf in tunix_llama.leaves(state).items()})
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(llama, checkpointer.restore(trained, target=target))
    return tunix_loss.in_dtype(llama, "float32")


def abstract_model(model: ModelSpec, dtype: str, remat: Remat, adapters: Adapters) -> Any:
    """The adapted model with shapes for weights.

    Qwix finds the projections by tracing a forward pass. The weights must be inputs of that trace: where they are made
    inside it, qwix follows them back beyond the parameter and passes over the MLP in silence.
    """
    import jax
    import qwix
    from flax import nnx

    made = provider(adapters)
    graph, state = nnx.split(tunix_llama.abstract_model(model, remat))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), state)
    plain = nnx.merge(graph, shapes)
    return nnx.eval_shape(
        lambda llama: qwix.apply_lora_to_model(llama, made, rngs=nnx.Rngs(0), **llama.get_model_input()), plain
    )


def provider(adapters: Adapters) -> Any:
    """Qwix's provider: adapters on the targets, NF4 on all seven projections where asked for."""
    import qwix

    quantized: dict[str, Any] = {}
    if adapters.tile_size is not None:
        quantized = {"weight_qtype": "nf4", "tile_size": adapters.tile_size}
    rules = [
        qwix.LoraRule(
            module_path=pattern(adapters.targets),
            rank=adapters.rank,
            alpha=float(adapters.alpha),
            dropout=adapters.dropout,
            **quantized,
        )
    ]
    if quantized:
        rules.append(qwix.QuantizationRule(module_path=pattern(tuple(MODULES)), **quantized))
    return _provider_class()(rules)


def pattern(targets: tuple[str, ...]) -> str:
    """The regular expression that qwix matches against the whole of a module's path."""
    return r"layers/\d+/(" + "|".join(MODULES[target] for target in targets) + ")"


@functools.cache
def _provider_class() -> Any:
    class DropsInTraining(lora_provider.provider_class()):  # type: ignore[misc]
        """Adapters with dropout drop where `tunix_dropout` says so."""

        def _get_current_rule_and_op_id(self, *args: Any, **kwargs: Any) -> Any:
            rule, operation = super()._get_current_rule_and_op_id(*args, **kwargs)
            return tunix_dropout.rule_here(rule), operation

    return DropsInTraining


def is_adapter(path: Path_) -> bool:
    """Whether a leaf belongs to an adapter."""
    return path[-1].endswith(("_lora_a", "_lora_b"))


def base_shapes(shapes: dict[Path_, Any]) -> dict[Path_, Any]:
    """The arrays of the base as a full checkpoint has them, NF4 ones under the name of their matrix."""
    found: dict[Path_, Any] = {}
    for path, leaf in shapes.items():
        if path[-2:] == ("array", "qvalue"):
            found[path[:-2]] = leaf
        elif path[-2:] != ("array", "scale") and not is_adapter(path):
            found[path] = leaf
    return found


def initial(path: Path_, shape: tuple[int, ...], seed: int) -> Any:
    """A is drawn (he_uniform), B is 0, both f32; drawn by name, so that no other adapter or device changes it."""
    import jax

    if path[-1].endswith("_lora_b"):
        return np.zeros(shape, np.float32)
    with jax.default_device(tunix_quantize.host()):
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32("/".join(path).encode()))
        return np.asarray(jax.nn.initializers.he_uniform()(key, shape, np.float32))


def _require_adapters(shapes: dict[Path_, Any], adapters: Adapters) -> None:
    names = ["/".join(path) for path in shapes if is_adapter(path)]
    missing = [target for target in adapters.targets if not any(f"/{MODULES[target]}/" in name for name in names)]
    if missing:
        raise SpecError(f"lora.targets: {', '.join(missing)} matches nothing in the model")


def _place(path: Path_, array: Any, *, shardings: dict[Path_, Any], mesh: Any) -> Any:
    """Put an array that every process has where it belongs; a scale too short to be divided lies on all devices."""
    import jax

    sharding: Any = shardings.get(path) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if path[-1] == "scale" and mesh is not None:
        spec = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
        fitting = [
            name if not name or size % mesh.shape[name] == 0 else None
            for name, size in zip(spec, array.shape, strict=True)
        ]
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*fitting))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
