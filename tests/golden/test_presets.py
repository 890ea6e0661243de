"""Every preset, as its engine gets it, to the letter; the published recipes, as their authors published them."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import documents
import pytest
import yaml
from checkpoints import run
from golden_types import Golden
from hf_configs import LLAMA3, OLD

from bridge import run_spec
from bridge.commands.init import presets
from bridge.commands.prepared import prepare
from bridge.commands.workspace import Workspace
from bridge.model_spec import ModelSpec
from bridge.options import Option, options, parse_devices

PRESETS = presets()
# The config.json of each model, as far as it differs from Llama 3.1 8B's; from the models' pages on the hub.
LLAMA32 = {"rope_scaling": {**LLAMA3, "factor": 32.0}, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {},
    "llama3.1-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama3.2-1b": {
        **LLAMA32,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
    },
    "llama3.2-3b": {
        **LLAMA32,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
PARAMETERS = {  # as the models' pages state them
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
}


def model_of(preset: str) -> str:
    return max((name for name in MODELS if preset.startswith(name)), key=len)


@pytest.fixture
def open_preset(tmp_path: Path) -> Any:
    """The workspace of a preset whose model lies beside it: only its config.json, which is all that rendering reads."""

    def build(preset: str, *overrides: str) -> Workspace:
        hf = tmp_path / "hf"
        hf.mkdir(exist_ok=True)
        (hf / "config.json").write_text(json.dumps({**OLD, **MODELS[model_of(preset)]}))
        (tmp_path / "bridge.yaml").write_text(PRESETS[preset])
        one = () if "devices:" in PRESETS[preset] else ("cluster.hardware=gpu", "cluster.devices=1")
        return Workspace.open(tmp_path / "bridge.yaml", ("model.source=hf", "model.tokenizer=hf", *one, *overrides))

    return build


@pytest.mark.parametrize("preset", PRESETS)
def test_the_engine_gets(preset: str, open_preset: Any, tmp_path: Path, golden: Golden) -> None:
    workspace = open_preset(preset)
    prepared = prepare(workspace, workspace.run.engine, None, None)
    text = prepared.text.replace(str(tmp_path), "/w").replace(sys.executable, "python")
    text = text.partition("\n\n\ndef main")[0]  # what a Tunix program does is in test_tunix_program.py
    # The last bit of a frequency hangs on the machine's `pow`; tests/unit/test_rope.py has them.
    text = re.sub(r"FREQUENCIES = \(.*?\n\)", "FREQUENCIES = (...)", text, flags=re.DOTALL)
    golden(f"presets/{preset}.txt", text)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_other_engine_takes_it_too(preset: str, open_preset: Any) -> None:
    workspace = open_preset(preset)
    other = {"maxtext": "tunix", "tunix": "maxtext"}[workspace.run.engine]
    prepared = prepare(workspace, other, None, None)
    if other == "maxtext":
        assert yaml.safe_load(prepared.text)["steps"] == workspace.run.train.steps
    else:
        ast.parse(prepared.text)
        assert f'"steps": {workspace.run.train.steps}' in prepared.text


def test_the_sizes_are_the_models() -> None:
    for name, changes in MODELS.items():
        assert ModelSpec.from_hf_config({**OLD, **changes}).parameters == PARAMETERS[name]


def test_the_list_has_one_line_a_preset() -> None:
    lines = run("init", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted(PRESETS)
    assert all(40 < len(line.partition(" ")[2].strip()) <= 120 for line in lines), lines
    wanted = {"8b-sft", "8b-lora", "8b-qlora", "8b-dpo", "70b-sft"}
    assert {f"llama3.1-{name}" for name in wanted} | {"llama3.2-1b-sft", "llama3.2-3b-sft"} <= set(PRESETS)


@pytest.mark.parametrize(
    ("preset", "says"),
    [
        (
            "smollm2-135m",
            "put the model's folder at model; put your data in data/train.jsonl; then: bridge convert --to",
        ),
        ("llama3.1-8b-qlora", "bridge.yaml; then: bridge convert --to tunix && bridge launch qlora\n"),
        (
            "llama3.2-1b-sft",
            "put your data in data/train.jsonl; then: bridge convert --to maxtext && bridge launch sft\n",
        ),
    ],
)
def test_init_says_what_is_next(preset: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in run("init", preset).stderr
    assert (tmp_path / "bridge.yaml").read_text() == PRESETS[preset]


def notebook() -> str:
    """MaxText's own notebook of SFT on GPUs, from its wheel."""
    cells = json.loads(_of_maxtext("examples/sft_llama3_demo_gpu.ipynb"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_sft_is_the_recipe_of_maxtexts_notebook() -> None:
    text = notebook()
    published = dict(re.findall(r'^ +f?"(\w+)=([^"{}]+)",$', text, re.MULTILINE))
    base = yaml.safe_load(_of_maxtext("configs/post_train/sft.yml")) | published
    spec = run_spec.parse(PRESETS["llama3.1-8b-sft"])
    assert spec.train.steps == int(published["steps"]) == 100
    assert spec.train.sequence_length == int(published["max_target_length"]) == 1024
    assert spec.train.batch_per_device == int(published["per_device_batch_size"])
    assert spec.train.learning_rate == float(published["learning_rate"])
    assert spec.train.dtype == published["dtype"] == "bfloat16"
    assert spec.data.train == published["hf_path"] == "HuggingFaceH4/ultrachat_200k"
    assert spec.model.tokenizer == re.findall(r'TOKENIZER_PATH = "(.+)"', text)[0]
    assert (spec.data.split, spec.data.packing) == (base["train_split"], base["packing"])
    assert (spec.data.loss_on == "completion") == base["sft_train_on_completion_only"]
    defaults = yaml.safe_load(_of_maxtext("configs/base.yml"))
    assert spec.train.schedule.warmup == defaults["warmup_steps_fraction"]
    assert spec.train.schedule.final == defaults["learning_rate_final_fraction"]
    assert spec.train.weight_decay == defaults["adam_weight_decay"]
    # The one number that is not the recipe's, on purpose; the preset says why.
    assert published["weight_dtype"] == "bfloat16"
    assert spec.train.weight_dtype == "auto"
    assert "Weights are kept in float32" in PRESETS["llama3.1-8b-sft"]


def _of_maxtext(name: str) -> str:
    """A file of the installed MaxText, without importing it."""
    found = importlib.util.find_spec("maxtext")
    assert found is not None
    assert found.submodule_search_locations is not None
    return (Path(next(iter(found.submodule_search_locations))) / name).read_text(encoding="utf-8")


def test_qlora_is_the_recipe_that_tunix_publishes() -> None:
    """Source: google/tunix, examples/qlora_llama3_gpu.ipynb, August 2026; it is in no wheel."""
    spec = run_spec.parse(PRESETS["llama3.1-8b-qlora"])
    train, lora = spec.train, spec.lora
    assert (spec.model.source, spec.model.tokenizer) == (
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
    )
    assert (train.method, lora.rank, lora.alpha, lora.tile_size, len(lora.targets)) == ("qlora", 16, 32.0, 32, 7)
    assert (train.batch_per_device, train.sequence_length, train.steps, train.eval_every) == (2, 512, 100, 25)
    assert (train.learning_rate, train.schedule.kind, train.schedule.warmup) == (1e-4, "constant", 0.0)
    assert train.weight_decay == 1e-4  # optax.adamw's default
    assert spec.data.train == "HuggingFaceH4/ultrachat_200k:train_sft[:2000]"
    assert spec.data.eval == "HuggingFaceH4/ultrachat_200k:test_sft[:200]"


def way(preset: str) -> Option:
    """What `bridge plan` says of a preset on the devices that its first line names."""
    spec = run_spec.parse(PRESETS[preset])
    found = re.search(r"(?:(\d+) hosts of )?(?:(\d+) x |one )(\d+) GB", PRESETS[preset].splitlines()[0])
    assert found is not None
    devices = parse_devices(f"{found[1] or 1}x{found[2] or 1}x{found[3]}GB")
    model = ModelSpec.from_hf_config({**OLD, **MODELS[model_of(preset)]})
    ways = {(option.engine, option.method): option for option in options(model, spec, devices)}
    return ways[spec.engine, spec.train.method]


@pytest.mark.parametrize("preset", [name for name, text in PRESETS.items() if " GB" in text.splitlines()[0]])
def test_it_fits_the_devices_it_names(preset: str) -> None:
    option = way(preset)
    assert option.fits, option.reason
    assert "memory_fraction" not in option.reason


def test_the_readmes_memory_is_the_plans() -> None:
    rows = re.findall(r"^\| `(llama\S+)` \| (.+) \|$", documents.read("README.md"), re.MULTILINE)
    assert len(rows) == 4
    for preset, said in rows:
        train, option = run_spec.parse(PRESETS[preset]).train, way(preset)
        assert option.memory is not None
        assert said.split(" | ")[:2] == [
            f"{train.batch_per_device} x {train.sequence_length} tokens",
            f"{option.memory.total / 1e9:.1f} GB",
        ]
        gpu, longest = said.split(" | ")[2:]
        assert f" {gpu}" in PRESETS[preset].splitlines()[0]
        assert longest == f"{option.longest} tokens"
