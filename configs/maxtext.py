"""MaxText's YAML from a spec: every dimension and the RoPE kind are stated, nothing hangs on a model's name.

Source of the keys: maxtext/configs/base.yml, configs/post_train/sft.yml and configs/types.py, 0.2.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge import tunix_llama
from bridge.configs.render import header, yaml_section
from bridge.errors import SpecError, UnsupportedError
from bridge.mesh import Mesh
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

VERSION = "0.2.5"

# Keys that bridge works out itself: another value would train another model, or elsewhere, in silence.
OWNED = {
    "run_name": "--run NAME",
    "base_output_directory": "workdir",
    "load_parameters_path": "bridge convert",
    "hf_access_token": "HF_TOKEN or `hf auth login`",
    "rope_type": "the model's config.json",
    "rope_use_scale": "the model's config.json",
    "rope_max_timescale": "the model's config.json",
    "model_name": "the model's config.json",
    "steps": "train.steps",
    # bridge.json records both, and an export follows them.
    "dtype": "train.dtype",
    "weight_dtype": "train.weight_dtype",
    "max_num_checkpoints_to_keep": "train.keep",
}


# The same of `maxtext.lora`.
OWNED_LORA = {
    "enable_lora": "train.method",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_module_path": "lora.targets",
    "lora_weight_qtype": "train.method",
    "lora_tile_size": "lora.tile_size",
}
PREFERENCE_METHODS = ("dpo", "orpo")
MODULES = {
    "q": "self_attention/query",
    "k": "self_attention/key",
    "v": "self_attention/value",
    "o": "self_attention/out",
    "gate": "mlp/wi_0",
    "up": "mlp/wi_1",
    "down": "mlp/wo",
}


@dataclass(frozen=True)
class Place:
    """Where a run lies and what it starts from: absolute paths, and how the checkpoint is laid out."""

    run_name: str
    runs_dir: str
    checkpoint: str
    tokenizer: str
    scanned: bool
    hardware: str
    train_files: tuple[str, ...] = ()


def render(run: RunSpec, model: ModelSpec, mesh: Mesh, place: Place) -> str:
    """The YAML of a run: full SFT, LoRA and QLoRA by MaxText's SFT trainer, full DPO and ORPO by its DPO trainer.

    Raises:
        UnsupportedError: the spec asks for what MaxText does not do, or NF4 tiles do not fit the model.
        SpecError: `maxtext:` sets a key that bridge works out itself.
    """
    if run.train.method in ("lora", "qlora") and run.lora.dropout:
        raise UnsupportedError(
            f"lora.dropout {run.lora.dropout:g} on maxtext: it has none", hint="lora.dropout: 0.0, or --engine tunix"
        )
    if run.train.method == "qlora":
        tunix_llama.check_tiles(model, run.lora.tile_size, run.lora.targets)
    taken = [f"maxtext.{key}: comes from {OWNED[key]}" for key in run.maxtext if key in OWNED]
    facts = model_section(model, place.scanned)
    taken += [
        f"maxtext.{key}: {run.maxtext[key]!r}, the converted checkpoint has {facts[key]!r}"
        for key in run.maxtext
        if key in facts and key not in OWNED and run.maxtext[key] != facts[key]
    ]
    taken += _taken_of_lora(run)
    if taken:
        raise SpecError("bridge sets these itself", details=taken)
    raw = {key: value for key, value in run.maxtext.items() if key != "lora"}
    notes = (
        "`bridge launch` runs it: it feeds the data and corrects MaxText's RoPE, which stock MaxText would not.",
        f"Mesh: {mesh.devices} device(s), data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}.",
    )
    sections = [
        ("the run", _run_section(run, place)),
        ("the model, from its config.json", model_section(model, place.scanned)),
        ("numbers", _number_section(run)),
        ("optimizer", _optimizer_section(run)),
        *_method_sections(run),
        ("mesh", mesh_section(mesh)),
        ("data, for reference: bridge's own data path reads it", _data_section(run, place)),
    ]
    if raw:
        sections.append(("maxtext: of the spec", raw))
    base = "dpo" if run.train.method in PREFERENCE_METHODS else "sft"
    text = header("maxtext", VERSION, *notes) + f"base_config: post_train/{base}.yml\n"
    for title, values in sections:
        own = {key: value for key, value in values.items() if key not in raw or title.startswith("maxtext:")}
        text += yaml_section(title, own)
    return text


def _taken_of_lora(run: RunSpec) -> list[str]:
    """What `maxtext.lora` sets that bridge.json records: an export would take another scale, or another base."""
    given = run.maxtext.get("lora", {})
    if not isinstance(given, Mapping):
        return [f"maxtext.lora: {given!r} is no mapping"]
    dotted = [f"maxtext.{key}: write it below maxtext.lora" for key in run.maxtext if key.startswith("lora.")]
    return dotted + [f"maxtext.lora.{key}: comes from {OWNED_LORA[key]}" for key in given if key in OWNED_LORA]


def model_section(model: ModelSpec, scanned: bool) -> dict[str, Any]:
    """The keys that make MaxText's Llama the model that config.json describes.

    `decoder_block`, `rope_type`, `mlp_activations` and `param_scan_axis` are what the mapping table requires.
    """
    return {
        "model_name": "default",
        "decoder_block": "llama2",
        "base_num_decoder_layers": model.layers,
        "base_emb_dim": model.embed,
        "base_num_query_heads": model.heads,
        "base_num_kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "base_mlp_dim": model.mlp,
        "mlp_activations": ["silu", "linear"],
        "vocab_size": model.vocab,
        "logits_via_embedding": model.tied,
        # MaxText would divide tied logits by sqrt(embed); Llama does not.
        "normalize_embedding_logits": False,
        "normalization_layer_epsilon": model.norm_eps,
        "rope_type": "llama3.1",
        "rope_use_scale": model.rope_scaling is not None,
        "rope_max_timescale": int(model.rope_theta),
        "enable_dropout": False,
        "scan_layers": scanned,
        "param_scan_axis": 1,
    }


def mesh_section(mesh: Mesh) -> dict[str, Any]:
    """Devices along MaxText's axes of one slice (`ici_*`)."""
    return {
        "ici_data_parallelism": mesh.data,
        "ici_fsdp_parallelism": mesh.fsdp,
        "ici_tensor_parallelism": mesh.tensor,
    }


def _run_section(run: RunSpec, place: Place) -> dict[str, Any]:
    return {
        "run_name": place.run_name,
        "base_output_directory": place.runs_dir,
        "load_parameters_path": place.checkpoint,
        "hardware": place.hardware,
        # bridge's shim joins the processes, with explicit addresses and timeouts.
        "skip_jax_distributed_system": True,
        "steps": run.train.total_steps,
        "checkpoint_period": run.train.save_every,
        "async_checkpointing": True,
        "log_period": min(10, run.train.total_steps),
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        "log_config": False,
    }


def _number_section(run: RunSpec) -> dict[str, Any]:
    weight_dtype = run.train.weight_dtype
    if weight_dtype == "auto":
        # MaxText's scanned LoRA fails when the two dtypes differ ("scan body function carry").
        weight_dtype = run.train.dtype if run.train.method in ("lora", "qlora") else "float32"
    return {"dtype": run.train.dtype, "weight_dtype": weight_dtype}


def _method_sections(run: RunSpec) -> list[tuple[str, dict[str, Any]]]:
    """The keys of a method that is not full SFT."""
    method = run.train.method
    if method in PREFERENCE_METHODS:
        settings = {
            "algo": method,
            "dpo_beta": run.preference.beta,
            "orpo_lambda": run.preference.lambda_orpo,
            "dpo_label_smoothing": run.preference.label_smoothing,
        }
        return [("preference", {"dpo": settings})]
    more = run.maxtext.get("lora", {})
    if method == "sft":
        return [("adapters: maxtext.lora of the spec", {"lora": more})] if more else []
    lora: dict[str, Any] = {
        "enable_lora": True,
        "lora_rank": run.lora.rank,
        "lora_alpha": run.lora.alpha,
        "lora_module_path": module_path(run.lora.targets),
    }
    if method == "qlora":
        lora |= {"lora_weight_qtype": "nf4", "lora_tile_size": run.lora.tile_size}
    return [("adapters", {"lora": lora | more})]


def module_path(targets: tuple[str, ...]) -> str:
    """MaxText's pattern of the modules that get an adapter (configs/post_train/lora_module_path.yml)."""
    return f"decoder/layers.*/({'|'.join(MODULES[name] for name in MODULES if name in targets)})"


def _optimizer_section(run: RunSpec) -> dict[str, Any]:
    train = run.train
    schedule: dict[str, Any] = {"lr_schedule_type": "cosine"}
    if train.schedule.kind == "constant":
        schedule = {"lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.0}
    return {
        "opt_type": "adamw",
        "learning_rate": train.learning_rate,
        **schedule,
        "warmup_steps_fraction": train.schedule.warmup,
        "learning_rate_final_fraction": train.schedule.final,
        "adam_weight_decay": train.weight_decay,
        "gradient_clipping_threshold": 1.0,
        "gradient_accumulation_steps": train.gradient_accumulation,
        "per_device_batch_size": train.batch_per_device,
        "max_target_length": train.sequence_length,
        "data_shuffle_seed": train.seed,
        "init_weights_seed": train.seed,
    }


def _data_section(run: RunSpec, place: Place) -> dict[str, Any]:
    evaluate = run.train.eval_every if run.data.eval and run.train.eval_every else -1
    preference = run.train.method in PREFERENCE_METHODS
    return {
        "dataset_type": "hf",
        "hf_path": "json",
        "hf_train_files": ",".join(place.train_files),
        "tokenizer_type": "huggingface",
        "tokenizer_path": place.tokenizer,
        "packing": run.data.packing,
        **({} if preference else {"sft_train_on_completion_only": run.data.loss_on == "completion"}),
        "eval_interval": evaluate,
        "eval_steps": -1,
        "grain_worker_count": 0,
    }
