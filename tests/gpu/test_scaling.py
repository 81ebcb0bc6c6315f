"""Many modelled drives on a GPU: every block moves, whatever is outstanding."""

from __future__ import annotations

import pytest

from benchmarks.drives.scaling import Drives, Load, Namespaces
from flashwarp.device import resolve

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("depth", "window", "threads"),
    [(1024, 1, 32), (1024, 1, 1 << 20), (1024, 64, 1 << 15), (32, 64, 1 << 15), (64, 3, 4096)],
)
def test_launch_moves_every_block_of_every_drive(
    write: bool, depth: int, window: int, threads: int
) -> None:
    """With rings of 32 entries far more is asked for than they hold, as in AGILE's Figure 1."""
    device = resolve("cuda:0")
    namespaces = Namespaces(3, 1 << 24)
    commands = (1 << 23) // 512

    with Drives(device, namespaces, "P5800X", 3, queue_pairs=2, depth=depth) as drives:
        load = Load(3, 512, write, threads, window)
        drives.seconds(load, commands)

        assert drives.right(load, commands)
        for number, controller in enumerate(drives.controllers):
            assert controller.stats()["held"] == commands
            written = namespaces.words_of(number, 1 << 23, 1 << 23)
            assert written.all() == write
