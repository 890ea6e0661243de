"""`bridge download`."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click

from bridge import hub
from bridge.commands import common
from bridge.errors import OutputError, SpecError


@click.command(
    epilog=common.examples("bridge download meta-llama/Llama-3.1-8B", "bridge download --spec bridge.yaml --out model")
)
@click.argument("model_id", required=False)
@click.option("--revision", help="Branch, tag or commit; default: the spec's, else main.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Default: the hub's own cache.")
@common.spec_option
@common.json_option
def command(model_id: str | None, revision: str | None, out: Path | None, spec: Path | None, as_json: bool) -> None:
    """Download a model: safetensors, config and tokenizer, nothing else. Prints the folder and the revision.

    Access and free space are checked before anything moves; a download that broke off goes on where it stopped.
    MODEL_ID defaults to the spec's model.
    """
    workspace = common.maybe_workspace(spec) if model_id is None else None
    if model_id is None:
        if workspace is None:
            raise SpecError("which model?", hint="name one, or run this in a folder with a bridge.yaml")
        model_id, revision = workspace.run.model.source, revision or workspace.run.model.revision
        local = workspace.path(model_id)
        if local.is_dir():
            raise SpecError(f"model.source is a folder, there is nothing to download: {local}")
    if not hub.is_id(model_id):
        raise SpecError(f"{model_id!r} is no hub id", hint="a hub id looks like meta-llama/Llama-3.1-8B")
    found = fetch(model_id, revision, out)
    if as_json:
        common.emit(found)
    else:
        click.echo(f"folder    {found['folder']}\nrevision  {found['revision']}")


def fetch(model_id: str, revision: str | None, out: Path | None) -> dict[str, Any]:
    """Download a model and say where it is.

    Raises:
        AccessError: as `hub.resolve`.
        OutputError: the disk is too small.
    """
    if not sys.stderr.isatty():
        # Read when huggingface_hub is imported; its bars are for terminals.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import constants

    if constants.is_offline_mode() and out is None:
        folder = hub.resolve(model_id, revision)
        return {"model": model_id, "revision": folder.name, "folder": str(folder), "bytes": size_of(folder)}
    listing = hub.preflight(model_id, revision)
    check_disk(listing.bytes, out or Path(constants.HF_HUB_CACHE), present(model_id, listing, out))
    common.say(
        f"{model_id}: {len(listing.files)} files, {common.gigabytes(listing.bytes)}, revision {listing.revision}"
    )
    start = time.monotonic()
    # The cache remembers a branch only when it is asked for by its name; a folder gets the commit that was checked.
    folder = hub.resolve(model_id, listing.revision if out else revision, local_dir=out)
    common.say(f"{model_id}: complete after {time.monotonic() - start:.0f} s")
    commit = listing.revision if out else folder.name
    return {"model": model_id, "revision": commit, "folder": str(folder.absolute()), "bytes": listing.bytes}


def present(model_id: str, listing: hub.Listing, out: Path | None) -> int:
    """Bytes of the listed files that are there already, whole."""
    from huggingface_hub import try_to_load_from_cache

    done = 0
    for name, size in listing.files.items():
        path = out / name if out else try_to_load_from_cache(model_id, name, revision=listing.revision)
        if isinstance(path, str | Path) and os.path.exists(path) and os.path.getsize(path) == size:
            done += size
    return done


def check_disk(needed: int, folder: Path, done: int) -> None:
    """Compare the free space with what is still to come.

    Raises:
        OutputError: the disk is too small.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if needed - done > free:
        raise OutputError(
            f"the model needs {common.gigabytes(needed - done)}, {existing} has {common.gigabytes(free)} free",
            hint="--out DIR or HF_HOME names a larger disk",
        )


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
