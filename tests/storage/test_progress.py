"""The line that shows the progress of what lasts."""

from __future__ import annotations

import io

import pytest

from flashwarp.storage import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO) -> io.StringIO:
    """Ask for progress on a terminal, with a clock of which each look takes a second."""
    clock = iter(range(1000))
    monkeypatch.setenv("FLASHWARP_PROGRESS", "1")
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    return terminal


def test_a_line_has_rate_and_remaining_time_and_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_on(monkeypatch, Terminal())
    count = progress.counting("reading", 1000, "rows")
    for _ in range(4):
        count(250)
    count(0)

    first, *_, last = shown.getvalue().split("\r")[1:]
    assert "25% of 1,000 rows, 250 rows/s, 3 s left" in first
    assert "100% of 1,000 rows, 250 rows/s" in last
    assert shown.getvalue().count("\n") == 1


def test_work_without_a_known_total_shows_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_on(monkeypatch, Terminal())
    count = progress.counting("copying", 0)
    count(500_000_000)
    count(500_000_000)
    count(0)

    assert "copying 1.00 GB, 0.50 GB/s" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[K\n")


@pytest.mark.parametrize(("asked", "terminal"), [("0", Terminal()), ("1", io.StringIO())])
def test_nothing_is_shown_unasked_or_elsewhere(
    monkeypatch: pytest.MonkeyPatch, asked: str, terminal: io.StringIO
) -> None:
    shown_on(monkeypatch, terminal)
    monkeypatch.setenv("FLASHWARP_PROGRESS", asked)
    count = progress.counting("reading", 10)
    count(5)
    count(5)

    assert terminal.getvalue() == ""
