"""`flashwarp graph`: make a graph on disk, and describe a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from flashwarp.config import parse_bytes

if TYPE_CHECKING:
    from flashwarp.apps.graphs import CsrGraph

__all__ = ["graph"]

graph = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Make graphs on disk, and look at them."
)


@graph.command()
def make(
    what: Annotated[
        str,
        typer.Argument(
            help="kron:SCALE, urand:SCALE, a file: .mtx, .npz, or a list of edges; or a folder."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Where offsets.npy and neighbours.npy go.")],
    edge_factor: Annotated[int, typer.Option(help="Edges drawn for each vertex.")] = 16,
    seed: Annotated[int, typer.Option(help="Of a generated graph.")] = 1,
    directed: Annotated[
        bool, typer.Option("--directed", help="Store edges of a file one way only.")
    ] = False,
    by_degree: Annotated[
        bool,
        typer.Option(
            "--by-degree", help="Number vertices by falling degree: searches read less of the file."
        ),
    ] = False,
    memory: Annotated[str, typer.Option(help="For edges, before they go to files.")] = "2 GiB",
) -> None:
    """Write a graph as sorted lists of neighbours (compressed sparse rows)."""
    from flashwarp.apps.graphs import load

    made = load(
        what,
        folder,
        edge_factor=edge_factor,
        seed=seed,
        symmetric=not directed,
        by_degree=by_degree,
        memory_bytes=parse_bytes(memory),
    )
    _tell(made)


@graph.command()
def info(folder: Annotated[Path, typer.Argument(help="What `make` wrote.")]) -> None:
    """Check every entry of a graph and print its size."""
    from flashwarp.apps.graphs import CsrGraph

    found = CsrGraph.open(folder)
    found.check()
    _tell(found)


def _tell(found: CsrGraph) -> None:
    degrees = found.degrees
    typer.echo(f"vertices   {found.vertices:,}, {int((degrees == 0).sum()):,} without neighbours")
    typer.echo(f"entries    {found.entries:,}{', with weights' if found.weighted else ''}")
    typer.echo(
        f"degree     mean {degrees.mean():.1f}, median {np.median(degrees):.0f}, "
        f"most {degrees.max():,}"
    )
    if found.labels is not None:
        typer.echo("order      by falling degree; the labels are in labels.npy")
    typer.echo(f"files      {found.folder}, neighbours {4 * found.entries / 2**20:,.1f} MiB")
