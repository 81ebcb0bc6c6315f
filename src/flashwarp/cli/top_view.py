"""The live view of `flashwarp top`, by textual, which is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.widgets import DataTable, Footer, Static

from flashwarp.probe.running import HEADINGS, failures, lines, rate

if TYPE_CHECKING:
    from flashwarp.probe.running import Processes

_PROGRAM_MAX = 40


class View(App[None]):  # type: ignore[misc]
    """A table that is asked for anew after each interval."""

    TITLE = "flashwarp top"
    CSS = "#head { padding: 0 1; } DataTable { height: 1fr; }"
    BINDINGS: ClassVar[list[Any]] = [("q", "quit", "Quit"), ("space", "pause", "Pause")]

    def __init__(self, processes: Processes, interval_s: float) -> None:
        super().__init__()
        self._processes = processes
        self._interval_s = interval_s
        self._paused = False

    def compose(self) -> ComposeResult:
        """Textual asks for the parts."""
        yield Static(id="head")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Textual says that it begins."""
        self.query_one(DataTable).add_columns(*HEADINGS)
        self._refresh()
        self.set_interval(self._interval_s, self._refresh)

    def action_pause(self) -> None:
        """Stop asking, or go on."""
        self._paused = not self._paused

    def _refresh(self) -> None:
        # A last interval may end after the widgets have gone.
        tables = self.query(DataTable)
        if self._paused or not tables:
            return
        seen = self._processes.told()
        table: DataTable[Text] = tables.first()
        place = table.cursor_row
        table.clear()
        for each in seen:
            for cells in lines(each, _PROGRAM_MAX):
                table.add_row(*map(Text, cells))
        if table.row_count:
            table.move_cursor(row=min(place, table.row_count - 1))
        read, written = (
            sum(row[name] for each in seen for row in each["routes"])
            for name in ("read_bytes_per_s", "written_bytes_per_s")
        )
        head = f"{len(seen)} processes, {rate(read)} read, {rate(written)} written"
        self.query_one("#head", Static).update(Text("\n".join([head, *failures(seen)])))
