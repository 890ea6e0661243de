"""Files of a checkpoint that are gone, cut or empty: never zeros in their place, never a traceback."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoints
import fault_models
import pytest

import oracles
from bridge.errors import CheckpointError

DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_models.write_model(tmp_path_factory.mktemp("hf"))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("zarr3", [True, False])
def test_a_chunk_of_a_file_per_chunk_checkpoint(zarr3: bool, damage: str, hf: Path, tmp_path: Path) -> None:
    """TensorStore reads a chunk that is not there as zeros: Orbax, and other tools, restore them in silence."""
    tree = oracles.maxtext_tree(*oracles.read_hf(hf), True)
    item = checkpoints.save(tmp_path / "ck" / "0", "items", tree, ocdbt=False, zarr3=zarr3)
    name = "params.params.decoder.layers.mlp.wo.kernel"
    files = (path for path in (item / name).rglob("*") if path.is_file())
    chunk = next(path for path in files if path.name not in ("zarr.json", ".zarray"))
    DAMAGES[damage](chunk)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read") as found:
        checkpoints.export(tmp_path / "ck", tmp_path / "back", "--base", hf)
    assert "incomplete or damaged" in str(found.value)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_every_data_file_of_a_database_checkpoint(engine: str, damage: str, hf: Path, tmp_path: Path) -> None:
    """Each file in turn: an error that names an array, or, for a superseded node of the tree, the very same tensors."""
    step = checkpoints.convert(hf, tmp_path / "ck", "--compression", "zstd:1", engine=engine)
    item = step / checkpoints.ITEMS[engine]
    files = [*sorted((item / "d").iterdir()), item / "manifest.ocdbt"]
    said = damage_each(files, DAMAGES[damage], step, hf, tmp_path / "back")
    assert len(said) > len(files) // 2


@pytest.mark.parametrize("damage", [*DAMAGES, "flipped"])
@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_every_data_file_of_a_checkpoint_written_in_place(engine: str, damage: str, hf: Path, tmp_path: Path) -> None:
    """Each array's file in turn, one flipped bit in its middle included."""
    step = checkpoints.convert(hf, tmp_path / "ck", engine=engine)
    item = step / checkpoints.ITEMS[engine]
    files = sorted(
        path for path in item.rglob("*") if path.is_file() and path.parent != item and "step" not in str(path)
    )
    said = damage_each(files, {**DAMAGES, "flipped": flip}[damage], step, hf, tmp_path / "back")
    data = [path for path in files if path.name != "zarr.json"]
    assert len(data) > 10
    assert len(said) >= len(data), "a damaged array was exported"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_each(files: list[Path], damage: Callable[[Path], object], step: Path, hf: Path, back: Path) -> list[str]:
    """Damage each file, export, mend it; the errors. No other values may come out, and no half folder stay."""
    said: list[str] = []
    for path in files:
        whole = path.read_bytes()
        damage(path)
        try:
            checkpoints.export(step, back)
            assert checkpoints.folders_differ(hf, back) == [], f"{path} is damaged and other values came out"
            shutil.rmtree(back)
        except CheckpointError as error:
            said.append(str(error))
        assert not back.exists()
        path.write_bytes(whole)
    assert [text for text in said if "cannot be opened" not in text and "cannot be read" not in text] == []
    return said


def test_a_check_of_a_damaged_conversion_names_the_array(hf: Path, tmp_path: Path) -> None:
    step = checkpoints.convert(hf, tmp_path / "ck")
    largest = max((step / "items").rglob("0"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"params\.params\..* cannot be read"):
        checkpoints.verify(step, "--exact", "--reference", hf)
