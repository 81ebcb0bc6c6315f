"""`flashwarp bench`: measure this machine, beside its ceilings and the alternatives.

Each benchmark is a subcommand, made from the signature of its `run` when it is asked for; without a
name, `flashwarp bench --gib 16` is the default one.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperGroup

from flashwarp.bench import BENCHES, DEFAULT

if TYPE_CHECKING:
    from flashwarp.probe.report import Report

__all__ = ["bench"]

_FILE_COLUMNS = 200


class _Benches(TyperGroup):
    """A group with a subcommand for each benchmark, imported when it is asked for."""

    # `Any`: typer brings its own copy of click from some version on, and takes the user's before.
    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (typer's signature)
        return list(BENCHES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 (typer's signature)
        if cmd_name not in BENCHES:
            return None
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, help=BENCHES[cmd_name])(_command(cmd_name))
        return typer.main.get_command(single)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Options of no benchmark are the default's, as they were when it was the only one.
        if not args or (args[0].startswith("-") and args[0] not in ("--list", "--help")):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    cls=_Benches,
    add_completion=False,
    help="Measure this machine, beside its ceilings and the alternatives. "
    f"Without a name: {DEFAULT}.",
)


def _print_list(wanted: bool) -> None:
    if wanted:
        width = max(map(len, BENCHES))
        for name, what in BENCHES.items():
            typer.echo(f"{name:{width}}  {what}")
        raise typer.Exit


@bench.callback()
def _benches(
    show_list: Annotated[
        bool,
        typer.Option("--list", help="Print the names.", callback=_print_list, is_eager=True),
    ] = False,
) -> None:
    pass


_COMMON: dict[str, Any] = {
    "device": Annotated[str | None, typer.Option(help="cpu or cuda:N; default the GPU.")],
    "folder": Annotated[Path | None, typer.Option(help="Where its files go; default /var/tmp.")],
    "json": Annotated[Path | None, typer.Option(help="Also write the results here.")],
}


def _command(name: str) -> Callable[..., None]:
    """Make a command whose options are the parameters of the benchmark's `run`."""
    run: Callable[..., Report] = importlib.import_module(f"flashwarp.bench.{name}").run
    hints = get_type_hints(run, include_extras=True)
    parameters = inspect.signature(run).parameters
    wanted = {key: (_COMMON[key], None) for key in ("device", "folder") if key in parameters}
    own = {
        key: (_option(hints[key]), parameter.default)
        for key, parameter in parameters.items()
        if key not in wanted
    }

    def command(**given: Any) -> None:
        json = given.pop("json")
        with tempfile.TemporaryDirectory(dir=given.get("folder") or "/var/tmp") as temporary:
            if "folder" in given:
                given["folder"] = Path(temporary)
            _finish(run(**given), json)

    options = wanted | own | {"json": (_COMMON["json"], None)}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for key, (annotation, default) in options.items()
        ]
    )
    command.__annotations__ = {key: annotation for key, (annotation, _) in options.items()}
    return command


def _option(hint: Any) -> Any:
    """`Annotated[int, "what it is"]` as typer has it."""
    return Annotated[hint.__origin__, typer.Option(help=hint.__metadata__[0])]


def _finish(report: Report, json: Path | None) -> None:
    # A file has no width: lines there are as long as the table.
    report.show(Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS))
    if json is not None:
        report.save(json)
    if report.wrong:
        typer.echo(f"wrong data: {', '.join(report.wrong)}", err=True)
        raise typer.Exit(1)
