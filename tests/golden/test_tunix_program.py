"""The generated Tunix programs, word for word."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import pytest
from golden_types import Golden

from bridge.configs.tunix import render, uses_adapters
from bridge.errors import SpecError, UnsupportedError
from bridge.model_spec import ModelSpec, RopeScaling
from bridge.run_spec import RunSpec, parse

MODEL = ModelSpec(
    layers=32,
    embed=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    vocab=128256,
    tied=False,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    norm_eps=1e-5,
    context=131072,
    dtype="bfloat16",
)
# As `bridge.rope` gives them up to an ulp; written by formula here so that the text hangs on nothing installed.
FREQUENCIES = tuple(2.0 ** -(pair / 4) for pair in range(64))
CASES = {
    "sft": "",
    "lora": "lora: {rank: 8, targets: [q, v]}",
    "qlora": "mesh: {fsdp: 4, tensor: 2}",
    "dpo": "preference: {beta: 0.2}",
    "orpo": "tunix: {lora: true, remat: block}",
}


def spec(method: str, more: str = "") -> RunSpec:
    return parse(
        f"model: {{source: meta-llama/Llama-3.1-8B}}\nengine: tunix\n"
        f"data: {{train: [a.jsonl, b.jsonl], eval: eval.jsonl}}\ntrain: {{method: {method}}}\n{more}\n"
    )


def program(run: RunSpec, **changes: Any) -> str:
    places = {
        "base_checkpoint": "checkpoints/tunix/0/model_params",
        "run_dir": f"runs/tunix-{run.train.method}",
        "tokenizer": "models/Llama-3.1-8B",
    }
    return render(run, MODEL, FREQUENCIES, **places | changes)


@pytest.mark.parametrize("method", CASES)
def test_program(golden: Golden, method: str) -> None:
    run = spec(method, CASES[method])
    text = program(run)
    assert text == program(run)
    golden(f"tunix/{method}.txt", text)
    tree = ast.parse(text)
    assert ("runtime.adapted_model" in text) == uses_adapters(run) == (method in ("lora", "qlora", "orpo"))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imported] == ["from bridge.launchers import tunix_runtime as runtime"]


def test_settings_and_facts_come_back() -> None:
    """What the constants of the text say, read by the runtime, is what went in."""
    from bridge.launchers import tunix_runtime

    run = spec("dpo", CASES["orpo"])
    text = program(run, tokenizer='a "quoted"\\path')
    names: dict[str, Any] = {"runtime": tunix_runtime}
    exec(compile(text.split("def main")[0], "program", "exec"), names)
    settings = names["SETTINGS"]
    assert names["MODEL"] == MODEL
    assert names["FREQUENCIES"] == FREQUENCIES
    assert names["TOKENIZER"] == 'a "quoted"\\path'
    assert settings.train == run.train.model_copy(update={"weight_dtype": "bfloat16"})
    assert (settings.data, settings.lora, settings.preference, settings.mesh) == (
        run.data,
        run.lora,
        run.preference,
        run.mesh,
    )
    with pytest.raises(SpecError, match="1 problem"):
        exec(compile(text.split("def main")[0].replace('"steps"', '"stepz"'), "program", "exec"), names)


def test_rendering_loads_no_engine() -> None:
    code = (
        "import sys, bridge.configs.tunix, bridge.engine_fixes as e; e.fixes(); "
        "print([m for m in ('jax', 'tunix', 'torch', 'orbax') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("tunix: {remta: block}", "tunix.remta: unknown key (did you mean remat?)"),
        ("tunix: {zzz: 1}", "tunix.zzz: unknown key (known: lora, remat)"),
        ("tunix: {lora: 1}", "tunix.lora: 1 (supported: False, True)"),
        ("tunix: {remat: all}", "tunix.remat: 'all' (supported: decoder, block, none)"),
        ("tunix: {lora: true}", "tunix.lora: true with the method sft"),
    ],
)
def test_engine_settings_are_checked(more: str, problem: str) -> None:
    with pytest.raises(SpecError, match="1 problem") as error:
        program(spec("sft", more))
    assert [detail for detail in error.value.details if problem in detail]


def test_what_tunix_cannot_do_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="tiles of 96") as error:
        program(spec("qlora", "lora: {tile_size: 96}"))
    assert error.value.details == (
        "head_dim 128 is no multiple of 96",
        "embed 4096 is no multiple of 96",
        "mlp 14336 is no multiple of 96",
    )
    assert "lora.tile_size: 128 fits" in str(error.value)
