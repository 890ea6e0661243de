"""What every test shares: an environment without surprises, tokenizers, and tiny models built once a session."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from fake_bucket import Bucket

TESTS = Path(__file__).resolve().parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))


def _settle_environment() -> None:
    """Set what jax and Hugging Face read at import; MaxText takes any M_<KEY> as a setting, so none may be left."""
    for name in list(os.environ):
        if name.startswith("M_") or name in ("XLA_FLAGS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            del os.environ[name]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


_settle_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` writes the files of tests/golden/expected anew."""
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


class Tiny(Protocol):
    """Builds a model of `models.SHAPES`, with changes to the choices of `models.make_llama`, once a session."""

    def __call__(self, name: str, **changes: Any) -> Path: ...


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`tiny("tied", dtype="float32")` is a folder that all tests share: copy it before you change it."""
    import models

    folders: dict[str, Path] = {}

    def build(name: str, **changes: Any) -> Path:
        key = json.dumps([name, changes], sort_keys=True)
        if key not in folders:
            folders[key] = models.make_preset(tmp_path_factory.mktemp(name), name, **changes)
        return folders[key]

    return build


@pytest.fixture(scope="module")
def served() -> Iterator[Bucket]:
    """A store of objects on loopback; one for each module that asks."""
    import fake_bucket

    with fake_bucket.serve() as bucket:
        yield bucket


@pytest.fixture
def bucket(served: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket, which this process sees as well."""
    return served.shown(monkeypatch)


@pytest.fixture(scope="session")
def llama_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer of Llama 3.1's kind: bos in front, three end tokens, no pad token."""
    import models

    folder = tmp_path_factory.mktemp("llama_tokenizer")
    models.write_bpe_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def chatml_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer of SmolLM2's kind: ChatML, a default system turn, pad equal to eos."""
    import models

    folder = tmp_path_factory.mktemp("chatml_tokenizer")
    models.write_chatml_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real SmolLM2-135M-Instruct as a Hugging Face folder, kept under .cache between sessions: do not change it."""
    from bridge.demo.model import ensure_model

    return ensure_model(TESTS.parent / ".cache" / "smollm2")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Path:
    """A folder with SmolLM2's real tokenizer and template."""
    return smollm2_folder


EXPECTED = TESTS / "golden" / "expected"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("help/plan.txt", text)`: equal to the file of that name; `--update-golden` writes it instead."""

    def check(name: str, text: str) -> None:
        path = EXPECTED / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: pytest tests/golden --update-golden writes it"
        assert text == path.read_text(encoding="utf-8")

    return check
