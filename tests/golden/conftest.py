"""Texts to the letter: `golden(name, text)` compares with tests/golden/expected/<name>."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_types import Golden

EXPECTED = Path(__file__).with_name("expected")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden("help/plan.txt", text)`: equal to the file of that name; `--update-golden` writes it instead."""

    def check(name: str, text: str) -> None:
        path = EXPECTED / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: pytest tests/golden --update-golden writes it"
        assert text == path.read_text(encoding="utf-8")

    return check
