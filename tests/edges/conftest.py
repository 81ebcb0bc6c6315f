"""Says with which seed the edges were tried, and runs the programs of a module in one nursery."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edges import budget, nursery


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"edges: FLASHWARP_EDGES_SEED={budget.SEED}, {budget.SECONDS:g} s for each that draws"
    )


@pytest.fixture(scope="module")
def run_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nursery.Run]:
    folder = tmp_path_factory.mktemp("programs")
    for each in (folder, *folder.parents[:2]):
        each.chmod(each.stat().st_mode | 0o011)  # for programs that become somebody else
    with nursery.opened(folder) as run:
        yield run
