"""`flashwarp bench`: measure this machine, beside its ceilings and the alternatives.

Each benchmark is a subcommand, made from the signature of its `run` when it is called. Without a
name, the options are those of the default benchmark: `flashwarp bench --gib 16`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from flashwarp.bench import BENCHES, DEFAULT
from flashwarp.cli.parser import Parser, amount, folder, output_path
from flashwarp.probe.report import kept

if TYPE_CHECKING:
    from flashwarp.probe.report import Report

__all__ = ["add_arguments"]

# Parameters that say how often something is done: at least once.
_COUNTS = frozenset({"epochs", "loads", "runs", "sources", "steps"})


def add_arguments(parser: Parser, arguments: Sequence[str]) -> None:
    """Give `parser` the options of the benchmark that `arguments` name."""
    parser.add_argument("--list", action=_PrintList, nargs=0, help="Print the names.")
    if not arguments or arguments[0].startswith("-"):
        parser.description = (
            f"{parser.description} Without a NAME: {DEFAULT}, whose options are below. "
            f"`%(prog)s NAME --help` shows the others'; NAME is one of: {', '.join(BENCHES)}."
        )
        _add_options(parser, DEFAULT)
        return
    names = parser.add_subparsers(metavar="NAME", required=True)
    for name, what in BENCHES.items():
        single = names.add_parser(name, help=what, description=what)
        if name == arguments[0]:
            _add_options(single, name)


class _PrintList(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        width = max(map(len, BENCHES))
        for name, what in BENCHES.items():
            print(f"{name:{width}}  {what}")
        parser.exit()


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Make an option of each parameter of the benchmark's `run`."""
    benchmark: Callable[..., Report] = importlib.import_module(f"flashwarp.bench.{name}").run
    hints = get_type_hints(benchmark, include_extras=True)
    parameters = inspect.signature(benchmark).parameters
    if "device" in parameters:
        parser.add_argument("--device", help="cpu or cuda:N; default the GPU.")
    if "folder" in parameters:
        parser.add_argument("--folder", type=folder, help="Where its files go; default /var/tmp.")
    for key, parameter in parameters.items():
        if key in ("device", "folder"):
            continue
        kind: Any = hints[key].__origin__
        convert: dict[str, Any] = {
            "type": kind if kind is str else amount(kind, int(key in _COUNTS))
        }
        if kind is bool:
            convert = {"action": argparse.BooleanOptionalAction}
        option = "--" + key.replace("_", "-")
        text = hints[key].__metadata__[0].replace("%", "%%")
        parser.add_argument(option, default=parameter.default, help=text, **convert)
    parser.add_argument("--json", type=output_path, help="Also write the results here.")
    parser.set_defaults(run=lambda options: _run(benchmark, list(parameters), options))


def _run(
    benchmark: Callable[..., Report], parameters: Sequence[str], options: argparse.Namespace
) -> None:
    given = {key: getattr(options, key) for key in parameters}
    with tempfile.TemporaryDirectory(dir=given.get("folder") or "/var/tmp") as temporary:
        if "folder" in given:
            given["folder"] = Path(temporary)
        with kept(options.json):
            report = benchmark(**given)
        report.show()
        if options.json is not None:
            report.save(options.json)
    for part, why in report.failed.items():
        print(f"{part} failed: {why}", file=sys.stderr)
    if report.wrong:
        print(f"wrong data: {', '.join(report.wrong)}", file=sys.stderr)
    if report.wrong or report.failed:
        sys.exit(1)
