"""`flashwarp tune`: choose settings for a file by what is read of it, and store them."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from flashwarp.cli.parser import Parser, amount, output_path
from flashwarp.errors import PathError


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` its options."""
    parser.description = (
        "Choose cache, line, policy, route and threads for a file, by a trace of it or by random "
        "rows; print the choice, its predicted and its measured gain; and store a profile, for "
        "fw.open(PATH, profile=PROFILE). Only reads the file."
    )
    parser.set_defaults(run=_run)
    parser.add_argument("path", type=Path, help="As for fw.open.")
    parser.add_argument("--dtype", help="Of a raw file, such as float32.")
    parser.add_argument("--shape", type=shape, help="Of a raw file, such as 1000,64.")
    parser.add_argument("--tensor", help="Name of a tensor in a safetensors file.")
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

    names = ("dtype", "shape", "tensor")
    opening = {name: each for name in names if (each := getattr(options, name)) is not None}
    output = options.output or Path(f"{options.path}.profile.json")
    # Before seconds of work, and not for a path of another kind, which has its own error.
    if options.path.is_file() and not os.access(output.parent, os.W_OK):
        told = "the profile cannot be stored beside the file: name another by -o"
        raise PathError(errno.EACCES, told, str(output))
    _, report = tune(
        options.path,
        None if options.trace is None else Trace.load(options.trace),
        device=options.device,
        cache_max=parse_bytes(options.cache_max, "--cache-max") if options.cache_max else None,
        accesses=options.accesses,
        call_rows=options.rows,
        **opening,
    )
    report.show()
    report.save(output)
    opening |= {"profile": str(output)}
    told = ", ".join(f"{name}={each!r}" for name, each in opening.items())
    print(f"\nstored in {output}: fw.open({str(options.path)!r}, {told})")


def shape(text: str) -> tuple[int, ...]:
    """Convert the value of an option to the lengths of axes."""
    return tuple(map(int, text.split(",")))
