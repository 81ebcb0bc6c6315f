"""`flashwarp graph`: make a graph on disk, and describe a folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashwarp.config import parse_bytes

if TYPE_CHECKING:
    from flashwarp.cli.parser import Parser
    from flashwarp.graphs import CsrGraph


def add_arguments(parser: Parser, _: Sequence[str]) -> None:
    """Give `parser` the subcommands and their options."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    what = "Write a graph as sorted lists of neighbours (compressed sparse rows)."
    make = commands.add_parser("make", help=what, description=what)
    make.set_defaults(run=_make)
    make.add_argument(
        "what",
        help="kron:SCALE, urand:SCALE, a file (.mtx, .npz, or a list of edges), or a folder.",
    )
    make.add_argument("folder", type=Path, help="Where offsets.npy and neighbours.npy go.")
    make.add_argument("--edge-factor", type=int, default=16, help="Edges drawn for each vertex.")
    make.add_argument("--seed", type=int, default=1, help="Of a generated graph.")
    edges = make.add_mutually_exclusive_group()
    edges.add_argument(
        "--directed",
        dest="symmetric",
        action="store_false",
        help="Store edges of a file one way only.",
    )
    edges.add_argument(
        "--undirected", dest="symmetric", action="store_true", help="Store them in both directions."
    )
    make.set_defaults(symmetric=None)
    make.add_argument(
        "--by-degree",
        action="store_true",
        help="Number vertices by falling degree: searches read less of the file.",
    )
    make.add_argument("--memory", default="2 GiB", help="For edges, before they go to files.")

    what = "Check every entry of a graph and report how large it is."
    info = commands.add_parser("info", help=what, description=what)
    info.set_defaults(run=_info)
    info.add_argument("folder", type=Path, help="What `make` wrote.")


def _make(options: argparse.Namespace) -> None:
    from flashwarp.graphs import load

    made = load(
        options.what,
        options.folder,
        edge_factor=options.edge_factor,
        seed=options.seed,
        symmetric=options.symmetric,
        by_degree=options.by_degree,
        memory_bytes=parse_bytes(options.memory),
    )
    _print_size(made)


def _info(options: argparse.Namespace) -> None:
    from flashwarp.graphs import CsrGraph

    found = CsrGraph.open(options.folder)
    found.check()
    _print_size(found)


def _print_size(found: CsrGraph) -> None:
    import numpy as np

    degrees = found.degrees
    print(f"vertices   {found.vertices:,}, {int((degrees == 0).sum()):,} without neighbours")
    print(f"entries    {found.entries:,}{', with weights' if found.weighted else ''}")
    print(
        f"degree     mean {degrees.mean():.1f}, median {np.median(degrees):.0f}, "
        f"most {degrees.max():,}"
    )
    if found.labels is not None:
        print("order      by falling degree; the labels are in labels.npy")
    print(f"files      {found.folder}, neighbours {4 * found.entries / 2**20:,.1f} MiB")
