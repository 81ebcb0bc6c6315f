"""Progress of the demo: one line a step, kept on the screen when the step is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["Steps"]

T = TypeVar("T")


class Steps:
    """Progress bars on a console; a context manager that keeps them alive."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def track(self, items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
        """Yield the items and move the bar of this step."""
        yield from self._progress.track(items, total=total, description=what)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show one step that has no parts."""
        task = self._progress.add_task(what, total=1)
        yield
        self._progress.advance(task)
