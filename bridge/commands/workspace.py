"""Where things lie: the folders that a spec implies, and which run and which checkpoint a command means."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import outputs, places, sidecar
from bridge.bucket_outputs import COMMIT
from bridge.errors import AccessError, CheckpointError, SpecError

if TYPE_CHECKING:
    from bridge.run_spec import RunSpec

SPEC = "bridge.yaml"


@dataclass(frozen=True)
class Workspace:
    """A spec and the folder that its relative paths start from."""

    run: RunSpec
    base: Path

    @classmethod
    def open(cls, spec: Path | None, overrides: tuple[str, ...] = ()) -> Workspace:
        """Read `spec`, or `bridge.yaml` in the current folder.

        Raises:
            SpecError: as `run_spec.load`, or what must lie on this host is in a bucket.
        """
        from bridge import run_spec  # pydantic takes a quarter of a second, which a verb without a spec is spared

        path = spec if spec is not None else Path(SPEC)
        run = run_spec.load(path, overrides)
        check_places(run)
        return cls(run, absolute(path).parent)

    def path(self, text: str) -> Path:
        """A path of the spec, absolute; in a bucket for `gs://`."""
        if places.in_bucket(text):
            return places.place(text)
        return absolute(self.base / Path(text).expanduser())

    @property
    def workdir(self) -> Path:
        """Where outputs go."""
        return self.path(self.run.workdir)

    @property
    def control(self) -> Path:
        """Where the files of runs lie that processes append to: workdir, or the spec's folder where it is a bucket."""
        return self.base if isinstance(self.workdir, places.BucketPath) else self.workdir

    def converted(self, engine: str) -> Path:
        """The folder of the converted checkpoint."""
        return self.workdir / "checkpoints" / engine

    def run_dir(self, name: str) -> Path:
        """The folder of a run, on this host: its config, logs and metrics.

        Raises:
            SpecError: the name is no plain folder name.
        """
        if not name or name.startswith((".", "-")) or any(char in name for char in "/\\\0\n"):
            raise SpecError(f"{name!r} cannot name a run: use a plain folder name")
        return self.control / "runs" / name

    def stored(self, run_dir: Path) -> Path:
        """Where a run's checkpoints lie: its folder, or the place of the same name in the bucket of workdir."""
        return self.workdir / "runs" / run_dir.name

    def export(self, form: str) -> Path:
        """The folder of an export."""
        return self.workdir / "export" / form

    def model_folder(self, *, download: bool = True) -> Path:
        """The model's Hugging Face folder; a hub id is downloaded on demand.

        Raises:
            SpecError: a local path that does not exist.
            AccessError: as `hub.resolve`.
        """
        return self._folder(self.run.model.source, self.run.model.revision, "model.source", download)

    def config_folder(self) -> Path:
        """A folder with the model's config.json; of a hub id that is not here yet, the small files alone are fetched.

        Raises:
            SpecError, AccessError: as `model_folder`.
        """
        try:
            return self.model_folder(download=False)
        except AccessError:
            return self._folder(self.run.model.source, self.run.model.revision, "model.source", True, weights=False)

    def tokenizer_folder(self) -> Path:
        """The tokenizer's folder, on this host: `model.tokenizer`, else the model's."""
        if self.run.model.tokenizer is None:
            return at_hand(self.model_folder())
        return self._folder(self.run.model.tokenizer, None, "model.tokenizer", True, weights=False)

    def _folder(self, text: str, revision: str | None, key: str, download: bool, *, weights: bool = True) -> Path:
        places.refuse_remote(text)
        local = self.path(text)
        if local.is_dir():
            return local
        if isinstance(local, places.BucketPath):
            raise SpecError(f"{key}: there is nothing at {local}")
        from bridge import hub, hub_lock

        if not hub.is_id(text):
            raise SpecError(f"{key}: there is no folder {local}", hint="a hub id looks like meta-llama/Llama-3.1-8B")
        pinned = hub_lock.commit(self.base, text, revision)
        return hub.resolve(text, pinned or revision, download=download, weights=weights, pinned=pinned is not None)

    def data_files(self, value: str | list[str] | None) -> tuple[str, ...]:
        """The data files of `data.train` or `data.eval`, absolute where they exist; a hub id stays as it is."""
        values = [value] if isinstance(value, str) else value or []
        return tuple(str(self.path(text)) if self.path(text).exists() else text for text in values)


def absolute(path: Path) -> Path:
    """The absolute path, without the `..` that TensorStore refuses."""
    return path.resolve() if ".." in path.parts else path.absolute()


def check_places(run: RunSpec) -> None:
    """Raise a SpecError where a spec names a bucket for what is read by its name on this host."""
    files = {
        "data.train": run.data.train_names,
        "data.eval": [run.data.eval] if isinstance(run.data.eval, str) else run.data.eval or [],
        "model.tokenizer": [run.model.tokenizer or ""],
        "cluster.hosts_file": [run.cluster.hosts_file or ""],
    }
    problems = [f"{key}: {name}" for key, names in files.items() for name in names if places.in_bucket(name)]
    if problems:
        raise SpecError("read from folders of this host, not from a bucket", details=problems, hint=places.COPY)


def at_hand(folder: Path) -> Path:
    """A folder of small files on this host: itself, or a copy that goes when this process ends.

    Tokenizers and engines open them by their names.
    """
    if not isinstance(folder, places.BucketPath):
        return folder
    copy = tempfile.mkdtemp(prefix="bridge-")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    sidecar.copy_side_files(folder, Path(copy))
    return Path(copy)


@dataclass(frozen=True)
class Chosen:
    """A checkpoint that a command works on: its tree, its sidecar's folder, and how it came to be chosen."""

    item: Path
    home: Path
    reason: str
    step: int | None = None


def find_checkpoint(
    workspace: Workspace | None, checkpoint: Path | None, step: int | None, engine: str | None
) -> Chosen:
    """The checkpoint that `CHECKPOINT`, or else the spec, means.

    Without a path: the newest run's best checkpoint by eval loss, else its newest; the converted checkpoint only
    when there is no run at all.

    Raises:
        CheckpointError: nothing there, or the newest run has no finished checkpoint.
    """
    if checkpoint is not None:
        checkpoint = places.place(checkpoint)
        return _inside(absolute(checkpoint), step, f"{checkpoint}")
    if workspace is None:
        raise CheckpointError("which checkpoint?", hint="name one, or run this in a folder with a bridge.yaml")
    engine = engine or workspace.run.engine
    runs = newest_runs(workspace)
    if runs:
        stored = workspace.stored(runs[0])
        steps = finished_steps(stored / "checkpoints")
        if not steps:
            raise CheckpointError(
                f"the newest run, {runs[0].name}, has no finished checkpoint",
                hint="wait for it, resume it with --resume, or name another checkpoint",
            )
        return _inside(stored, step, f"the newest run, {runs[0].name}", measured=runs[0])
    converted = workspace.converted(engine)
    if not converted.is_dir():
        raise CheckpointError(f"there is no run and no {converted}", hint=f"bridge convert --to {engine} makes one")
    return _inside(converted, step, "the converted checkpoint (there is no run yet)")


def newest_runs(workspace: Workspace) -> list[Path]:
    """Run folders, the one that was launched last first."""
    runs = [path.parent for path in (workspace.control / "runs").glob(f"*/{sidecar.FILE}")]
    return sorted(runs, key=lambda path: ((path / sidecar.FILE).stat().st_mtime_ns, path.name), reverse=True)


def finished_steps(folder: Path) -> list[int]:
    """Steps of complete checkpoints in a folder, rising."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _is_step(path) and _item(path) is not None)


def _is_step(path: Path) -> bool:
    return path.name.isascii() and path.name.isdigit() and len(path.name) < 19


def _item(step: Path) -> Path | None:
    """The tree of a step folder: MaxText's `items`, or `model_params` of the trainer that both engines share.

    In a bucket Orbax marks a finished step by an object that is written last, since nothing can be renamed there.
    """
    if isinstance(step, places.BucketPath) and not (step / COMMIT).is_file():
        return None
    for name in ("items", "model_params"):
        if (step / name / "_METADATA").is_file() and (step / "_CHECKPOINT_METADATA").is_file():
            return step / name
    return None


def _inside(path: Path, step: int | None, reason: str, measured: Path | None = None) -> Chosen:
    """Find the tree in what the user named: a run, a checkpoint folder, a step, or the tree itself.

    `measured` has the run's eval losses where they do not lie beside its checkpoints.
    """
    if outputs.is_unfinished(path):
        raise CheckpointError(f"{path} was never finished: what wrote it was stopped, or is still at work")
    if not path.is_dir():
        left = [f"{part.name} was never finished" for part in outputs.unfinished(path)]
        hint = "run the command that wrote it again: it cleans up first" if left else None
        raise CheckpointError(f"{path} is not a folder", details=left, hint=hint)
    if (path / "_METADATA").is_file() and (not isinstance(path, places.BucketPath) or _item(path.parent) == path):
        found = int(path.parent.name) if _is_step(path.parent) else None
        return Chosen(path, _home(path), reason, found)
    if _item(path) is not None:
        return Chosen(_item(path) or path, _home(path), reason, int(path.name) if _is_step(path) else None)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = finished_steps(folder)
    if not steps:
        unfinished = [entry.name for entry in folder.iterdir() if "orbax-checkpoint-tmp" in entry.name]
        detail = [f"{name} was never finished" for name in unfinished]
        raise CheckpointError(f"{path} has no finished checkpoint", details=detail)
    if step is not None and step not in steps:
        raise CheckpointError(f"{path} has no checkpoint of step {step}", details=[f"steps: {steps}"])
    chosen, why = _pick(measured or folder.parent, steps) if step is None else (step, f"step {step}, as asked")
    item = _item(folder / str(chosen))
    if item is None:
        raise CheckpointError(f"{folder / str(chosen)} holds no tree")
    return Chosen(item, _home(item), f"{reason}: {why}" if len(steps) > 1 or folder != path else reason, chosen)


def _pick(run: Path, steps: list[int]) -> tuple[int, str]:
    from bridge.launchers import metrics

    best = metrics.best_step(metrics.MetricsLog(run, writes=False).eval_losses, steps)
    if best is None:
        return steps[-1], f"step {steps[-1]}, the newest"
    return best, f"step {best}, the best by eval loss"


def _home(path: Path) -> Path:
    """The folder above a tree that holds its `bridge.json`; the tree's own step folder when there is none."""
    for folder in (path, *list(path.parents)[:3]):
        found = folder / sidecar.FILE
        if found.is_file() and not sidecar.is_lock(found):
            return folder
    return path.parent
