"""`bridge completion`."""

from __future__ import annotations

import click

from bridge.commands import common

SHELLS = ("bash", "zsh", "fish")


@click.command(epilog=common.examples("bridge completion bash", "bridge completion fish | source"))
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion of verbs, options, presets and files for SHELL.

    \b
    A line for the shell's own start-up file:
      ~/.bashrc                   eval "$(bridge completion bash)"
      ~/.zshrc, after compinit    eval "$(bridge completion zsh)"
      ~/.config/fish/config.fish  bridge completion fish | source
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:  # click has these three
        raise click.UsageError(f"{shell} is not supported by this click")
    click.echo(found(ctx.find_root().command, {}, "bridge", "_BRIDGE_COMPLETE").source())
