"""Raw queue pairs of a drive in all shapes: what is read is what was stored last."""

from __future__ import annotations

import shutil

import pytest

from qemu import guest
from qemu.suites.commands import Shape, by_fio, by_plain_loop, commands
from qemu.suites.drives import drive
from qemu.suites.machines import HOLDING, ROUGH
from qemu.suites.record import BLOCK_BYTES, SHAPES, integrity

MACHINE = ROUGH

# `python -m qemu.record` sends ten million.
COMMANDS = 60_000


@pytest.mark.parametrize(
    ("shape", "part"), SHAPES.items(), ids=[f"{s.queue_pairs}x{s.depth}" for s in SHAPES]
)
def test_no_block_is_bad(shape: Shape, part: float) -> None:
    found = integrity(HOLDING, shape, int(COMMANDS * part))

    assert (found["wrong"], found["failed"], found["wrong_on_drive"]) == (0, 0, 0)
    assert found["commands"] >= COMMANDS * part


def test_block_of_somebody_else_is_counted() -> None:
    shape = Shape(1, 16)
    settings = {"queue_pairs": 1, "depth": shape.depth, "allow_raw_writes": True}
    with (
        drive(HOLDING, **settings) as controller,
        commands(controller, shape, BLOCK_BYTES) as queues,
    ):
        namespace = queues.namespace
        namespace.write(5 * BLOCK_BYTES, namespace.read(6 * BLOCK_BYTES, BLOCK_BYTES))

        outcome = queues.run(namespace.nbytes // BLOCK_BYTES)

        assert (outcome.wrong, outcome.failed, queues.wrong_on_drive()) == (1, 0, 1)


def test_others_read_as_many() -> None:
    """What the record compares with reads without a failure, too."""
    with drive(HOLDING, allow_raw_writes=True) as controller:
        assert by_plain_loop(controller, 16, 4096, 5000).failed == 0
    if shutil.which("fio") is None:
        pytest.skip("fio is missing; on Debian: sudo apt-get install fio")
    guest.bind(guest.address_of(HOLDING), "nvme")
    assert by_fio(guest.block_device(HOLDING), 16, 4096, 0.5).commands > 0
