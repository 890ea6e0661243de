"""`bridge download`."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bridge import hub, hub_lock, sidecar
from bridge.commands import common
from bridge.errors import OutputError, SpecError


@click.command(
    epilog=common.examples("bridge download meta-llama/Llama-3.1-8B", "bridge download --spec bridge.yaml --out model")
)
@click.argument("model_id", required=False)
@click.option("--revision", help="Branch, tag or commit; default: the spec's, else main.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Default: the hub's own cache.")
@click.option("--update", is_flag=True, help="Take what the branch stands for now, and move the lock to it.")
@common.spec_option
@common.json_option
def command(
    model_id: str | None, revision: str | None, out: Path | None, update: bool, spec: Path | None, as_json: bool
) -> None:
    """Download a model: safetensors, config and tokenizer, nothing else. Prints the folder and the revision.

    Access and free space are checked before anything moves; a download that broke off goes on where it stopped.
    MODEL_ID defaults to the spec's model; a tokenizer from another model comes with it.

    The commit is written to bridge.json beside the spec, or beside --out; it is taken again from then on, by
    bridge convert too, until --update.
    """
    wanted = [_named(model_id, revision, out)] if model_id is not None else _of_spec(spec, revision)
    for each in wanted:
        if not hub.is_id(each.model_id):
            raise SpecError(f"{each.model_id!r} is no hub id", hint="a hub id looks like meta-llama/Llama-3.1-8B")
    quiet_bars()
    # The small one last, but asked for first: a tokenizer that is gated must show before gigabytes move.
    listed = [look(each, update) for each in reversed(wanted)][::-1]
    found = [fetch(each, listing, out if each.weights else None) for each, listing in zip(wanted, listed, strict=True)]
    if as_json:
        common.emit(found[0] | {"tokenizer": found[1] if len(found) > 1 else None})
        return
    click.echo(f"folder    {found[0]['folder']}\nrevision  {found[0]['revision']}")
    if len(found) > 1:
        click.echo(f"tokenizer {found[1]['folder']}")


@dataclass(frozen=True)
class Wanted:
    """A model of the hub, and the folder of the lock that pins it; None: nothing pins it."""

    model_id: str
    asked: str | None
    lock: Path | None
    weights: bool = True


def _named(model_id: str, revision: str | None, out: Path | None) -> Wanted:
    return Wanted(model_id, revision, out.absolute().parent if out is not None else None)


def _of_spec(spec: Path | None, revision: str | None) -> list[Wanted]:
    """The model of the spec, and its tokenizer where that comes from another model of the hub.

    Raises:
        SpecError: there is no spec, or the model is a folder.
    """
    workspace = common.maybe_workspace(spec)
    if workspace is None:
        raise SpecError("which model?", hint="name one, or run this in a folder with a bridge.yaml")
    model = workspace.run.model
    local = workspace.path(model.source)
    if local.is_dir():
        raise SpecError(f"model.source is a folder, there is nothing to download: {local}")
    # Another revision than the spec's is a look aside: the spec's lock does not move.
    lock = workspace.base if revision in (None, model.revision) else None
    wanted = [Wanted(model.source, revision or model.revision, lock)]
    if model.tokenizer not in (None, model.source) and not workspace.path(model.tokenizer).is_dir():
        wanted.append(Wanted(model.tokenizer, None, workspace.base, weights=False))
    return wanted


def quiet_bars() -> None:
    """No progress bars of huggingface_hub where nobody looks; it reads the variable when it is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def look(wanted: Wanted, update: bool) -> hub.Listing | None:
    """What the hub would give of a model, at the commit that is pinned; None when the hub may not be asked.

    Raises:
        AccessError: as `hub.preflight`.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return None
    pinned = None if update or wanted.lock is None else hub_lock.commit(wanted.lock, wanted.model_id, wanted.asked)
    listing = hub.preflight(wanted.model_id, pinned or wanted.asked, weights=wanted.weights, pinned=pinned is not None)
    if pinned is not None:
        newest = hub.newest(wanted.model_id, wanted.asked)
        moved = (
            f"; {wanted.asked or 'main'} is at {newest[:12]} now, --update takes it"
            if newest and newest != pinned
            else ""
        )
        common.say(f"{wanted.model_id}: commit {pinned[:12]}, as {sidecar.FILE} has it{moved}")
    return listing


def fetch(wanted: Wanted, listing: hub.Listing | None, out: Path | None) -> dict[str, Any]:
    """Download a model, pin it, and say where it is.

    Raises:
        AccessError: as `hub.resolve`.
        OutputError: the disk is too small.
    """
    from huggingface_hub import constants

    model_id, weights = wanted.model_id, wanted.weights
    if listing is None:
        pinned = hub_lock.commit(wanted.lock, model_id, wanted.asked) if wanted.lock else None
        folder = hub.resolve(model_id, pinned or wanted.asked, weights=weights, local_dir=out)
        commit = hub.commit_of(folder) or pinned
        return _found(wanted, commit, folder, size_of(folder))
    check_disk(listing.bytes, out or Path(constants.HF_HUB_CACHE), present(model_id, listing, out))
    what = f"{len(listing.files)} files, {common.gigabytes(listing.bytes)}, revision {listing.revision}"
    common.say(f"{model_id}: {what}")
    # The cache remembers a branch only when it is asked for by its name; it is, where it still stands for that commit.
    by_name = out is None and hub.newest(model_id, wanted.asked) == listing.revision
    with watched(model_id, listing.bytes, storing(model_id, out)):
        folder = hub.resolve(model_id, wanted.asked if by_name else listing.revision, local_dir=out, weights=weights)
    commit = listing.revision if out else hub.commit_of(folder)
    if wanted.lock is not None and commit is not None:
        hub_lock.write(wanted.lock, model_id, wanted.asked, commit)
    return _found(wanted, commit, folder, listing.bytes)


def _found(wanted: Wanted, commit: str | None, folder: Path, size: int) -> dict[str, Any]:
    return {"model": wanted.model_id, "revision": commit, "folder": str(folder.absolute()), "bytes": size}


def storing(model_id: str, out: Path | None) -> Path:
    """Where the bytes of a download arrive, those of unfinished files too."""
    from huggingface_hub import constants

    return out or Path(constants.HF_HUB_CACHE) / f"models--{model_id.replace('/', '--')}" / "blobs"


@contextlib.contextmanager
def watched(title: str, total: int, folder: Path, every: float = 1.0) -> Iterator[None]:
    """Sparse lines of progress while a folder grows; on a terminal huggingface_hub has its own bars."""
    if sys.stderr.isatty():
        yield
        return
    lines, done, begun = common.SparseLines(title, total), threading.Event(), grown(folder)

    def look() -> None:
        seen = begun
        while not done.wait(every):
            now = grown(folder)
            lines.advance(max(0, now - seen))
            seen = max(seen, now)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    start = time.monotonic()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    common.say(f"{title}: complete after {time.monotonic() - start:.0f} s")


def grown(folder: Path) -> int:
    """Bytes of all files below a folder; files that go away meanwhile count nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(root, name).lstat().st_size
    return total


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
