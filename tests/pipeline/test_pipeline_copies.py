"""Rows in place on a GPU, moved by copy engines: the fake driver really copies them, in the order
of streams. Kernels do nothing there, so what warps pull is not looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp.device import CudaDevice, DeviceArray, OwnedStream
from flashwarp.errors import ArgumentError, CaptureError
from flashwarp.launch import copying
from flashwarp.storage import routes
from support import fake_cuda
from support.cuda_arrays import gpu
from support.fake_cuda import fake

ROWS, WIDTH = 40, 8192  # rows of 64 KiB


def values(rows: int = ROWS) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(rows * WIDTH, dtype=np.int64).reshape(rows, WIDTH)


def memory(data: np.ndarray[Any, Any], mode: str, device: CudaDevice) -> fw.Array:
    storage = fw.storage.Memory(data)
    return fw.open(storage, mode, data.dtype, data.shape, device=device, cache="64 KiB")


@contextlib.contextmanager
def opened(mode: str = "r", **options: Any) -> Iterator[tuple[fw.Array, fw.Pipeline, OwnedStream]]:
    """Rows in memory on such a GPU, and a pipeline over them for one stream."""
    assert fake().fake_run_streams() == 0
    device = gpu()
    with device, memory(values(), mode, device) as x:
        stream = device.create_stream()
        with fw.Pipeline(x, 20, stream=stream, **options) as p:
            yield x, p, stream


def content(x: fw.Array, rows: DeviceArray, stream: OwnedStream) -> np.ndarray[Any, Any]:
    x.device.wait(stream, 10)
    return np.asarray(rows)


def queued() -> list[str]:
    """Names of what was launched, in order."""
    told = fake().fake_queued
    told.restype = ctypes.c_char_p
    return [line.split()[0] for line in told().decode().splitlines()]


def device_ids(x: fw.Array, ids: list[int]) -> DeviceArray:
    array = x.device.empty_array((len(ids),), np.int64)
    x.device.upload(array.address, np.array(ids, np.int64))
    return array


def check_sequences_and_lists_of_long_rows_are_copied() -> None:
    with opened(depth=4) as (x, p, stream):
        lists: list[Any] = [slice(3, 9), range(9, 3, -2), [5, 6, 7, -1, 0, 1, 5], []]
        for ids in lists:
            assert p.prefetch(ids).route == "copies"
        for ids in lists:
            want = values()[np.r_[ids] if isinstance(ids, slice) else np.array(ids, int)]
            np.testing.assert_array_equal(content(x, p.take(), stream), want)
        assert p.stats.moved["copies, prefetch"].rows == 6 + 3 + 7
        assert "copy engines" in p.explain().reason


def check_neighbours_are_one_copy() -> None:
    with opened() as (x, p, stream):
        before = [fake().fake_count(b"cuMemcpyAsync"), fake().fake_count(b"cuMemcpyBatchAsync")]
        p.prefetch(list(range(2, 20)))
        content(x, p.take(), stream)
        after = [fake().fake_count(b"cuMemcpyAsync"), fake().fake_count(b"cuMemcpyBatchAsync")]
        assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0]


def check_ids_on_the_gpu_are_pulled_by_warps() -> None:
    with opened() as (x, p, _):
        ids = device_ids(x, [1, 2])
        fake().fake_forget_queued()
        assert p.prefetch(ids).route == "pull"
        assert any("stream" in each for each in queued())


def check_a_buffer_in_use_is_not_overwritten() -> None:
    with opened(depth=2) as (x, p, stream):
        p.prefetch(range(1))
        first = p.take()
        np.testing.assert_array_equal(content(x, first, stream), values()[:1])
        fake().fake_pend(stream.handle)  # a kernel that still reads the buffer
        for k in range(1, 4):
            p.prefetch(range(k, k + 1))
            last = p.take()
        assert last.address == first.address
        assert not x.device.done(stream)
        held = np.frombuffer(_bytes_at(first.address, 8 * WIDTH), np.int64)
        np.testing.assert_array_equal(held, values()[0])
        fake().fake_pend(0)
        np.testing.assert_array_equal(content(x, last, stream), values()[3:4])


def _bytes_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def check_the_host_waits_for_nothing_and_allocates_nothing() -> None:
    counted = [b"cuEventCreate", b"cuMemAlloc", b"cuMemHostAlloc", b"cuStreamCreate", b"cuMemFree"]
    with opened(depth=2) as (x, p, stream):
        ids = device_ids(x, [1, 2])
        for _ in range(4):
            for each in (range(9), ids):
                p.prefetch(each)
                p.take()
        before = [fake().fake_count(each) for each in counted]
        fake().fake_pend(stream.handle)  # whatever waits for the stream would never end
        for _ in range(50):
            for each in (range(9), ids):
                p.prefetch(each)
                p.take()
        assert [fake().fake_count(each) for each in counted] == before
        fake().fake_pend(0)


def check_what_is_written_is_in_the_storage_and_no_old_line_stays() -> None:
    with opened("r+") as (x, p, stream):
        rows = x.device.empty_array((3, WIDTH), np.int64)
        x.device.upload(rows.address, values()[:3] - 7)
        fake().fake_forget_queued()
        ticket = p.write_back([30, 2, 11], rows)
        assert ticket.route == "copies"
        p.prefetch([2, 3])
        read = content(x, p.take(), stream)
        np.testing.assert_array_equal(read, [values()[1] - 7, values()[3]])
        flush, invalidate = "_Z14fw_flush_linesy", "_Z19fw_invalidate_linesy"
        assert queued()[:3] == [flush, invalidate, flush]
        p.reclaim()
        p.flush()
        stored = x._attachment.storage.array.reshape(ROWS, WIDTH)
        np.testing.assert_array_equal(stored[[30, 2, 11]], values()[:3] - 7)


def check_rows_that_are_no_device_memory() -> None:
    with opened("r+") as (x, p, _):
        wrong = x.device.empty_array((3, WIDTH), np.float64)
        with pytest.raises(ArgumentError, match="float64"):
            p.write_back([1, 2, 3], wrong)
        with pytest.raises(ArgumentError, match="shape"):
            p.write_back([1, 2], x.device.empty_array((3, WIDTH), np.int64))
        with pytest.raises(ArgumentError, match="row 3"):
            p.write_back([1, 3, 3], wrong)


def check_a_graph_has_what_warps_pull() -> None:
    with opened("r+") as (x, p, stream):
        ids = device_ids(x, [1, 2])
        p.prefetch(ids)
        rows = p.take()
        x.device.wait(stream)

        fake().fake_capture_begin(stream.handle)
        p.prefetch(ids)
        p.take()
        p.write_back(ids, rows)
        p.reclaim()
        assert fake().fake_capture_end() == 1

        p.prefetch(ids)
        fake().fake_capture_begin(stream.handle)
        with pytest.raises(CaptureError, match="same capture"):
            p.take()
        with pytest.raises(CaptureError, match="ids as an array on the GPU"):
            p.prefetch(range(3))
        assert fake().fake_capture_end() == 1
        p.take()
        fake().fake_destroy_graphs()


def check_buffers_are_not_allocated_in_a_capture() -> None:
    with opened() as (x, p, stream):
        ids = device_ids(x, [1, 2])
        fake().fake_capture_begin(stream.handle)
        with pytest.raises(CaptureError, match="before"):
            p.prefetch(ids)
        assert fake().fake_capture_end() == 1


def check_a_file_that_is_registered_in_pieces() -> None:
    routes.PIECE_BYTES = copying.PIECE_BYTES = 1 << 18
    fake().fake_registers(1, 1, ctypes.c_size_t(1 << 18))
    path = Path(os.environ["FLASHWARP_CACHE_DIR"]).parent / f"rows{os.getpid()}.npy"
    np.save(path, values())
    device = gpu()
    with device, fw.open(path, device=device, cache="64 KiB", immutable=True) as x:
        stream = device.create_stream()
        with fw.Pipeline(x, 40, stream=stream) as p:
            assert p.prefetch(slice(0, 40)).route == "copies", p.explain()
            np.testing.assert_array_equal(content(x, p.take(), stream), values())


def check_a_batch_arrives_behind_the_stores_before_it() -> None:
    with opened("r+") as (_, p, _):
        p.prefetch(slice(0, 3))
        p.write_back(slice(0, 3), p.take())
        fake().fake_pend(p._route._out.handle)  # stores from a buffer of the turn

        ticket = p.prefetch(slice(3, 6))
        done = ticket.done()
        fake().fake_pend(0)

        assert not done
        ticket.wait(20)


def check_a_write_does_not_overtake_the_read_of_its_rows() -> None:
    with opened("r+") as (_, p, _):
        p.prefetch(slice(0, 3))
        rows = p.take()
        fake().fake_pend(p._route._side.handle)  # reads are under way

        reading = p.prefetch(slice(3, 6))
        writes = [p.write_back(slice(at, at + 3), rows) for at in (8, 5, 12)]
        done = [each.done() for each in (reading, *writes)]
        fake().fake_pend(0)

        assert done == [False, True, False, False]
        for each in (reading, *writes):
            each.wait(20)


test_on_the_fake_driver = fake_cuda.test_of(globals())
