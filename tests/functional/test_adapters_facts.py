"""Facts of an adapter: JSON, options, PEFT configs; what an engine cannot express is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import adapter_cases as cases
import numpy as np
import pytest

from bridge.converters.adapters import AdapterFacts, facts_from_options, import_peft
from bridge.errors import BridgeError, CheckpointError, UnsupportedError
from bridge.model_spec import ModelSpec

RANK = 2
QLORA = AdapterFacts(16, 32.0, ("q", "v"), "nf4", 32, "meta-llama/Llama-3.1-8B", "bfloat16")


def test_facts_survive_json() -> None:
    assert AdapterFacts.from_json(json.loads(json.dumps(QLORA.to_json()))) == QLORA
    assert QLORA.scale == 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank: 0"),
        ({"alpha": float("nan")}, "alpha: nan"),
        ({"alpha": "32"}, "alpha: '32'"),
        ({"targets": ["v", "q"]}, "in order"),
        ({"targets": ["q", "lm_head"]}, "lm_head"),
        ({"targets": []}, "targets"),
        ({"quantization": "int8"}, "int8"),
        ({"tile_size": None}, "tile_size: None, with quantization 'nf4'"),
        ({"base_dtype": "int8"}, "base_dtype: 'int8'"),
        ({"scale": 2.0}, "unknown: scale"),
    ],
)
def test_damaged_facts_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        AdapterFacts.from_json({**QLORA.to_json(), **change})


def test_missing_facts_are_named() -> None:
    with pytest.raises(CheckpointError, match="missing: alpha"):
        AdapterFacts.from_json({"rank": 4, "targets": ["q"]})


def test_options_complete_a_foreign_checkpoint() -> None:
    facts = facts_from_options(None, 32, None, measured=(16, ("q", "v")), base="b")
    assert facts == AdapterFacts(16, 32, ("q", "v"), base="b")
    assert facts_from_options(8, 16.0, ["v", "q"]) == AdapterFacts(8, 16.0, ("q", "v"))
    with pytest.raises(CheckpointError, match=r"(?s)no bridge.json that says alpha.*--alpha ALPHA"):
        facts_from_options(None, None, None, measured=(16, ("q", "v")))


def test_what_is_recorded_needs_no_option_and_beats_none() -> None:
    assert facts_from_options(None, None, None, recorded=QLORA) == QLORA
    assert facts_from_options(16, 32, ("q", "v"), recorded=QLORA, base="/local/base").base == "/local/base"
    with pytest.raises(CheckpointError, match=r"alpha of the adapter .*the option: 16, bridge.json: 32"):
        facts_from_options(None, 16, None, recorded=QLORA)
    with pytest.raises(CheckpointError, match=r"rank of the adapter .*the option: 8, bridge.json: 16"):
        facts_from_options(8, None, None, recorded=QLORA)
    with pytest.raises(
        CheckpointError, match=r"targets of the adapter .*bridge.json: q, v, the checkpoint's arrays: q"
    ):
        facts_from_options(None, None, None, recorded=QLORA, measured=(16, ("q",)))
    plain = AdapterFacts(16, 32.0, ("q", "v"))
    with pytest.raises(CheckpointError, match=r"quantization .*the option: nf4, bridge.json: none"):
        facts_from_options(None, None, None, recorded=plain, quantization="nf4", tile_size=32)
    with pytest.raises(UnsupportedError, match="lm_head"):
        facts_from_options(8, 16, ["q", "lm_head"])


@pytest.fixture
def case(tiny: Any, tmp_path: Path) -> tuple[ModelSpec, cases.Factors, Path]:
    folder = tiny("mha")
    config = json.loads((folder / "config.json").read_text())
    return ModelSpec.from_folder(folder), cases.random_factors(config, RANK), tmp_path / "peft"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 5}),
        ("layers_to_transform", [0]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [5]),
        ("alora_invocation_tokens", [1]),
        ("loftq_config", {"loftq_bits": 4}),
        ("lora_bias", True),
        ("use_qalora", True),
        ("some_future_option", 1),
        ("peft_type", "IA3"),
    ],
)
def test_what_an_engine_cannot_express_is_refused_by_name(key: str, value: Any, case: Any, tmp_path: Path) -> None:
    model, factors, folder = case
    cases.write_peft(folder, factors, RANK, 4, **{key: value})
    with pytest.raises(UnsupportedError, match=key):
        import_peft(folder, model, "tunix", True, tmp_path / "0")
    assert not (tmp_path / "0").exists()


def test_what_changes_nothing_is_accepted(case: Any, tmp_path: Path) -> None:
    model, factors, folder = case
    harmless = {
        "rank_pattern": {"q_proj": RANK},
        "alpha_pattern": {},
        "layers_to_transform": list(range(model.layers)),
        "modules_to_save": None,
        "lora_dropout": 0.1,
        "init_lora_weights": "gaussian",
        "target_modules": r".*\.(q|k|v|o|gate|up|down)_proj",
        "peft_version": "0.13.0",
        "loftq_config": {},
    }
    cases.write_peft(folder, factors, RANK, 4, **harmless)
    assert import_peft(folder, model, "tunix", True, tmp_path / "0").targets == cases.ALL


def test_excluded_modules_are_not_missed(case: Any, tmp_path: Path) -> None:
    """PEFT leaves the list of targets as it was typed, and the excluded ones without factors."""
    model, factors, folder = case
    kept = {key: value for key, value in factors.items() if key[1] != "v"}
    listed = {"target_modules": [f"{target}_proj" for target in cases.ALL]}
    cases.write_peft(folder, kept, RANK, 4, **listed)
    with pytest.raises(CheckpointError, match="the tensors are of q, k, o, gate, up, down"):
        import_peft(folder, model, "tunix", True, tmp_path / "0")
    cases.write_peft(folder, kept, RANK, 4, **listed, exclude_modules=["v_proj"])
    assert "v" not in import_peft(folder, model, "tunix", True, tmp_path / "0").targets


def test_rslora_becomes_the_alpha_of_the_same_scale(case: Any, tmp_path: Path) -> None:
    model, factors, folder = case
    cases.write_peft(folder, factors, RANK, 4, use_rslora=True)
    facts = import_peft(folder, model, "maxtext", True, tmp_path / "0")
    assert facts.scale == pytest.approx(4 / math.sqrt(RANK), rel=1e-15)
    metadata = json.loads((tmp_path / "0" / "_CHECKPOINT_METADATA").read_text())
    assert metadata["custom_metadata"]["lora"] == {"lora_rank": RANK, "lora_alpha": facts.alpha}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda t: t.pop("base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"),
            r"missing.*1.*q_proj.lora_B",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)}),
            "base_model.model.lm_head.weight",
        ),
        (
            lambda t: t.update({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((4, 64))}),
            r"q_proj.lora_A.weight  has \(4, 64\), rank 2 needs \(2, 64\)",
        ),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": np.zeros((2, 64)),
                }
            ),
            r"unexpected.*layers.9",
        ),
        (lambda t: [t.pop(k) for k in list(t) if "up_proj" in k], "the tensors are of q, k, v, o, gate, down"),
        (
            lambda t: t.update(
                {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": np.zeros(64, np.float32)}
            ),
            "lora_magnitude_vector",
        ),
    ],
)
def test_half_or_strange_tensors_are_refused(damage: Any, message: str, case: Any, tmp_path: Path) -> None:
    model, factors, folder = case
    cases.write_peft(folder, factors, RANK, 4)
    tensors = cases.read_tensors(folder)
    damage(tensors)
    cases.write_tensors(folder, tensors)
    with pytest.raises(BridgeError, match=f"(?s){message}"):
        import_peft(folder, model, "tunix", True, tmp_path / "0")
    assert not (tmp_path / "0").exists()


def test_folders_that_are_no_adapters(case: Any, tmp_path: Path) -> None:
    model, _, folder = case
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors"):
        import_peft(folder, model, "tunix", True, tmp_path / "0")
    (folder / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickled"):
        import_peft(folder, model, "tunix", True, tmp_path / "0")


def test_a_recorded_quantization_comes_along_and_may_not_disagree(case: Any, tmp_path: Path) -> None:
    model, factors, folder = case
    cases.write_peft(folder, factors, RANK, 4)
    recorded = AdapterFacts(RANK, 4.0, cases.ALL, "nf4", 16, "older/base", "bfloat16")
    (folder / "bridge.json").write_text(json.dumps({"adapter": recorded.to_json()}))
    facts = import_peft(folder, model, "tunix", True, tmp_path / "0")
    assert (facts.quantization, facts.tile_size, facts.base_dtype) == ("nf4", 16, "bfloat16")
    (folder / "bridge.json").write_text(json.dumps({"adapter": {**recorded.to_json(), "alpha": 8.0}}))
    with pytest.raises(CheckpointError, match=r"alpha.*8.*4"):
        import_peft(folder, model, "tunix", True, tmp_path / "1")
