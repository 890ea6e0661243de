"""MaxText's own converters, in processes of their own, on a tiny model: what bridge is compared with.

    by_maxtext(source)             its conversion of a Hugging Face folder
    exported_by_maxtext(item, ...) its export of a checkpoint that bridge wrote

Its converter takes sizes from a table of known models: the entry of Llama 3.1 8B is replaced by the model's own.
Run as a program: SOURCE OUT, and it writes OUT/scanned and OUT/unscanned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import oracles


def by_maxtext(source: Path) -> dict[bool, Path]:
    """MaxText's float32 conversions of a Hugging Face folder, scanned and not: the step folders. Made once a folder."""
    out = source.parent / f"{source.name}-by-maxtext"
    if not out.exists():
        _run(__file__, source, out)
    return {True: out / "scanned" / "0", False: out / "unscanned" / "0"}


def exported_by_maxtext(item: Path, source: Path, out: Path, *, scanned: bool) -> Path:
    """MaxText's own export, in float32, of the checkpoint in `item`; `source` has its sizes and its tokenizer."""
    arguments = {**_settings(source, scanned), "load_parameters_path": item, "base_output_directory": out}
    settings = [f"{key}={value}" for key, value in {**arguments, "weight_dtype": "float32"}.items()]
    flags = ["--override_model_architecture", f"--hf_model_path={source}"]
    _run("-m", "maxtext.checkpoint_conversion.to_huggingface", *settings, *flags)
    return out


def _run(*argv: object) -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parent)}
    arguments = [sys.executable, *map(str, argv)]
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"MaxText's converter failed: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def _settings(source: Path, scanned: bool) -> dict[str, object]:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {
        "model_name": "llama3.1-8b",
        "override_model_config": True,
        "base_emb_dim": config["hidden_size"],
        "base_num_query_heads": config["num_attention_heads"],
        "base_num_kv_heads": oracles.kv_heads_of(config),
        "base_num_decoder_layers": config["num_hidden_layers"],
        "base_mlp_dim": config["intermediate_size"],
        "head_dim": oracles.head_dim_of(config),
        "vocab_size": config["vocab_size"],
        "logits_via_embedding": config["tie_word_embeddings"],
        "scan_layers": scanned,
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
    }


def main(source: Path, out: Path) -> None:
    """Convert twice with MaxText's converter."""
    from maxtext.checkpoint_conversion import to_maxtext
    from transformers import LlamaConfig

    to_maxtext.HF_MODEL_CONFIGS["llama3.1-8b"] = LlamaConfig.from_pretrained(source)
    for name, scanned in (("scanned", True), ("unscanned", False)):
        arguments = {**_settings(source, scanned), "base_output_directory": out / name}
        to_maxtext.main(
            ["to_maxtext", *(f"{key}={value}" for key, value in arguments.items())],
            lazy_load_tensors=False,
            hf_model_path=str(source),
            save_dtype="float32",
            simulated_cpu_devices_count=1,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
