"""The demo's model: made once, loaded offline by transformers, and what it must be."""

from __future__ import annotations

import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from bridge.demo import model as demo_model
from bridge.demo.answers import answer
from bridge.demo.model import clean_config, ensure_model, folder_faults, repair_tokenizer, tokenizer_config
from bridge.errors import CheckpointError, MissingDependency, OutputError
from bridge.model_spec import ModelSpec


def test_the_folder_loads_offline_and_answers(smollm2_folder: Path) -> None:
    answers = answer(smollm2_folder, ["What is the capital of France?"], max_new_tokens=24)
    assert answers == ["The capital of France is Paris."]  # measured; shows that the turn's end stops it


def test_answers_are_cut_at_the_limit(smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    (text,) = answer(smollm2_folder, ["What is the capital of France?"], max_new_tokens=3)
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    assert text == "The capital of"
    assert len(tokenizer(text).input_ids) == 3


def test_the_weights_are_a_bfloat16_llama_with_a_tied_head(smollm2_folder: Path) -> None:
    import safetensors
    import torch

    opened: Any = safetensors.safe_open  # has no types
    with opened(smollm2_folder / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert weights.metadata() == {"format": "pt"}
        assert {weights.get_tensor(name).dtype for name in names} == {torch.bfloat16}
        assert weights.get_slice("model.layers.29.self_attn.k_proj.weight").get_shape() == [192, 576]
    layer = {name.removeprefix("model.layers.0.") for name in names if name.startswith("model.layers.0.")}
    assert len(layer) == 9
    rest = {"model.embed_tokens.weight", "model.norm.weight"}
    assert names == rest | {f"model.layers.{index}.{part}" for index in range(30) for part in layer}


def test_the_config_says_what_the_hub_says_of_this_model(smollm2_folder: Path) -> None:
    config = json.loads((smollm2_folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert (config["rope_theta"], config["rope_parameters"]["rope_theta"]) == (100000.0, 100000.0)
    assert (config["dtype"], config["torch_dtype"], config["tie_word_embeddings"]) == ("bfloat16", "bfloat16", True)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not [key for key in config if key.endswith("name_or_path")]
    generation = json.loads((smollm2_folder / "generation_config.json").read_text())
    for values in (config, generation):
        assert [values[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 2]
    # 134,515,008 is the parameter count that the model's page on the hub gives.
    assert ModelSpec.from_folder(smollm2_folder).parameters == 134_515_008


def test_transformers_reads_the_config_as_this_model(smollm2_folder: Path) -> None:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(smollm2_folder, local_files_only=True)
    assert (config.hidden_size, config.num_hidden_layers, config.rms_norm_eps) == (576, 30, 1e-05)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert str(config.dtype) == "torch.bfloat16"


def test_the_tokenizer_ends_turns_splits_digits_and_gives_every_text_back(smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    # llama.cpp's rule for this vocabulary: digits first, so the two spaces stay together (written by hand).
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    text = "A “line” — with ▁, é and 3 . It 's kept"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert chat == system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_second_call_leaves_the_folder_alone(smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Path:
        raise AssertionError("a complete folder needs no package")

    monkeypatch.setattr(demo_model, "obtain_gguf", refuse)
    before = {path.name: path.stat().st_mtime_ns for path in smollm2_folder.iterdir()}
    assert ensure_model(smollm2_folder) == smollm2_folder
    assert {path.name: path.stat().st_mtime_ns for path in smollm2_folder.iterdir()} == before


@pytest.mark.parametrize("broken", ["missing", "truncated", "no header", "other model"])
def test_an_incomplete_folder_is_not_taken(smollm2_folder: Path, tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in smollm2_folder.iterdir():
        (folder / path.name).symlink_to(path)
    assert folder_faults(folder) == []
    name = "config.json" if broken == "other model" else "model.safetensors"
    (folder / name).unlink()
    if broken == "truncated":
        with (smollm2_folder / name).open("rb") as whole:
            (folder / name).write_bytes(whole.read(1 << 20))
    elif broken == "no header":
        (folder / name).write_bytes(b"\xff" * 64)
    elif broken == "other model":
        config = json.loads((smollm2_folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    with pytest.raises(OutputError, match="not the demo's model") as caught:
        ensure_model(folder)
    assert name in str(caught.value)


def test_a_folder_with_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="not the demo's model"):
        ensure_model(tmp_path / "model")
    assert (tmp_path / "model" / "thesis.txt").read_text() == "mine"


def test_a_file_in_the_way_of_the_parent_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        ensure_model(tmp_path / "file" / "model")


def test_gguf_floats_become_the_decimals_they_were() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    loaded = {
        "model_type": "llama",
        "num_attention_heads": 2,
        "rms_norm_eps": 9.999999747378752e-06,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "_model_name_or_path": "somewhere",
        **sizes,
    }
    config = clean_config(loaded)
    assert config["rms_norm_eps"] == 1e-05
    assert (config["rope_theta"], config["rope_scaling"]) == (5e5, None)
    assert "_model_name_or_path" not in config


def test_the_repair_puts_back_the_splitting_of_digits(smollm2_folder: Path) -> None:
    """The cached folder would hide a broken repair, so the fault of transformers 5.12.1 is made again here."""
    from tokenizers import Tokenizer

    good = json.loads((smollm2_folder / "tokenizer.json").read_text(encoding="utf-8"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    faulty = {**good, "pre_tokenizer": byte_level}

    def tokens(tokenizer: dict[str, Any]) -> list[str]:
        return list(Tokenizer.from_str(json.dumps(tokenizer)).encode("a  12").tokens)

    assert tokens(faulty) == ["a", "Ġ", "Ġ", "1", "2"]
    assert tokens(repair_tokenizer(faulty)) == ["a", "ĠĠ", "1", "2"]
    assert tokenizer_config(faulty)["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("package", ["torch", "gguf"])
def test_a_missing_package_is_named_before_any_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, within: str | None = None) -> ModuleSpec | None:
        return None if name == package else real(name, within)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(MissingDependency, match=package) as caught:
        ensure_model(tmp_path / "model")
    assert "bridge-llama[demo]" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_answers_need_a_model_with_a_chat_template(smollm2_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        answer(tmp_path, ["Hi"])
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(smollm2_folder / name)
    with pytest.raises(CheckpointError, match="no chat template"):
        answer(tmp_path, ["Hi"])
