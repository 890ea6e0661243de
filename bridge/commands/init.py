"""`bridge init`."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from bridge.commands import common
from bridge.errors import BridgeError, OutputError

DEFAULT = "smollm2-135m"


def presets() -> dict[str, str]:
    """The text of every preset, by name."""
    folder = importlib.resources.files("bridge.configs") / "presets"
    texts = {
        path.name.removesuffix(".yaml"): path.read_text(encoding="utf-8")
        for path in folder.iterdir()
        if path.name.endswith(".yaml")
    }
    return dict(sorted(texts.items()))


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Presets for the shell, each with its line of `--list` where the shell shows one."""
    del ctx, param
    return [
        CompletionItem(name, help=described(text)) for name, text in presets().items() if name.startswith(incomplete)
    ]


def described(text: str) -> str:
    """A preset in one line: its first comment."""
    return text.splitlines()[0].removeprefix("# ")


@click.command(epilog=common.examples("bridge init llama3.1-8b-sft", "bridge init --list"))
@click.argument("preset", required=False, shell_complete=_complete)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default="bridge.yaml", show_default=True)
@click.option("--list", "as_list", is_flag=True, help="One line a preset.")
@click.option("--schema", is_flag=True, help="The JSON Schema of bridge.yaml, for editors.")
def command(preset: str | None, out: Path, as_list: bool, schema: bool) -> None:
    """Write a bridge.yaml to start from. PRESET is one of --list."""
    known = presets()
    if schema:
        from bridge.run_spec import RunSpec

        click.echo(json.dumps(RunSpec.model_json_schema(), indent=2))
        return
    if as_list:
        width = max(map(len, known))
        for name, text in known.items():
            click.echo(f"{name:{width}}  {described(text)}")
        return
    name = preset or DEFAULT
    if name not in known:
        raise BridgeError(f"there is no preset {name!r}", details=[f"presets: {', '.join(known)}"])
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(known[name])
    except FileExistsError as error:
        raise OutputError(f"{out} exists", hint="--out names another file") from error
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    common.say(f"written: {out}; {_next(known[name], name)}")


def _next(text: str, name: str) -> str:
    """What a preset still needs, and the command that follows."""
    from bridge import hub, run_spec

    spec = run_spec.parse(text, where=name)
    files = [source for source in spec.data.train_names if source.endswith((".jsonl", ".parquet"))]
    needed = "" if hub.is_id(spec.model.source) else f"put the model's folder at {spec.model.source}; "
    needed += f"put your data in {', '.join(files)}; " if files else ""
    return f"{needed}then: bridge convert --to {spec.engine} && bridge launch {spec.train.method}"
