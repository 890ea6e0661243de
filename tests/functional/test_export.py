"""`bridge export --to hf`: bit for bit what went in, as a complete folder that transformers loads offline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    convert,
    different,
    export,
    folders_differ,
    maxtext_expected,
    restore,
    run,
    save,
    without_step,
)
from conftest import Tiny
from safetensors.numpy import save_file

import models
import oracles
from bridge.converters import slabs, transfer
from bridge.errors import BridgeError, CheckpointError, OutputError

DTYPES = ["bfloat16", "float16", "float32"]
# head_dim 64, 96 and 128 untied, and tied ones of 64 and 128.
ROUND_TRIPS: list[tuple[str, dict[str, Any]]] = [
    ("untied", {"embed": 128, "heads": 2, "kv_heads": 1, "layers": 2}),
    ("untied", {"embed": 128, "heads": 2, "kv_heads": 1, "layers": 2, "tied": True}),
    ("head_dim_96", {}),
    ("head_dim_96", {"tied": True}),
    ("head_dim_128", {}),
    ("head_dim_128", {"tied": True}),
]
CASES = [(name, {**changes, "dtype": dtype}) for name, changes in ROUND_TRIPS for dtype in DTYPES]


@pytest.mark.parametrize("unscanned", [False, True])
@pytest.mark.parametrize(("name", "changes"), CASES, ids=lambda value: str(value).replace("'", ""))
def test_a_round_trip_returns_every_bit(
    name: str, changes: dict[str, Any], unscanned: bool, tiny: Tiny, tmp_path: Path
) -> None:
    source = tiny(name, edge_values=True, **changes)
    convert(source, tmp_path / "ckpt", *(["--unscanned"] if unscanned else []))
    back = export(tmp_path / "ckpt", tmp_path / "hf")
    if changes["dtype"] != "float32":
        assert folders_differ(source, back) == []
        return
    wrong = folders_differ(source, back)
    assert {part.rsplit(".", 2)[1] for part in wrong} == {"q_proj"}, "edge values: the smallest of f32 among them"
    a, b = oracles.read_hf(source)[0], oracles.read_hf(back)[0]
    head_dim = oracles.head_dim_of(oracles.read_hf(source)[1])
    for part in wrong:
        # What arithmetic leaves where a scale is folded in: one ulp unless head_dim is a power of four, and the last
        # bits of numbers below 1e-36, which the scale makes subnormal.
        apart = np.abs(a[part].view(np.int32).astype(np.int64) - b[part].view(np.int32))
        small = np.abs(a[part]) < 1e-36
        assert apart[~small].max() == (0 if head_dim == 64 else 1)
        assert np.abs(a[part] - b[part])[small].max() <= head_dim**0.5 * 2.0**-149


@pytest.mark.parametrize("name", sorted(models.SHAPES))
def test_a_round_trip_through_tunix_returns_every_bit(name: str, tiny: Tiny, tmp_path: Path) -> None:
    convert(tiny(name, edge_values=True), tmp_path / "ckpt", engine="tunix")
    assert folders_differ(tiny(name, edge_values=True), export(tmp_path / "ckpt", tmp_path / "hf")) == []


def test_every_layer_comes_back_as_itself(tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny("llama3"), tmp_path / "src")
    tensors, _ = oracles.read_hf(source)
    filled = {name: np.full_like(value, 1 + index) for index, (name, value) in enumerate(sorted(tensors.items()))}
    save_file(filled, source / "model.safetensors", metadata={"format": "pt"})
    for engine in ("maxtext", "tunix"):
        convert(source, tmp_path / engine, engine=engine)
        assert folders_differ(source, export(tmp_path / engine, tmp_path / f"hf-{engine}")) == []


def test_many_small_slabs_give_the_same_bits(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny("head_dim_128", edge_values=True)
    monkeypatch.setattr(transfer.Budget, "slab_bytes", property(lambda _: 3000))
    monkeypatch.setattr(slabs, "BLOCK_BYTES", 700)
    monkeypatch.setattr(slabs, "STORED_BYTES", 5000)
    convert(source, tmp_path / "ckpt")
    monkeypatch.setattr(transfer.Budget, "slab_bytes", property(lambda _: 11000))
    assert folders_differ(source, export(tmp_path / "ckpt", tmp_path / "hf")) == []


@pytest.mark.parametrize(("engine", "unscanned"), [("maxtext", False), ("maxtext", True), ("tunix", False)])
def test_blocks_read_in_place_are_what_tensorstore_reads(
    engine: str, unscanned: bool, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two ways to read the same files; blocks of many sizes, padded ones among them."""
    source = tiny("head_dim_96", dtype="bfloat16", edge_values=True)
    open_shard = transfer.open_shard
    for block_bytes, stored_bytes in ((900, 900), (900, 3100), (5000, 1 << 20), (4 << 20, 4 << 20)):
        monkeypatch.setattr(slabs, "BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(slabs, "STORED_BYTES", stored_bytes)
        monkeypatch.setattr(slabs, "CHUNK_ELEMENTS", 16)
        here = tmp_path / f"{block_bytes}-{stored_bytes}"
        convert(source, here / "ckpt", *(["--unscanned"] if unscanned else []), engine=engine)
        readers: list[Any] = []

        def counted(*args: Any, found: list[Any] = readers) -> Any:
            found.append(open_shard(*args))
            return found[-1]

        monkeypatch.setattr(transfer, "open_shard", counted)
        in_place = export(here / "ckpt", here / "in place")
        assert readers
        assert all(readers), "an array that bridge wrote must be read in place"
        monkeypatch.setattr(transfer, "open_shard", lambda *_: None)
        assert folders_differ(in_place, export(here / "ckpt", here / "through tensorstore")) == []
        assert folders_differ(source, in_place) == []


@pytest.mark.parametrize("name", ["tied", "untied", "llama3"])
def test_transformers_loads_the_export(name: str, tiny: Tiny, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = tiny(name, tokenizer="llama", rope_spelling="old")
    convert(source, tmp_path / "ckpt")
    back = export(tmp_path / "ckpt", tmp_path / "hf", "--max-shard-size", "100kB")
    ours, info = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    theirs = AutoModelForCausalLM.from_pretrained(source)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert ours.config.rope_parameters == theirs.config.rope_parameters
    assert ours.config.tie_word_embeddings == (name == "tied")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (back, source)]
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for tokenizer in tokenizers]
    assert texts[0] == texts[1]
    assert "Ho" in texts[0]
    stops = [GenerationConfig.from_pretrained(folder).eos_token_id for folder in (back, source)]
    assert stops[0] == stops[1]
    assert isinstance(stops[0], list), "several end-of-turn ids survive"


@pytest.mark.parametrize("tokenizer", ["llama", "chatml"])
def test_the_small_files_come_back_byte_for_byte(tokenizer: str, tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny("mqa", tokenizer=tokenizer), tmp_path / "src")
    (source / "special_tokens_map.json").write_text('{"x":  1}')
    convert(source, tmp_path / "ckpt")
    small = {path.name: path.read_bytes() for path in source.iterdir() if not path.name.startswith("model")}
    shutil.rmtree(source)  # the export needs neither the hub nor the source
    back = export(tmp_path / "ckpt", tmp_path / "hf")
    found = {path.name: path.read_bytes() for path in back.iterdir() if not path.name.startswith("model")}
    assert found.keys() == small.keys()
    assert [name for name in small if name != "config.json" and found[name] != small[name]] == []
    assert {"tokenizer.json", "generation_config.json"} <= found.keys()
    assert any(b"chat_template" in value or "chat_template" in name for name, value in found.items())


@pytest.mark.parametrize("spelling", ["old", "new", "both"])
@pytest.mark.parametrize("name", ["scaled", "mha"])
def test_the_config_speaks_to_transformers_4_and_5(name: str, spelling: str, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny(name, rope_spelling=spelling)
    convert(source, tmp_path / "ckpt")
    config = json.loads((export(tmp_path / "ckpt", tmp_path / "hf") / "config.json").read_text())
    scaling = models.SHAPES[name].get("scaling")
    old = {"rope_type": "llama3", **scaling} if scaling else None
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == old
    assert config["rope_parameters"] == {"rope_theta": 500000.0, **(old or {"rope_type": "default"})}
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]
    before = json.loads((source / "config.json").read_text())
    own = {"rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype"}
    assert {key: value for key, value in config.items() if key not in own} == {
        key: value for key, value in before.items() if key not in own
    }


def test_shards_have_a_correct_index(tiny: Tiny, tmp_path: Path) -> None:
    import safetensors

    source = tiny("untied")
    convert(source, tmp_path / "ckpt")
    back = export(tmp_path / "ckpt", tmp_path / "hf", "--max-shard-size", "400kB")
    assert folders_differ(source, back) == []
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(back.glob("*.safetensors"))
    count = len(files)
    assert [file.name for file in files] == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert count >= 3
    seen: dict[str, str] = {}
    total = 0
    for file in files:
        opened: Any = safetensors.safe_open
        with opened(file, framework="numpy") as tensors:
            assert tensors.metadata() == {"format": "pt"}
            sizes = {name: tensors.get_tensor(name).nbytes for name in tensors.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= 400_000 or len(sizes) == 1
        seen |= dict.fromkeys(sizes, file.name)
        total += sum(sizes.values())
    assert index == {"metadata": {"total_size": total}, "weight_map": seen}
    one = export(tmp_path / "ckpt", tmp_path / "one")
    assert [path.name for path in one.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["tied", "mqa"])
def test_a_tied_model_has_no_head(name: str, tiny: Tiny, tmp_path: Path) -> None:
    convert(tiny(name), tmp_path / "ckpt")
    assert ("lm_head.weight" in oracles.read_hf(export(tmp_path / "ckpt", tmp_path / "hf"))[0]) == (name != "tied")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chosen_dtype_rounds_once_and_is_said(dtype: str, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("head_dim_128", dtype="float32", edge_values=True)
    convert(source, tmp_path / "ckpt")
    back = export(tmp_path / "ckpt", tmp_path / "hf", "--dtype", dtype)
    found, config = oracles.read_hf(back)
    assert (config["dtype"], config["torch_dtype"]) == (dtype, dtype)
    # The checkpoint's own value, divided by the scale exactly, is rounded once.
    query = restore(tmp_path / "ckpt" / "0" / "items")["params.params.decoder.layers.self_attention.query.kernel"]
    scale = float(np.float32(1 / np.sqrt(128)))
    heads = query[:, 1].astype(np.float64) / scale
    halves = np.concatenate([heads[..., 0::2], heads[..., 1::2]], axis=-1).reshape(96, -1).T
    kind = found["model.norm.weight"].dtype
    wanted = {name: oracles.round_once(value, kind) for name, value in oracles.read_hf(source)[0].items()}
    name = "model.layers.1.self_attn.q_proj.weight"
    assert different({name: found[name]}, {name: oracles.round_once(halves, kind)}) == []
    assert [key for key in different(found, wanted) if "q_proj" not in key] == []


def test_a_checkpoint_is_checked_before_anything_is_written(tiny: Tiny, tmp_path: Path) -> None:
    tree = maxtext_expected(tiny("mha"), True)
    gate, query = (f"params.params.decoder.layers.{part}.kernel" for part in ("mlp.wi_0", "self_attention.query"))
    broken: dict[str, tuple[dict[str, Any], str]] = {
        "missing": ({key: value for key, value in tree.items() if key != gate}, f"missing      {gate}  (64, 2, 96)"),
        "renamed": ({("x" if key == gate else key).replace("x", gate + "s"): v for key, v in tree.items()}, gate + "s"),
        "extra": ({**tree, gate.replace("wi_0", "wi_9"): tree[gate]}, "unexpected   "),
        "shape": ({**tree, gate: tree[gate][:, :1]}, f"shape        {gate}  file has (64, 1, 96)"),
        "dtype": ({**tree, query: tree[query].astype(np.int8)}, f"dtype        {query}  int8"),
        "double": ({**tree, query: tree[query].astype(np.int32)}, f"dtype        {query}  int32"),
    }
    for name, (values, message) in broken.items():
        save(tmp_path / name / "0", "items", values)
        for args in ((), ("--dry-run",)):
            with pytest.raises(CheckpointError) as found:
                export(tmp_path / name, tmp_path / "hf", "--base", tiny("mha"), *args)
            assert message in str(found.value)
        assert not (tmp_path / "hf").exists()
    save(tmp_path / "whole" / "0", "items", tree)
    export(tmp_path / "whole", tmp_path / "hf", "--base", tiny("mha"))
    assert folders_differ(tiny("mha"), tmp_path / "hf") == []


def test_a_dry_run_prints_the_tensors_and_writes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    convert(tiny("tied"), tmp_path / "ckpt")
    result = run("export", tmp_path / "ckpt", "--out", tmp_path / "hf", "--dry-run")
    assert not (tmp_path / "hf").exists()
    for name, tensor in oracles.read_hf(tiny("tied"))[0].items():
        assert f"{name}  bfloat16{list(tensor.shape)}\n" in result.stdout


def test_a_checkpoint_that_nothing_describes_needs_a_base(tiny: Tiny, tmp_path: Path) -> None:
    convert(tiny("mha"), tmp_path / "ckpt")
    (tmp_path / "ckpt" / "bridge.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no bridge\.json beside it") as found:
        export(tmp_path / "ckpt", tmp_path / "hf")
    assert "--base DIR" in str(found.value)
    export(tmp_path / "ckpt", tmp_path / "hf", "--base", tiny("mha"))
    assert folders_differ(tiny("mha"), tmp_path / "hf") == []
    shutil.rmtree(tmp_path / "ckpt" / "hf")
    with pytest.raises(OutputError, match="exists"):
        export(tmp_path / "ckpt", tmp_path / "hf", "--base", tiny("mha"))


def test_a_checkpoint_that_lost_its_small_files_says_so(tiny: Tiny, tmp_path: Path) -> None:
    convert(tiny("mha"), tmp_path / "ckpt")
    shutil.rmtree(tmp_path / "ckpt" / "hf")
    with pytest.raises(BridgeError, match=r"has no config\.json"):
        export(tmp_path / "ckpt", tmp_path / "hf")
    assert without_step(restore(tmp_path / "ckpt" / "0" / "items"))
