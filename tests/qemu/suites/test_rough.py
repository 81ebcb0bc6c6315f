"""Drives that are reset or pulled out of their slot while arrays use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import flashwarp as fw
from flashwarp.errors import ControllerLost, FlashwarpError, StorageError
from flashwarp.storage import Storage
from qemu import guest
from qemu.suites.machines import PULLED, RESET, ROUGH
from qemu.suites.ways import KERNEL, PASSTHROUGH, VFIO, array, bound

MACHINE = ROUGH

NBYTES = 1 << 20


class Reading(threading.Thread):
    """Gathers all the time; keeps the error that ends it, and what was wrong."""

    def __init__(self, x: fw.Array, expected: npt.NDArray[np.int32]) -> None:
        super().__init__(daemon=True)
        self.turns = 0
        self.wrong = 0
        self.error: BaseException | None = None
        self.ending = threading.Event()
        self._x, self._expected = x, expected

    def run(self) -> None:
        chooser = np.random.default_rng(7)
        try:
            while not self.ending.is_set():
                places = chooser.integers(0, self._expected.size, 500)
                got = np.asarray(self._x.gather(places))
                self.wrong += int((got != self._expected[places]).sum())
                self.turns += 1
        except BaseException as error:  # the test looks at it
            self.error = error


@contextmanager
def reading(way: str, drive: int) -> Iterator[tuple[fw.Array, Reading]]:
    """An array that a thread reads meanwhile; it reads at least once before the caller goes on."""
    expected = np.random.default_rng(drive).integers(0, 1 << 30, NBYTES // 4, np.int32)
    with array(way, drive, nbytes=NBYTES, dtype="i4", line=4096) as x:
        x[:] = expected
        x.flush()
        thread = Reading(x, expected)
        thread.start()
        go_on(thread)
        yield x, thread
        thread.ending.set()
        thread.join(60)
        assert not thread.is_alive(), "a gather waits for ever"
        assert thread.wrong == 0


def go_on(thread: Reading, turns: int = 3) -> None:
    """Wait until the thread has read some more, or has ended."""
    end = thread.turns + turns
    guest.wait_until(
        lambda: thread.turns >= end or thread.error is not None, "the thread reads", 60
    )


# Resets by the kernel's driver are not tested: after some, QEMU 7.2 completed no commands any more,
# whoever used the drive, and the kernel waited for ever.


@pytest.mark.parametrize("function", [False, True], ids=["controller", "function"])
def test_reset_loses_the_arrays_of_vfio_and_no_others(function: bool) -> None:
    expected = np.arange(NBYTES // 4, dtype=np.int32)
    with fw.nvme.VfioController(bound(VFIO, RESET), 2, 64, allow_raw_writes=True) as controller:
        thread = lose_array(controller, expected, function)
        assert isinstance(thread.error, ControllerLost), thread.error
        assert thread.wrong == 0
        with controller.namespace(1) as namespace, opened(namespace, controller) as x:
            np.testing.assert_array_equal(x[:], expected)


def lose_array(
    controller: fw.nvme.VfioController, expected: npt.NDArray[np.int32], function: bool
) -> Reading:
    """Store, and reset the controller while a thread reads; return the thread."""
    with controller.namespace(1) as namespace:
        x = opened(namespace, controller)
        x[:] = expected
        x.flush()
        thread = Reading(x, expected)
        thread.start()
        go_on(thread)
        controller.reset(function=function)
        thread.join(60)
        with pytest.raises(ControllerLost):
            x.close()
    return thread


def opened(namespace: Storage, controller: fw.nvme.VfioController) -> fw.Array:
    options: dict[str, Any] = {"device": "cpu", "cache": "64 KiB", "controller": controller}
    return fw.open(namespace, "r+", "i4", NBYTES // 4, **options)


@pytest.mark.parametrize(
    ("way", "drive"), list(zip([KERNEL, PASSTHROUGH, VFIO], PULLED, strict=True))
)
def test_drive_that_is_pulled_out_is_an_error(way: str, drive: int) -> None:
    # The last flush, when the array closes, finds no drive either.
    with pytest.raises((StorageError, ControllerLost)):
        pull_while_reading(way, drive)
    guest.wait_until(lambda: not guest.is_there(drive), "the slot is empty")


def pull_while_reading(way: str, drive: int) -> None:
    with reading(way, drive) as (x, thread):
        start = time.monotonic()
        guest.pull(drive)
        thread.join(60)
        assert not thread.is_alive(), "a gather waits for a drive that is gone"
        assert isinstance(thread.error, StorageError | ControllerLost), thread.error
        print(f"{way}: after {time.monotonic() - start:.1f} s: {thread.error}")
        with pytest.raises(FlashwarpError):
            x.gather([0, 5000, 100000, 262143])
