"""How options of the `flashwarp` command are parsed: argparse, with defaults shown in the help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

__all__ = ["Parser", "existing_path"]


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
