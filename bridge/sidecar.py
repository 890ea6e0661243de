"""`bridge.json`: what a checkpoint remembers about itself, and `hf/` beside it: the small files an export needs."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import bridge
from bridge.errors import CheckpointError
from bridge.model_spec import FLOAT_DTYPES, ModelSpec, read_json

FILE = "bridge.json"
HF = "hf"
FORMAT = 1
LOCK = "lock"
"""The `kind` of a `bridge.json` that pins downloads (bridge/hub_lock.py) and describes no checkpoint."""

# The small files of a Hugging Face folder that travel with a checkpoint, byte for byte.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

KINDS: dict[str, type | tuple[type, ...]] = {
    "engine": str,
    "scanned": bool,
    "method": (str, type(None)),
    "source": dict,
    "dtypes": dict,
    "layout": dict,
    "adapter": (dict, type(None)),
    "versions": dict,
}


@dataclass(frozen=True)
class Sidecar:
    """The facts of a checkpoint that its engine's files do not hold."""

    engine: str
    model: ModelSpec
    scanned: bool
    method: str | None = None
    """None for a converted checkpoint, else how it was trained."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where it came from: path or hub id, revision, sha256 of every source file's header and of config.json."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """The source's dtype, tensor by tensor where they differ, else under `all`."""
    layout: dict[str, Any] = field(default_factory=dict)
    """RoPE kind, folded scale, engine settings the layout assumes."""
    adapter: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write `bridge.json` into `folder`."""
        values = {"format": FORMAT, "bridge": bridge.__version__, **asdict(self)}
        (folder / FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def hf_dtype(self, name: str) -> str:
        """The dtype that a tensor had in the source."""
        return self.dtypes.get(name, self.dtypes.get("all", self.model.dtype))


def read(folder: Path) -> Sidecar | None:
    """The sidecar of a checkpoint folder; None when it has none.

    Raises:
        CheckpointError: it is damaged, or of a newer format.
    """
    path = folder / FILE
    if not path.exists():
        return None
    values = read_json(path)
    if values.get("kind") == LOCK:
        return None
    if values.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {values.get('format')!r}, this bridge reads {FORMAT}", hint="update bridge"
        )
    try:
        model = ModelSpec.from_json(values["model"])
        known = {key: values[key] for key in ("engine", "scanned", "method", "source", "dtypes", "layout", "adapter")}
        sidecar = Sidecar(model=model, versions=values.get("versions", {}), **known)
    except KeyError as error:
        raise CheckpointError(f"{path} is damaged: {error} is missing") from error
    wrong = [name for name, kinds in KINDS.items() if not isinstance(getattr(sidecar, name), kinds)]
    if not wrong and not all(kind in FLOAT_DTYPES for kind in sidecar.dtypes.values()):
        wrong = ["dtypes"]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {', '.join(wrong)} of the wrong type")
    return sidecar


def is_lock(path: Path) -> bool:
    """Whether a `bridge.json` is a lock.

    Raises:
        CheckpointError: it is no JSON object.
    """
    return read_json(path).get("kind") == LOCK


def inside(folder: Path, name: str, where: Path) -> Path:
    """The path of a plain file name in a folder; links may lead into the hub cache's own `blobs`, nowhere else.

    Raises:
        CheckpointError: the name has a folder in it, or the file is a link that leaves the folder.
    """
    if not name or len(name) > 200 or name in (".", "..") or re.search(r"[/\\\0]", name):
        raise CheckpointError(f"{where}: {name!r} is not a plain file name")
    path = folder / name
    if path.is_symlink():
        target, home = path.resolve(), folder.resolve()
        blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
        if home not in target.parents and blobs not in target.parents:
            raise CheckpointError(f"{where}: {name} is a link that leaves the folder ({target})")
    return path


def copy_side_files(source: Path, target: Path) -> list[str]:
    """Copy the small files that exist, byte for byte; returns their names.

    Raises:
        CheckpointError: one is a link that leaves the folder; following it would publish a file of someone's.
    """
    target.mkdir(exist_ok=True)
    names = [name for name in SIDE_FILES if inside(source, name, where=source).is_file()]
    for name in names:
        (target / name).write_bytes((source / name).read_bytes())
    return names


def replace_tokenizer(source: Path, target: Path) -> None:
    """Put another model's tokenizer in the place of the one among the small files in `target`.

    Its chat template and its end tokens come with it: a base model that was trained with them stops by them.

    Raises:
        CheckpointError: as `copy_side_files`.
    """
    own = [name for name in SIDE_FILES if name not in ("config.json", "generation_config.json")]
    for name in own:
        (target / name).unlink(missing_ok=True)
    for name in (*own, "generation_config.json"):
        if inside(source, name, where=source).is_file():
            (target / name).write_bytes((source / name).read_bytes())


def sha256(data: bytes) -> str:
    """The digest of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def source_facts(folder: Path, files: list[Path], origin: str, revision: str | None) -> dict[str, Any]:
    """Where a checkpoint came from: digests of config.json and of every weight file's header."""
    headers = {}
    for path in sorted(files):
        with path.open("rb") as file:
            start = file.read(8)
            headers[path.name] = sha256(start + file.read(int.from_bytes(start, "little")))
    return {
        "origin": origin,
        "revision": revision,
        "config": sha256((folder / "config.json").read_bytes()),
        "headers": headers,
    }
