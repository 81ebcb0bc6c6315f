"""Entry point of the `flashwarp` command.

Subcommands live in a module each and are imported when they are called or listed, so that
`flashwarp --version` answers at once. An error of the library ends a command with its message and
exit code 1, without a traceback. So does one of the system's, such as a full disk under the output.

SIGTERM and SIGHUP end a command by way of its `finally` clauses, so that it takes its files along.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from importlib.metadata import version
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from flashwarp.errors import FlashwarpError

__all__ = ["app", "main"]

_COMMANDS = ("doctor", "demo", "bench", "graph", "trace")
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
            group = typer.main.get_command(found)
            group.name = cmd_name
            return group
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
    _open_standard_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # and not ignored, as under nohup
            signal.signal(number, _end)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except (FlashwarpError, OSError) as error:
        _silence(sys.stdout)
        # Whoever read our output may have gone, as in `flashwarp doctor | head`: that is no error.
        if not isinstance(error, BrokenPipeError):
            _complain(error)
        sys.exit(1)


def _complain(error: Exception) -> None:
    try:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}")
    except OSError:
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Let nothing be written any more, not even by the interpreter when it flushes at exit."""
    with contextlib.suppress(OSError):
        stream.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_standard_streams() -> None:
    """Open what the caller has closed: its number would be a data file's, and its stream None."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _end(number: int, frame: object) -> None:  # noqa: ARG001 (a handler's signature)
    sys.exit(128 + number)
