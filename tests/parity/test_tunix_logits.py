"""The real Tunix model against PyTorch: f32 logits of whole sequences, and what stock Tunix would have given."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from numpy.typing import NDArray
from tunix_checkpoints import convert

from bridge import engine_fixes, tunix_llama
from bridge.converters.parity.tunix import forward, logits
from bridge.errors import CheckpointError, UnsupportedError
from bridge.model_spec import ModelSpec
from bridge.rope import inverse_frequencies

TOKENS = 512
SPREAD = 21  # 512 positions up to 10731
Logits = NDArray[np.float32]


def tokens_of(model: ModelSpec) -> NDArray[np.int64]:
    return np.random.default_rng(7).integers(0, model.vocab, TOKENS)


def torch_logits(folder: Path, tokens: NDArray[Any], positions: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    import torch
    from transformers import LlamaForCausalLM

    make: Any = LlamaForCausalLM
    model = make.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    with torch.no_grad():
        out = model(torch.from_numpy(tokens)[None], position_ids=torch.from_numpy(positions)[None]).logits[0]
    result: NDArray[np.float64] = out.double().numpy()
    return result


def stock_logits(item: Path, spec: ModelSpec, tokens: NDArray[Any], positions: NDArray[Any]) -> Logits:
    """The same weights in Tunix's model as it comes: its module, loaded once more, out of the corrections' reach."""
    from flax import nnx
    from tunix.models.llama3 import model as corrected

    found = importlib.util.spec_from_file_location("stock_llama3", str(corrected.__file__))
    assert found is not None
    assert found.loader is not None
    stock = importlib.util.module_from_spec(found)
    found.loader.exec_module(stock)
    config = tunix_llama.engine_config(spec)
    values = {field: getattr(config, field) for field in config.__dataclass_fields__ if "config" not in field}
    llama = stock.Llama3(stock.ModelConfig(**values), rngs=nnx.Rngs(0))
    nnx.update(llama, nnx.state(tunix_llama.load(spec, item, "float32")))
    return forward(llama, tokens, positions)


def swapped(frequencies: Sequence[float]) -> list[float]:
    """The frequencies with two in the middle exchanged."""
    out = list(frequencies)
    half = len(out) // 2
    out[half], out[half + 1] = out[half + 1], out[half]
    return out


@pytest.mark.parametrize("name", ["llama3", "untied", "tied", "head_dim_128"])
def test_logits_are_pytorchs(tiny: Tiny, tmp_path: Path, name: str) -> None:
    folder = tiny(name, dtype="float32")
    model = ModelSpec.from_folder(folder)
    item, tokens = convert(folder, tmp_path / "converted"), tokens_of(model)
    frequencies = inverse_frequencies(model)
    spread = np.arange(TOKENS) * SPREAD
    for positions in (np.arange(TOKENS), spread):
        single = torch_logits(folder, tokens, positions, "float32")
        tolerance = max(1e-4, 4 * np.abs(single - torch_logits(folder, tokens, positions, "float64")).max())
        found = logits(item, model, tokens, positions, frequencies)
        assert found.shape == (TOKENS, model.vocab)
        assert np.abs(found - single).max() <= tolerance
        assert tolerance < 0.01
    # The check can fail: stock Tunix does, and so does one pair of frequencies exchanged.
    assert np.abs(stock_logits(item, model, tokens, spread) - single).max() > 1
    assert np.abs(logits(item, model, tokens, spread, swapped(frequencies)) - single).max() > 10 * tolerance


def test_every_model_keeps_its_own_frequencies(tiny: Tiny, tmp_path: Path) -> None:
    """Two models of one shape in one process, compiled by one jit, eager, rematerialised and copied."""
    from flax import nnx

    folder = tiny("scaled", dtype="float32", layers=1)
    spec = ModelSpec.from_folder(folder)
    item, tokens, positions = convert(folder, tmp_path / "converted"), tokens_of(spec), np.arange(TOKENS)
    right = inverse_frequencies(spec)
    engine_fixes.apply("tunix", right)
    first = tunix_llama.load(spec, item, "float32")
    before = forward(first, tokens, positions)
    engine_fixes.apply("tunix", right[::-1])
    second = tunix_llama.load(spec, item, "float32")
    checkpointed = tunix_llama.load(spec, item, "float32", remat="decoder")
    after = forward(second, tokens, positions)
    assert np.abs(before - after).max() > 0.1
    np.testing.assert_array_equal(forward(first, tokens, positions), before)
    np.testing.assert_array_equal(forward(nnx.clone(first), tokens, positions), before)

    compiled = nnx.jit(lambda llama, *inputs: llama(inputs[0], inputs[1], None, inputs[2]))
    causal = np.tril(np.ones((TOKENS, TOKENS), bool))[None]
    inputs = (tokens[None].astype(np.int32), positions[None].astype(np.int32), causal)
    for llama, expected in ((first, before), (second, after), (first, before), (checkpointed, after)):
        np.testing.assert_allclose(compiled(llama, *inputs)[0][0], expected, atol=1e-4)


def test_corrections_refuse_another_tunix(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunix.models.llama3 import model as llama

    monkeypatch.setattr(engine_fixes, "engine_version", lambda _: "0.2.0")
    with pytest.raises(UnsupportedError, match=r"google-tunix 0.2.0 is installed.*tested with 0.1.7"):
        engine_fixes.apply("tunix", [1.0])
    monkeypatch.undo()

    def changed(inputs: Any, positions: Any, head_dim: int, rope_theta: float, factor: float) -> Any: ...

    monkeypatch.setattr(llama, "apply_rope", changed)
    with pytest.raises(UnsupportedError, match="tunix-rope-frequencies does not fit"):
        engine_fixes.apply("tunix", [1.0])


def test_a_model_built_too_early_does_not_run(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("scaled", dtype="float32", layers=1)
    spec = ModelSpec.from_folder(folder)
    item = convert(folder, tmp_path / "converted")
    engine_fixes.apply("tunix", inverse_frequencies(spec))
    llama = tunix_llama.load(spec, item, "float32")
    del llama.layers[0].attn.rope_frequencies
    with pytest.raises(UnsupportedError, match="built before the correction"):
        forward(llama, [1, 2], [0, 1])
    engine_fixes.apply("tunix", [1.0])
    with pytest.raises(ValueError, match="head_dim is 64, the RoPE constants are for 2"):
        forward(tunix_llama.load(spec, item, "float32"), [1, 2], [0, 1])


def test_a_checkpoint_of_another_model_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("scaled", dtype="float32", layers=1)
    item = convert(folder, tmp_path / "converted")
    other = ModelSpec.from_folder(tiny("scaled", dtype="float32", layers=2, mlp=80))
    engine_fixes.apply("tunix", inverse_frequencies(other))
    with pytest.raises(CheckpointError, match="does not match the model") as error:
        tunix_llama.load(other, item, "float32")
    assert any(detail.startswith("missing      layers.1.attn.q_proj.w.value") for detail in error.value.details)
    assert any("checkpoint has (96, 96), the model needs (96, 80)" in detail for detail in error.value.details)
    with pytest.raises(CheckpointError, match="no _METADATA"):
        tunix_llama.load(other, tmp_path / "nowhere", "float32")


def test_tunix_sampler_writes_what_transformers_writes(tiny: Tiny, tmp_path: Path) -> None:
    """Greedy, through the sampler's own compiled prefill and decode with a key-value cache."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM
    from tunix.generate.sampler import CacheConfig, Sampler

    folder = tiny("scaled", dtype="float32", layers=2, tokenizer="llama")
    spec = ModelSpec.from_folder(folder)
    engine_fixes.apply("tunix", inverse_frequencies(spec))
    llama = tunix_llama.load(spec, convert(folder, tmp_path / "converted"), "float32")
    make: Any = AutoTokenizer
    tokenizer = make.from_pretrained(folder)
    prompt, count = "The capital of France is Paris, a city on the river. " * 3, 24
    cache = CacheConfig(cache_size=256, num_layers=spec.layers, num_kv_heads=spec.kv_heads, head_dim=spec.head_dim)
    sampler = Sampler(llama, tokenizer, cache)
    written = sampler([prompt], max_generation_steps=count, echo=False, eos_tokens=[spec.vocab + 1])
    make = LlamaForCausalLM
    reference = make.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    expected = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, ids.shape[1] :]
    assert len(expected) == count
    assert np.asarray(written.tokens[0])[:count].tolist() == expected.tolist()
