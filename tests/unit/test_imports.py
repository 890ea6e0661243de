"""The import rules of the architecture, enforced on the syntax trees: who may import whom, and nothing heavy on top.

errors <- model_spec <- run_spec <- rest of the spine <- converters | configs | launchers <- demo <- commands <- cli
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("converters", "configs", "launchers")
LONGEST = 300
ORDER = {
    "errors": 0,
    "hf_keys": 0,
    "spec_yaml": 1,
    "model_spec": 1,
    "run_spec": 2,
    "demo": 5,
    "commands": 6,
    "cli": 7,
    "__main__": 8,
}
ORDER |= dict.fromkeys(FOLDERS, 4)
SPINE = 3  # mesh, sidecar, engine_fixes, and whatever else lies directly in bridge/
ENGINE_LIBRARIES = ("datasets", "flax", "grain", "maxtext", "optax", "qwix", "tunix")
TORCH_LIBRARIES = ("accelerate", "gguf", "peft", "torch", "transformers")
HEAVY = frozenset((*ENGINE_LIBRARIES, *TORCH_LIBRARIES, "jax", "jaxlib", "orbax", "tensorstore"))


def modules() -> Iterator[tuple[str, Path]]:
    """Yields every module that users import, by the name they import it under, with its file."""
    for folder in ("bridge", *FOLDERS):
        for path in sorted((ROOT / folder).rglob("*.py")):  # rglob does not enter the symlinks in bridge/
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield (name if folder == "bridge" else f"bridge.{name}"), path


def targets(node: ast.AST, module: str, is_package: bool) -> list[str]:
    """Returns the absolute names that one import statement asks for; nothing for another kind of node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package] if node.level else []
    return [".".join([*base, *([node.module] if node.module else []), alias.name]) for alias in node.names]


def wrong_arrows(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Returns the imports of a module, at any depth, that the architecture forbids."""
    own = module.split(".")[1] if "." in module else ""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        for target in targets(node, module, is_package):
            top, _, rest = target.partition(".")
            part = rest.split(".")[0]
            if top in FOLDERS:  # works in a checkout only: installed, the name is bridge.<folder>
                wrong.append(target)
            elif top == "bridge" and part and part != "__version__" and part != own:
                above = ORDER.get(part, SPINE) > (ORDER.get(own, SPINE) if own else -1)
                if above or (part in FOLDERS and own in FOLDERS):
                    wrong.append(target)
    return wrong


def on_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yields the nodes that run when a module is imported: no function bodies, nothing under TYPE_CHECKING."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from on_import(statement.orelse)
            continue
        yield statement
        for field in ("body", "orelse", "finalbody"):
            yield from on_import(getattr(statement, field, []))
        for branch in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from on_import(branch.body)


def heavy_on_top(source: str) -> list[str]:
    """Returns the heavy libraries that importing this source would load directly."""
    nodes = list(on_import(ast.parse(source).body))
    tops = {target.split(".")[0] for node in nodes for target in targets(node, "bridge.any", False)}
    return sorted(tops & HEAVY)


def loaded_heavy(statement: str) -> list[str]:
    """Returns the heavy libraries that a fresh Python has loaded after the statement."""
    program = f"import sys\n{statement}\nprint(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split()


def too_long(path: Path) -> bool:
    return len(path.read_text(encoding="utf-8").splitlines()) > LONGEST


def test_arrows() -> None:
    wrong = {
        name: found
        for name, path in modules()
        if (found := wrong_arrows(name, path.read_text("utf-8"), is_package=path.name == "__init__.py"))
    }
    assert wrong == {}


def test_every_part_is_seen() -> None:
    parts = {name.split(".")[1] for name, _ in modules() if "." in name}
    assert parts >= {"errors", "model_spec", "run_spec", "demo", "commands", "cli", "__main__", *FOLDERS}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bridge.converters.plan", "from bridge.configs import render"),
        ("bridge.converters.plan", "def f():\n    import bridge.launchers.plan"),
        ("bridge.launchers.maxtext", "from bridge import converters"),
        ("bridge.launchers.maxtext", "from ..configs import render"),
        ("bridge.configs.maxtext", "from configs import render"),
        ("bridge.configs.maxtext", "from bridge.commands import config"),
        ("bridge.mesh", "from bridge.launchers.plan import Launch"),
        ("bridge.model_spec", "from bridge.run_spec import RunSpec"),
        ("bridge.run_spec", "from .mesh import Mesh"),
        ("bridge.errors", "from bridge.model_spec import ModelSpec"),
        ("bridge.commands.convert", "from bridge.cli import main"),
        ("bridge", "from bridge.errors import BridgeError"),
    ],
)
def test_wrong_arrows_are_found(module: str, source: str) -> None:
    assert len(wrong_arrows(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bridge.converters.plan", "from bridge.converters.layout import Rule\nfrom . import layout"),
        ("bridge.launchers.shim", "from bridge.engine_fixes import fixes\nfrom bridge import __version__"),
        ("bridge.commands.convert", "from bridge.converters import transfer\nfrom bridge.demo import model"),
        ("bridge.cli", "from bridge.commands import convert"),
    ],
)
def test_right_arrows_pass(module: str, source: str) -> None:
    assert wrong_arrows(module, source) == []


def test_a_package_resolves_its_relative_imports() -> None:
    assert wrong_arrows("bridge.converters", "from ..configs import render", is_package=True) == [
        "bridge.configs.render"
    ]
    assert wrong_arrows("bridge.converters", "from .layout import Rule", is_package=True) == []


def test_nothing_heavy_at_module_top() -> None:
    assert {name: found for name, path in modules() if (found := heavy_on_top(path.read_text("utf-8")))} == {}


def test_heavy_libraries_at_module_top_are_found() -> None:
    for source in ("import jax.numpy as jnp", "try:\n    import torch\nexcept ImportError:\n    torch = None"):
        assert len(heavy_on_top(source)) == 1
    assert heavy_on_top("class A:\n    from orbax import checkpoint") == ["orbax"]
    lazy = "if TYPE_CHECKING:\n    import torch\ndef f():\n    import jax\n"
    assert heavy_on_top(lazy + "import numpy\nfrom bridge.converters import torch") == []


def test_the_command_line_loads_nothing_heavy() -> None:
    commands = [name for name, _ in modules() if name.startswith("bridge.commands")]
    assert loaded_heavy(f"import bridge.cli, {', '.join(commands)}") == []
    assert loaded_heavy("import tensorstore") == ["tensorstore"]


def test_no_file_is_too_long(tmp_path: Path) -> None:
    files = [path for _, path in modules()] + sorted((ROOT / "tests").rglob("*.py"))
    assert [str(path.relative_to(ROOT)) for path in files if too_long(path)] == []
    (tmp_path / "long.py").write_text("pass\n" * (LONGEST + 1))
    assert too_long(tmp_path / "long.py")
