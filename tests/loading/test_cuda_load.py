"""How `load` moves bytes to a GPU, by the driver's calls, in a driver without a GPU.

Its memory is the host's, so the bytes that arrive are looked at as they are.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")

from flashwarp.device import CudaDevice
from flashwarp.errors import DeviceError, StorageError
from flashwarp.loading import contents, moving
from flashwarp.loading.places import Place
from flashwarp.transfer import CopyEngine, pool_of
from support import fake_cuda
from support.fake_cuda import NOT_SUPPORTED, failing, fake

KIB = 1 << 10
# The last chunk ends inside of a page.
NBYTES = 41_000
STAGING = 96 * KIB


class Load:
    """An array in a file of the page cache, and memory of the device that takes it."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, "x.npy")
        self.array = np.random.default_rng(7).integers(0, 256, NBYTES, np.uint8)
        np.save(self.path, self.array)
        self.device = CudaDevice(0)
        self.target = self.device.allocate(NBYTES)
        CopyEngine(self.device).close()  # its events stay in the pool
        self.live = fake().fake_live_allocations()
        self.pinned: list[Any] = []
        self.done: list[int] = []

    def move(self, o_direct: bool | None = None) -> None:
        """Load it, and note what is pinned, and the bytes that have arrived."""
        register = self.device.register_host

        def counted(address: int, nbytes: int, read_only: bool) -> Any:
            self.pinned.append(register(address, nbytes, read_only))
            return self.pinned[-1]

        self.device.register_host = counted  # type: ignore[method-assign]
        moving.move(
            contents.contents(self.path).values(),
            {"x": Place(self.target.address, self.device.own_stream())},
            self.device,
            o_direct=o_direct,
            staging_bytes=STAGING,
            progress=lambda done, total: self.done.append(done),
            meanwhile=lambda: None,
        )

    def is_right(self) -> bool:
        """Whether all bytes have arrived, and nothing is lent any more."""
        arrived = self.device.download(self.target.address, NBYTES) == self.array.tobytes()
        return arrived and self.done[-1] == NBYTES and self.left_nothing()

    def left_nothing(self) -> bool:
        """Whether no buffer is lent any more, and only buffers that are free were allocated."""
        shared = pool_of(self.device).shared
        live = fake().fake_live_allocations() - len(shared.free)
        return bool(shared.lent == 0 and live == self.live)


@contextlib.contextmanager
def loading() -> Iterator[Load]:
    with tempfile.TemporaryDirectory(dir=os.environ["FOLDER"]) as folder:
        load = Load(folder)
        yield load
        # Not whenever the garbage collector comes: the next one counts what is allocated.
        load.target.close()
        load.device.close()


def check_bytes_arrive_by_either_way() -> None:
    for o_direct in (None, False, True):
        with loading() as load:
            load.move(o_direct)

            assert load.is_right()


def check_buffers_take_turns_within_the_limit() -> None:
    with loading() as load:
        moving._CHUNK_BYTES = 4 * KIB  # eleven chunks

        load.move()

        assert load.is_right()
        assert 1 <= len(load.pinned) <= 6
        assert sum(each.nbytes for each in load.pinned) <= 24 * KIB


def check_a_device_that_registers_no_memory_allocates_the_buffers() -> None:
    with loading() as load, failing("cuMemHostRegister", NOT_SUPPORTED):
        before = fake().fake_count(b"cuMemHostAlloc")

        load.move()

        assert load.is_right()
        assert not load.pinned
        assert fake().fake_count(b"cuMemHostAlloc") > before


def check_a_file_that_is_cut_meanwhile_is_an_error() -> None:
    with loading() as load:
        deliver = moving._Mover._deliver
        moving._CHUNK_BYTES = 4 * KIB

        def cut(*each: Any) -> Any:
            os.truncate(load.path, 4 * KIB)
            return deliver(*each)

        moving._Mover._deliver = cut  # type: ignore[method-assign]
        with pytest.raises(StorageError, match=r"cut|written"):
            load.move()

        assert load.left_nothing()


def check_a_copy_that_fails_is_an_error_and_leaves_nothing_pinned() -> None:
    with loading() as load:
        with failing("cuMemcpyAsync", 999), pytest.raises(DeviceError, match="999"):
            load.move()

        assert load.pinned
        assert load.left_nothing()


def check_a_second_load_pins_nothing() -> None:
    with loading() as load:
        load.move()
        pinned = len(load.pinned)

        load.move()

        assert load.is_right()
        assert len(load.pinned) == pinned


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("cuda")
    return fake_cuda.build(folder) | {"FOLDER": str(folder)}


test_loads = fake_cuda.test_of(globals())
