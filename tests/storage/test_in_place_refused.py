"""What cannot be read in place goes through the rings, and says why.

The GPU is `support.fake_cuda`, which refuses to register what a check tells it to refuse.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp._jit import compiler
from flashwarp._jit.compiler import Artifact, KernelResources
from flashwarp.device import host_memory
from flashwarp.device.cuda import CudaDevice
from flashwarp.device.host_memory import PinnedFiles
from flashwarp.errors import DeviceError, RouteError
from flashwarp.launch.rows import MaintenanceParams
from flashwarp.storage import Concatenated, Memory, Striped, routes
from flashwarp.storage.lease import Lease
from support import fake_cuda
from support.fake_cuda import fake
from support.file_writer import OPEN_S_MAX

NBYTES = 1 << 20


def gpu() -> CudaDevice:
    """A GPU whose maintenance kernels nobody had to compile."""
    nbytes = ctypes.sizeof(MaintenanceParams)

    def compiled(arch: str, *_: Any, options: tuple[str, ...] = (), **__: Any) -> Artifact:
        (name,) = re.findall(r"-DFW_ONLY_(\w+)=1", " ".join(options))
        symbol = f"_Z{len(name) + 3}fw_{name}y"
        resources = KernelResources(symbol, nbytes, (nbytes,), 32, 0, 0, 0)
        return Artifact(arch, name, b"\x7fELF", "", {symbol: resources}, from_cache=False)

    # For good: this process runs one check.
    compiler.compile_source = compiled
    return CudaDevice(0)


def may_register(*, any_memory: bool = True, read_only: bool = True, most: int = 1 << 40) -> None:
    fake().fake_registers(int(any_memory), int(read_only), ctypes.c_size_t(most))


def make(folder: str, name: str = "x", nbytes: int = NBYTES) -> Path:
    path = Path(folder) / name
    path.write_bytes(bytes(nbytes))
    try:
        Lease(str(path)).close()
    except OSError as error:
        pytest.skip(f"no lease on a file in {folder}: {error}")
    return path


def opened(what: Any, device: CudaDevice, **more: Any) -> fw.Array:
    return fw.open(what, dtype="i8", device=device, cache="64 KiB", **more)


def reason_of(array: fw.Array) -> str:
    told = array.explain()
    assert told.route == "bounce"
    return told.reason


def seconds_to_open_for_writing(path: Path) -> float:
    begin = time.monotonic()
    with path.open("r+b"):
        return time.monotonic() - begin


def check_device_that_registers_no_read_only_memory() -> None:
    with TemporaryDirectory() as folder, gpu() as device:
        path = make(folder)
        may_register(read_only=False)

        with opened(path, device) as x:
            assert "not read in place, because cuda:0 cannot register read-only" in reason_of(x)
            assert not x.service.plain_reads
            assert host_memory.pinned_files.nbytes == 0
            assert seconds_to_open_for_writing(path) < OPEN_S_MAX
        with pytest.raises(RouteError, match="cannot register read-only"):
            opened(path, device, strict="in_place")
        with pytest.raises(DeviceError, match="cannot register read-only"):
            opened(path, device, controller=fw.nvme.SoftwareController(route="in_place"))

    may_register()
    with (
        TemporaryDirectory() as folder,
        gpu() as device,
        opened(make(folder), device, strict="in_place") as x,
    ):
        assert x.service.plain_reads
        assert "a lease holds writers off" in str(x.explain())


def check_memory_that_could_be_written_is_registered_as_such() -> None:
    may_register(read_only=False)
    with gpu() as device:
        with opened(Memory(np.zeros(64, np.int64), writable=False), device) as x:
            assert x.explain().route == "in_place"
            assert fake().fake_registered_flags() == 1 | 2
        frozen = np.zeros(64, np.int64)
        frozen.flags.writeable = False
        with opened(Memory(frozen), device) as x:
            assert "cannot register read-only" in reason_of(x)


def check_confidential_computing_is_named() -> None:
    may_register(any_memory=False)
    with (
        TemporaryDirectory() as folder,
        gpu() as device,
        opened(make(folder), device) as x,
        opened(Memory(np.zeros(64, np.int64), writable=False), device) as y,
    ):
        for array in (x, y):
            assert "NOT_SUPPORTED" in reason_of(array)
            assert "as under confidential computing" in reason_of(array)


def check_large_file_is_registered_in_pieces() -> None:
    routes.PIECE_BYTES = NBYTES // 4
    may_register(most=NBYTES // 4)
    with TemporaryDirectory() as folder, gpu() as device:
        path = make(folder, nbytes=NBYTES + 4096)
        opened(path, device).close()  # loads kernels
        before = fake().fake_live_allocations()
        calls = fake().fake_count(b"cuMemHostRegister")

        opened(path, device, strict="in_place").close()

        assert fake().fake_count(b"cuMemHostRegister") - calls == 1 + 5
        assert fake().fake_live_allocations() == before
        # The memory of a caller is not divided.
        held = np.zeros(NBYTES // 4, np.int64)
        with opened(Memory(held, writable=False), device) as x:
            assert f"registering {held.nbytes} " in reason_of(x)


def check_pieces_that_are_refused_leave_none_registered() -> None:
    routes.PIECE_BYTES = NBYTES // 4
    may_register(most=NBYTES // 8)
    with TemporaryDirectory() as folder, gpu() as device:
        path = make(folder)
        opened(path, device).close()  # loads kernels
        before = fake().fake_live_allocations()
        with opened(path, device) as x:
            assert "INVALID_VALUE" in reason_of(x)
        assert fake().fake_live_allocations() == before


def check_stripes_of_which_one_is_refused_all_take_the_rings() -> None:
    may_register(most=NBYTES)
    with TemporaryDirectory() as folder, gpu() as device:
        paths = [make(folder, "a"), make(folder, "b", 2 * NBYTES)]
        with opened(Striped(paths, 4096), device) as x:
            assert f"registering {2 * NBYTES} read-only bytes" in reason_of(x)
            assert [each.route for each in x.service.services] == ["bounce"] * 2
            assert host_memory.pinned_files.nbytes == 0
            for path in paths:
                assert seconds_to_open_for_writing(path) < OPEN_S_MAX


def check_parts_are_read_in_place_until_one_of_their_files_is_written() -> None:
    may_register()
    with TemporaryDirectory() as folder, gpu() as device:
        paths = [make(folder, "a"), make(folder, "b")]
        parts = [(paths[0], 8, 4096), (paths[1], 16, NBYTES - 16), (paths[0], 8192, 1000)]
        with opened(Concatenated(parts), device, strict="in_place") as x:
            assert x.service.plain_reads
            assert x.in_place is None
            assert "a lease holds writers off" in str(x.explain())
            assert host_memory.pinned_files.nbytes > 0
            assert seconds_to_open_for_writing(paths[1]) < OPEN_S_MAX
            assert x.service.route == "bounce"
            assert seconds_to_open_for_writing(paths[0]) < OPEN_S_MAX
        assert host_memory.pinned_files.nbytes == 0
        with opened(Concatenated(parts), device, immutable=True) as x:
            assert x.service.route == "in_place"
            assert "immutable=True" in str(x.explain())


def check_parts_that_are_no_whole_words_take_the_rings() -> None:
    may_register()
    with TemporaryDirectory() as folder, gpu() as device:
        path = make(folder)
        for parts in ([(path, 0, 12), (path, 16, 4)], [(path, 4, 8), (path, 16, 8)]):
            with opened(Concatenated(parts), device) as x:
                assert x.explain().route == "bounce"


def check_parts_of_which_one_is_refused_all_take_the_rings() -> None:
    may_register(most=NBYTES // 2)
    with TemporaryDirectory() as folder, gpu() as device:
        paths = [make(folder, "a"), make(folder, "b")]
        parts = [(paths[0], 0, 4096), (paths[1], 0, NBYTES)]
        opened(paths[0], device, shape=(8,)).close()  # loads kernels
        before = fake().fake_live_allocations()
        with opened(Concatenated(parts), device) as x:
            assert f"registering {NBYTES} read-only bytes" in reason_of(x)
            for path in paths:
                assert seconds_to_open_for_writing(path) < OPEN_S_MAX
        assert fake().fake_live_allocations() == before


def check_arrays_share_the_budget_of_pinned_files() -> None:
    share = 1.5 * NBYTES / host_memory.available_bytes()
    os.environ["FLASHWARP_IN_PLACE_BUDGET"] = str(share)
    with TemporaryDirectory() as folder, gpu() as device:
        first, second = make(folder, "a"), make(folder, "b")
        with opened(first, device, strict="in_place"):
            opened(first, device, strict="in_place").close()  # the same pages
            with opened(second, device) as x:
                assert f"its {NBYTES} bytes, with {NBYTES} of other arrays" in reason_of(x)
                assert "in_place_budget" in reason_of(x)
            with pytest.raises(RouteError, match="of other arrays"):
                opened(second, device, strict="in_place")
        assert host_memory.pinned_files.nbytes == 0
        opened(second, device, strict="in_place").close()
        with opened(Striped([first, second], 4096), device) as x:
            assert f"no file is read in place, because of {second}: its" in reason_of(x)


def check_writers_do_not_wait_for_stripes_that_one_controller_serves() -> None:
    with TemporaryDirectory() as folder, gpu() as device:
        paths = [make(folder, "a"), make(folder, "b")]
        with opened(Striped(paths, 4096), device, line="8 KiB") as x:
            assert "one controller for all 2 members" in reason_of(x)
            for path in paths:
                assert seconds_to_open_for_writing(path) < OPEN_S_MAX


test_in_place = fake_cuda.test_of(globals())


# The budget.


def test_files_count_once_until_their_last_array_has_ended() -> None:
    pinned = PinnedFiles()
    a, b = (1, 10), (1, 11)

    first, others = pinned.reserve(a, 100, 150)
    assert others == 0
    assert pinned.reserve(b, 60, 150) == (None, 100)
    again, others = pinned.reserve(a, 120, 150)
    assert (others, pinned.nbytes) == (100, 120)
    assert first is not None
    assert again is not None
    first()
    first()
    assert pinned.nbytes == 120
    again()
    assert pinned.nbytes == 0
    assert pinned.reserve(b, 150, 150)[0] is not None
    assert pinned.reserve(a, 1, 150) == (None, 150)
    assert pinned.nbytes == 150
