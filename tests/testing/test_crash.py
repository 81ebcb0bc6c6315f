"""Power cuts and kill -9: what was flushed is there, and the rest is old or new.

The suites themselves are tested on subjects that break their promise, which they must notice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.storage import Storage
from flashwarp.testing import CrashSuite, KillSuite
from support.samples import EVERYTHING


class PowerCuts(CrashSuite):
    # An image takes some milliseconds to open and to check.
    states_max = 150 if EVERYTHING else 30


class ArrayMethods:
    """How arrays of int64 are written, committed and read."""

    def store(self, x: fw.Array, changes: Mapping[int, int]) -> None:
        elements = np.array(list(changes))
        x.scatter(elements, np.array(list(changes.values())))

    def commit(self, x: fw.Array) -> None:
        x.flush()

    def load(self, x: fw.Array) -> Sequence[int]:
        return list(x[...].tolist())

    def close(self, x: fw.Array) -> None:
        x.close()


def small_array(storage: Storage, **options: Any) -> fw.Array:
    return fw.open(
        storage, "r+", "i8", 256, **{"device": "cpu", "line": 512, "cache": 2048, **options}
    )


class TestArray(ArrayMethods, PowerCuts):
    def open(self, storage: Storage) -> fw.Array:
        return small_array(storage)


class TestArrayOfLongLines(ArrayMethods, PowerCuts):
    """Lines of eight sectors, which are torn."""

    element_count = 2048
    storage_nbytes = 16384
    seeds = (4, 5) if EVERYTHING else (4,)

    def open(self, storage: Storage) -> fw.Array:
        return fw.open(storage, "r+", "i8", 2048, device="cpu", line=4096, cache=16384)


class TestArrayThroughBuffers(ArrayMethods, PowerCuts):
    """Dirty lines make room while the next ones come; rings of two entries."""

    element_count = 1024
    storage_nbytes = 8192
    seeds = (6, 7) if EVERYTHING else (6,)

    def open(self, storage: Storage) -> fw.Array:
        controller = fw.nvme.SoftwareController(queue_pairs=1, depth=2, route="bounce")
        return fw.open(
            storage, "r+", "i8", 1024, device="cpu", line=512, cache=2048, controller=controller
        )


class TestTwoArraysOnOneCache(PowerCuts):
    """Each one's dirty lines make room for the other's; a flush of both commits."""

    element_count = 512
    storage_nbytes = 4096
    seeds = (8, 9) if EVERYTHING else (8,)

    def open(self, storage: Storage) -> tuple[fw.Array, fw.Array, fw.Cache]:
        cache = fw.Cache(2048, 512, device="cpu")
        neighbour = fw.open(fw.storage.Memory(4096), "r+", "i8", cache=cache)
        return small_array_of(storage, cache), neighbour, cache

    def store(self, subject: Any, changes: Mapping[int, int]) -> None:
        x, neighbour, _ = subject
        elements, values = np.array(list(changes)), np.array(list(changes.values()))
        for half in (slice(0, None, 2), slice(1, None, 2)):
            if elements[half].size:
                x.scatter(elements[half], values[half])
            neighbour[...] = len(changes)

    def commit(self, subject: Any) -> None:
        subject[0].flush()

    def load(self, subject: Any) -> Sequence[int]:
        return list(subject[0][...].tolist())

    def close(self, subject: Any) -> None:
        with contextlib.ExitStack() as ends:
            for each in reversed(subject):
                ends.callback(each.close)


def small_array_of(storage: Storage, cache: fw.Cache) -> fw.Array:
    return fw.open(storage, "r+", "i8", 512, cache=cache)


class TestKilledArray(ArrayMethods, KillSuite):
    def create(self, path: Path) -> None:
        fw.create(path, "i8", 256, device="cpu").close()

    def open(self, path: Path) -> fw.Array:
        return fw.open(path, "r+", device="cpu", line=512, cache=2048, o_direct=False)


class TestKilledDirectArray(ArrayMethods, KillSuite):
    """Past the page cache, where a kill may end a transfer half-way."""

    element_count = 4096
    seeds = (5, 6)

    def create(self, path: Path) -> None:
        fw.create(path, "i8", 4096, device="cpu").close()

    def open(self, path: Path) -> fw.Array:
        try:
            return fw.open(path, "r+", device="cpu", line=4096, cache=16384, o_direct=True)
        except OSError as error:
            pytest.skip(str(error))


# The suites notice what they are for. Not named Test..., so that pytest leaves them alone.


class CommitsNothing(TestArray):
    def commit(self, x: fw.Array) -> None:
        pass


class ForgetsTheFlush(TestArray):
    """Writes its lines back, and does not tell the drive to keep them."""

    def commit(self, x: fw.Array) -> None:
        x._attachment.maintain("flush_lines", warps=4)


class BelievesTheSecondFlush(TestArray):
    """As arrays once did: a flush after one that failed succeeds."""

    failing_plans = ("flush eio n=2",)

    def commit(self, x: fw.Array) -> None:
        x._attachment.flush_failure = None
        x.flush()


class MixesElements(TestArray):
    def load(self, x: fw.Array) -> Sequence[int]:
        values = x[...]
        # An element of which one half is old and one new.
        halves = values.view(np.uint32).reshape(-1, 2)
        mixed = np.roll(halves[:, 0], 1)
        return list((values & ~np.int64(0xFFFFFFFF) | mixed).tolist())


@pytest.mark.parametrize("broken", [CommitsNothing, ForgetsTheFlush, MixesElements])
def test_suite_notices(broken: type[CrashSuite]) -> None:
    with pytest.raises(AssertionError, match=r"seed .* element \d+ holds"):
        broken().test_power_cut()


def test_suite_notices_a_flush_that_failed() -> None:
    BelievesTheSecondFlush().test_power_cut()
    with pytest.raises(AssertionError, match=r"faults 'flush eio n=2'.* element \d+ holds"):
        BelievesTheSecondFlush().test_power_cut_after_failures()


class KilledLiar(TestKilledArray):
    """Reports before anything left the process."""

    def commit(self, x: fw.Array) -> None:
        pass


def test_kill_suite_notices(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"element \d+ holds"):
        KilledLiar().test_killed_process_loses_nothing_it_reported(tmp_path)


def test_kill_suite_notices_a_child_that_fails(tmp_path: Path) -> None:
    class Unreachable(TestKilledArray):
        """Defined where the child cannot find it."""

    with pytest.raises(AssertionError, match="ended by itself"):
        Unreachable().test_killed_process_loses_nothing_it_reported(tmp_path)
