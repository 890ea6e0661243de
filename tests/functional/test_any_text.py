"""Specs and Orbax metadata that are none: each is refused by a sentence of its own, in bounded time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import checkpoints
import fault_models
import pytest

from bridge import run_spec
from bridge.errors import CheckpointError, SpecError

BOMB = "b0: &b0 {x: 1, y: 2}\n" + "".join(f"b{n}: &b{n} {{x: *b{n - 1}, y: *b{n - 1}}}\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "uses a YAML alias"),
        ("a: &a [*a]", "uses a YAML alias"),
        ("a: !!int ''", "not valid YAML: IndexError"),
        ("a: !!bool x", "not valid YAML: KeyError"),
        ("a: !!timestamp x", "not valid YAML: AttributeError"),
        ("a: !!python/object/apply:os.system [id]", "not valid YAML in line 1: could not determine a constructor"),
        ("model: {source: x}\nmaxtext: {a: 2020-01-01}", "maxtext.a: date is no plain value"),
        ("model: {source: x}\nmaxtext: {a: .nan}", "maxtext.a: nan is no finite number"),
        ("model: {source: x}\nmaxtext: {'a\\nb: 1': 2}", "a key must be text|is no name of a setting|no valid"),
        ('model: {source: x}\nmaxtext: {"a\\nb": 2}', "is no name of a setting"),
        ("model: {source: x}\n5: x", "5: a key must be text"),
        ("model: {source: " + "[" * 60 + "]" * 60 + "}", "nested too deeply"),
        ("a: " + "[" * 100_000, "is nested too deeply"),
        ("a:\n  " + "- " * 100_000, "is nested too deeply"),
        ("model: {source: x}\ntrain: {steps: 5}\ntrain: {seed: 1}", "train: stands there twice, in line 3 again"),
        ("model: {source: x, source: y}", "source: stands there twice"),
        ("x" * 300_000, "longer than"),
        ('model: {source: "a\\0b"}', "a text with a NUL"),
    ],
)
def test_a_spec_that_is_no_spec(text: str, says: str) -> None:
    start = time.monotonic()
    with pytest.raises(SpecError, match=says):
        run_spec.parse(text)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["tree_metadata"].update(entry("../../../etc", "passwd")), "leaves the folder"),
        (lambda m: m["tree_metadata"].update(entry("decoder", "a/../../b")), "leaves the folder"),
        (lambda m: m["tree_metadata"].update(entry("params.params", "decoder.decoder_norm.scale")), "is there twice"),
        (lambda m: m.update(tree_metadata=[]), "has no tree_metadata"),
        (lambda m: m["tree_metadata"].update({"x": 5}), "the entry x is damaged"),
        (lambda m: m.update(use_zarr3=False), "cannot be opened"),
    ],
)
def test_orbax_metadata_that_lies(change: Any, says: str, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    path = checkpoints.convert(hf, tmp_path / "ck") / "items" / "_METADATA"
    values = json.loads(path.read_text())
    change(values)
    fault_models.write_json(path, values)
    with pytest.raises(CheckpointError, match=says):
        checkpoints.export(tmp_path / "ck", tmp_path / "back")


def entry(*keys: str) -> dict[str, Any]:
    """One entry of `tree_metadata`."""
    metadata = [{"key": key, "key_type": 2} for key in keys]
    return {str(keys): {"key_metadata": metadata, "value_metadata": {"value_type": "np.ndarray"}}}
