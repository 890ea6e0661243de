"""Which base an adapter belongs to, and what must be said of one that comes without `bridge.json`."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adapter_cases as cases
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import Tiny

import oracles
from bridge.cli import cli
from bridge.errors import BridgeError

RANK, ALPHA = 4, 10.0
TARGETS = ("q", "o", "down")


def bridge(*argv: str) -> Any:
    done = CliRunner().invoke(cli, list(argv))
    assert done.exit_code == 0, done.output
    return done


def refused(*argv: str) -> str:
    """The text of the error."""
    done = CliRunner().invoke(cli, list(argv))
    assert isinstance(done.exception, BridgeError), done.output
    return str(done.exception)


@dataclass(frozen=True)
class Foreign:
    """A step that an engine's own trainer saved: no `bridge.json`; its base, and the factors in PEFT's layout."""

    step: Path
    base: Path
    factors: cases.Factors


@pytest.fixture
def foreign(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Foreign:
    base = shutil.copytree(tiny("untied", mlp=96, tokenizer="llama"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    factors = cases.random_factors(config, RANK, targets=TARGETS)
    step = cases.write_orbax(tmp_path / "7", cases.engine_tree(factors, config, "tunix")).parent
    monkeypatch.chdir(tmp_path)
    return Foreign(step, base, factors)


@pytest.mark.usefixtures("foreign")
def test_a_foreign_adapter_needs_what_its_arrays_do_not_say() -> None:
    based = ("7", "--base", "base")
    assert "says alpha of its adapter" in refused("export", *based, "--out", "out")
    for verb in (("export", "--out", "out"), ("verify",), ("generate", "--prompt", "x")):
        assert "--alpha ALPHA" in refused(*verb, *based)
    assert "says tile-size" in refused("export", *based, "--alpha", "10", "--quantization", "nf4", "--out", "out")
    assert "nothing says what model it is" in refused("export", "7", "--alpha", "10", "--out", "out")
    assert not Path("out").exists()


def test_its_quantization_is_taken_from_the_options(foreign: Foreign) -> None:
    """Without them the merge is on the base as it is, and says so; with them on what qwix makes of it."""
    import jax.numpy as jnp
    from qwix._src.core import qarray

    given = ("--base", "base", "--alpha", str(ALPHA), "--dtype", "float32")
    plain = bridge("export", "7", *given, "--out", "plain")
    assert "taken as trained on a base that was not quantized" in plain.stderr
    nf4 = bridge("export", "7", *given, "--quantization", "nf4", "--tile-size", "32", "--out", "nf4")
    assert "taken as" not in nf4.stderr
    assert "the original one differs by up to" in nf4.stderr
    tensors, _ = oracles.read_hf(foreign.base)
    (a, b), name = foreign.factors[1, "down"], "model.layers.1.mlp.down_proj.weight"
    weight = tensors[name]
    how = qarray.HowToQuantize(qtype="nf4", channelwise_axes=(0,), tiled_axes={1: 32}, calibration_method="absmax")
    held = np.asarray(qarray.dequantize(qarray.quantize(jnp.asarray(weight), how))).astype(np.float32)
    for folder, base in (("plain", weight.astype(np.float32)), ("nf4", held)):
        merged, _ = oracles.read_hf(Path(folder))
        np.testing.assert_allclose(merged[name], base + b @ a * np.float32(ALPHA / RANK), atol=1e-6)
    assert np.abs(held - weight.astype(np.float32)).max() > 0.01
    record = bridge(
        "export", "7", *given[:4], "--quantization", "nf4", "--tile-size", "32", "--to", "peft", "--out", "p"
    )
    assert "NF4 (tiles of 32)" in Path("p/README.md").read_text(), record.stderr


def test_another_model_of_the_same_shape_is_no_base(foreign: Foreign, tmp_path: Path) -> None:
    """Llama 3.1 8B and its Instruct model have the same shapes: their config.json tells them apart."""
    peft = cases.write_peft(tmp_path / "peft", foreign.factors, RANK, ALPHA)
    bridge("convert", str(peft), "--base", "base", "--to", "tunix", "--out", "adapter")
    bridge("export", "adapter", "--out", "right")
    other = shutil.copytree(foreign.base, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    assert "another config.json than the base" in refused("export", "adapter", "--base", "other", "--out", "wrong")
    assert not Path("wrong").exists()


def test_a_relative_base_starts_at_the_spec(foreign: Foreign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the base's name below the current one is not the base."""
    peft = cases.write_peft(tmp_path / "peft", foreign.factors, RANK, ALPHA)
    bridge("convert", str(peft), "--base", "base", "--to", "tunix", "--out", "adapter")
    record = json.loads(Path("adapter/bridge.json").read_text())
    record["adapter"]["base"] = record["source"]["origin"] = "base"
    Path("adapter/bridge.json").write_text(json.dumps(record))
    Path("bridge.yaml").write_text("model: {source: base}\nengine: tunix\n")
    decoy = tmp_path / "elsewhere" / "base"
    shutil.copytree(foreign.base, decoy)
    (decoy / "model.safetensors").write_bytes(b"no weights")
    monkeypatch.chdir(decoy.parent)
    bridge("export", "../adapter", "--spec", "../bridge.yaml", "--out", "merged")
    merged, _ = oracles.read_hf(Path("merged"))
    (a, b), name = foreign.factors[0, "q"], "model.layers.0.self_attn.q_proj.weight"
    weight = oracles.read_hf(foreign.base)[0][name].astype(np.float32)
    np.testing.assert_allclose(merged[name].astype(np.float32), weight + b @ a * np.float32(ALPHA / RANK), rtol=1e-2)


def test_checkpoints_are_found_through_the_folder_above(foreign: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ("tunix", "maxtext"):
        bridge("convert", "base", "--to", engine, "--out", engine)
    below = foreign.step.parent / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    for engine in ("tunix", "maxtext"):
        assert json.loads(bridge("verify", f"../{engine}", "--exact", "--json").stdout)["ok"] is True
        assert json.loads(bridge("inspect", f"../{engine}", "--json").stdout)["format"] == engine
        bridge("export", f"../{engine}", "--out", f"../{engine}-out")
        exported, original = (oracles.read_hf(Path(f"../{name}"))[0] for name in (f"{engine}-out", "base"))
        assert cases.unequal(exported, original) == []


def test_an_adapters_dry_run_writes_nothing_and_says_what_would_be(foreign: Foreign, tmp_path: Path) -> None:
    peft = str(cases.write_peft(tmp_path / "peft", foreign.factors, RANK, ALPHA))
    before = sorted(tmp_path.rglob("*"))
    for engine, unscanned in (("tunix", ()), ("maxtext", ()), ("maxtext", ("--unscanned",))):
        argv = ("convert", peft, "--base", "base", "--to", engine, "--out", "out", *unscanned)
        said = bridge(*argv, "--dry-run").stdout.splitlines()
        assert sorted(tmp_path.rglob("*")) == before
        bridge(*argv)
        item = next(Path("out/0").glob("*/_METADATA")).parent
        stored = cases.read_orbax(item)
        told = {line.split("  ")[0]: line.split("  ")[1] for line in said[:-1]}
        names = {name.removeprefix("params.params.").removesuffix(".value"): array for name, array in stored.items()}
        assert told == {name: f"{array.dtype}{list(array.shape)}" for name, array in names.items()}
        assert f"{len(names)} arrays" in said[-1]
        shutil.rmtree("out")


def test_options_of_full_checkpoints_are_refused_for_an_adapter(foreign: Foreign, tmp_path: Path) -> None:
    peft = str(cases.write_peft(tmp_path / "peft", foreign.factors, RANK, ALPHA))
    argv = ("convert", peft, "--base", "base", "--to", "tunix", "--out", "out")
    assert "--dtype, --check of an adapter" in refused(*argv, "--dtype", "bfloat16", "--check")
    assert "--compression of an adapter" in refused(*argv, "--compression", "zstd:1")
    assert not Path("out").exists()


def test_what_is_read_is_never_overwritten(foreign: Foreign, tmp_path: Path) -> None:
    peft = str(cases.write_peft(tmp_path / "peft", foreign.factors, RANK, ALPHA))
    bridge("convert", peft, "--base", "base", "--to", "tunix", "--out", "adapter")
    base = (foreign.base / "model.safetensors").read_bytes()
    for argv in (
        ("export", "adapter", "--out", "base"),
        ("export", "adapter", "--out", "adapter"),
        ("export", "adapter", "--to", "peft", "--out", "adapter"),
        ("convert", peft, "--base", "base", "--to", "tunix", "--out", peft),
        ("convert", peft, "--base", "base", "--to", "tunix", "--out", "base"),
    ):
        refused(*argv, "--overwrite")
    assert (foreign.base / "model.safetensors").read_bytes() == base
    assert Path(peft, "adapter_model.safetensors").is_file()
    assert Path("adapter/bridge.json").is_file()
