"""PEFT adapter folders: `adapter_config.json` and `adapter_model.safetensors`.

A key of the config that changes what the adapter computes, and that an engine's adapters cannot express, is refused
by name; nothing is dropped.
Source: peft/tuners/lora/{config,layer}.py and peft/utils/save_and_load.py, 0.21.2.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.converters.adapter_facts import TARGETS, AdapterFacts, sort_targets
from bridge.converters.adapter_layout import RANK, FactorArray
from bridge.converters.hf_store import Stored, inside, read_header
from bridge.converters.layout import axes_of
from bridge.converters.plan import ITEM_BYTES, Tensor
from bridge.errors import CheckpointError, UnsupportedError
from bridge.model_spec import ModelSpec, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Keys that say nothing about what a saved adapter computes.
NEUTRAL_KEYS = frozenset(
    """task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha
    lora_dropout target_modules exclude_modules use_rslora layers_to_transform layers_pattern rank_pattern alpha_pattern
    megatron_core qalora_group_size eva_config runtime_config ensure_weight_tying init_lora_weights""".split()  # noqa: SIM905
)
# Keys that change it, and the only values under which it stays plain LoRA.
FIXED_KEYS: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "megatron_config": (None,),
    "trainable_token_indices": (None,),
    "loftq_config": (None, {}),
    "corda_config": (None,),
    "lora_ga_config": (None,),
    "velora_config": (None,),
    "alora_invocation_tokens": (None,),
    "monteclora_config": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
}
# Other ways to initialise (pissa, olora, loftq, corda ...) change the base model's weights.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
FACTOR_NAME = re.compile(r"base_model\.model\.model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)_proj\.lora_[AB]\.weight")


class PeftSource:
    """A PEFT adapter's tensors; each is small enough to be read whole."""

    def __init__(self, folder: Path) -> None:
        self.stored = _open_headers(folder)

    @property
    def headers(self) -> dict[str, Tensor]:
        """Shape and dtype of every tensor."""
        return {name: stored.tensor for name, stored in self.stored.items()}

    def read(self, name: str) -> NDArray[Any]:
        """All elements of a tensor as unsigned integers of the dtype's width, flat.

        Raises:
            CheckpointError: the file ended early.
        """
        stored = self.stored[name]
        count, width = math.prod(stored.tensor.shape), ITEM_BYTES[stored.tensor.dtype]
        bits: NDArray[Any] = np.fromfile(stored.file, dtype=f"u{width}", count=count, offset=stored.offset)
        if bits.size != count:
            raise CheckpointError(f"{stored.file} ended within {name}: was it changed or truncated meanwhile?")
        return bits


def read_facts(folder: Path, model: ModelSpec, headers: Mapping[str, Tensor]) -> AdapterFacts:
    """The facts of a PEFT adapter: from its config, with the targets that its tensors show.

    `use_rslora` (scale alpha / sqrt(rank)) is turned into the alpha that gives the same scale as alpha / rank.

    Raises:
        UnsupportedError: a setting that the engines' adapters cannot express, named.
        CheckpointError: the config is damaged, or disagrees with the tensors.
    """
    path = folder / CONFIG
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(f"{path}: peft_type is {config.get('peft_type')!r}, only 'LORA' is supported")
    refused = [
        f"{key}: {config[key]!r} (supported: {' or '.join(json.dumps(value) for value in allowed)})"
        for key, allowed in FIXED_KEYS.items()
        if key in config and config[key] not in allowed
    ]
    known = NEUTRAL_KEYS | FIXED_KEYS.keys()
    refused += [f"{key}: {value!r} is not understood" for key, value in config.items() if key not in known and value]
    if config.get("init_lora_weights") not in PLAIN_INITS:
        refused.append(f"init_lora_weights: {config['init_lora_weights']!r} changes the base model's weights")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    for key, value in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or any(one != value for one in pattern.values()):
            refused.append(f"{key}: {pattern!r} (an engine's adapter has one rank and one alpha: {value})")
    layers = config.get("layers_to_transform")
    chosen = [layers] if isinstance(layers, int) else layers or list(range(model.layers))
    numbers = isinstance(chosen, list) and all(type(layer) is int for layer in chosen)
    if not numbers or set(chosen) != set(range(model.layers)):
        refused.append(f"layers_to_transform: {layers!r} (an engine's adapter is on all {model.layers} layers)")
    if refused:
        raise UnsupportedError(
            f"{path}: {len(refused)} setting(s) that adapters of MaxText and Tunix cannot express", details=refused
        )
    if type(rank) is not int or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise CheckpointError(f"{path}: r is {rank!r} and lora_alpha is {alpha!r}, both must be numbers")
    if not 1 <= rank < 1 << 31 or not abs(alpha) < 1e300:
        raise CheckpointError(f"{path}: r is {rank!r} and lora_alpha is {alpha!r}, both must be numbers")
    if config.get("use_rslora"):
        alpha = alpha * math.sqrt(rank)
    # With modules left out by pattern, the list alone does not say what is adapted.
    modules = None if config.get("exclude_modules") else config.get("target_modules")
    targets = _targets(folder, headers, modules)
    base = config.get("base_model_name_or_path")
    return AdapterFacts(rank, alpha, targets, base=base if isinstance(base, str) and base else None)


def with_recorded(folder: Path, facts: AdapterFacts) -> AdapterFacts:
    """Facts with the quantization that `bridge.json` beside the adapter records, if there is one.

    Raises:
        CheckpointError: `bridge.json` and the adapter's config disagree.
    """
    path = folder / "bridge.json"
    record = read_json(path).get("adapter") if path.exists() else None
    if not isinstance(record, dict):
        return facts
    recorded = AdapterFacts.from_json(record)
    for name in ("rank", "targets"):
        if getattr(recorded, name) != getattr(facts, name):
            raise CheckpointError(
                f"{name} of the adapter is told in two ways: bridge.json: {getattr(recorded, name)}, "
                f"{CONFIG}: {getattr(facts, name)}"
            )
    if not math.isclose(recorded.alpha, facts.alpha, rel_tol=1e-12):
        raise CheckpointError(f"alpha of the adapter: bridge.json {recorded.alpha}, {CONFIG} {facts.alpha}")
    return replace(recorded, base=facts.base or recorded.base)


def check_tensors(
    arrays: tuple[FactorArray, ...], headers: Mapping[str, Tensor], model: ModelSpec, facts: AdapterFacts
) -> None:
    """Compare an adapter's tensors with what its facts need, names both ways.

    Raises:
        CheckpointError: missing, unexpected, wrongly shaped or unsupported tensors, all listed.
    """
    axes = {**axes_of(model), RANK: facts.rank}
    needed = {array.hf(layer): array.factor.hf_shape(axes) for array in arrays for layer in array.layers}
    problems = [f"missing      {name}  {shape}" for name, shape in needed.items() if name not in headers]
    problems += [f"unexpected   {name}  {tensor.shape}" for name, tensor in headers.items() if name not in needed]
    for name, shape in needed.items():
        tensor = headers.get(name)
        if tensor is not None and tensor.shape != shape:
            problems.append(f"shape        {name}  has {tensor.shape}, rank {facts.rank} needs {shape}")
        if tensor is not None and tensor.dtype not in ITEM_BYTES:
            problems.append(f"dtype        {name}  {tensor.dtype} (supported: {', '.join(ITEM_BYTES)})")
    if problems:
        raise CheckpointError(
            f"the adapter is not complete, or not of this model: {len(problems)} of {len(needed)} tensors",
            details=problems,
        )


def write_config(out: Path, facts: AdapterFacts) -> None:
    """Write `adapter_config.json` and a README that notes the quantization, which PEFT's config has no key for."""
    alpha = int(facts.alpha) if float(facts.alpha).is_integer() else facts.alpha
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": facts.base,
        "revision": None,
        "inference_mode": True,
        "r": facts.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": [f"{target}_proj" for target in facts.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
    }
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(_readme(facts), encoding="utf-8")


def _readme(facts: AdapterFacts) -> str:
    front = ["---", "library_name: peft", *([f"base_model: {json.dumps(facts.base)}"] if facts.base else []), "---", ""]
    modules = ", ".join(f"{name}_proj" for name in facts.targets)
    lines = [f"LoRA adapter, rank {facts.rank}, alpha {facts.alpha:g}, on {modules}."]
    if facts.quantization is not None:
        dtype = f", scales in {facts.base_dtype}" if facts.base_dtype else ""
        lines += [
            "",
            f"It was trained on a base held in {facts.quantization.upper()} (tiles of {facts.tile_size}{dtype}).",
            "On the unquantized base it computes something else; `bridge export --to hf` merges it into the base that "
            "it was trained on.",
        ]
    return "\n".join(front + lines) + "\n"


def _open_headers(folder: Path) -> dict[str, Stored]:
    if (folder / WEIGHTS).is_file():
        return read_header(inside(folder, WEIGHTS, where=folder))
    if (folder / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{folder} has only pickled weights (adapter_model.bin), which can run code when they are read",
            hint="save them as safetensors: model.save_pretrained(folder)",
        )
    raise CheckpointError(f"{folder} has no {WEIGHTS}", hint="is it a PEFT adapter folder?")


def _targets(folder: Path, headers: Mapping[str, Tensor], modules: Any) -> tuple[str, ...]:
    """The targets that the tensors show; a list in the config must name the same ones."""
    matches = {name: FACTOR_NAME.fullmatch(name) for name in headers}
    shown = {match[1] for match in matches.values() if match and match[1] in TARGETS}
    strange = [
        f"{name}  {headers[name].shape}" for name, match in matches.items() if not match or match[1] not in TARGETS
    ]
    if strange or not shown:
        raise UnsupportedError(
            f"{folder / WEIGHTS}: {len(strange)} of {len(headers)} tensors are no LoRA factors of a Llama projection",
            details=strange,
        )
    listed = shown
    if isinstance(modules, list):
        listed = {str(module).rsplit(".", 1)[-1].removesuffix("_proj") for module in modules}
    if listed != shown:
        raise CheckpointError(
            f"{folder / CONFIG} targets {', '.join(sort_targets(list(listed)))}, "
            f"the tensors are of {', '.join(sort_targets(list(shown)))}"
        )
    return tuple(sort_targets(list(shown)))
