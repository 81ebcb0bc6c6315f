"""`flashwarp bench`: what flashwarp reaches on this machine, beside what the machine gives.

The benchmarks that reproduce papers and rivals run from a checkout. Their old names are refused by
a message that has the new command.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flashwarp.cli.parser import Parser, add_json, amount, folder, text_beside

_PARTS = ("gather", "load", "pipeline", "checkpoint")
_BYTES_MIN = 1 << 20

_MOVED = {
    "asynchronous": "kernels asynchronous",
    "first_light": "arrays",
    "calls": "calls",
    "files": "files",
    "shared": "shared",
    "latency": "kernels latency",
    "defaults": "arrays defaults",
    "hits": "kernels hits",
    "scaling": "drives scaling",
    "bfs": "graphs bfs",
    "cc": "graphs cc",
    "spmv": "graphs spmv",
    "vectoradd": "arrays vectoradd",
    "ctc": "kernels ctc",
    "tables": "tables",
    "pipelines": "pipelines",
    "ngrams": "tables ngrams",
    "tiers": "drives tiers",
    "dlrm": "tables dlrm",
    "checkpoints": "checkpoints",
    "workers": "pipelines workers",
    "load": "load",
    "activations": "activations",
    "prices": "drives prices",
    "registers": "kernels registers",
}


def add_arguments(parser: Parser, arguments: Sequence[str]) -> None:
    """Give `parser` the options of this command, or refuse the name of a benchmark."""
    if arguments and arguments[0] in _MOVED:
        command = f"`python -m benchmarks {_MOVED[arguments[0]]}`"
        parser.error(f"{arguments[0]} is {command} in a checkout of flashwarp")
    parser.description = (
        "Measure disk, link and memory, and how near gathers, loads, pipelines and checkpoints "
        "come, each with its data checked. Takes a minute, and files of twice SIZE."
    )
    parser.add_argument("--device", help="cpu or cuda:N; default the GPU, if one works.")
    parser.add_argument(
        "--folder", type=folder, help="On the disk to measure, for its files; default /var/tmp."
    )
    parser.add_argument(
        "--size", help="Bytes of the file that is read; default 2 GiB, 256 MiB on the CPU device."
    )
    parser.add_argument(
        "--parts", default=",".join(_PARTS), help="What to measure beside the machine itself."
    )
    parser.add_argument(
        "--runs", type=amount(int, 1), default=3, help="Of each figure; the median counts."
    )
    add_json(parser)
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> None:
    # Imported here: the help of all commands stays fast.
    from flashwarp.config import choice, integer, parse_bytes
    from flashwarp.device import resolve
    from flashwarp.probe.reach import reach
    from flashwarp.probe.report import kept

    parts = [each.strip() for each in options.parts.split(",")]
    for each in parts:
        choice("parts", each, _PARTS)
    device = resolve(options.device)
    size = options.size or ("2 GiB" if device.kind == "cuda" else "256 MiB")
    nbytes = integer("size", parse_bytes(size, "size"), _BYTES_MIN, 1 << 50)
    with (
        tempfile.TemporaryDirectory(dir=options.folder or "/var/tmp", prefix="flashwarp-") as place,
        kept(options.json),
        text_beside(options.json),
    ):
        report = reach(device, Path(place), nbytes, parts, options.runs)
        report.show()
    if options.json is not None:
        report.save(options.json)
    for part, why in report.failed.items():
        print(f"{part} failed: {why}", file=sys.stderr)
    if report.wrong:
        print(f"wrong data: {', '.join(report.wrong)}", file=sys.stderr)
    if report.wrong or report.failed:
        sys.exit(1)
