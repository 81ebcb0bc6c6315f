"""Ranges of rows that a GPU reads in place, by copy engines: the fake driver really copies them, in
the order of streams. Kernels do nothing there, so what warps move is not looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp.array.attachment import Attachment
from flashwarp.device import DeviceArray, OwnedStream
from flashwarp.errors import BoundsError, DeviceError, IndexDtypeError
from flashwarp.launch import copying
from flashwarp.storage import routes
from flashwarp.storage.lease import Lease
from support import fake_cuda
from support.cuda_arrays import gpu
from support.fake_cuda import fake

ROWS, WIDTH = 48, 8192  # rows of 64 KiB
FLUSH, GATHER = "_Z14fw_flush_linesy", "_Z14fw_gather_rowsy"


def values() -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(ROWS * WIDTH, dtype=np.int64).reshape(ROWS, WIDTH)


@contextlib.contextmanager
def opened(
    mode: str = "r", storage: Any = None, cache: str = "64 KiB", **options: Any
) -> Iterator[tuple[fw.Array, OwnedStream]]:
    """Rows in memory on such a GPU, and a stream of the caller's."""
    assert fake().fake_run_streams() == 0
    storage = fw.storage.Memory(values()) if storage is None else storage
    device = gpu()
    with (
        device,
        fw.open(storage, mode, "i8", (ROWS, WIDTH), device=device, cache=cache, **options) as x,
    ):
        fake().fake_forget_queued()
        yield x, device.create_stream()


def room(x: fw.Array, rows: int) -> DeviceArray:
    return x.device.empty_array((rows, WIDTH), np.int64)


def held(rows: DeviceArray) -> np.ndarray[Any, Any]:
    """What is in the memory of an array now: a download would wait for the stream."""
    content = ctypes.string_at(rows.address, rows.nbytes)
    return np.frombuffer(content, np.int64).reshape(rows.shape)


def queued() -> list[str]:
    """Names of what was launched, in order."""
    told = fake().fake_queued
    told.restype = ctypes.c_char_p
    return [line.split()[0] for line in told().decode().splitlines()]


def check_long_ranges_are_copied_and_counted() -> None:
    with opened() as (x, _):
        np.testing.assert_array_equal(x[3:40], values()[3:40])
        np.testing.assert_array_equal(x.gather(range(20)), values()[:20])
        out = room(x, 30)
        assert x.gather(slice(10, -8), out=out) is out
        np.testing.assert_array_equal(held(out), values()[10:40])
        rows = x.gather_async(slice(0, 24), room(x, 24)).result(20)
        np.testing.assert_array_equal(held(rows), values()[:24])

        assert queued() == [], "no kernel was needed"
        told = x.explain()
        moved = (37 + 20 + 30 + 24) * WIDTH * 8
        assert x.stats.bytes_copied == x.stats.bytes_read == x.stats.bytes_used == moved
        assert f"by copy engines from {1 << 20} bytes on" in told.facts["ranges"]
        assert f"4 ranges of {moved} bytes" in str(told)


def check_warps_read_what_is_short_or_fits_the_cache() -> None:
    with opened() as (x, _):
        assert x[3:18].shape == (15, WIDTH), "less than 1 MiB"
        assert x.gather(np.arange(40)).shape == (40, WIDTH), "a list is no range"
        assert x[0:40:2].shape == (20, WIDTH)
        assert queued() == [GATHER] * 3
        assert x.stats.bytes_copied == 0
    with opened(cache="2 MiB") as (x, _):
        assert x[0:40].shape == (40, WIDTH), "less than twice the cache"
        assert queued() == [GATHER]
        assert f"from {2 * x.cache.capacity} bytes on" in x.explain().facts["ranges"]


def check_warps_read_what_copy_engines_cannot() -> None:
    parts = [fw.storage.Memory(half, writable=False) for half in np.split(values(), 2)]
    with opened(storage=fw.storage.Concatenated(parts)) as (x, _):
        assert x.explain().route == "in_place"
        assert x[:].shape == x.shape
        assert queued() == [GATHER]
        assert "by warps, because the rows lie in several storages" in x.explain().facts["ranges"]


def check_dirty_lines_are_written_before() -> None:
    with opened("r+") as (x, stream):
        first = room(x, 20)
        x.gather(slice(0, 20), out=first, stream=stream)
        x[0:20]
        assert queued() == [FLUSH, FLUSH]
        x.wait()


def check_a_flush_that_cannot_be_launched_fails_the_call() -> None:
    with opened("r+") as (x, stream):
        before = fake().fake_count(b"cuMemcpyAsync")
        with (
            fake_cuda.failing("cuLaunchKernel", fake_cuda.OUT_OF_MEMORY),
            pytest.raises(DeviceError),
        ):
            x.gather(slice(0, 20), out=room(x, 20), stream=stream)
        assert fake().fake_count(b"cuMemcpyAsync") == before, "no old rows are read"


def check_a_copy_comes_in_the_order_of_its_stream() -> None:
    with opened() as (x, stream):
        out = room(x, 20)
        ctypes.memset(out.address, 0, out.nbytes)
        other = x.device.create_stream()
        fake().fake_pend(other.handle)  # a kernel that still uses the memory
        x.device.order(other.handle, stream.handle)
        x.gather(slice(7, 27), out=out, stream=stream)
        assert not x.device.done(stream)
        assert not held(out).any()

        fake().fake_pend(0)
        x.wait(stream)
        np.testing.assert_array_equal(held(out), values()[7:27])


def check_many_calls_create_nothing_and_wait_for_nothing() -> None:
    counted = [b"cuEventCreate", b"cuMemAlloc", b"cuMemHostAlloc", b"cuStreamCreate"]
    with opened() as (x, stream):
        out = room(x, 40)
        x.gather(slice(0, 40), out=out, stream=stream)
        before = [fake().fake_count(each) for each in counted]
        fake().fake_pend(stream.handle)  # whatever waits for the stream would never end
        for _ in range(20):
            x.gather(slice(0, 40), out=out, stream=stream)
        assert [fake().fake_count(each) for each in counted] == before
        fake().fake_pend(0)


def check_a_graph_has_what_warps_read() -> None:
    with opened() as (x, stream):
        out = room(x, 20)
        x.gather(slice(0, 3), out=room(x, 3), stream=stream)
        x.device.wait(stream)
        before = fake().fake_count(b"cuMemcpyAsync")
        fake().fake_capture_begin(stream.handle)
        x.gather(slice(0, 20), out=out, stream=stream)
        assert fake().fake_capture_end() == 1
        assert fake().fake_count(b"cuMemcpyAsync") == before
        assert queued()[-1] == GATHER
        fake().fake_destroy_graphs()


def check_a_copy_that_the_driver_refuses_fails_its_call() -> None:
    with opened() as (x, stream), fake_cuda.failing("cuMemcpyAsync", fake_cuda.OUT_OF_MEMORY):
        with pytest.raises(DeviceError):
            x.gather(slice(0, 20), out=room(x, 20), stream=stream)
        with pytest.raises(DeviceError):
            x.gather_async(slice(0, 20), room(x, 20))


def check_a_file_that_is_registered_in_pieces() -> None:
    routes.PIECE_BYTES = copying.PIECE_BYTES = 1 << 18
    fake().fake_registers(1, 1, ctypes.c_size_t(1 << 18))
    path = Path(os.environ["FLASHWARP_CACHE_DIR"]).parent / f"ranges{os.getpid()}"
    values().tofile(path)
    with opened(storage=path, immutable=True) as (x, _):
        np.testing.assert_array_equal(x[1:47], values()[1:47])
        assert x.stats.bytes_copied == 46 * WIDTH * 8


def check_rows_that_are_none() -> None:
    with opened() as (x, _):
        assert x.gather(slice(5, 5)).shape == (0, WIDTH)
        with pytest.raises(BoundsError):
            x.gather(range(40, ROWS + 1))
        with pytest.raises(IndexDtypeError):
            x.gather(slice(0.5, 20))


def leased() -> None:
    """A file that others may open for writing: its copies are looked at again."""
    path = Path(os.environ["FLASHWARP_CACHE_DIR"]).parent / f"leased{os.getpid()}"
    values().tofile(path)
    with opened(storage=path) as (x, stream):
        assert x.service.leased
        np.testing.assert_array_equal(x[1:47], values()[1:47])
        assert queued() == []

        x.gather(slice(0, 20), out=room(x, 20), stream=stream)
        assert queued() == [GATHER], "nothing could look at it again"
        told = x.explain().facts["ranges"]
        assert "on streams, by warps" in told, told

        finish, comes = Attachment.finish, threading.Event()

        def with_a_writer(attachment: Attachment, what: str, run: int | None) -> None:
            finish(attachment, what, run)
            if not comes.is_set():
                comes.set()
                path.open("r+b").close()  # returns when the lease was given up

        fake().fake_forget_queued()
        Attachment.finish = with_a_writer  # type: ignore[method-assign]
        x[1:47]
        assert comes.is_set()
        assert queued() == [GATHER], "warps read it again"
        assert "by warps, because" in x.explain().facts["ranges"]


def test_files_under_a_lease(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    try:
        Lease(str(tmp_path / "file")).close()
    except OSError as error:
        pytest.skip(f"no lease on a file in {tmp_path}: {error}")
    fake_cuda.run(leased, environment)


test_on_the_fake_driver = fake_cuda.test_of(globals())
