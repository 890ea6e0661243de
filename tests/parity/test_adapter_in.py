"""`bridge convert ADAPTER --base DIR`: an adapter that PEFT has saved, on either engine, against PEFT itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapter_cases as cases
import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from conftest import Tiny
from numpy.typing import NDArray

from bridge.cli import cli
from bridge.errors import CheckpointError

RANK, ALPHA, TOKENS = 4, 12.0, 64
# head_dim 64 tied and grouped, 128 untied where 1/sqrt(head_dim) is no power of two, and as many kv heads as heads.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied-64": ("tied", {"head_dim": 64, "heads": 4, "mlp": 96}),
    "untied-128": ("head_dim_128", {"mlp": 96, "layers": 2}),
    "mha-32": ("mha", {"head_dim": 32}),
}


def bridge(*argv: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, list(argv))
    assert done.exit_code == code, done.output
    return done.stdout


def place(base: Path, folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    """A workspace with the converted base; the current folder."""
    (folder / "bridge.yaml").write_text(yaml.safe_dump({"model": {"source": str(base)}, "engine": engine}))
    monkeypatch.chdir(folder)
    bridge("convert", "--to", engine, *options)
    return folder


def saved_by_peft(base: Path, folder: Path, targets: tuple[str, ...], dtype: str, **choices: Any) -> Path:
    import peft
    import torch
    from transformers import LlamaForCausalLM

    untyped: Any = peft
    names = [f"{target}_proj" for target in targets]
    settings = untyped.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=names, **choices)
    torch.manual_seed(0)
    network = untyped.get_peft_model(LlamaForCausalLM.from_pretrained(base), settings)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
            if "lora_" in name:
                parameter.data = parameter.data.to(getattr(torch, dtype))
    network.save_pretrained(folder)
    return folder


def by_torch(folder: Path, adapter: Path | None = None) -> NDArray[np.float32]:
    """f32 logits of PyTorch, with PEFT's adapter on it where one is given."""
    import peft
    import torch
    from transformers import LlamaForCausalLM

    make: Any = LlamaForCausalLM
    network = make.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        load: Any = peft.PeftModel.from_pretrained
        network = load(network, adapter)
    with torch.no_grad():
        found: NDArray[np.float32] = network.eval()(torch.from_numpy(tokens().astype(np.int64))[None]).logits[0].numpy()
    return found


def tokens() -> NDArray[np.int32]:
    return np.random.default_rng(3).integers(0, 250, TOKENS, dtype=np.int32)


def by_engine(folder: Path, adapter: Path, engine: str) -> NDArray[np.float32]:
    """The engine's own f32 forward pass with the adapter on, from what `bridge.json` says alone."""
    from bridge.commands import adapter as adapters
    from bridge.commands import checkpoint, verify_adapter
    from bridge.commands.forward import adapted_pass
    from bridge.commands.workspace import Workspace

    workspace = Workspace.open(folder / "bridge.yaml")
    found = checkpoint.find(workspace, adapter, None, None)
    assert found.engine == engine
    facts = adapters.Options().facts(found)
    with adapted_pass(found, facts, verify_adapter.converted(found, workspace), TOKENS) as forward:
        return forward(tokens(), np.arange(TOKENS, dtype=np.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "shape", "targets", "dtype", "choices", "options"),
    [
        ("tunix", "untied-128", cases.ALL, "float32", {}, ()),
        ("tunix", "tied-64", ("q",), "bfloat16", {"use_rslora": True}, ()),
        ("tunix", "mha-32", ("gate", "up", "down"), "float32", {}, ()),
        ("maxtext", "tied-64", cases.ALL, "bfloat16", {"use_rslora": True}, ()),
        ("maxtext", "untied-128", ("q", "o"), "float32", {}, ("--unscanned",)),
        ("maxtext", "mha-32", ("gate", "up", "down"), "float32", {}, ()),
    ],
)
def test_the_engine_computes_what_peft_does(
    engine: str,
    shape: str,
    targets: tuple[str, ...],
    dtype: str,
    choices: dict[str, Any],
    options: tuple[str, ...],
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, changes = SHAPES[shape]
    base = tiny(name, dtype="float32", **changes)
    adapter = saved_by_peft(base, tmp_path / "peft", targets, dtype, **choices)
    folder = place(base, tmp_path, engine, monkeypatch, *options)
    bridge("convert", str(adapter), "--base", str(base), "--to", engine, "--out", "adapter", *options)
    expected = by_torch(base, adapter)
    assert np.abs(expected - by_torch(base)).max() > 0.1  # the adapter shows
    assert np.abs(by_engine(folder, folder / "adapter", engine) - expected).max() < 1e-4
    # And out again: merged, and as the adapter that went in.
    bridge("export", "--to", "hf", "adapter", "--out", "merged")
    assert np.abs(by_torch(folder / "merged") - expected).max() < 1e-4
    bridge("export", "--to", "peft", "adapter", "--out", "back")
    assert np.abs(by_torch(base, folder / "back") - expected).max() < 1e-5
    given, back = cases.read_tensors(adapter), cases.read_tensors(folder / "back")
    scaled = [name for name in cases.unequal(back, given) if "q_proj.lora_B" not in name]
    assert scaled == [], "all but MaxText's scaled query comes back bit for bit"


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "options"), [("maxtext", ()), ("maxtext", ("--unscanned",)), ("tunix", ())])
def test_a_qlora_adapter_is_verified_in_the_dtype_it_was_trained_in(
    engine: str, options: tuple[str, ...], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MaxText quantizes in the compute dtype: a pass in f32 would make other weights of the same base."""
    from bridge.converters.adapters import AdapterFacts

    name, changes = SHAPES["untied-128"]
    base = tiny(name, **changes)
    targets = ("q", "v", "o", "down")
    adapter = saved_by_peft(base, tmp_path / "peft", targets, "float32")
    held = cases.ALL if engine == "tunix" else None
    facts = AdapterFacts(RANK, ALPHA, targets, "nf4", 32, str(base), "bfloat16", held)
    (adapter / "bridge.json").write_text(json.dumps({"adapter": facts.to_json()}))
    folder = place(base, tmp_path, engine, monkeypatch, *options)
    bridge("convert", str(adapter), "--base", str(base), "--to", engine, "--out", "adapter", *options)
    result = json.loads(bridge("verify", "adapter", "--tokens", "64", "--json"))
    assert result["ok"] is True
    assert result["max_abs"] <= result["tolerance"] < 1e-3
    bridge("export", "--to", "hf", "adapter", "--out", "merged")
    bridge("export", "--to", "hf", "adapter", "--out", "other", "--merge-base", "original")
    if engine == "tunix":
        exported_is_looked_at()
    engine_logits = by_engine(folder, folder / "adapter", engine)
    # The merged export is in bf16: rounded, but the same model; on the original base it is another one.
    near, far = (np.abs(by_torch(folder / kind) - engine_logits).max() for kind in ("merged", "other"))
    assert near < 0.3 * far
    # The engine's weights, not only bridge's: had it been trained in f32, the check of the bf16 merge would fail.
    record = json.loads((folder / "adapter" / "bridge.json").read_text())
    record["adapter"]["base_dtype"] = "float32"
    monkeypatch.setattr("bridge.commands.verify_adapter.merge", _merge_as_bfloat16)
    (folder / "adapter" / "bridge.json").write_text(json.dumps(record))
    assert json.loads(bridge("verify", "adapter", "--tokens", "64", "--json", code=1))["ok"] is False


def exported_is_looked_at() -> None:
    """A reference must be the merge, in whichever dtype it was exported; the other merge is another model."""
    bridge("export", "--to", "hf", "adapter", "--out", "wide", "--dtype", "float32")
    for folder in ("merged", "wide"):
        given = ("verify", "adapter", "--tokens", "16", "--reference", folder, "--json")
        result = json.loads(bridge(*given))
        assert (result["ok"], result["exact"]) == (True, True)
    assert json.loads(bridge(*given, "--exact"))["different"] == []
    done = CliRunner().invoke(cli, ["verify", "adapter", "--tokens", "16", "--reference", "other"])
    assert isinstance(done.exception, CheckpointError)
    assert "merged into its base: 14 of" in str(done.exception)


def _merge_as_bfloat16(found: Any, facts: Any, base: Path, out: Path, dtype: str) -> None:
    from dataclasses import replace

    from bridge.commands import adapter, verify_adapter

    changed = replace(facts, base_dtype="bfloat16")
    bytes_ = verify_adapter.SHARD_BYTES
    adapter.write_merged(found, changed, base, out, dtype, bytes_, "dequantized", False, tell=lambda _: None)
