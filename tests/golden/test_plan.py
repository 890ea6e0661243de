"""The tables of `bridge plan` for Llama 3.1 8B, to the letter."""

from __future__ import annotations

import pytest
from golden_types import Golden
from llama_shapes import LLAMA_8B

from bridge import options
from bridge.commands.plan import lines
from bridge.run_spec import RunSpec


@pytest.mark.parametrize("devices", ["1x16GB", "1x24GB", "8x80GB", "2x8x80GB", "7x80GB"])
def test_llama_8b(devices: str, golden: Golden) -> None:
    run = RunSpec.model_validate({"model": {"source": "x"}})
    there = options.parse_devices(devices)
    found = options.options(LLAMA_8B, run, there)
    text = "\n".join(lines(found, options.recommend(found, there), there, run.train.sequence_length)) + "\n"
    golden(f"plan/{devices}.txt", text)
