"""MaxText's YAML, to the letter; and as MaxText's own loader reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from golden_types import Golden

from bridge.configs.maxtext import Place, render
from bridge.errors import SpecError, UnsupportedError
from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec, RopeScaling
from bridge.run_spec import RunSpec, parse

LLAMA31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
LLAMA32 = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)


def model(**changes: Any) -> ModelSpec:
    """Llama 3.1 8B, with changes."""
    facts: dict[str, Any] = {
        "layers": 32,
        "embed": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "mlp": 14336,
        "vocab": 128256,
        "tied": False,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA31,
        "norm_eps": 1e-5,
        "context": 131072,
        "dtype": "bfloat16",
    }
    return ModelSpec(**{**facts, **changes})


def place(**changes: Any) -> Place:
    values: dict[str, Any] = {
        "run_name": "maxtext-sft",
        "runs_dir": "/w/runs",
        "checkpoint": "/w/checkpoints/maxtext/0/items",
        "tokenizer": "/w/checkpoints/maxtext/hf",
        "scanned": True,
        "hardware": "gpu",
        "train_files": ("/w/train.jsonl",),
    }
    return Place(**{**values, **changes})


def spec(text: str = "") -> RunSpec:
    return parse("model: {source: m}\n" + text)


CASES: dict[str, tuple[RunSpec, ModelSpec, Mesh, Place]] = {
    "llama3.1-8b": (spec(), model(), Mesh(1, 8, 1), place()),
    "llama3.2-1b-tied-unscanned": (
        spec("data: {eval: e.jsonl, packing: true, loss_on: all}\ntrain: {schedule: {kind: constant}, dtype: float32}"),
        model(layers=16, embed=2048, kv_heads=8, head_dim=64, mlp=8192, tied=True, rope_scaling=LLAMA32),
        Mesh(1, 2, 2),
        place(scanned=False, hardware="cpu"),
    ),
    "qlora": (
        spec("train: {method: qlora}\nlora: {rank: 8, targets: [q, v, down]}"),
        model(),
        Mesh(1, 1, 1),
        place(run_name="maxtext-qlora"),
    ),
    "dpo": (
        spec("train: {method: dpo}\ndata: {column: null}\npreference: {beta: 0.2}"),
        model(),
        Mesh(1, 8, 1),
        place(run_name="maxtext-dpo"),
    ),
    "overrides": (
        spec("maxtext: {remat_policy: minimal, async_checkpointing: false}"),
        model(rope_scaling=None, rope_theta=10000.0),
        Mesh(2, 4, 1),
        place(run_name='odd "name" $(x)', train_files=("/w/a b.jsonl", "/w/ü.jsonl")),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name: str, golden: Golden) -> None:
    golden(f"maxtext/{name}.yml", render(*CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_yaml_has_each_key_once_and_reads_back(name: str) -> None:
    run, facts, mesh, where = CASES[name]
    text = render(run, facts, mesh, where)
    keys = [line.split(":")[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert len(keys) == len(set(keys))
    values = yaml.safe_load(text)
    assert values["run_name"] == where.run_name
    assert values["hf_train_files"] == ",".join(where.train_files)
    assert values["learning_rate"] == run.train.learning_rate
    assert values["normalization_layer_epsilon"] == facts.norm_eps
    assert values["rope_type"] == "llama3.1"
    assert values["rope_use_scale"] == (facts.rope_scaling is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_maxtext_accepts_it(name: str, tmp_path: Path) -> None:
    """MaxText's schema refuses unknown keys, so every key here is one of its own, of the right type."""
    from maxtext.configs import pyconfig

    run, facts, _, where = CASES[name]
    text = render(run, facts, Mesh(1, 1, 1), Place(**{**vars(where), "runs_dir": str(tmp_path), "hardware": "cpu"}))
    path = tmp_path / "config.yml"
    path.write_text(text)
    config = pyconfig.initialize_pydantic(["", str(path)])
    assert config.emb_dim == facts.embed
    assert config.num_kv_heads == facts.kv_heads
    assert config.logits_via_embedding == facts.tied
    assert config.scan_layers == where.scanned
    assert config.use_sft == (run.train.method not in ("dpo", "orpo"))
    assert config.use_dpo != config.use_sft
    assert config.lora.enable_lora == (run.train.method == "qlora")
    assert config.steps == run.train.steps
    path.write_text(text + "remat_polcy: minimal\n")
    with pytest.raises(Exception, match="remat_polcy"):
        pyconfig.initialize_pydantic(["", str(path)])


def test_refuses_what_it_owns_and_what_it_cannot() -> None:
    with pytest.raises(SpecError) as error:
        render(spec("maxtext: {rope_type: yarn, steps: 3}"), model(), Mesh(1, 1, 1), place())
    assert "maxtext.rope_type: comes from the model's config.json" in str(error.value)
    assert "maxtext.steps: comes from train.steps" in str(error.value)
    with pytest.raises(UnsupportedError, match=r"lora.dropout 0.1 on maxtext"):
        render(spec("train: {method: lora}\nlora: {dropout: 0.1}"), model(), Mesh(1, 1, 1), place())


def test_nf4_tiles_must_fit_what_is_quantized() -> None:
    """MaxText quantizes the targets; of these the output projection alone is cut along head_dim."""
    shape = model(head_dim=16, embed=4096)
    text = "train: {method: qlora}\nlora: {targets: [TARGETS]}"
    with pytest.raises(UnsupportedError, match="tiles of 32") as error:
        render(spec(text.replace("TARGETS", "q, o")), shape, Mesh(1, 1, 1), place())
    assert error.value.details == ("head_dim 16 is no multiple of 32",)
    fitting = yaml.safe_load(render(spec(text.replace("TARGETS", "q, down")), shape, Mesh(1, 1, 1), place()))
    assert fitting["lora"]["lora_tile_size"] == 32
    with pytest.raises(UnsupportedError, match="tiles of 32"):
        render(spec(text.replace("TARGETS", "q, down")), model(mlp=14340), Mesh(1, 1, 1), place())


def test_what_bridge_json_records_cannot_be_set_behind_its_back() -> None:
    """An export takes alpha, dtype and quantization from bridge.json, which has them from the spec."""
    text = "train: {method: lora}\nmaxtext: {dtype: float32, lora.lora_alpha: 9, lora: {lora_rank: 3, lora_alpha: 7}}"
    with pytest.raises(SpecError) as error:
        render(spec(text), model(), Mesh(1, 1, 1), place())
    assert error.value.details == (
        "maxtext.dtype: comes from train.dtype",
        "maxtext.lora.lora_alpha: write it below maxtext.lora",
        "maxtext.lora.lora_rank: comes from lora.rank",
        "maxtext.lora.lora_alpha: comes from lora.alpha",
    )
    with pytest.raises(SpecError, match="bridge sets these"):
        render(spec("maxtext: {lora: {enable_lora: true}}"), model(), Mesh(1, 1, 1), place())
    with pytest.raises(SpecError) as error:
        render(spec("maxtext: {lora: 3}"), model(), Mesh(1, 1, 1), place())
    assert error.value.details == ("maxtext.lora: 3 is no mapping",)


def test_an_adapter_to_go_on_from_joins_the_others_settings(tmp_path: Path) -> None:
    from maxtext.configs import pyconfig

    more = "maxtext: {lora: {lora_restore_path: /w/adapter/0/items}, log_config: false}"
    run = spec(f"train: {{method: lora}}\ncluster: {{hardware: cpu}}\n{more}")
    text = render(run, model(), Mesh(1, 1, 1), place(hardware="cpu", runs_dir=str(tmp_path)))
    (tmp_path / "config.yml").write_text(text)
    config = pyconfig.initialize_pydantic(["", str(tmp_path / "config.yml")])
    assert (config.lora.lora_rank, config.lora.lora_alpha) == (16, 32.0)
    assert str(config.lora.lora_restore_path) == "/w/adapter/0/items"
