"""Every reader that takes bytes from outside, as functions from bytes: whatever they are given, only a BridgeError.

    TARGETS[name].read(data)     put the data where the reader looks, and read; a BridgeError is swallowed
    TARGETS[name].seed           valid bytes
    nasty(value, choose)         a copy of a JSON value with one part replaced by something unpleasant

The property tests and the coverage-guided fuzzer share them.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import fault_models
import numpy as np

from bridge.converters import adapter_layout, check, hf_store, peft_store, plan, tokenizer_file, transfer, unpacked
from bridge.errors import BridgeError
from bridge.model_spec import ModelSpec

Choose = Callable[[int], int]
"""A number below the given one."""

NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, 2**31, 2**63, 2**64, 10**400, float("inf"), float("nan"), 1e-320, "", "x", "../x",
    "/etc/passwd", "a/b", "a\\b", "\x00", "\x1b[2J", "\ud800", "é", "x" * 5000, "layers", "F32", "llama3", [], [[]], {},
    [0], [1, 2], [0, 10**19], ["x"], [{}], {"a": 1}, {"": None}, [[[[[[]]]]]],
)  # fmt: skip


YAML = (
    b"model:\n  source: x\ntrain: {steps: !!int 5}\nlora: {alpha: !!float 2}\n",
    b"model: {source: !!str x}\ndata: {packing: !!bool true, train: [a, !!null b]}\n",
    b"a: &a [1]\nb: *a\n? c\n: |\n  text\n--- \nd: !!timestamp 2001-01-01\n",
)


ARRAY = "params.params.decoder.layers.mlp.wi_0.kernel"


@dataclass(frozen=True)
class Target:
    """One kind of file: valid bytes, and what reads it."""

    seed: bytes
    reader: Callable[[bytes], object]
    binary_header: bool = False
    more: tuple[bytes, ...] = ()
    """Other bytes to start from: what a format has beyond JSON."""

    def read(self, data: bytes) -> bool:
        """Whether the reader accepted the data; any exception but a BridgeError is a finding."""
        try:
            self.reader(data)
        except BridgeError as error:
            str(error).encode()
            return False
        return True

    def parts(self) -> tuple[Any, bytes]:
        """The JSON value within the seed, and what follows it."""
        if not self.binary_header:
            return json.loads(self.seed), b""
        length = int.from_bytes(self.seed[:8], "little")
        return json.loads(self.seed[8 : 8 + length]), self.seed[8 + length :]

    def encode(self, value: Any, rest: bytes) -> bytes:
        """A JSON value in the target's form."""
        text = json.dumps(value).encode()
        return len(text).to_bytes(8, "little") + text + rest if self.binary_header else text


def nasty(value: Any, choose: Choose) -> Any:
    """A copy of a JSON value in which one part, at any depth, is replaced, removed, or joined by another."""
    value = copy.deepcopy(value)
    parent, place = None, None
    node: Any = value
    while isinstance(node, dict | list) and node and (parent is None or choose(4)):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        parent, place = node, keys[choose(len(keys))]
        node = node[place]
    unpleasant = NASTY[choose(len(NASTY))]
    action = choose(4)
    if parent is None:
        return unpleasant
    if action == 0:
        del parent[place]
    elif action == 1 and isinstance(parent, dict):
        parent[str(unpleasant)[:200]] = parent.pop(place)
    elif action == 2 and isinstance(parent, list):
        parent.insert(0, unpleasant)
    else:
        parent[place] = unpleasant
    return value


def memory() -> str | None:
    """A folder in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@cache
def home() -> Path:
    """A folder of this process with a tiny model, an adapter and a checkpoint in it."""
    # The fuzzer ends its processes without any clean-up, so it names a folder that it removes itself.
    folder = Path(tempfile.mkdtemp(prefix="bridge-fuzz-", dir=os.environ.get("BRIDGE_FUZZ_HOME", memory())))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 32
    both = {"rope_scaling": scaling, "rope_parameters": {**scaling, "rope_theta": 500000.0}, "head_dim": 16}
    hf = fault_models.write_model(folder / "hf", vocab_size=400, **both)
    fault_models.write_json(hf / "tokenizer_config.json", {"chat_template": "{{ x }}<|eot_id|>"})
    added = [{"id": 300, "content": "<|eot_id|>", "special": True}]
    fault_models.write_json(hf / "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added})
    fault_models.write_model(folder / "sharded", shards=2)
    write_adapter(folder / "adapter")
    import checkpoints

    checkpoints.convert(folder / "hf", folder / "ck")
    return folder


def write_adapter(folder: Path) -> None:
    """A PEFT adapter of rank 2 on q and v of the tiny model."""
    folder.mkdir()
    arrays: dict[str, Any] = {}
    for layer in range(2):
        for target, rows in (("q", 64), ("v", 32)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}_proj.lora_"
            arrays[f"{name}A.weight"] = np.ones((2, 64), np.float32)
            arrays[f"{name}B.weight"] = np.ones((rows, 2), np.float32)
    fault_models.write_safetensors(folder / "adapter_model.safetensors", *fault_models.encode(arrays))
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {},
        "layers_to_transform": [0, 1],
        "modules_to_save": [],
        "init_lora_weights": True,
        "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
    }
    fault_models.write_json(folder / "adapter_config.json", config)


def _file(*parts: str) -> Callable[[Callable[[Path], object]], Callable[[bytes], object]]:
    """Readers of a file that lies somewhere in `home()`: the data replaces it for the time of a call."""

    def wrap(reader: Callable[[Path], object]) -> Callable[[bytes], object]:
        def read(data: bytes) -> object:
            path = home().joinpath(*parts)
            whole = path.read_bytes()
            path.write_bytes(data)
            try:
                return reader(home() / parts[0])
            finally:
                path.write_bytes(whole)

        return read

    return wrap


def read_model(folder: Path) -> None:
    """As `bridge convert` does before a byte moves."""
    model = ModelSpec.from_folder(folder)
    for engine in ("maxtext", "tunix"):
        table = plan.table_for(model, engine)
        check.source(plan.make_plan(table, model), hf_store.HfSource(folder), table, model)
    tokenizer_file.check(folder, model.vocab)
    tokenizer_file.never_stops(folder)


def read_adapter(folder: Path) -> None:
    """As `bridge convert ADAPTER` does before a byte moves."""
    model = ModelSpec.from_folder(home() / "hf")
    source = peft_store.PeftSource(folder)
    facts = peft_store.with_recorded(folder, peft_store.read_facts(folder, model, source.headers))
    arrays = adapter_layout.plan_adapter(model, "tunix", True, facts.targets, facts.rank)
    peft_store.check_tensors(arrays, source.headers, model, facts)


def read_checkpoint(folder: Path) -> None:
    """As `bridge export` does before a byte moves."""
    from bridge.commands import checkpoint, export, inspect

    found = checkpoint.find(None, folder, None, None)
    found.open()
    with mock.patch.object(transfer.Budget, "whole_bytes", 0), mock.patch.object(unpacked, "GROUP_BYTES", 4096):
        source = found.open()  # every array as if it were to be unpacked
        path = tuple(ARRAY.split("."))
        source.read(path, tuple(slice(side) for side in source.leaves[path].tensor.shape), 1)
    export.target_tensors(found, "source")
    inspect.engine_facts(folder)


def read_spec(data: bytes) -> None:
    """As every verb does."""
    from bridge import run_spec

    path = home() / "bridge.yaml"
    path.write_bytes(data)
    run_spec.load(path)


@cache
def targets() -> dict[str, Target]:
    """Every kind of file, by name."""
    folder = home()
    spec = {"model": {"source": "hf"}, "engine": "maxtext", "train": {"steps": 5, "schedule": {"kind": "cosine"}},
            "mesh": {"fsdp": 8}, "lora": {"targets": ["q"], "alpha": 2.0}, "maxtext": {"remat_policy": "full"},
            "data": {"train": ["a.jsonl"]}, "cluster": {"nodes": 2, "xla_flags": ["--a"]}}  # fmt: skip
    files = {
        "safetensors": ("hf", "model.safetensors", read_model, True),
        "index": ("sharded", "model.safetensors.index.json", read_model, False),
        "config": ("hf", "config.json", read_model, False),
        "tokenizer": ("hf", "tokenizer.json", read_model, False),
        "tokenizer_config": ("hf", "tokenizer_config.json", read_model, False),
        "generation": ("hf", "generation_config.json", read_model, False),
        "adapter": ("adapter", "adapter_config.json", read_adapter, False),
        "adapter_weights": ("adapter", "adapter_model.safetensors", read_adapter, True),
        "sidecar": ("ck", "bridge.json", read_checkpoint, False),
        "metadata": ("ck", "0/items/_METADATA", read_checkpoint, False),
        "array": ("ck", f"0/items/{ARRAY}/zarr.json", read_checkpoint, False),
    }
    found = {
        name: Target((folder / part / file).read_bytes(), _file(part, file)(reader), binary)
        for name, (part, file, reader, binary) in files.items()
    }
    return {**found, "spec": Target(json.dumps(spec).encode(), read_spec, more=YAML)}
