"""The NF4 base made on the host, leaf by leaf, against qwix's own quantization of the whole model; and its cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from tunix_checkpoints import convert

from bridge import engine_fixes, tunix_llama
from bridge.errors import SpecError, UnsupportedError
from bridge.launchers import tunix_adapters, tunix_quantize
from bridge.launchers.tunix_adapters import Adapters
from bridge.model_spec import ModelSpec
from bridge.rope import inverse_frequencies

SEVEN = ("q", "k", "v", "o", "gate", "up", "down")


def bits(array: Any) -> Any:
    values = np.asarray(array)
    return values.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


def opened(tiny: Tiny, tmp_path: Path, dtype: str) -> tuple[ModelSpec, Path]:
    folder = tiny("tied", dtype=dtype, layers=2, seed=3)
    model = ModelSpec.from_folder(folder)
    engine_fixes.apply("tunix", inverse_frequencies(model))
    return model, convert(folder, tmp_path / "converted")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nf4_is_qwixs_bit_for_bit(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """embed 96 has three tiles, o_proj shares its scales over six heads; slices are smaller than any matrix."""
    import qwix
    from flax import nnx

    model, item = opened(tiny, tmp_path, dtype)
    adapters = Adapters(rank=4, alpha=8.0, targets=SEVEN, tile_size=32)
    monkeypatch.setattr(tunix_quantize, "SLICE_VALUES", 1000)
    ours = tunix_llama.leaves(nnx.state(tunix_adapters.load(model, item, dtype, None, "none", adapters)))
    base = tunix_llama.load(model, item, dtype)
    whole = qwix.apply_lora_to_model(
        base, tunix_adapters.provider(adapters), rngs=nnx.Rngs(0), **base.get_model_input()
    )
    theirs = tunix_llama.leaves(nnx.state(whole))
    assert ours.keys() == theirs.keys()
    assert sum(path[-1] == "qvalue" for path in ours) == 14
    for path, array in theirs.items():
        if tunix_adapters.is_adapter(path):
            assert ours[path].shape == array.shape
            assert ours[path].dtype == np.float32
            continue
        assert ours[path].dtype == array.dtype, path
        np.testing.assert_array_equal(bits(ours[path]), bits(array), err_msg=".".join(path))
    # The comparison can fail: another tile gives other values.
    path = ("layers", "0", "mlp", "up_proj", "kernel")
    method = tunix_quantize.how(tunix_adapters.abstract_model(model, dtype, "none", adapters), path)
    rounded = tunix_quantize.read(item, path, dtype)
    other = tunix_quantize.quantize(rounded[::-1], method)["qvalue"]
    assert (bits(other) != bits(theirs[*path, "array", "qvalue"])).any()


def test_the_base_is_nf4_whatever_the_targets(tiny: Tiny, tmp_path: Path) -> None:
    from flax import nnx

    model, item = opened(tiny, tmp_path, "bfloat16")
    llama = tunix_adapters.load(model, item, "bfloat16", None, "none", Adapters(4, 8.0, ("q", "down"), 32))
    paths = tunix_llama.leaves(nnx.state(llama))
    assert {path[-2] for path in paths if path[-1] == "qvalue"} == {"array"}
    assert sum(path[-1] == "qvalue" for path in paths) == 14
    adapted = {path[3] for path in paths if tunix_adapters.is_adapter(path)}
    assert adapted == {"q_proj", "down_proj"}


def test_activations_keep_the_dtype_of_the_base(tiny: Tiny, tmp_path: Path) -> None:
    """f32 adapters on a bf16 base: without care everything after the first adapter would run in f32."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    model, item = opened(tiny, tmp_path, "bfloat16")
    tokens, mask = jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8, 8), bool)
    for tile in (None, 32):
        llama = tunix_adapters.load(model, item, "bfloat16", None, "none", Adapters(5, 8.0, SEVEN, tile))
        graph, state = nnx.split(llama)
        made = jax.make_jaxpr(lambda s, graph=graph: nnx.merge(graph, s)(tokens, tokens, None, mask)[0])(state)
        assert made.out_avals[0].dtype == jnp.bfloat16
        products = [equation for equation in equations(made.jaxpr) if equation.primitive.name == "dot_general"]
        wide = [equation for equation in products if equation.outvars[0].aval.dtype == jnp.float32]
        # Seven projections a layer, two products each, through the rank of 5.
        assert len(wide) == 28
        assert all(any(5 in operand.aval.shape for operand in equation.invars) for equation in wide)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a trace, those of inner functions included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_what_does_not_fit_is_refused_first(tiny: Tiny, tmp_path: Path) -> None:
    model, item = opened(tiny, tmp_path, "bfloat16")
    with pytest.raises(UnsupportedError, match="tiles of 64") as error:
        tunix_adapters.load(model, item, "bfloat16", None, "none", Adapters(4, 8.0, SEVEN, 64))
    assert error.value.details == (
        "head_dim 32 is no multiple of 64",
        "embed 96 is no multiple of 64",
        "mlp 96 is no multiple of 64",
    )
    with pytest.raises(SpecError, match=r"lora\.targets: query matches nothing"):
        tunix_adapters.load(model, item, "bfloat16", None, "none", Adapters(4, 8.0, ("q", "query")))
    with pytest.raises(SpecError, match="an empty list matches nothing"):
        tunix_adapters.check(model, Adapters(4, 8.0, ()))


MEASURE = """
import sys
from pathlib import Path
import jax
from bridge import engine_fixes
from bridge.launchers import tunix_adapters, tunix_quantize
from bridge.launchers.tunix_adapters import Adapters
from bridge.model_spec import ModelSpec
from bridge.rope import inverse_frequencies
model = ModelSpec.from_folder(Path(sys.argv[1]))
engine_fixes.apply("tunix", inverse_frequencies(model))
peak = 0
def watched(path, array, *, place=tunix_adapters._place, **kwargs):
    global peak
    placed = place(path, array, **kwargs)
    peak = max(peak, sum(live.nbytes for live in jax.live_arrays() if live.sharding.device_set == {jax.devices()[1]}))
    return placed
tunix_adapters._place = watched
mesh = jax.sharding.Mesh([[jax.devices()[1]]], ("fsdp", "tp"))
llama = tunix_adapters.load(model, Path(sys.argv[2]), "bfloat16", mesh, "none", Adapters(4, 8.0, ("q",), 32))
print(peak, 2 * model.parameters)
"""


def test_only_nf4_reaches_the_device(tiny: Tiny, tmp_path: Path) -> None:
    """The host is one simulated device and the accelerator another: at no time does the second hold the bf16 base."""
    folder = tiny("untied", layers=4, mlp=512)
    item = convert(folder, tmp_path / "converted")
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(folder), str(item)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    peak, base = map(int, done.stdout.split())
    model = ModelSpec.from_folder(folder)
    embeddings = 2 * 2 * model.vocab * model.embed
    # A uint4 takes a byte on the CPU, and a tile of 32 a bf16 scale; norms and adapters are small.
    limit = embeddings + (base - embeddings) * (1 / 2 + 1 / 32) * 1.05
    assert peak < limit < 0.65 * base
