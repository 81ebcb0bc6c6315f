"""Says with which seed the edges were tried."""

from __future__ import annotations

from typing import Any

from edges import budget


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"edges: FLASHWARP_EDGES_SEED={budget.SEED}, {budget.SECONDS:g} s for each that draws, "
        f"{budget.MISUSE_SEQUENCES} sequences of misuse"
    )
