"""The command line. Verbs are imported on use, so that `bridge --help` answers at once."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

import bridge
from bridge.errors import BridgeError, printable

VERBS = {
    "init": "Write a bridge.yaml to start from.",
    "plan": "Say what fits: memory by method, mesh, longest rows, and which to take.",
    "doctor": "Look at this machine: engines, devices, space, login, variables.",
    "download": "Fetch a model from the hub: only what is needed.",
    "data": "Show what the model will see: text, ids, loss mask; counts.",
    "convert": "Convert a Hugging Face folder into an engine's checkpoint.",
    "config": "Print the engine's configuration for the spec.",
    "launch": "Train: sft, lora, qlora, dpo or orpo.",
    "export": "Turn a checkpoint back into a Hugging Face folder.",
    "verify": "Prove a checkpoint: logits against PyTorch, or weights bit by bit.",
    "generate": "Answer a prompt with the engine's own model, greedily.",
    "inspect": "Say what a folder holds: format, model, tensors.",
    "diff": "Compare two folders of weights across formats.",
    "report": "Look at runs: curves and outcomes on one HTML page.",
    "completion": "Print the completion for bash, zsh or fish.",
    "demo": "The whole way on a real small model, in minutes, on a CPU.",
}

EPILOG = """\b
Examples:
  bridge init smollm2-135m
  bridge convert --to maxtext && bridge launch sft && bridge export --to hf && bridge verify
"""


class Verbs(click.Group):
    """Commands by name, each from `bridge/commands/<name>.py`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of use."""
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import a verb; None when there is none of that name."""
        del ctx
        if name not in VERBS:
            return None
        module: Any = importlib.import_module(f"bridge.commands.{name}")
        command: click.Command = module.command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click, with a suggestion for a mistyped verb."""
        import difflib

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], VERBS, n=1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Verbs for the shell, without importing any."""
        verbs = [CompletionItem(name, help=text) for name, text in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of verbs, without importing any."""
        del ctx
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(bridge.__version__, prog_name="bridge")
def cli() -> None:
    """Fine-tune Llama on JAX: Hugging Face in, MaxText or Tunix, Hugging Face out, proven.

    With a bridge.yaml in the folder the verbs need no more arguments.
    """


def main() -> None:
    """Entry point: a BridgeError becomes one clear message and its exit code."""
    try:
        code = cli.main(standalone_mode=False)  # click gives back what a verb passed to ctx.exit
        sys.exit(code if isinstance(code, int) else 0)
    except BridgeError as error:
        click.echo(f"bridge: error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("bridge: stopped", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        if error.filename is None:
            raise
        click.echo(f"bridge: error: {printable(f'{error.filename}: {error.strerror}')}", err=True)
        sys.exit(1)
