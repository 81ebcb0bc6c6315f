"""Entry point of the `flashwarp` command.

Each subcommand is a module of this folder with `add_arguments(parser, arguments)`. Only the module
that is called is imported, so that `flashwarp --help` answers at once. An error of the library ends
a command with its message and exit code 1, without a traceback. So does an error of the system,
such as a full disk under the output. A wrong option ends it with exit code 2.

SIGINT, SIGTERM and SIGHUP end a command by way of its `finally` clauses, so that it removes its
files. The exit code is then 128 and the number of the signal.

PYTHON_ARGCOMPLETE_OK: a shell that completes a command line runs this program with it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TextIO

from flashwarp.cli.parser import Parser
from flashwarp.errors import FlashwarpError

COMMANDS = {
    "doctor": "Report what works on this machine, what does not, and why.",
    "bench": "Measure what this machine gives, and what flashwarp reaches on it.",
    "graph": "Make graphs on disk, and look at them.",
    "file": "Make, check and convert GVDK images; show where files lie on devices.",
    "ckpt": "List checkpoints, verify, show, prune and copy them.",
    "tune": "Choose cache, line, policy and threads for a file, and store them.",
    "top": "Show the running programs that use flashwarp, and what they move.",
    "report": "Turn a run or a trace into one page of HTML, with plots.",
    "serve": "Own a cache that other programs share, until it is interrupted.",
    "trace": "Record which lines are used, and compare replacement policies on them.",
}
"""What each subcommand does; it is the module of that name."""

_COMPLETION = """\
Completion by bash and zsh, and by fish, with the package argcomplete:
  pip install 'flashwarp[completion]'
  eval "$(register-python-argcomplete flashwarp)"
  register-python-argcomplete --shell fish flashwarp | source
"""


def run(arguments: Sequence[str]) -> None:
    """Run the command line `arguments`, without the name of the program.

    Raises SystemExit for wrong options and for help, and what the command raises.
    """
    top = Parser(prog="flashwarp", description="GPU memory that extends into flash.")
    top.epilog, top.formatter_class = _COMPLETION, argparse.RawDescriptionHelpFormatter
    if completes := "_ARGCOMPLETE" in os.environ:
        arguments = os.environ["COMP_LINE"].split()[1:]
    top.add_argument("--version", action="version", version=f"flashwarp {version('flashwarp')}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    # Of the program itself no option takes a value.
    name = next((each for each in arguments if not each.startswith("-")), None)
    for each, what in COMMANDS.items():
        parser = commands.add_parser(each, help=what, description=what)
        if each == name:
            rest = arguments[arguments.index(each) + 1 :]
            importlib.import_module(f"flashwarp.cli.{each}").add_arguments(parser, rest)
    if completes:
        importlib.import_module("argcomplete").autocomplete(top)  # and exits
    if name == "demo":
        top.error("the demo lives in the repository of flashwarp: run `make demo` in a clone")
    if not arguments:
        top.print_help(sys.stderr)
        sys.exit(2)
    options = top.parse_args(arguments)
    options.run(options)


def main(act: Callable[[Sequence[str]], None] = run) -> None:
    """Run the command line of this process, or `act` with its words; exits with its code."""
    _open_standard_streams()
    os.environ.setdefault("FLASHWARP_PROGRESS", "1")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # and not ignored, as under nohup
            signal.signal(number, _end)
    try:
        try:
            act(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except (FlashwarpError, OSError) as error:
        _silence(sys.stdout)
        # Whoever read our output may have gone, as in `flashwarp doctor | head`: that is no error.
        if not isinstance(error, BrokenPipeError):
            _complain(error)
        sys.exit(1)
    except KeyboardInterrupt:
        _silence(sys.stdout)
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


def _complain(error: Exception) -> None:
    try:
        # In place of the progress of what has failed.
        erase = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{erase}error: {error}", file=sys.stderr, flush=True)
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
        # A terminal without Unicode shows a question mark where we print a check mark.
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")


def _end(number: int, frame: object) -> None:  # noqa: ARG001 (a handler's signature)
    sys.exit(128 + number)
