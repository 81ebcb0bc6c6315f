"""`flashwarp tune`: choose settings for a file by what is read of it, and store them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flashwarp.cli.parser import Parser, amount, output_path


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` its options."""
    parser.description = (
        "Choose cache, line, policy, route and threads for a file, by a trace of it or by random "
        "rows; print the predicted and the measured gain; and store a profile, for "
        "fw.open(PATH, profile=PROFILE). Only reads the file."
    )
    parser.set_defaults(run=_run)
    parser.add_argument("path", type=Path, help="What fw.open opens by its path alone.")
    parser.add_argument("--trace", type=Path, help="Of `flashwarp.trace.record`; else random rows.")
    parser.add_argument("--cache-max", default="", help="Most bytes of cache; default as `auto`.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N.")
    parser.add_argument(
        "--accesses", type=amount(int, 1), default=50_000, help="How many are looked at."
    )
    parser.add_argument("--rows", type=amount(int, 1), default=64, help="Rows of a call.")
    parser.add_argument("-o", "--output", type=output_path, help="Default: PATH.profile.json.")


def _run(options: argparse.Namespace) -> None:
    from flashwarp.config import parse_bytes
    from flashwarp.trace import Trace
    from flashwarp.trace.tune import tune

    chosen, report = tune(
        options.path,
        None if options.trace is None else Trace.load(options.trace),
        device=options.device,
        cache_max=parse_bytes(options.cache_max, "--cache-max") if options.cache_max else None,
        accesses=options.accesses,
        call_rows=options.rows,
    )
    report.show()
    output = options.output or Path(f"{options.path}.profile.json")
    report.save(output)
    kept = ("cache", "line", "policy", "o_direct", "threads")
    told = ", ".join(f"{name}={getattr(chosen, name)!r}" for name in kept)
    print(f"\n{told if chosen.cache is not None else 'nothing beats the defaults'}")
    print(f"stored in {output}: fw.open({str(options.path)!r}, profile={str(output)!r})")
