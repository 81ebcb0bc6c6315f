"""`flashwarp top`: the running programs of this user that have arrays open, and what they move."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from flashwarp.cli.parser import STDOUT, Parser, add_json, amount, write_json

_CLEAR = "\x1b[H\x1b[J"


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` its options."""
    parser.description = (
        "Show the running programs of this user that have arrays open: hit rates, GB/s by route "
        "beside the ceiling that `flashwarp doctor` has measured, waits, errors, pinned memory and "
        "threads. They are asked only while this runs."
    )
    parser.set_defaults(run=_run)
    parser.add_argument("--once", action="store_true", help="Look once; so does --json.")
    add_json(parser)
    parser.add_argument(
        "--interval", type=amount(float), default=1.0, help="Seconds between two looks."
    )


def _run(options: argparse.Namespace) -> None:
    from flashwarp.endings import sleep
    from flashwarp.probe.running import Processes, table

    live = not options.once and not options.json and sys.stdout.isatty()
    with contextlib.closing(Processes()) as processes:
        if live and find_spec("textual") is not None:
            from flashwarp.cli.top_view import View

            View(processes, options.interval).run()
            return
        processes.look()
        while True:
            sleep(options.interval)
            seen = processes.told()
            if options.json is not None:
                write_json(options.json, seen)
            if options.json != STDOUT:
                print(f"{_CLEAR if live else ''}{table(seen)}", flush=True)
            if not live:
                return
