"""The other tools that do the same work, each in a process of its own.

    python benchmarks/peers.py maxtext SOURCE OUT lazy|eager   MaxText's to_maxtext
    python benchmarks/peers.py tunix SOURCE OUT                Tunix's safetensors loader and Orbax's saver

MaxText's converter takes a model's sizes from a table of known models: the entry of Llama 3.1 8B is replaced by the
folder's own, which changes no step of its work.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from measure import Cost, measure


def maxtext_settings(source: Path) -> dict[str, object]:
    """The settings that describe a model folder to MaxText's converters."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {
        "model_name": "llama3.1-8b",
        "override_model_config": True,
        "base_emb_dim": config["hidden_size"],
        "base_num_query_heads": config["num_attention_heads"],
        "base_num_kv_heads": config["num_key_value_heads"],
        "base_num_decoder_layers": config["num_hidden_layers"],
        "base_mlp_dim": config["intermediate_size"],
        "head_dim": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "logits_via_embedding": config["tie_word_embeddings"],
        "scan_layers": True,
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
    }


def _patched(source: Path) -> None:
    from maxtext.checkpoint_conversion.utils import hf_model_configs
    from transformers import LlamaConfig

    hf_model_configs.HF_MODEL_CONFIGS["llama3.1-8b"] = LlamaConfig.from_pretrained(source)


def maxtext(source: Path, out: Path, lazy: bool) -> None:
    """MaxText's own conversion; 16 simulated devices where it reads lazily, since one fails with Orbax 0.12."""
    from maxtext.checkpoint_conversion import to_maxtext

    _patched(source)
    arguments = {**maxtext_settings(source), "base_output_directory": out}
    to_maxtext.main(
        ["to_maxtext", *(f"{key}={value}" for key, value in arguments.items())],
        lazy_load_tensors=lazy,
        hf_model_path=str(source),
        save_dtype="bfloat16",
        simulated_cpu_devices_count=16 if lazy else 1,
    )


def maxtext_export(item: Path, source: Path, out: Path) -> None:
    """MaxText's own export of a checkpoint."""
    import runpy

    _patched(source)
    arguments = {**maxtext_settings(source), "load_parameters_path": item, "base_output_directory": out}
    settings = [f"{key}={value}" for key, value in {**arguments, "weight_dtype": "bfloat16"}.items()]
    flags = ["--override_model_architecture", f"--hf_model_path={source}"]
    sys.argv = ["to_huggingface", *settings, *flags]
    runpy.run_module("maxtext.checkpoint_conversion.to_huggingface", run_name="__main__")


def tunix(source: Path, out: Path) -> None:
    """Tunix's way: the model from safetensors, then Orbax's saver, as its own CLI does."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp
    from flax import nnx
    from tunix.models.llama3 import model, params

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    shape = model.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=int(config.get("rope_theta", 500_000)),
        norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        loaded = params.create_model_from_safe_tensors(str(source), shape, mesh, dtype=jnp.bfloat16)
    with ocp.StandardCheckpointer() as saver:
        saver.save(out.absolute() / "0" / "model_params", nnx.to_pure_dict(nnx.state(loaded)))


def _tokenizer(source: Path) -> None:
    """The smallest tokenizer there is: MaxText's exporter wants one to copy."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(source)


def run(source: Path, folder: Path) -> dict[str, Cost]:
    """Every peer on one model folder; an output is kept as long as the next peer reads it.

    One that runs out of memory is killed, and the others go on: its status is then not 0.
    """
    this = [sys.executable, __file__]
    found: dict[str, Cost] = {}
    _tokenizer(source)
    for name, lazy in (("MaxText to_maxtext (lazy)", "lazy"), ("MaxText to_maxtext (eager)", "eager")):
        argv = [*this, "maxtext", str(source), str(folder / f"maxtext-{lazy}"), lazy]
        found[name] = measure(argv, must=False)
    item = folder / "maxtext-eager" / "0" / "items"
    if item.exists():
        argv = [*this, "export", str(item), str(folder / "maxtext-export"), str(source)]
        found["MaxText to_huggingface"] = measure(argv, must=False)
        argv = ["export", str(item), "--to", "hf", "--out", str(folder / "bridge-export"), "--base", str(source)]
        found["bridge export of MaxText's checkpoint"] = measure([sys.executable, "-m", "bridge", *argv])
    tunix_out = folder / "tunix"
    found["Tunix loader + Orbax saver"] = measure([*this, "tunix", str(source), str(tunix_out)], must=False)
    if importlib.util.find_spec("orbaxport") and tunix_out.exists():  # pip install orbaxport==1.3.0
        argv = ["--input", str(tunix_out), "--output", str(folder / "orbaxport"), "--key-map", "llama3"]
        argv += ["--transpose", "--hf-folder", "--base-model-path", str(source)]
        found["orbaxport (a third of the names right)"] = measure(
            [sys.executable, "-m", "orbaxport", *argv], must=False
        )
    return found


if __name__ == "__main__":
    engine, first, second, *more = sys.argv[1:]
    if engine == "maxtext":
        maxtext(Path(first), Path(second), more[0] == "lazy")
    elif engine == "export":
        maxtext_export(Path(first), Path(more[0]), Path(second))
    else:
        tunix(Path(first), Path(second))
