"""`run.json`: what an engine process needs to know of its run. Written once by `bridge launch`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.errors import LaunchError
from bridge.model_spec import ModelSpec, read_json
from bridge.run_spec import RunSpec

FILE = "run.json"


@dataclass(frozen=True)
class RunFile:
    """A run, resolved: absolute paths, the model's facts, the RoPE constants."""

    engine: str
    program: str
    """The generated config or program, a file name in the run's folder."""
    spec: RunSpec
    base: str
    """The folder that the spec's relative paths start from."""
    model: ModelSpec
    frequencies: tuple[float, ...]
    tokenizer: str
    checkpoint: str
    epochs: float | None = None
    """What the user asked for in the place of steps, which `spec` has already."""

    def write(self, run_dir: Path) -> None:
        """Write `run.json`."""
        values = {
            "engine": self.engine,
            "program": self.program,
            "spec": self.spec.model_dump(mode="json"),
            "base": self.base,
            "model": self.model.to_json(),
            "frequencies": list(self.frequencies),
            "tokenizer": self.tokenizer,
            "checkpoint": self.checkpoint,
            "epochs": self.epochs,
        }
        (run_dir / FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, run_dir: Path) -> RunFile:
        """Read `run.json`.

        Raises:
            LaunchError: it lacks something.
        """
        values: dict[str, Any] = read_json(run_dir / FILE)
        try:
            return cls(
                engine=values["engine"],
                program=values["program"],
                spec=RunSpec.model_validate_json(json.dumps(values["spec"])),
                base=values["base"],
                model=ModelSpec.from_json(values["model"]),
                frequencies=tuple(values["frequencies"]),
                tokenizer=values["tokenizer"],
                checkpoint=values["checkpoint"],
                epochs=values.get("epochs"),
            )
        except (KeyError, ValueError) as error:
            raise LaunchError(f"{run_dir / FILE} is damaged: {error}") from error
