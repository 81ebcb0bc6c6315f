"""Entry point of the `flashwarp` command.

Subcommands live in a module each and are imported when they are called or listed, so that
`flashwarp --version` answers at once. An error of the library ends a command with its message and
exit code 1, without a traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from flashwarp.errors import FlashwarpError

__all__ = ["app", "main"]

_COMMANDS = ("doctor", "demo", "bench", "graph", "simulate", "trace")
"""Each is the function, or the group of commands, of that name in the module of that name."""


class _LazyGroup(TyperGroup):
    """A group that imports a subcommand when it is asked for."""

    # `Any`: typer brings its own copy of click from some version on, and takes the user's before.
    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (typer's signature)
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 (typer's signature)
        if cmd_name not in _COMMANDS:
            return None
        found = getattr(importlib.import_module(f"flashwarp.cli.{cmd_name}"), cmd_name)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(found)
        return typer.main.get_command(single)


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashwarp {version('flashwarp')}")
        raise typer.Exit


@app.callback()
def _flashwarp(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """GPU memory that extends into flash."""


def main() -> None:
    """Run the command line of this process; exits with its code."""
    try:
        app()
    except FlashwarpError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(1)
    except BrokenPipeError:
        # Whoever read our output has gone, as in `flashwarp doctor | head`. Nothing may be written
        # any more, not even by the interpreter when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
