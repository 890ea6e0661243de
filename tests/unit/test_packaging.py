"""What users install: the wheel holds every file of the tree, runs from an empty folder, and leaves nothing generic."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bridge

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("converters", "configs", "launchers")
ENGINES = {"maxtext", "google-tunix", "torch", "transformers", "flax"}


def copy_tree(target: Path) -> Path:
    """Copies what a build reads, so that it leaves no build/ or egg-info in the checkout."""
    for folder in ("bridge", *FOLDERS):
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, target / name)
    return target


def build_wheel(tree: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def files_of_tree() -> set[str]:
    """Returns every file of the four folders, data included, by the path it must have in the wheel."""
    found = set()
    for folder in ("bridge", *FOLDERS):
        for path in (ROOT / folder).rglob("*"):  # rglob does not enter the symlinks in bridge/
            if path.is_file() and "__pycache__" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                found.add(name if folder == "bridge" else f"bridge/{name}")
    return found


def files_of_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python on the unpacked wheel. With -S no .pth file is read: the editable install cannot fill a gap."""
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-S", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(copy_tree(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked into an empty folder, which is all that installing a pure wheel is."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_the_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    assert files_of_wheel(wheel) == files_of_tree()


def test_a_forgotten_package_or_data_pattern_is_seen(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    text = (tree / "setup.cfg").read_text()
    for line in ("    bridge.converters.tables\n", "bridge.demo = *.jsonl\n"):
        assert text.count(line) == 1
        text = text.replace(line, "")
    (tree / "setup.cfg").write_text(text)
    missing = files_of_tree() - files_of_wheel(build_wheel(tree, tmp_path / "dist"))
    assert "bridge/converters/tables/llama_maxtext.py" in missing
    assert "bridge/demo/train.jsonl" in missing


def test_nothing_generic_at_the_top_level(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"bridge", f"bridge_llama-{bridge.__version__}.dist-info"}


def test_the_module_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "bridge", "--version")
    assert done.returncode == 0, done.stderr
    assert bridge.__version__ in done.stdout


def test_the_three_folders_come_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    names = [f"bridge.{folder}" for folder in FOLDERS]
    program = f"import {', '.join(names)}; print({', '.join(f'{name}.__file__' for name in names)}, sep='\\n')"
    done = run(installed, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(installed / "bridge" / folder / "__init__.py") for folder in FOLDERS]


def test_folders_of_the_user_do_not_stand_in_for_ours(installed: Path, tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise RuntimeError('the folder of the user was imported')\n")
    program = f"import bridge.cli, {', '.join(f'bridge.{folder}' for folder in FOLDERS)}"
    for arguments in (("-m", "bridge", "--version"), ("-c", program)):
        done = run(installed, tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
    assert "the folder of the user" in run(installed, tmp_path, "-c", "import configs").stderr


def options() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def requirements(text: str) -> list[Requirement]:
    return [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    split = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {str(canonicalize_name(name)): version for name, version in split}


def unpinned(wanted: list[Requirement], pinned: dict[str, str]) -> list[str]:
    """Returns the requirements that no pin fulfils."""
    return [
        str(one)
        for one in wanted
        if not one.specifier.contains(pinned.get(str(canonicalize_name(one.name)), "0"), prereleases=True)
        or canonicalize_name(one.name) not in pinned
    ]


def test_the_base_install_needs_no_engine() -> None:
    names = {one.name for one in requirements(options()["options"]["install_requires"])}
    assert "orbax-checkpoint" in names
    assert names & ENGINES == set()


def test_all_holds_every_extra_but_cuda_and_fuzz() -> None:
    extras = options()["options.extras_require"]
    (everything,) = requirements(extras["all"])
    assert everything.name == "bridge-llama"
    assert everything.extras == set(extras) - {"all", "cuda", "fuzz"}


def test_the_constraints_pin_what_the_extras_ask_for() -> None:
    configuration = options()
    texts = [configuration["options"]["install_requires"], *configuration["options.extras_require"].values()]
    wanted = [one for text in texts for one in requirements(text) if one.name != "bridge-llama"]
    assert len(wanted) > 40
    assert unpinned(wanted, pins()) == []
    assert unpinned([Requirement("pytest<1"), Requirement("left-pad")], pins()) == ["pytest<1", "left-pad"]


def test_every_make_target_is_declared_and_explained() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):.*## ", text, flags=re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    assert targets == set(phony.split())
    assert targets >= {"setup", "demo", "test", "check", "bench", "golden"}
