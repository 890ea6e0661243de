"""The oracles against programs that `bridge` does not contain: transformers, MaxText, Tunix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
import oracles

PRESETS = sorted(models.SHAPES)
TOKENS = 72
POSITIONS = {
    "in a row": list(range(TOKENS)),
    "spaced to 14200": list(range(0, 200 * TOKENS, 200)),  # beyond the original context of every preset
}
IDS = [int(token) for token in np.random.default_rng(7).integers(0, 259, TOKENS)]
SCALED = [name for name in PRESETS if models.SHAPES[name].get("scaling")]


class DoubleTorch:
    """torch with f32 spelled f64: transformers asks for f32 by name in norms, softmax and RoPE, whatever the model."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return self._torch.float64 if name in ("float", "float32") else getattr(self._torch, name)


@pytest.fixture
def double_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers' own Llama compute everything in f64, the RoPE tables included."""
    import torch
    from transformers import modeling_rope_utils
    from transformers.models.llama import modeling_llama

    def tables(self: Any, _: Any, position_ids: Any) -> tuple[Any, Any]:
        angles = position_ids[0].to(torch.float64)[:, None] * self.inv_freq[None, :]
        angles = torch.cat((angles, angles), dim=-1)[None]
        return angles.cos(), angles.sin()

    monkeypatch.setattr(modeling_llama, "torch", DoubleTorch(torch))
    monkeypatch.setattr(modeling_rope_utils, "torch", DoubleTorch(torch))
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", tables)


def torch_logits(folder: Path, positions: list[int], dtype: str) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    if dtype == "float64":
        assert model.model.rotary_emb.inv_freq.dtype == torch.float64
    # Without a mask transformers takes a jump in the positions for the start of another, packed sequence.
    with torch.no_grad():
        output = model(
            torch.tensor([IDS]), position_ids=torch.tensor([positions]), attention_mask=torch.ones((1, len(IDS)))
        )
    return output.logits[0].numpy()


@pytest.mark.parametrize("spacing", POSITIONS)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.usefixtures("double_transformers")
def test_forward_is_transformers_forward_in_double(name: str, spacing: str, tiny: Any) -> None:
    folder = tiny(name)
    positions = POSITIONS[spacing]
    tensors, config = oracles.read_hf(folder)
    expected = torch_logits(folder, positions, "float64")
    assert expected.dtype == np.float64
    assert expected.std() > 0.5
    logits = oracles.forward(tensors, config, IDS, positions)
    assert np.abs(logits - expected).max() < 1e-9
    # The same check sees a theta that is off by a tenth of a percent, and key rows that moved by one.
    wrong_theta = {**config, "rope_parameters": {**config["rope_parameters"], "rope_theta": 500500.0}}
    assert np.abs(oracles.forward(tensors, wrong_theta, IDS, positions) - expected).max() > 1e-6
    swapped = {**tensors}
    key = "model.layers.0.self_attn.k_proj.weight"
    swapped[key] = np.roll(tensors[key], 1, axis=0)
    assert np.abs(oracles.forward(swapped, config, IDS, positions) - expected).max() > 0.1


@pytest.mark.parametrize("name", SCALED)
def test_scaling_acts_on_the_positions_that_the_checks_use(name: str, tiny: Any) -> None:
    tensors, config = oracles.read_hf(tiny(name))
    plain = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    positions = POSITIONS["in a row" if name == "scaled" else "spaced to 14200"]
    difference = oracles.forward(tensors, config, IDS, positions) - oracles.forward(tensors, plain, IDS, positions)
    assert np.abs(difference).max() > 1.0


@pytest.mark.parametrize("name", PRESETS)
def test_forward_is_ordinary_transformers_within_single_precision(name: str, tiny: Any) -> None:
    folder = tiny(name, dtype="float32")
    tensors, config = oracles.read_hf(folder)
    logits = oracles.forward(tensors, config, IDS)
    assert np.abs(logits - torch_logits(folder, POSITIONS["in a row"], "float32")).max() < 1e-4


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("spelling", ["old", "new", "both"])
def test_frequencies_in_every_spelling_of_the_config(name: str, spelling: str, tiny: Any) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = tiny(name, rope_spelling=spelling)
    _, config = oracles.read_hf(folder)
    assert ("rope_parameters" in config, "rope_theta" in config) == (spelling != "old", spelling != "new")
    make: Any = LlamaRotaryEmbedding  # untyped in transformers
    expected = make(LlamaConfig.from_pretrained(folder)).inv_freq.numpy()
    assert expected.dtype == np.float32
    np.testing.assert_allclose(oracles.llama3_inverse_frequencies(config), expected, rtol=4e-7, atol=0)


def test_frequencies_refuse_another_rope() -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    with pytest.raises(ValueError, match="yarn"):
        oracles.llama3_inverse_frequencies(config)


# What MaxText's abstract parameters of one layer look like: E embed, H heads, K kv heads, D head_dim, M mlp, V vocab.
MAXTEXT_SHAPES = {
    "logits_dense-kernel": "EV",
    "query-kernel": "EHD",
    "key-kernel": "EKD",
    "value-kernel": "EKD",
    "out-kernel": "HDE",
    "wi_0-kernel": "EM",
    "wi_1-kernel": "EM",
    "wo-kernel": "ME",
}


def sizes_of(config: dict[str, Any]) -> dict[str, int]:
    keys = {"E": "hidden_size", "H": "num_attention_heads", "K": "num_key_value_heads", "M": "intermediate_size"}
    sizes = {letter: config[key] for letter, key in keys.items()}
    return {**sizes, "V": config["vocab_size"], "D": config.get("head_dim") or sizes["E"] // sizes["H"]}


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_maxtext_tree_is_what_maxtexts_hooks_make(name: str, scanned: bool, tiny: Any) -> None:
    from maxtext.checkpoint_conversion.utils import param_mapping
    from maxtext.checkpoint_conversion.utils.tensor_handling import apply_hook_fns

    tensors, config = oracles.read_hf(tiny(name))
    sizes = sizes_of(config)
    facts = {"num_hidden_layers": config["num_hidden_layers"], "head_dim": sizes["D"]}
    names = param_mapping.LLAMA31_MAXTEXT_TO_HF_PARAM_MAPPING(facts, None, scanned)
    hooks = param_mapping.LLAMA31_MAXTEXT_TO_HF_PARAM_HOOK_FN(facts, None, scanned, saving_to_hf=False)
    if config["tie_word_embeddings"]:
        del names["params-decoder-logits_dense-kernel"]

    def engine_array(engine_name: str, hf_name: str) -> Any:
        source = tensors[hf_name].astype(np.float32)
        layout = MAXTEXT_SHAPES.get("-".join(engine_name.split("-")[-2:]))
        shape = tuple(sizes[letter] for letter in layout) if layout else source.shape
        return np.asarray(apply_hook_fns(source, shape, hooks.get(engine_name)))

    expected = {}
    for engine_name, sources in names.items():
        parts = [engine_array(engine_name, source) for source in ([sources] if isinstance(sources, str) else sources)]
        array = parts[0] if isinstance(sources, str) else np.stack(parts, axis=1)  # MaxText's param_scan_axis
        expected["params." + engine_name.replace("-", ".")] = array

    tree = oracles.maxtext_tree(tensors, config, scanned)
    assert unequal(tree, expected) == []
    # Key rows that moved by one, and a layer that overwrote another, are seen.
    q, k = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    swapped = {**tensors, k: np.roll(tensors[k], 1, axis=0)}
    assert len(unequal(oracles.maxtext_tree(swapped, config, scanned), expected)) == 1
    repeated = {**tensors, q: tensors[q.replace("layers.1", "layers.0")]}
    assert len(unequal(oracles.maxtext_tree(repeated, config, scanned), expected)) == 1


@pytest.mark.parametrize("name", PRESETS)
def test_tunix_tree_follows_tunixs_own_key_map(name: str, tiny: Any) -> None:
    from tunix.models.llama3 import params

    tensors, config = oracles.read_hf(tiny(name))
    mapping = params._get_key_and_transform_mapping(tunix_config(config))
    expected = {}
    for hf_name, tensor in tensors.items():
        matches = [(pattern, target) for pattern, target in mapping.items() if re.fullmatch(pattern, hf_name)]
        [(pattern, (path, transform))] = matches
        permute, reshape = transform or (None, None)
        array = tensor.transpose(permute) if permute else tensor
        expected[re.sub(pattern, path, hf_name) + ".value"] = array.reshape(reshape) if reshape else array

    tree = oracles.tunix_tree(tensors, config)
    assert unequal(tree, expected) == []
    up, gate = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    swapped = {**tensors, up: tensors[gate], gate: tensors[up]}
    assert len(unequal(oracles.tunix_tree(swapped, config), expected)) == 2


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_tunix_tree_is_what_tunixs_loader_makes(name: str, tiny: Any) -> None:
    from flax import nnx
    from tunix.models.llama3 import params

    folder = tiny(name)
    tensors, config = oracles.read_hf(folder)
    model = params.create_model_from_safe_tensors(str(folder), tunix_config(config))
    loaded = {
        ".".join(map(str, path)) + ".value": np.asarray(variable.get_value())
        for path, variable in nnx.state(model, nnx.Param).flat_state()
    }
    assert unequal(oracles.tunix_tree(tensors, config), loaded) == []


def tunix_config(config: dict[str, Any]) -> Any:
    from tunix.models.llama3 import model

    sizes = sizes_of(config)
    return model.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=sizes["V"],
        embed_dim=sizes["E"],
        hidden_dim=sizes["M"],
        num_heads=sizes["H"],
        head_dim=sizes["D"],
        num_kv_heads=sizes["K"],
        rope_theta=500000,
        norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
    )


def unequal(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names that only one side has, and names whose dtype, shape or bits differ."""
    names = sorted(found.keys() ^ expected.keys())
    for name in sorted(found.keys() & expected.keys()):
        ours, theirs = np.ascontiguousarray(found[name]), np.ascontiguousarray(expected[name])
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape) or ours.tobytes() != theirs.tobytes():
            names.append(name)
    return names
