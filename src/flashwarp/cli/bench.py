"""`flashwarp bench`: measure this machine, beside its ceilings and the alternatives."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["bench"]


def bench(
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N; default the GPU.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the file goes.")] = None,
    gib: Annotated[float, typer.Option(help="Size of the file in GiB.")] = 1.0,
    json: Annotated[Path | None, typer.Option(help="Also write the results here.")] = None,
) -> None:
    """Measure rows, elements and files against the ceilings of this machine."""
    from flashwarp.bench import first_light

    with tempfile.TemporaryDirectory(dir=folder or "/var/tmp") as temporary:
        report = first_light.run(device, Path(temporary), gib)
    report.show(Console())
    if json is not None:
        report.save(json)
    if report.wrong:
        typer.echo(f"wrong data: {', '.join(report.wrong)}", err=True)
        raise typer.Exit(1)
