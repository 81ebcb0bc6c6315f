"""Every byte is where it belongs after many commands, at any depth, by every way to the drive."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from qemu import guest
from qemu.suites.machines import HOLDING, ROUGH, SLOW
from qemu.suites.namespaces import contents
from qemu.suites.ways import KERNEL, array, bound, each_way

MACHINE = ROUGH

# Of each way and shape of the rings; hours find what seconds do not.
SECONDS = float(os.environ.get("FLASHWARP_INTEGRITY_SECONDS", "1"))

ROWS, ROW_BYTES = 512, 4096


@each_way
@pytest.mark.parametrize(("queue_pairs", "depth"), [(1, 2), (1, 1024), (4, 16), (16, 128)])
def test_rows_are_what_was_stored(way: str, queue_pairs: int, depth: int) -> None:
    chooser = np.random.default_rng(queue_pairs * depth)
    model = chooser.integers(0, 256, (ROWS, ROW_BYTES), np.uint8)
    commands, bad = 0, 0
    with array(
        way,
        HOLDING,
        nbytes=model.nbytes,
        queue_pairs=queue_pairs,
        depth=depth,
        line=ROW_BYTES,
        cache="256 KiB",
    ) as x:
        x[:] = model.reshape(-1)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            begin = int(chooser.integers(0, ROWS - 64))
            for row in chooser.integers(begin, begin + 64, 4):
                model[row] = chooser.integers(0, 256, ROW_BYTES, np.uint8)
                x[row * ROW_BYTES : (row + 1) * ROW_BYTES] = model[row]
            # Blocks of the same lines and of others, in no order.
            places = chooser.integers(0, model.size, 2000)
            bad += int((np.asarray(x.gather(places)) != model.reshape(-1)[places]).sum())
        x.flush()
        x.drop_cache()
        bad += int((np.asarray(x[:]) != model.reshape(-1)).sum())
        commands = x.stats.commands
    bound(KERNEL, HOLDING)
    on_drive = contents(guest.block_device(HOLDING), model.nbytes)
    print(f"{way}: {queue_pairs} x {depth}: {commands} commands, {bad} bad bytes")
    assert bad == 0
    assert on_drive == model.tobytes()
    assert commands > ROWS


@each_way
def test_slow_drive_completes_everything(way: str) -> None:
    """With more in flight than it serves in a second, and an end while it is at work."""
    with array(way, SLOW, nbytes=2 << 20, line=4096, dtype="i4") as x:
        x[:] = np.arange(x.size, dtype=np.int32)
        x.flush()
        x.drop_cache()
        places = np.random.default_rng(1).permutation(x.size)[:300]
        np.testing.assert_array_equal(x.gather(places), places)
        x.prefetch(np.arange(0, x.size, 1024))
    with array(way, SLOW, nbytes=2 << 20, line=4096, dtype="i4") as x:
        assert x[x.size - 1] == x.size - 1
