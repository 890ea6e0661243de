"""Adapters in PyTorch with PEFT against the engines' own models with the same adapters: f32 logits on a CPU."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import adapter_cases as cases
import numpy as np
import pytest
from numpy.typing import NDArray

from bridge import engine_fixes, tunix_llama
from bridge.converters.adapters import ITEMS, AdapterFacts, export_peft, import_peft
from bridge.converters.merge import export_merged
from bridge.converters.parity.tunix import forward
from bridge.model_spec import ModelSpec
from bridge.rope import inverse_frequencies

RANK, ALPHA, TOKENS, TOLERANCE = 4, 12.0, 64, 1e-4
FACTS = AdapterFacts(RANK, ALPHA, cases.ALL)
MODULES = ".*(q|k|v|o|gate|up|down)_proj"
Logits = NDArray[np.float32]


@pytest.fixture
def base(tiny: Any) -> Path:
    folder: Path = tiny("untied", dtype="float32")
    return folder


@pytest.fixture
def model(base: Path) -> ModelSpec:
    return ModelSpec.from_folder(base)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A PEFT adapter of `base`."""
    return saved_by_peft(base, tmp_path / "peft")


def saved_by_peft(base: Path, folder: Path) -> Path:
    """An adapter that PEFT itself has saved, with values that show."""
    import peft
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    untyped: Any = peft
    names = [f"{target}_proj" for target in cases.ALL]
    settings = untyped.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=names)
    adapted = untyped.get_peft_model(LlamaForCausalLM.from_pretrained(base), settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    adapted.save_pretrained(folder)
    return folder


def tokens(model: ModelSpec) -> NDArray[np.int32]:
    return np.random.default_rng(7).integers(0, model.vocab, TOKENS, dtype=np.int32)


def by_torch(folder: Path, model: ModelSpec, adapter: Path | None = None, **choices: Any) -> Logits:
    import peft
    import torch
    from transformers import LlamaForCausalLM

    make: Any = LlamaForCausalLM
    network = make.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        load: Any = peft.PeftModel.from_pretrained
        network = load(network, adapter, **choices)
    with torch.no_grad():
        logits: Logits = network.eval()(torch.from_numpy(tokens(model).astype(np.int64))[None]).logits[0].numpy()
    return logits


def tunix_model(base: Path, model: ModelSpec, folder: Path, **quantization: Any) -> Any:
    """Tunix's Llama in f32 with RoPE corrected and fresh adapters, as its trainer is given it."""
    import qwix
    from flax import nnx

    engine_fixes.apply("tunix", inverse_frequencies(model))
    llama = tunix_llama.load(model, cases.convert(base, folder / "base", "tunix"), "float32")
    provider = qwix.LoraProvider(module_path=MODULES, rank=RANK, alpha=ALPHA, **quantization)
    return qwix.apply_lora_to_model(llama, provider, rngs=nnx.Rngs(0), **llama.get_model_input())


def restore(llama: Any, root: Path) -> None:
    """As Tunix's trainer restores adapters."""
    from tunix.sft.checkpoint_manager import CheckpointManager

    manager = CheckpointManager(str(root))
    assert manager.maybe_restore(llama, restore_only_lora_params=True)[0] == 0
    manager.close()


def save(network: Any, root: Path) -> Path:
    """As Tunix's trainer saves adapters, for both engines."""
    from tunix.sft.checkpoint_manager import CheckpointManager

    manager = CheckpointManager(str(root))
    assert manager.save(5, network, save_only_lora_params=True, force=True)
    manager.close()
    return root / "5" / "model_params"


def apart(a: Logits, b: Logits) -> float:
    return float(np.abs(a - b).max())


def exported(item: Path, model: ModelSpec, engine: str, scanned: bool, out: Path) -> Path:
    out.mkdir()
    export_peft(item, FACTS, model, engine, scanned, out)
    return out


def with_config(folder: Path, base: Path) -> Path:
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder


@pytest.mark.slow
def test_tunix_with_an_imported_adapter_is_peft(base: Path, model: ModelSpec, adapter: Path, tmp_path: Path) -> None:
    expected = by_torch(base, model, adapter)
    assert apart(expected, by_torch(base, model)) > 0.5  # the adapter shows
    facts = import_peft(adapter, model, "tunix", True, tmp_path / "tunix" / "0")
    assert (facts.rank, facts.alpha, facts.targets) == (RANK, ALPHA, cases.ALL)
    llama = tunix_model(base, model, tmp_path)
    restore(llama, tmp_path / "tunix")
    places = np.arange(TOKENS)
    logits = forward(llama, tokens(model), places)
    assert apart(logits, expected) < TOLERANCE
    # What Tunix saves comes back as the adapter that went in, and PEFT loads it in every way.
    out = exported(save(llama, tmp_path / "saved"), model, "tunix", True, tmp_path / "out")
    assert cases.unequal(cases.read_tensors(out), cases.read_tensors(adapter)) == []
    assert apart(by_torch(base, model, out), logits) < TOLERANCE
    assert apart(by_torch(base, model, out, low_cpu_mem_usage=True), logits) < TOLERANCE
    # The check sees another alpha.
    values = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps({**values, "lora_alpha": 13}))
    assert apart(by_torch(base, model, out), logits) > 10 * TOLERANCE


@pytest.mark.slow
def test_merged_tunix_adapters_are_the_model_that_was_trained(
    base: Path, model: ModelSpec, adapter: Path, tmp_path: Path
) -> None:
    import_peft(adapter, model, "tunix", True, tmp_path / "tunix" / "0")
    item = tmp_path / "tunix" / "0" / "model_params"
    nf4 = AdapterFacts(RANK, ALPHA, cases.ALL, "nf4", 32, str(base), "float32")
    merge = functools.partial(export_merged, item, base)
    folders = {}
    for name, facts, choice in (("plain", FACTS, {}), ("nf4", nf4, {}), ("other", nf4, {"merge_base": "original"})):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        merge(facts, model, "tunix", True, folders[name], **choice)  # type: ignore[arg-type]
        with_config(folders[name], base)
    for name, quantization in (("plain", {}), ("nf4", {"weight_qtype": "nf4", "tile_size": 32})):
        llama = tunix_model(base, model, tmp_path / f"{name}_engine", **quantization)
        restore(llama, tmp_path / "tunix")
        logits = forward(llama, tokens(model), np.arange(TOKENS))
        assert apart(logits, by_torch(folders[name], model)) < 2 * TOLERANCE
        assert apart(logits, by_torch(folders["nf4" if name == "plain" else "other"], model)) > 0.5


# head_dim 128, where 1/sqrt(head_dim) is no power of two, for both.
@pytest.mark.slow
@pytest.mark.parametrize(("scanned", "quantization"), [(True, None), (False, "nf4")])
def test_maxtext_with_an_imported_adapter_is_peft(
    scanned: bool, quantization: Literal["nf4"] | None, tiny: Any, tmp_path: Path
) -> None:
    base = tiny("head_dim_128", dtype="float32", mlp=96, layers=2)
    model = ModelSpec.from_folder(base)
    adapter = saved_by_peft(base, tmp_path / "peft")
    expected = by_torch(base, model, adapter)
    imported = import_peft(adapter, model, "maxtext", scanned, tmp_path / "adapter" / "0")
    tile = 32 if quantization else None
    facts = replace(imported, quantization=quantization, tile_size=tile, base_dtype="float32")
    item = tmp_path / "adapter" / "0" / ITEMS["maxtext"]
    network, logits = maxtext_model(base, model, scanned, item, facts, tmp_path)
    # Plain, MaxText computes what PEFT does on the same base; quantized, something else than on the original base.
    assert (apart(logits, expected) < TOLERANCE) == (quantization is None)
    # MaxText's checkpoint comes back as the adapter, but for dividing by what was multiplied with.
    out = exported(save(network, tmp_path / "saved"), model, "maxtext", scanned, tmp_path / "out")
    given, back = cases.read_tensors(adapter), cases.read_tensors(out)
    assert all("q_proj.lora_B" in name for name in cases.unequal(back, given))
    assert all(np.allclose(back[name], given[name], rtol=2e-7, atol=0) for name in given)
    (tmp_path / "merged").mkdir()
    report = export_merged(item, base, facts, model, "maxtext", scanned, tmp_path / "merged")
    merged = by_torch(with_config(tmp_path / "merged", base), model)
    assert apart(merged, logits) < 2 * TOLERANCE
    assert (report.max_difference > 0.01) == (quantization is not None)


def maxtext_model(
    base: Path, model: ModelSpec, scanned: bool, item: Path, facts: AdapterFacts, folder: Path
) -> tuple[Any, Logits]:
    """MaxText's own model with its own adapters, restored by `lora.lora_restore_path`, and its logits in f32."""
    engine_fixes.apply("maxtext", inverse_frequencies(model))
    import jax
    import jax.numpy as jnp
    import yaml
    from flax.core.spmd import logical_axis_rules
    from maxtext.common import checkpointing
    from maxtext.configs import pyconfig
    from maxtext.utils import lora_utils, model_creation_utils

    from bridge.configs.maxtext import model_section

    text = {
        "base_config": "post_train/sft.yml",
        "run_name": "test",
        "base_output_directory": str(folder),
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "log_config": False,
        **model_section(model, scanned),
        "lora": {
            "enable_lora": True,
            "lora_rank": facts.rank,
            "lora_alpha": facts.alpha,
            "lora_weight_qtype": facts.quantization,
            "lora_tile_size": facts.tile_size,
            "lora_restore_path": str(item),
        },
    }
    (folder / "config.yml").write_text(yaml.safe_dump(text))
    settings = pyconfig.initialize_pydantic(
        ["", str(folder / "config.yml")],
        load_parameters_path=str(cases.convert(base, folder / "base", "maxtext", scanned)),
        dtype="float32",
        weight_dtype="float32",
        attention="dot_product",
        matmul_precision="highest",
        float32_logits=True,
        per_device_batch_size=1,
        max_target_length=TOKENS,
        enable_tensorboard=False,
    )
    # MaxText reads rank and alpha here, and refuses to restore under other ones.
    recorded = checkpointing.load_checkpoint_metadata(str(item))["lora"]
    assert (recorded["lora_rank"], recorded["lora_alpha"]) == (facts.rank, facts.alpha)
    network, mesh = model_creation_utils.from_pretrained(settings)
    with jax.set_mesh(mesh), logical_axis_rules(settings.logical_axis_rules):
        network = lora_utils.apply_lora_to_model(network, mesh, settings)
        network = lora_utils.restore_lora_from_path(network, settings)
        out = network(
            decoder_input_tokens=jnp.asarray(tokens(model))[None],
            decoder_positions=jnp.arange(TOKENS)[None],
            decoder_segment_ids=jnp.ones((1, TOKENS), jnp.int32),
            enable_dropout=False,
        )
    return network, np.asarray(out[0], np.float32)
