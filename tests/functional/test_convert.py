"""`bridge convert`: what it writes, restored by stock Orbax, is what the oracle and MaxText's own converter say."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    ITEMS,
    Tree,
    convert,
    different,
    load_v1,
    maxtext_expected,
    restore,
    run,
    without_step,
)
from conftest import Tiny
from maxtext_converter import by_maxtext, exported_by_maxtext

import models
import oracles
from bridge import sidecar
from bridge.converters import check, slabs, transfer
from bridge.converters.hf_store import HfSource
from bridge.converters.orbax_source import TreeSource
from bridge.converters.orbax_store import TreeSink
from bridge.converters.plan import make_plan, table_for
from bridge.errors import BridgeError, CheckpointError
from bridge.model_spec import ModelSpec

LAYOUTS = [("maxtext", True), ("maxtext", False), ("tunix", True)]
DTYPES = ["bfloat16", "float16", "float32"]


def flags(scanned: bool) -> list[str]:
    return [] if scanned else ["--unscanned"]


def expected(source: Path, engine: str, scanned: bool) -> Tree:
    if engine == "maxtext":
        return maxtext_expected(source, scanned)
    return oracles.tunix_tree(*oracles.read_hf(source))


@pytest.mark.parametrize(("engine", "scanned"), LAYOUTS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "bfloat16") for name in models.SHAPES]
    + [(name, dtype) for name in ("head_dim_128", "tied", "mqa") for dtype in ("float16", "float32")],
)
def test_stock_orbax_restores_what_the_oracle_says(
    name: str, dtype: str, engine: str, scanned: bool, tiny: Tiny, tmp_path: Path
) -> None:
    source = tiny(name, dtype=dtype, edge_values=True)
    step = convert(source, tmp_path / "out", *flags(scanned), engine=engine)
    wanted = expected(source, engine, scanned)
    item = step / ITEMS[engine]
    for found in (restore(item), load_v1(step, item.name)):
        assert found.pop("step", np.int64(0)) == 0
        assert different(found, wanted) == []
    # The comparison sees one bit.
    key = sorted(wanted)[0]
    bit = wanted[key].copy()
    bit.reshape(-1).view(f"u{bit.dtype.itemsize}")[-1] ^= 1
    assert different(wanted, {**wanted, key: bit}) == [key]


@pytest.mark.parametrize("scanned", [True, False])
def test_maxtexts_own_converter_writes_the_same_bits(scanned: bool, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("head_dim_128")
    theirs = restore(by_maxtext(source)[scanned] / "items")
    step = convert(source, tmp_path / "out", "--dtype", "float32", *flags(scanned))
    ours = restore(step / "items")
    assert theirs.pop("step") == ours.pop("step")
    assert len(theirs) == (12 if scanned else 30)
    assert different(ours, theirs) == []


def test_maxtexts_own_exporter_reads_what_bridge_wrote(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("head_dim_128", tokenizer="llama")
    step = convert(source, tmp_path / "out")
    found, _ = oracles.read_hf(exported_by_maxtext(step / "items", source, tmp_path / "hf", scanned=True))
    wanted, _ = oracles.read_hf(source)
    rounded = {name: oracles.round_once(value.astype(np.float32), ml_dtypes.bfloat16) for name, value in found.items()}
    assert {value.dtype.name for value in found.values()} == {"float32"}
    assert different(rounded, wanted) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("engine", ITEMS)
@pytest.mark.parametrize("kind", DTYPES)
def test_a_chosen_dtype_is_one_rounding(kind: str, engine: str, dtype: str, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("head_dim_128", dtype=kind, edge_values=True)
    step = convert(source, tmp_path / "out", "--dtype", dtype, engine=engine)
    tensors, config = oracles.read_hf(source)
    exact = oracles.maxtext_tree(tensors, config, True) if engine == "maxtext" else oracles.tunix_tree(tensors, config)
    to = next(array for array in restore(step / ITEMS[engine]).values() if array.ndim > 1).dtype
    assert to.name == dtype
    wanted = {name: oracles.round_once(array.astype(np.float32), to) for name, array in exact.items()}
    assert different(without_step(restore(step / ITEMS[engine])), wanted) == []


def test_many_small_slabs_give_the_same_bits(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny("head_dim_96", dtype="float16", edge_values=True)
    permuted: list[int] = []
    import_block = transfer.bits.import_block

    def counted(raw: Any, *args: Any) -> Any:
        permuted.append(raw.nbytes)
        return import_block(raw, *args)

    monkeypatch.setattr(transfer.bits, "import_block", counted)
    monkeypatch.setattr(transfer.Budget, "slab_bytes", property(lambda _: 7000))
    monkeypatch.setattr(slabs, "BLOCK_BYTES", 900)
    monkeypatch.setattr(slabs, "STORED_BYTES", 2900)
    monkeypatch.setattr(slabs, "CHUNK_ELEMENTS", 16)
    for engine, scanned in LAYOUTS:
        for compression in ("none", "zstd:1"):
            permuted.clear()
            out = tmp_path / f"{engine}{scanned}{compression}"
            step = convert(source, out, "--check", "--compression", compression, *flags(scanned), engine=engine)
            found = without_step(restore(step / ITEMS[engine]))
            assert different(found, expected(source, engine, scanned)) == []
            assert len(permuted) > 500, "the arrays must have been cut into many blocks"


@pytest.mark.parametrize("compression", ["zstd:1", "zstd:3"])
def test_compression_changes_no_value(compression: str, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("mqa")
    step = convert(source, tmp_path / "out", "--compression", compression, "--check")
    assert different(without_step(restore(step / "items")), maxtext_expected(source, True)) == []


def flip(item: Path, name: str) -> None:
    """Change the last bit of the last value of an array in a checkpoint."""
    array = TreeSource(item).leaves[tuple(name.split("."))].array
    values = np.array(array.read().result())
    values.reshape(-1).view(f"u{values.dtype.itemsize}")[-1] ^= 1
    array.write(values).result()


@pytest.mark.parametrize(("engine", "scanned"), LAYOUTS)
def test_the_check_finds_one_bit_in_any_array(engine: str, scanned: bool, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("mha")
    item = convert(source, tmp_path / "out", *flags(scanned), engine=engine) / ITEMS[engine]
    model = ModelSpec.from_folder(source)
    plan = make_plan(table_for(model, engine), model, scanned)
    with HfSource(source) as hf:
        check.against_source(plan, model, hf, item)
        for name in (plan[0].name, plan[2].name, plan[-1].name):
            flip(item, name)
            with pytest.raises(CheckpointError, match="1 arrays differ from the source") as found:
                check.against_source(plan, model, hf, item)
            assert found.value.details == (name,)
            flip(item, name)
        check.against_source(plan, model, hf, item)


def test_a_failed_check_leaves_no_checkpoint(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = TreeSink.finish
    broken = "params.params.decoder.decoder_norm.scale"

    def damaged(self: TreeSink, custom: dict[str, Any]) -> None:
        finish(self, custom)
        flip(self.folder, broken)

    monkeypatch.setattr(TreeSink, "finish", damaged)
    with pytest.raises(CheckpointError, match="1 arrays differ") as found:
        convert(tiny("mha"), tmp_path / "out", "--check")
    assert broken in str(found.value)
    assert not (tmp_path / "out").exists()
    convert(tiny("mha"), tmp_path / "out")
    assert (tmp_path / "out").exists(), "without --check nobody looks"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_check_refuses_what_is_not_finite(value: float, tiny: Tiny, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    source = shutil.copytree(tiny("mha"), tmp_path / "src")
    tensors, _ = oracles.read_hf(source)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 4] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} has NaN or Inf"):
        convert(source, tmp_path / "out", "--check")


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("engine", ITEMS)
def test_a_dry_run_prints_the_plan_and_writes_nothing(engine: str, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("tied")
    before = listing(source)
    result = run("convert", source, "--to", engine, "--out", tmp_path / "out", "--dry-run")
    assert listing(tmp_path) == []
    assert listing(source) == before
    for name, array in expected(source, engine, True).items():
        assert f"{name}  {array.dtype}{list(array.shape)}" in result.stdout
    weights = sum(tensor.size for tensor in oracles.read_hf(source)[0].values())
    assert f"{weights:,} parameters" in result.stdout


def test_what_the_checkpoint_remembers(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("scaled", shards=2, tokenizer="llama")
    step = convert(source, tmp_path / "out", "--unscanned")
    facts = sidecar.read(tmp_path / "out")
    assert facts is not None
    assert (facts.engine, facts.scanned, facts.method) == ("maxtext", False, None)
    assert facts.model == ModelSpec.from_folder(source)
    assert facts.dtypes == {"all": "bfloat16"}
    assert facts.source["origin"] == str(source)
    assert facts.source["config"] == hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    for shard in source.glob("*.safetensors"):
        data = shard.read_bytes()
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        assert facts.source["headers"][shard.name] == hashlib.sha256(header).hexdigest()
    for path in (tmp_path / "out" / "hf").iterdir():
        assert path.read_bytes() == (source / path.name).read_bytes()
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "out" / "hf").iterdir()
    }
    assert json.loads((step / "_CHECKPOINT_METADATA").read_text())["custom_metadata"] == {"scan_layers": False}


def test_shards_give_the_same_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    one = convert(tiny("untied"), tmp_path / "one")
    five = convert(tiny("untied", shards=5), tmp_path / "five")
    assert different(restore(one / "items"), restore(five / "items")) == []


@pytest.mark.parametrize("size", ["0", "-1GiB", "many", "1XB"])
def test_a_size_that_is_none_is_refused(size: str, tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="size"):
        convert(tiny("mha"), tmp_path / "out", f"--memory={size}")
