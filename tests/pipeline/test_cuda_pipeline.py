"""Pipelines on a GPU, made for real through the driver's interface into a driver without a GPU.

The fake runs copies and words in the order of their streams, so batches that pass the host really
move. Kernels do nothing there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp.device import DeviceArray
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    CaptureError,
    DeviceError,
    IndexDtypeError,
    StorageError,
)
from flashwarp.pipeline import staged
from flashwarp.pipeline.engine import BatchEngine, Ring
from flashwarp.storage import File, Memory
from flashwarp.testing.faults import Faulty
from support import fake_cuda
from support.cuda_arrays import gpu, stream_of_last_launch
from support.fake_cuda import fake, report

ROWS, WIDTH = 1000, 96


def values() -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(ROWS * WIDTH, dtype=np.int64).reshape(ROWS, WIDTH)


def path() -> Path:
    return Path(os.environ["FLASHWARP_CACHE_DIR"]).parent / f"rows{os.getpid()}"


@contextlib.contextmanager
def opened(batch: int = 300, faults: str = "", **options: Any) -> Iterator[Any]:
    """A file of rows on such a GPU, and a pipeline over it whose batches have several chunks."""
    staged.RING = Ring(16384, 4)
    values().tofile(path())
    storage: Any = File(path(), writable=True)
    if faults:
        storage = Faulty(storage, faults)
    mode = options.pop("mode", "r+")
    assert fake().fake_run_streams() == 0
    device = gpu()
    with (
        device,
        fw.open(storage, mode, "i8", (ROWS, WIDTH), device=device, cache="64 KiB") as x,
        fw.Pipeline(x, batch, **{"sms": 0, "timeout_s": 20, **options}) as p,
    ):
        yield x, p


def on_gpu(x: fw.Array, ids: Any) -> DeviceArray:
    array = x.device.empty_array((len(ids),), np.int64)
    x.device.upload(array.address, np.asarray(ids, np.int64))
    return array


def arrived(p: Any) -> Any:
    """The oldest batch."""
    return np.asarray(p.take())


def check_what_is_written_is_in_the_storage_after_a_flush_and_after_close() -> None:
    with opened(faults="write delay=500000us") as (_, p):
        p.write_back(slice(0, 2), np.full((2, WIDTH), -1, np.int64))
        p.flush()
        assert np.fromfile(path(), np.int64)[0] == -1
        p.write_back(slice(0, 2), np.full((2, WIDTH), -2, np.int64))
        p.close()
        assert np.fromfile(path(), np.int64)[0] == -2


def check_batches_move_behind_the_callers_work() -> None:
    with opened() as (x, p):
        p._stream = stream = x.device.create_stream()
        rows = x.device.empty_array((1, WIDTH), np.int64)
        fake().fake_pend(stream.handle)  # a kernel that uses a buffer, and another one's rows

        read = p.prefetch([4])
        p._route._engine.wait("prefetch", read.number, 20)  # the ring has it
        write = p.write_back([5], rows)
        done = read.done(), write.done()
        fake().fake_pend(0)

        assert done == (False, False)
        write.wait(20)
        np.testing.assert_array_equal(arrived(p), values()[4:5])


def check_tiles_pin_no_lists_and_use_rings_again() -> None:
    with opened(faults="write delay=20000us") as (x, p):
        p.close()  # which leaves a ring of each direction
        tiles = partial(fw.Pipeline.tiles, x, 300, sms=0, timeout_s=20)
        pinned = fake().fake_count(b"cuMemHostAlloc")
        for k, tile in enumerate(tiles(writable=True, read=False)):
            x.device.upload(tile.address, np.full((len(tile), WIDTH), k))
        # Requests, results and the two words of a ring.
        assert fake().fake_count(b"cuMemHostAlloc") == pinned + 4
        stored = np.fromfile(path(), np.int64).reshape(ROWS, WIDTH)
        np.testing.assert_array_equal(stored, np.arange(ROWS)[:, None] // 300 + np.zeros(WIDTH))

        assert sum(len(tile) for tile in tiles()) == ROWS
        assert fake().fake_count(b"cuMemHostAlloc") == pinned + 8


def check_no_batch_fills_a_buffer_that_is_being_written_back() -> None:
    with opened(depth=1) as (_, p):
        p.prefetch(slice(0, 3))
        p.write_back(slice(0, 3), p.take())
        fake().fake_pend(p._route._copying["write_back"].handle)  # rows are taken from the buffer

        ticket = p.prefetch(slice(3, 6))
        p._route._engine.wait("prefetch", ticket.number, 20)  # the ring has it
        done = ticket.done()
        fake().fake_pend(0)

        assert not done
        ticket.wait(20)


def check_a_batch_that_fails_raises_and_later_ones_run() -> None:
    with opened(faults="read eio bytes=38400-38401", mode="r") as (_, p):
        ticket = p.prefetch([1, 50, 2])
        p.prefetch([3])
        with pytest.raises(StorageError):
            ticket.wait(20)
        with pytest.raises(StorageError):
            p.take()
        np.testing.assert_array_equal(arrived(p), values()[3:4])


def check_rows_out_of_bounds() -> None:
    with opened(mode="r") as (x, p):
        with pytest.raises(BoundsError):
            p.prefetch([ROWS])
        ticket = p.prefetch(on_gpu(x, [1, ROWS]))
        with pytest.raises(BoundsError, match=str(ROWS)):
            ticket.wait(20)
        with pytest.raises(BoundsError):
            p.take()
        p.prefetch([2])


def check_a_writable_array_belongs_to_the_pipeline() -> None:
    with opened() as (x, p):
        for call in (lambda: x.gather([1]), lambda: x[1], x.check, x.flush):
            with pytest.raises(ArgumentError, match="belongs to a pipeline"):
                call()
        p.prefetch([1])
        p.take()
        p.close()
        x.check()


def check_steady_state_creates_nothing_and_waits_for_nothing() -> None:
    counted = [b"cuEventCreate", b"cuMemAlloc", b"cuMemHostAlloc", b"cuStreamCreate"]
    with opened(mode="r") as (x, p):
        ids = on_gpu(x, range(200))
        for _ in range(8):
            p.prefetch(ids)
            arrived(p)
        before = [fake().fake_count(each) for each in counted]
        for _ in range(50):
            p.prefetch(ids)
            arrived(p)
        assert [fake().fake_count(each) for each in counted] == before


def check_batches_that_pass_the_host_are_in_no_capture() -> None:
    with opened() as (x, p):
        stream = x.device.create_stream()
        p._stream = stream
        p.prefetch([4])
        rows = p.take()
        x.device.wait(stream)
        fake().fake_capture_begin(stream.handle)
        for call in (lambda: p.prefetch([5]), lambda: p.write_back([5], rows)):
            with pytest.raises(CaptureError, match="replays"):
                call()
        assert fake().fake_capture_end() == 1, "the capture goes on"
        p.prefetch([5])
        np.testing.assert_array_equal(np.asarray(p.take()), values()[5:6])


def check_ids_of_other_dtypes() -> None:
    with opened(mode="r") as (x, p):
        narrow = x.device.empty_array((3,), np.int32)
        with pytest.raises(IndexDtypeError, match="int64"):
            p.prefetch(narrow)


def check_rows_in_place_are_pulled_by_few_warps() -> None:
    device = gpu()
    memory = fw.storage.Memory(np.zeros(200_000, np.int64))
    with device, fw.open(memory, "r+", "i8", device=device, cache="64 KiB") as x:
        with fw.Pipeline(x, 100_000, sms=3) as p:
            assert p.explain().route == "pull"
            assert p.explain().facts["multiprocessors"] == 3
            ids = x.device.empty_array((100_000,), np.int64)
            p.prefetch(ids)
            blocks, threads, stream, _ = report(device, x.cache.geometry.tags)
            assert blocks == 3, "a block may have a multiprocessor of its own"
            assert threads == 8 * 32
            assert stream == stream_of_last_launch(x) == p._route._side.handle
            assert len(p.take()) == 100_000
        x.check()  # the pipeline's stream is gone, and the array does not wait for it


def check_rows_in_place_are_pulled_by_one_call_of_the_extension() -> None:
    device = gpu()
    memory = fw.storage.Memory(np.zeros(200_000, np.int64))
    with (
        device,
        fw.open(memory, "r+", "i8", device=device, cache="64 KiB") as x,
        fw.Pipeline(x, 1000, sms=3, stream=1) as p,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(fw.Array, "_queue", None)
        ids, own = x.device.empty_array((1000,), np.int64), p._route._side.handle
        fake().fake_hold(1)
        for _ in range(2):
            p.prefetch(ids)
            assert len(p.take()) == 1000

        assert stream_of_last_launch(x) == own
        assert fake().fake_waits(own, 1), "the caller's work has computed the ids"
        assert own in x._attachment._streams
        assert x._attachment.launcher.moved.rows == 2000
        fake().fake_hold(0)


def check_a_pull_becomes_part_of_a_capture() -> None:
    device = gpu()
    memory = fw.storage.Memory(np.zeros(200_000, np.int64))
    with device, fw.open(memory, "r", "i8", device=device, cache="64 KiB") as x:
        stream = x.device.create_stream()
        with fw.Pipeline(x, 1000, stream=stream) as p:
            ids = x.device.empty_array((1000,), np.int64)
            p.prefetch(ids)
            p.take()
            fake().fake_capture_begin(stream.handle)
            p.prefetch(ids)
            p.take()
            assert fake().fake_capture_end() == 1, "the capture broke"
            assert x._attachment.launcher.graphs.count == 1
        fake().fake_destroy_graphs()


def check_a_destination_that_the_driver_refuses_fails_its_batch() -> None:
    assert fake().fake_run_streams() == 0
    with (
        gpu() as device,
        BatchEngine(
            device, Memory(values()), rows=ROWS, row_bytes=WIDTH * 8, batch_rows=64,
            ring=Ring(16384, 4), copies=True, timeout_s=5,
        ) as engine,
        fake_cuda.failing("cuMemcpyAsync", fake_cuda.ILLEGAL_ADDRESS),
        fake_cuda.failing("cuMemcpyBatchAsync", fake_cuda.ILLEGAL_ADDRESS),
    ):  # fmt: skip
        ticket = engine.submit("prefetch", range(64), values().ctypes.data)
        with pytest.raises(DeviceError, match=r"device: .* returned 700; 64 rows"):
            engine.wait("prefetch", ticket)


test_on_the_fake_driver = fake_cuda.test_of(globals())
