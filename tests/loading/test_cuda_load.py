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
        self.live = fake().fake_live_allocations()
        self.pinned: list[Any] = []
        self.most = 0

    def move(self, o_direct: bool | None = None) -> None:
        """Load it; the most bytes of its pages that are pinned at a time are in `most`."""
        register = self.device.register_host

        def counted(address: int, nbytes: int, read_only: bool) -> Any:
            made = register(address, nbytes, read_only)
            if read_only:
                self.pinned.append(made)
                self.most = max(self.most, sum(p.nbytes for p in self.pinned if not p.closed))
            return made

        self.device.register_host = counted  # type: ignore[method-assign]
        found = contents.contents(self.path)
        moving.move(
            found.values(),
            {"x": Place(self.target.address, self.device.own_stream())},
            self.device,
            o_direct=o_direct,
            staging_bytes=STAGING,
            progress=lambda done, total: None,
            meanwhile=lambda: None,
        )

    def is_right(self) -> bool:
        """Whether all bytes have arrived, and nothing is pinned or allocated any more."""
        arrived = self.device.download(self.target.address, NBYTES) == self.array.tobytes()
        return arrived and fake().fake_live_allocations() == self.live


@contextlib.contextmanager
def loading() -> Iterator[Load]:
    with tempfile.TemporaryDirectory(dir=os.environ["FOLDER"]) as folder:
        yield Load(folder)


def count(call: str) -> int:
    return int(fake().fake_count(call.encode()))


def check_the_copy_engine_reads_the_page_cache_itself() -> None:
    with loading() as load:
        moving._CHUNK_BYTES = 16 * KIB
        allocations = count("cuMemHostAlloc")

        load.move()

        assert load.is_right()
        assert len(load.pinned) == 3
        assert load.most <= STAGING
        assert count("cuMemHostAlloc") == allocations


def check_pages_of_more_chunks_than_slots_are_pinned_a_few_at_a_time() -> None:
    with loading() as load:
        moving._THREADS_MAX = 1
        moving._CHUNK_BYTES = 4 * KIB

        load.move()

        assert load.is_right()
        assert len(load.pinned) == 11
        assert load.most <= 8 * KIB


def check_pages_that_the_driver_refuses_are_copied_through_buffers() -> None:
    with loading() as load:
        refuse = load.device.context.register_host

        def register(address: int, nbytes: int, read_only: bool) -> None:
            if read_only:
                with failing("cuMemHostRegister", NOT_SUPPORTED):
                    return refuse(address, nbytes, read_only)
            return refuse(address, nbytes, read_only)

        load.device.context.register_host = register

        load.move()

        assert load.is_right()
        assert not load.pinned


def check_what_is_read_past_the_page_cache_goes_through_buffers() -> None:
    with loading() as load:
        load.move(o_direct=True)

        assert load.is_right()
        assert not load.pinned


def check_a_file_that_is_cut_before_its_pages_are_pinned_is_an_error() -> None:
    with loading() as load:
        pin = moving._Slot.pin

        def cut(slot: Any, address: int, nbytes: int) -> None:
            os.truncate(load.path, 4 * KIB)
            with failing("cuMemHostRegister", 1):  # as the driver: pages behind the end are none
                pin(slot, address, nbytes)

        moving._Slot.pin = cut  # type: ignore[method-assign]
        with pytest.raises(StorageError, match="cut"):
            load.move()

        assert fake().fake_live_allocations() == load.live


def check_a_file_that_is_written_while_its_pages_are_pinned_is_an_error() -> None:
    with loading() as load:
        pin = moving._Slot.pin

        def write(slot: Any, address: int, nbytes: int) -> None:
            pin(slot, address, nbytes)
            with load.path.open("r+b") as file:
                file.write(b"x")
            os.utime(load.path, ns=(1, 1))

        moving._Slot.pin = write  # type: ignore[method-assign]
        with pytest.raises(StorageError, match="written"):
            load.move()

        assert fake().fake_live_allocations() == load.live


def check_a_copy_that_fails_is_an_error_and_leaves_nothing_pinned() -> None:
    with loading() as load:
        with failing("cuMemcpyAsync", 999), pytest.raises(DeviceError, match="999"):
            load.move()

        assert fake().fake_live_allocations() == load.live


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("cuda")
    return fake_cuda.build(folder) | {"FOLDER": str(folder)}


@fake_cuda.checks(globals())
def test_loads(check: Any, environment: dict[str, str]) -> None:
    fake_cuda.run(check, environment)
