"""How options of the `flashwarp` command are parsed: argparse, with defaults shown in the help."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class _Help(argparse.HelpFormatter):
    """Adds the default of an option to its help text."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = (None, "", False, argparse.SUPPRESS)
        if not action.option_strings or any(action.default is value for value in silent):
            return action.help
        return f"{action.help} [default: %(default)s]"


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated options; its subcommands get the same kind."""

    def __init__(self, **given: Any) -> None:
        super().__init__(formatter_class=_Help, allow_abbrev=False, **given)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse would not say that a disk was full.
        print(message, end="", file=file or sys.stderr)


def existing_path(text: str) -> Path:
    """Convert the value of an option to a path, or refuse it."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return path


def folder(text: str) -> Path:
    """Convert the value of an option to the path of a folder that exists, or refuse it."""
    path = existing_path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path


def output_path(text: str) -> Path:
    """Convert the value of an option to a path for results, or refuse it before the work begins."""
    path = Path(text)
    folder(str(path.parent))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    return path


STDOUT = Path("/dev/stdout")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the option that all commands with results for programs have."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        type=output_path,
        metavar="FILE",
        help="Print the results as JSON and all else to stderr, or write them to FILE as well.",
    )


def text_beside(path: Path | None) -> contextlib.AbstractContextManager[object]:
    """Send text to stderr in the ``with`` if JSON goes to stdout."""
    return contextlib.redirect_stdout(sys.stderr) if path == STDOUT else contextlib.nullcontext()


def write_json(path: Path, content: object) -> None:
    """Write results to where `--json` says."""
    text = json.dumps(content, indent=2) + "\n"
    if path == STDOUT:
        print(text, end="")
    else:
        path.write_text(text)


def amount(kind: type[int] | type[float], least: int = 0) -> Callable[[str], float]:
    """Return what converts the value of an option to a number from `least` on, or refuses it."""

    def convert(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid {kind.__name__} value: {text!r}") from None
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number from {least} on")
        return number

    return convert
