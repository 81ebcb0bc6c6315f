"""`python -m benchmarks NAME [PART]`: measure, beside the ceilings of the machine and alternatives.

The options of a part are made from the signature of its `run` when it is called. A part that fails
and data that is wrong end the command with exit code 1, after all other parts.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks import BENCHES
from flashwarp.cli.parser import Parser, add_json, amount, folder, text_beside
from flashwarp.errors import FlashwarpError
from flashwarp.probe.report import Report, kept

__all__ = ["main"]

# Parameters that say how often something is done: at least once.
_COUNTS = frozenset({"epochs", "loads", "runs", "sources", "steps"})

# Which extra of flashwarp brings a package.
_EXTRAS = {"torch": "torch", "scipy": "graphs", "matplotlib": "plot"}


def main(arguments: Sequence[str]) -> None:
    """Run the command line `arguments`; what an interrupted run has made is removed."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    top = Parser(prog="python -m benchmarks", description="Measure flashwarp on this machine.")
    top.add_argument("--list", action=_PrintList, nargs=0, help="Print all names and parts.")
    names = top.add_subparsers(metavar="NAME", required=True)
    for name, parts in BENCHES.items():
        what = parts.get(name) or f"One of the parts {', '.join(parts)}."
        bench = names.add_parser(name, help=what, description=what)
        if arguments and arguments[0] == name:
            _add_parts(bench, name, arguments[1:])
    options = top.parse_args(arguments or ["--help"])
    try:
        options.run(options)
    except (FlashwarpError, OSError) as error:
        sys.exit(f"error: {error}")
    except ImportError as error:
        sys.exit(f"error: {_absent(error)}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _absent(error: ImportError) -> str:
    """Say what installs a library that a benchmark has not found; errors of our own pass."""
    name = (error.name or "").partition(".")[0]
    if name in ("benchmarks", "flashwarp"):
        raise error
    if not name:  # as flashwarp.torch says it itself
        return str(error)
    what = f"'.[{_EXTRAS[name]}]'" if name in _EXTRAS else name
    return f"{error}: the benchmark needs it; in a checkout, `pip install {what}`"


class _PrintList(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for name, parts in BENCHES.items():
            for part, what in parts.items():
                print(f"{name if part == name else f'{name} {part}':22}  {what}")
        parser.exit()


def _add_parts(parser: Parser, name: str, arguments: Sequence[str]) -> None:
    """Give the parser of a benchmark its parts, and the options of the one that is called."""
    parts = {part: what for part, what in BENCHES[name].items() if part != name}
    if name in BENCHES[name] and (not arguments or arguments[0] not in parts):
        if parts:
            parser.description = f"{parser.description} Other parts: {', '.join(parts)}."
        _add_options(parser, f"benchmarks.{name}.{name}")
        return
    subparsers = parser.add_subparsers(metavar="PART", required=True)
    for part, what in parts.items():
        single = subparsers.add_parser(part, help=what, description=what)
        if arguments and arguments[0] == part:
            _add_options(single, f"benchmarks.{name}.{part}")


def _add_options(parser: argparse.ArgumentParser, module: str) -> None:
    """Make an option of each parameter of the part's `run`."""
    benchmark: Callable[..., Report] = importlib.import_module(module).run
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
    add_json(parser)
    parser.set_defaults(run=lambda options: _run(benchmark, list(parameters), options))


def _run(
    benchmark: Callable[..., Report], parameters: Sequence[str], options: argparse.Namespace
) -> None:
    given = {key: getattr(options, key) for key in parameters}
    with tempfile.TemporaryDirectory(dir=given.get("folder") or "/var/tmp") as temporary:
        if "folder" in given:
            given["folder"] = Path(temporary)
        with kept(options.json), text_beside(options.json):
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


if __name__ == "__main__":
    main(sys.argv[1:])
