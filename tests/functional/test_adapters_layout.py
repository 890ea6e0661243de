"""PEFT <-> engine checkpoints: every factor where it belongs, bit for bit, both ways, on both engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapter_cases as cases
import ml_dtypes
import numpy as np
import pytest

import oracles
from bridge.converters.adapters import (
    ITEMS,
    AdapterFacts,
    export_peft,
    facts_from_options,
    import_peft,
    measure_checkpoint,
    recorded_by_engine,
)
from bridge.errors import CheckpointError
from bridge.model_spec import ModelSpec

LAYOUTS = [("tunix", True), ("maxtext", True), ("maxtext", False)]
# head_dim 64, 32, 96, 128: 1/sqrt of it is a power of two, and three times is not.
SHAPES = ["untied", "tied", "head_dim_96", "head_dim_128"]
RANK = 3


def load(folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    return ModelSpec.from_folder(folder), json.loads((folder / "config.json").read_text())


def wide(engine: str, target: str, dtype: Any) -> Any:
    """MaxText's scaled query factor needs float32 where the other factors do not."""
    return np.float32 if engine == "maxtext" and target == "q" else dtype


@pytest.mark.parametrize(("engine", "scanned"), LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_import_writes_what_the_layout_says(name: str, engine: str, scanned: bool, tiny: Any, tmp_path: Path) -> None:
    model, config = load(tiny(name))
    factors = cases.random_factors(config, RANK)
    adapter = cases.write_peft(tmp_path / "peft", factors, RANK, 6)
    facts = import_peft(adapter, model, engine, scanned, tmp_path / "0")
    assert facts == AdapterFacts(RANK, 6, cases.ALL, base="some/base")
    written = cases.read_orbax(tmp_path / "0" / ITEMS[engine])
    expected = cases.engine_tree(factors, config, engine, scanned)
    assert cases.unequal(written, expected) == []
    # The check sees a factor in the wrong place.
    swapped = {**factors, (0, "k"): factors[1, "k"]}
    assert cases.unequal(written, cases.engine_tree(swapped, config, engine, scanned)) != []


@pytest.mark.parametrize(("engine", "scanned"), LAYOUTS)
@pytest.mark.parametrize("name", ["untied", "head_dim_128"])
def test_the_engines_product_is_the_weights_delta(
    name: str, engine: str, scanned: bool, tiny: Any, tmp_path: Path
) -> None:
    """B A, put where the oracle of the *weights* puts a weight, is the product of the engine's two factors."""
    model, config = load(tiny(name))
    factors = cases.random_factors(config, RANK)
    tensors, _ = oracles.read_hf(tiny(name))
    for (layer, target), (a, b) in factors.items():
        tensors[f"{cases.module(layer, target)}.weight"] = b.astype(np.float32) @ a.astype(np.float32)
    if engine == "tunix":
        weights = oracles.tunix_tree(tensors, config)
    else:
        weights = oracles.maxtext_tree(tensors, config, scanned)
    import_peft(cases.write_peft(tmp_path / "peft", factors, RANK, 6), model, engine, scanned, tmp_path / "0")
    tree = cases.read_orbax(tmp_path / "0" / ITEMS[engine])
    compared = 0
    for path, a in tree.items():
        if "_lora_a" not in path:
            continue
        b = tree[path.replace("_lora_a", "_lora_b")]
        weight = weights[
            path.replace("_lora_a", "") if engine == "tunix" else f"params.params.{path}".replace("_lora_a.value", "")
        ]
        if engine == "maxtext" and scanned:
            delta = np.einsum("ilr,rlo->lio", a, b)
            weight = np.moveaxis(weight, 1, 0)
        else:
            delta = a.reshape(-1, RANK) @ b.reshape(RANK, -1)
        np.testing.assert_allclose(delta.reshape(weight.shape), weight, rtol=0, atol=1e-6)
        compared += 1
    assert compared == len(tree) // 2 > 0


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("engine", "scanned"), LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_engine_to_peft_to_engine_is_the_identity(
    name: str, engine: str, scanned: bool, dtype: Any, tiny: Any, tmp_path: Path
) -> None:
    model, config = load(tiny(name))
    trained = cases.engine_tree(cases.random_factors(config, RANK, dtype=dtype, seed=1), config, engine, scanned)
    # A trained checkpoint has values that no scaling has touched, in one dtype.
    random = np.random.default_rng(2)
    trained = {path: random.standard_normal(array.shape).astype(dtype) for path, array in trained.items()}
    item = cases.write_orbax(tmp_path / "run", trained)
    assert measure_checkpoint(item, model, engine, scanned) == (RANK, cases.ALL)
    out = tmp_path / "peft"
    out.mkdir()
    export_peft(item, AdapterFacts(RANK, 6.0, cases.ALL), model, engine, scanned, out)
    import_peft(out, model, engine, scanned, tmp_path / "0")
    back = cases.read_orbax(tmp_path / "0" / ITEMS[engine])
    assert cases.unequal(back, trained) == []


@pytest.mark.parametrize(("engine", "scanned"), LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_export_is_the_inverse_of_the_oracle(engine: str, scanned: bool, dtype: Any, tiny: Any, tmp_path: Path) -> None:
    model, config = load(tiny("untied"))  # head_dim 64: MaxText's scale is 1/8, exact in every dtype
    factors = cases.random_factors(config, RANK, targets=("q", "k", "o", "down"), dtype=dtype)
    tree = {k: v.astype(dtype) for k, v in cases.engine_tree(factors, config, engine, scanned).items()}
    item = cases.write_orbax(tmp_path / "run", tree)
    out = tmp_path / "peft"
    out.mkdir()
    export_peft(item, AdapterFacts(RANK, 6.0, ("q", "k", "o", "down"), base="b"), model, engine, scanned, out)
    assert cases.unequal(cases.read_tensors(out), cases.peft_tensors(factors)) == []
    config_json = json.loads((out / "adapter_config.json").read_text())
    assert config_json["target_modules"] == ["q_proj", "k_proj", "o_proj", "down_proj"]
    assert (config_json["r"], config_json["lora_alpha"], config_json["base_model_name_or_path"]) == (RANK, 6, "b")
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_scale_that_is_no_power_of_two_is_undone_to_half_a_unit(tiny: Any, tmp_path: Path) -> None:
    model, config = load(tiny("head_dim_128"))
    tree = cases.engine_tree(cases.random_factors(config, RANK), config, "maxtext", True)
    path = "decoder.layers.self_attention.query.kernel_lora_b.value"
    # The first value that multiplying does not bring back; about one in seven is such.
    tree[path] = np.random.default_rng(3).uniform(1.5, 2.0, tree[path].shape).astype(np.float32)
    out = tmp_path / "peft"
    out.mkdir()
    facts = AdapterFacts(RANK, 6.0, cases.ALL)
    export_peft(cases.write_orbax(tmp_path / "run", tree), facts, model, "maxtext", True, out)
    scale = np.float64(np.float32(1 / np.sqrt(128)))
    row = tree[path][:, 0, :].reshape(RANK, -1, 64, 2).transpose(1, 3, 2, 0).reshape(-1, RANK)
    exact = row.astype(np.float64) / scale
    found = cases.read_tensors(out)["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert found.tobytes() == oracles.round_once(exact, np.float32).tobytes()
    assert (out / "bridge_rounding.safetensors").is_file()
    # Without the differences the way back is off by one unit, and only there.
    import_peft(out, model, "maxtext", True, tmp_path / "with")
    (out / "bridge_rounding.safetensors").unlink()
    import_peft(out, model, "maxtext", True, tmp_path / "without")
    kept = cases.read_orbax(tmp_path / "with" / "items")
    lost = cases.read_orbax(tmp_path / "without" / "items")
    assert cases.unequal(kept, tree) == []
    assert cases.unequal(lost, tree) == [path]
    assert np.abs(lost[path].view(np.int32) - tree[path].view(np.int32)).max() == 1


def test_differences_of_another_tensor_are_not_used(tiny: Any, tmp_path: Path) -> None:
    """An adapter that was trained on after its export has other values: the recorded differences are not its."""
    model, config = load(tiny("head_dim_128"))
    item = cases.write_orbax(
        tmp_path / "run", cases.engine_tree(cases.random_factors(config, RANK), config, "maxtext", True)
    )
    out = tmp_path / "peft"
    out.mkdir()
    export_peft(item, AdapterFacts(RANK, 6.0, cases.ALL), model, "maxtext", True, out)
    newer = cases.random_factors(config, RANK, seed=9)
    cases.write_tensors(out, cases.peft_tensors(newer))
    import_peft(out, model, "maxtext", True, tmp_path / "0")
    expected = cases.engine_tree(newer, config, "maxtext", True)
    assert cases.unequal(cases.read_orbax(tmp_path / "0" / "items"), expected) == []


@pytest.mark.parametrize(("engine", "scanned"), LAYOUTS)
def test_bf16_in_stays_bf16_but_for_the_scaled_query(engine: str, scanned: bool, tiny: Any, tmp_path: Path) -> None:
    model, config = load(tiny("head_dim_128"))
    factors = cases.random_factors(config, RANK, dtype=ml_dtypes.bfloat16)
    import_peft(cases.write_peft(tmp_path / "peft", factors, RANK, 6), model, engine, scanned, tmp_path / "0")
    expected = {
        path: array.astype(wide(engine, "q" if "query.kernel_lora_b" in path else "", array.dtype))
        for path, array in cases.engine_tree(factors, config, engine, scanned).items()
    }
    assert cases.unequal(cases.read_orbax(tmp_path / "0" / ITEMS[engine]), expected) == []


BROKEN = [
    (
        "a without b",
        lambda tree: tree.pop("layers.1.attn.k_proj.w_lora_b.value"),
        "missing.*layers.1.attn.k_proj.w_lora_b",
    ),
    (
        "a layer missing",
        lambda tree: [tree.pop(f"layers.2.mlp.up_proj.kernel_lora_{x}.value") for x in "ab"],
        "missing.*layers.2.mlp.up_proj.kernel_lora_a",
    ),
    (
        "rank differs",
        lambda tree: tree.update({"layers.0.attn.q_proj.w_lora_a.value": np.zeros((256, 4), np.float32)}),
        "layers.0.attn.q_proj.w_lora_a  has rank 4, others 3",
    ),
    (
        "shape differs",
        lambda tree: tree.update({"layers.0.attn.q_proj.w_lora_a.value": np.zeros((128, 3), np.float32)}),
        r"layers.0.attn.q_proj.w_lora_a  has \(128, 3\), the model needs \(256, 3\)",
    ),
    (
        "another module",
        lambda tree: tree.update({"lm_head.w_lora_a.value": np.zeros((256, 3), np.float32)}),
        "unexpected   lm_head.w_lora_a",
    ),
    (
        "a family missing",
        lambda tree: [tree.pop(k) for k in list(tree) if "v_proj" in k],
        "targets of the adapter.*v.*",
    ),
]


@pytest.mark.parametrize(("_what", "damage", "message"), BROKEN, ids=[case[0] for case in BROKEN])
def test_half_an_adapter_is_refused(_what: str, damage: Any, message: str, tiny: Any, tmp_path: Path) -> None:
    model, config = load(tiny("untied"))
    tree = cases.engine_tree(cases.random_factors(config, RANK), config, "tunix")
    damage(tree)
    item = cases.write_orbax(tmp_path / "run", tree)
    out = tmp_path / "peft"
    out.mkdir()
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        export_peft(item, AdapterFacts(RANK, 6.0, cases.ALL), model, "tunix", True, out)
    assert list(out.iterdir()) == []


def test_layout_mix_ups_are_refused(tiny: Any, tmp_path: Path) -> None:
    model, config = load(tiny("untied"))
    tree = cases.engine_tree(cases.random_factors(config, RANK), config, "maxtext", scanned=False)
    item = cases.write_orbax(tmp_path / "run", tree)
    with pytest.raises(CheckpointError, match=r"(?s)unexpected +decoder.layers_0.*layers stacked"):
        measure_checkpoint(item, model, "maxtext", True)
    full = cases.write_orbax(tmp_path / "full", {"embedder.input_embedding.value": np.zeros((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match="no LoRA adapters"):
        measure_checkpoint(full, model, "tunix", True)
    with pytest.raises(CheckpointError, match=r"rank of the adapter.*bridge.json: 8, the checkpoint's arrays: 3"):
        export_peft(item, AdapterFacts(8, 6.0, cases.ALL), model, "maxtext", False, tmp_path)


def test_what_maxtexts_own_loop_saves_is_read(tiny: Any, tmp_path: Path) -> None:
    """Under `params.params`, with optimizer state and step, and its settings in the step's metadata."""
    model, config = load(tiny("untied"))
    factors = cases.random_factors(config, RANK, targets=("q", "v"))
    weights = cases.engine_tree(factors, config, "maxtext", True)
    tree = {f"params.params.{path.removesuffix('.value')}": array for path, array in weights.items()}
    tree |= {f"opt_state.0.mu.{path}": array for path, array in tree.items()}
    item = cases.write_orbax(tmp_path / "run", {**tree, "step": np.array(5)}, "items")
    metadata = json.loads((tmp_path / "run" / "_CHECKPOINT_METADATA").read_text())
    settings = {"enable_lora": True, "lora_rank": RANK, "lora_alpha": 6.0, "lora_weight_qtype": None}
    metadata["custom_metadata"] = {"scan_layers": True, "lora": settings}
    (tmp_path / "run" / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))
    recorded = recorded_by_engine(item)
    assert recorded == {"rank": RANK, "alpha": 6.0}
    measured = measure_checkpoint(item, model, "maxtext", True)
    facts = facts_from_options(None, None, None, engine=recorded, measured=measured)
    assert facts == AdapterFacts(RANK, 6.0, ("q", "v"))
    with pytest.raises(CheckpointError, match=r"alpha .*the option: 7, the checkpoint's own metadata: 6"):
        facts_from_options(None, 7, None, engine=recorded, measured=measured)
    out = tmp_path / "peft"
    out.mkdir()
    export_peft(item, facts, model, "maxtext", True, out)
    assert cases.unequal(cases.read_tensors(out), cases.peft_tensors(factors)) == []


def test_a_damaged_file_of_differences_is_named(tiny: Any, tmp_path: Path) -> None:
    model, config = load(tiny("mha"))
    adapter = cases.write_peft(tmp_path / "peft", cases.random_factors(config, RANK), RANK, 6)
    (adapter / "bridge_rounding.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(CheckpointError, match=r"bridge_rounding.safetensors cannot be read"):
        import_peft(adapter, model, "maxtext", True, tmp_path / "0")
    assert not (tmp_path / "0").exists()
