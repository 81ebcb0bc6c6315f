"""Arrays that share a cache: the table that kernels look through, and the end of one among others.

What kernels do meanwhile is the simulator's: the scenario `neighbour_closes`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.cache.structs import VolumeStruct
from flashwarp.errors import DeviceTimeout


@pytest.fixture
def cache() -> Iterator[fw.Cache]:
    with fw.Cache(64 * 512, 512, device="cpu") as shared:
        yield shared


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.bin"
    np.arange(4096, dtype=np.int64).tofile(path)
    return path


def open_on(cache: fw.Cache, file: Path) -> fw.Array:
    return fw.open(file, dtype=np.int64, cache=cache)


def entry(x: fw.Array) -> VolumeStruct:
    """The array's entry in the cache's table, in place: the device is the CPU."""
    return VolumeStruct.from_address(x._attachment.launcher.volume.address)


def test_open_array_is_attached_and_nobody_visits(cache: fw.Cache, file: Path) -> None:
    with open_on(cache, file) as x:
        assert (entry(x).attached, entry(x).visitors) == (1, 0)


def test_close_waits_for_a_warp_that_is_at_the_queues(cache: fw.Cache, file: Path) -> None:
    x = open_on(cache, file)
    there = entry(x)
    there.visitors += 1

    closer = threading.Thread(target=x.close)
    closer.start()
    deadline = time.monotonic() + 20
    while there.attached and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    still_waits = closer.is_alive() and there.line_count != 0 and there.queues != 0
    there.visitors -= 1
    closer.join(20)

    assert still_waits
    assert not closer.is_alive()
    assert (there.attached, there.line_count, there.queues) == (0, 0, 0)


def test_warp_that_stays_is_named_and_nothing_is_freed(cache: fw.Cache, file: Path) -> None:
    x = open_on(cache, file)
    there = entry(x)
    there.visitors += 2
    queues = there.queues

    with pytest.raises(DeviceTimeout, match=r"after 0\.05 s \(2 warps\)"):
        x._attachment.launcher.volume.table_entry.withdraw(timeout_s=0.05)

    assert there.queues == queues
    there.visitors -= 2
    x.close()


# A visitor that came too late counts itself, looks, and leaves: all of it may happen while the next
# array takes the entry.
def test_count_of_late_visitors_outlives_the_array(cache: fw.Cache, file: Path) -> None:
    with open_on(cache, file) as x:
        there = entry(x)
    there.visitors += 1

    with open_on(cache, file) as y:
        assert y._attachment.launcher.volume.address == x._attachment.launcher.volume.address
        assert (there.attached, there.visitors) == (1, 1)
        there.visitors -= 1


def test_neighbour_goes_on_when_an_array_closes(cache: fw.Cache, file: Path) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    rows = np.random.default_rng(7).integers(0, 4096, 256)

    def read(neighbour: fw.Array) -> None:
        try:
            while not stop.is_set():
                assert np.array_equal(neighbour[rows], rows)
        except BaseException as error:
            failures.append(error)

    with open_on(cache, file) as neighbour:
        reader = threading.Thread(target=read, args=(neighbour,))
        reader.start()
        for _ in range(30):
            with open_on(cache, file) as x:
                assert np.array_equal(x[rows], rows)
        stop.set()
        reader.join(20)

    assert failures == []
