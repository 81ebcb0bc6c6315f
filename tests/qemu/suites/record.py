"""What the guest measures for `python -m qemu.record`; prints one line of JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from qemu import guest
from qemu.suites.commands import Outcome, Shape, by_fio, by_plain_loop, commands
from qemu.suites.drives import drive

# Shapes of the rings, up to all entries of all of them outstanding, and each one's share of the
# commands: fewer where one command waits for the other.
SHAPES = {
    Shape(1, 2): 0.02,
    Shape(16, 2, threads=2): 0.06,
    Shape(1, 128): 0.2,
    Shape(2, 16, threads=2): 0.12,
    Shape(4, 1024, threads=2): 0.2,
    Shape(16, 64, threads=2): 0.2,
    Shape(16, 1024, threads=2): 0.2,
}
BLOCK_BYTES = 512
# One command in three is a write.
WRITES = 85

# Rates: random reads by one thread.
ONE_THREAD = Shape(1, 256, outstanding=128)
READ_BYTES = 4096


def integrity(number: int, shape: Shape, count: int) -> dict[str, Any]:
    """Send commands to a drive; return how many ended, and how many blocks were wrong."""
    with (
        drive(
            number, queue_pairs=shape.queue_pairs, depth=shape.depth, allow_raw_writes=True
        ) as controller,
        commands(controller, shape, BLOCK_BYTES) as queues,
    ):
        outcome = queues.run(count, WRITES)
        wrong = queues.wrong_on_drive()
    return {**asdict(shape), **asdict(outcome), "wrong_on_drive": wrong}


def rates(number: int, count: int, seconds: float) -> dict[str, Outcome]:
    """Read from a drive in each way."""
    found = {}
    settings = {"queue_pairs": 1, "depth": ONE_THREAD.depth, "allow_raw_writes": True}
    with drive(number, **settings) as controller:
        with commands(controller, ONE_THREAD, READ_BYTES, fill=False) as queues:
            found["flashwarp"] = queues.run(count, checks=False)
        window = ONE_THREAD.window
        found["plain loop"] = by_plain_loop(controller, window, READ_BYTES, count)
    guest.bind(guest.address_of(number), "nvme")
    paths = {
        "fio, io_uring_cmd": guest.character_device(number),
        "fio, io_uring": guest.block_device(number),
    }
    for name, path in paths.items():
        found[name] = by_fio(path, window, READ_BYTES, seconds)
    return found


def main() -> None:
    """Arguments: commands of the integrity run, rounds of rates, seconds of fio in each."""
    total, rounds, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    # The first drive holds data; the second stores nothing, and answers as fast as QEMU can.
    found: dict[str, Any] = {
        "integrity": [integrity(0, shape, int(total * part)) for shape, part in SHAPES.items()],
        "rates": [
            {"drive": number, **{name: asdict(each) for name, each in found.items()}}
            for _ in range(rounds)
            for number in (0, 1)
            for found in [rates(number, 200_000 * (1 + 2 * number), seconds)]
        ],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
