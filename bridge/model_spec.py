"""`ModelSpec`: the sizes and facts of a Llama model, from and to a Hugging Face `config.json`.

Nothing is looked up in a table of known models: whatever `config.json` says is read, and a key that changes
the computation and is not understood is refused by name.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from bridge.errors import CheckpointError, SpecError, UnsupportedError
from bridge.hf_keys import FIXED_KEYS, LIMITS, NEUTRAL_KEYS, SIZE_KEYS

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the RoPE frequencies (`rope_type: llama3`).

    Source: transformers/modeling_rope_utils.py, `_compute_llama3_parameters`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and facts of one model. Every size is a positive number of elements."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    context: int
    dtype: str
    family: str = "llama"

    @property
    def parameters(self) -> int:
        """The number of weights, a tied embedding counted once."""
        attention = self.embed * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.embed * self.mlp + 2 * self.embed
        return self.layers * layer + self.vocab * self.embed * (1 if self.tied else 2) + self.embed

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> ModelSpec:
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: a fact is missing, unknown or of the wrong type.
        """
        try:
            facts = dict(facts)
            scaling = facts.pop("rope_scaling")
            spec = cls(rope_scaling=RopeScaling(**scaling) if scaling else None, **facts)
            sizes = (spec.embed, spec.heads, spec.kv_heads, spec.mlp, spec.vocab, spec.context)
            numbers = (spec.rope_theta, spec.norm_eps, *(astuple(spec.rope_scaling) if spec.rope_scaling else ()))
            sound = all(map(_is_size, (*sizes, spec.layers, spec.head_dim))) and all(map(_is_positive, numbers))
            sound = sound and spec.layers <= LIMITS["num_hidden_layers"] and spec.head_dim <= LIMITS["head_dim"]
            sound = sound and (type(spec.tied), type(spec.family)) == (bool, str) and spec.dtype in FLOAT_DTYPES
            if not sound:
                raise ValueError("a size is no positive integer, or a fact is not of its kind")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"the model facts in bridge.json are damaged: {error}") from error
        return spec

    @classmethod
    def from_hf_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelSpec:
        """Read the facts from a parsed Hugging Face `config.json` of a `LlamaForCausalLM`.

        `rope_scaling` with `rope_theta` (transformers 4) and `rope_parameters` (transformers 5) are both
        understood, as are `torch_dtype` and `dtype`.

        Raises:
            UnsupportedError: the model is no Llama, or a key changes the computation in a way not supported.
            SpecError: a value is missing or impossible. All problems are listed at once.
        """
        if not isinstance(config, dict):
            raise SpecError(f"{where} is not a JSON object")
        if config.get("model_type") != "llama":
            raise UnsupportedError(
                f"{where}: model_type is {config.get('model_type')!r}, only 'llama' is supported",
                hint="Llama 3, 3.1, 3.2 (text), 3.3 and other LlamaForCausalLM models convert",
            )
        problems: list[str] = []
        refused = [
            f"{key}: {config[key]!r} (supported: {' or '.join(map(repr, allowed))})"
            for key, allowed in FIXED_KEYS.items()
            if key in config and config[key] not in allowed
        ]
        known = NEUTRAL_KEYS | FIXED_KEYS.keys() | SIZE_KEYS.keys()
        known |= {"num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"}
        known |= {"rope_theta", "rope_scaling", "rope_parameters"}
        refused += [
            f"{key}: {value!r} is not understood"
            for key, value in config.items()
            if key not in known and value is not None
        ]
        scaling, theta = _read_rope(config, refused, problems)
        sizes = {field: _positive(config, key, problems) for key, field in SIZE_KEYS.items()}
        heads = sizes["heads"]
        kv_heads = _positive(config, "num_key_value_heads", problems, default=heads)
        if config.get("head_dim") is None and heads and sizes["embed"] % heads:
            problems.append(f"hidden_size {sizes['embed']} is not a multiple of num_attention_heads {heads}")
        head_dim = _positive(config, "head_dim", problems, default=sizes["embed"] // heads if heads else 0)
        if kv_heads and heads % kv_heads:
            problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if head_dim > LIMITS["head_dim"]:
            problems.append(f"head_dim {head_dim} is more than {LIMITS['head_dim']}")
        if head_dim % 2:
            problems.append(f"head_dim {head_dim} is odd, RoPE needs an even one")
        eps = _number(config, "rms_norm_eps", 1e-6, problems)
        tied = config.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            problems.append(f"tie_word_embeddings: {tied!r} is neither true nor false")
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        if dtype not in FLOAT_DTYPES:
            problems.append(f"dtype: {dtype!r} (supported: {', '.join(FLOAT_DTYPES)})")
        context = _positive(config, "max_position_embeddings", problems, default=2048)
        if refused:
            raise UnsupportedError(
                f"{where}: {len(refused)} setting(s) change the computation and are not supported",
                details=refused,
                hint="dropping a key in silence could give other logits than PyTorch's; "
                "remove it from config.json only if you know that it changes nothing",
            )
        if problems:
            raise SpecError(f"{where}: {len(problems)} problem(s)", details=problems)
        return cls(
            layers=sizes["layers"],
            embed=sizes["embed"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=sizes["mlp"],
            vocab=sizes["vocab"],
            tied=tied,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=eps,
            context=context,
            dtype=dtype,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Read `config.json` in a Hugging Face folder.

        Raises:
            CheckpointError: there is no readable config.json.
            UnsupportedError, SpecError: as `from_hf_config`.
        """
        return cls.from_hf_config(read_json(folder / "config.json"), where=str(folder / "config.json"))

    def rope_config(self) -> dict[str, Any]:
        """The RoPE keys of a `config.json`, in both spellings (transformers 4 and 5)."""
        parameters: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_scaling is None:
            return {"rope_theta": self.rope_theta, "rope_scaling": None, "rope_parameters": parameters}
        scaling = {
            "factor": self.rope_scaling.factor,
            "high_freq_factor": self.rope_scaling.high_freq_factor,
            "low_freq_factor": self.rope_scaling.low_freq_factor,
            "original_max_position_embeddings": self.rope_scaling.original_context,
            "rope_type": "llama3",
        }
        return {
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {**scaling, "rope_theta": self.rope_theta},
        }


def read_json(path: Path) -> dict[str, Any]:
    """Parse a small JSON object.

    Raises:
        CheckpointError: missing, unreadable, too large (16 MiB), or no JSON object.
    """
    try:
        if not path.is_file() and path.exists():  # a pipe would never end
            raise CheckpointError(f"{path} is no file")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_CONFIG_BYTES >> 20} MiB, that is no configuration")
        value = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a ValueError where a name appears twice, since readers differ in which one they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return found


def _positive(config: dict[str, Any], key: str, problems: list[str], default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            problems.append(f"{key} is missing")
        return default or 0
    if _is_size(value) and value <= LIMITS.get(key, value):
        return int(value)
    limit = f" up to {LIMITS[key]}" if key in LIMITS else ""
    problems.append(f"{key}: {value!r} is not a positive integer{limit}")
    return default or 0


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _number(config: dict[str, Any], key: str, default: float, problems: list[str]) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not _is_positive(value):
        problems.append(f"{key}: {value!r} is not a positive number")
        return default
    return float(value)


def _read_rope(config: dict[str, Any], refused: list[str], problems: list[str]) -> tuple[RopeScaling | None, float]:
    """RoPE scaling and theta from either spelling; both must agree where both are given."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            problems.append(f"{key}: {value!r} is not an object")
            return None, 10000.0
    theta = _number(config, "rope_theta", 10000.0, problems)  # transformers' default
    if new is not None:
        inner = _number(new, "rope_theta", theta, problems)
        if "rope_theta" in config and inner != theta:
            problems.append(f"rope_theta: {theta} here, {inner} in rope_parameters")
        theta = inner
    read = [
        _read_scaling(key, value, refused, problems)
        for key, value in (("rope_parameters", new), ("rope_scaling", old))
        if value is not None
    ]
    if len(read) == 2 and read[0] != read[1]:
        problems.append(f"rope_scaling and rope_parameters disagree: {old!r}, {new!r}")
    return (read[0] if read else None), theta


def _read_scaling(key: str, value: dict[str, Any], refused: list[str], problems: list[str]) -> RopeScaling | None:
    kind = value.get("rope_type", value.get("type", "default"))
    if kind not in ("default", "llama3"):
        refused.append(f"{key}: rope type {kind!r} (supported: 'default', 'llama3')")
        return None
    numbers = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    extra = {name for name in value if value[name] is not None} - {*numbers, "rope_type", "type", "rope_theta"}
    if value.get("partial_rotary_factor") == 1:
        extra -= {"partial_rotary_factor"}
    refused.extend(f"{key}.{name}: {value[name]!r} is not understood" for name in sorted(extra))
    if kind == "default":
        return None
    missing = [name for name in numbers if value.get(name) is None]
    if missing:
        problems.append(f"{key}: {', '.join(missing)} missing")
        return None
    factor, low, high, original = (_number(value, name, 1.0, problems) for name in numbers)
    if high <= low:
        problems.append(f"{key}: high_freq_factor {high} must exceed low_freq_factor {low}")
    if original != int(original):
        problems.append(f"{key}: original_max_position_embeddings {original} is not an integer")
    return RopeScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=int(original))
