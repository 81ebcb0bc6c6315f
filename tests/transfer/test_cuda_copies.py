"""Copies on a GPU, made for real through the driver's interface into a driver without a GPU.

The fake queues copies behind words and other streams, so their order is tested, and it counts
calls: a copy in steady state creates nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from typing import NoReturn

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")

from flashwarp import _waiting
from flashwarp.device import CudaDevice
from flashwarp.errors import (
    ArgumentError,
    CaptureError,
    DeviceError,
    DeviceTimeout,
    ForkError,
)
from flashwarp.transfer import (
    CopyEngine,
    Direction,
    Pool,
    TransferClient,
    buffer,
    cuda_copier,
    pool,
    pool_of,
)
from support import fake_cuda
from support.fake_cuda import ILLEGAL_ADDRESS, NOT_SUPPORTED, failing, fake
from support.words import Word

COUNTED = [
    b"cuEventCreate",
    b"cuStreamCreate",
    b"cuMemAlloc",
    b"cuMemHostAlloc",
    b"cuMemFree",
    b"cuMemFreeHost",
]


def content(device: CudaDevice, memory: object, nbytes: int) -> bytes:
    return device.download(memory.address, nbytes)  # type: ignore[attr-defined]


def check_bytes_arrive_in_all_directions() -> None:
    device = CudaDevice(0)
    ring = TransferClient(device, "tests", 4 * 4096, 4096)
    there, beside = device.allocate(4096), device.allocate(4096)
    with CopyEngine(device) as engine:
        first, last = ring.take(timeout_s=10), ring.take(timeout_s=10)
        first.as_numpy()[:] = np.arange(4096) % 251
        up = engine.copy(there, first)
        across = engine.copy(beside, there, after=up)
        down = engine.copy(last, beside, after=across)
        down.wait(10)

        assert [t.direction for t in (up, across, down)] == [
            Direction.TO_DEVICE,
            Direction.WITHIN,
            Direction.TO_HOST,
        ]
        np.testing.assert_array_equal(last.as_numpy(), first.as_numpy())
        assert fake().fake_count(b"cuMemcpyAsync") == 3
    ring.close()


def check_a_copy_in_steady_state_creates_nothing() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(4 << 20), device.allocate_host(4 << 20)
    stream = device.create_stream()
    with CopyEngine(device) as engine:
        for _ in range(3):
            engine.copy(there, here, after=stream).wait(10)
            engine.copy(there, here, 64, after=stream).wait(10)
        before = [fake().fake_count(each) for each in COUNTED]

        for turn in range(200):
            engine.copy(there, here, 64 if turn % 2 else None, after=stream)
            engine.copy(here, there, 64, after=stream).before(stream)
        engine.wait(10)

        assert [fake().fake_count(each) for each in COUNTED] == before


def check_a_copy_waits_for_the_producer_and_the_consumer_for_the_copy() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(64), device.allocate_host(64)
    producer, consumer = device.create_stream(), device.create_stream()
    there_bytes = np.full(64, 3, np.uint8)
    with CopyEngine(device) as engine:
        fake().fake_pend(producer.handle)
        copy = engine.copy(here, there, after=producer)
        copy.before(consumer)
        assert not copy.done()
        assert not here.as_numpy().any()
        # What the producer writes before its end is what is copied.
        ctypes.memmove(there.address, there_bytes.ctypes.data, 64)
        fake().fake_pend(0)
        copy.wait(10)

        assert (here.as_numpy() == 3).all()
        own = engine._copiers[Direction.TO_HOST]._queue.handle  # type: ignore[attr-defined]
        assert fake().fake_waits(own, producer.handle) == 1
        assert fake().fake_waits(consumer.handle, own) == 1


def check_an_idle_producer_costs_no_event() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(64), device.allocate_host(64)
    stream = device.create_stream()
    with CopyEngine(device) as engine:
        before = fake().fake_count(b"cuStreamWaitEvent")
        engine.copy(there, here, after=stream).wait(10)
        assert fake().fake_count(b"cuStreamWaitEvent") == before


def check_a_buffer_in_flight_is_not_lent() -> None:
    device = CudaDevice(0)
    there = device.allocate(4096)
    ring = TransferClient(device, "tests", 4096, 4096)
    word = Word(device)
    with CopyEngine(device) as engine:
        buffer = ring.take(timeout_s=10)
        buffer.as_numpy()[:] = 5
        word.hold(engine, Direction.TO_DEVICE, 1)
        engine.copy(there, buffer)
        buffer.release()
        assert ring.try_take() is None
        with pytest.raises(DeviceTimeout, match="4096 are released and in copies"):
            ring.take(timeout_s=0.02)

        word.store(1)
        ring.take(timeout_s=10).as_numpy()[:] = 0
        assert content(device, there, 4096) == bytes([5]) * 4096
    ring.close()


def pooled(device: CudaDevice, blocks: int) -> Pool:
    """Let a client take buffers at once and leave them, and look often whether they are in use."""
    pool._FLOOR_BYTES, pool._IDLE_S, pool._LOOK_S = 2 * 4096, 0.05, 0.002
    with TransferClient(device, "tests", blocks * 4096, 4096, reserved=True) as client:
        held = [client.take() for _ in range(blocks)]
        for each in held:
            each.release()
    return pool_of(device)


def check_what_is_above_the_floor_is_given_back_when_idle() -> None:
    found = pooled(CudaDevice(0), 9)

    assert _waiting.until(lambda: len(found.shared.free) == 2, 20) is None
    assert found.pinned_bytes == {"transfer buffers": 2 * 4096}
    assert fake().fake_count(b"cuMemHostUnregister") == 7
    assert _waiting.until(lambda: found._keeper is None, 20) is None


def check_nothing_is_given_back_while_the_gpu_works() -> None:
    device = CudaDevice(0)
    fake().fake_hold(device.own_stream())
    found = pooled(device, 9)
    time.sleep(0.2)
    assert len(found.shared.free) == 9
    assert fake().fake_count(b"cuMemHostUnregister") == 0

    fake().fake_hold(0)

    assert _waiting.until(lambda: len(found.shared.free) == 2, 20) is None


def check_buffers_are_pinned_ahead_while_the_gpu_works() -> None:
    device = CudaDevice(0)
    fake().fake_hold(device.own_stream())
    found = pooled(device, 9)
    time.sleep(0.2)  # the thread would give back

    with TransferClient(device, "ahead", 3 << 16, 1 << 16, reserved=True, ahead=True) as client:
        assert _waiting.until(lambda: client.allocated_bytes == 3 << 16, 20) is None
    assert found._pinning is None
    fake().fake_hold(0)


def check_another_thread_follows_one_that_failed() -> None:
    printed: list[object] = []
    threading.excepthook = printed.append
    device = CudaDevice(0)
    idle, failing_once = device.idle, [RuntimeError("no reason")]

    def idle_or_failing() -> bool:
        return idle() if not failing_once else _raise(failing_once.pop())

    device.idle = idle_or_failing  # type: ignore[method-assign]
    found = pooled(device, 9)
    assert _waiting.until(lambda: printed, 20) is None
    assert _waiting.until(lambda: found._keeper is None, 20) is None

    pooled(device, 9)

    assert _waiting.until(lambda: len(found.shared.free) == 2, 20) is None


def _raise(error: Exception) -> NoReturn:
    raise error


def check_a_block_is_given_back_piece_by_piece() -> None:
    buffer.PIECE_BYTES = 4096
    device = CudaDevice(0)
    block = buffer.Block(device, 3 * 4096)
    given: list[int] = []

    block.close(lambda: given.append(fake().fake_count(b"cuMemHostUnregister")))

    assert given == [0, 1, 2]
    assert fake().fake_count(b"cuMemHostUnregister") == 3


def check_a_copy_is_cut_where_pieces_meet() -> None:
    buffer.PIECE_BYTES = cuda_copier.PIECE_BYTES = 1 << 16
    fake().fake_without_batches()
    device = CudaDevice(0)
    there = device.allocate(3 << 16)
    content = np.random.default_rng(0).integers(0, 256, 3 << 16, np.uint8)
    with (
        TransferClient(device, "tests", 3 << 16, 3 << 16) as client,
        CopyEngine(device) as engine,
    ):
        held = client.take()
        held.as_numpy()[:] = content
        up = engine.copy(there, held.address + 100, 2 << 16, after=())
        engine.copy(held.address + 9, there, 2 << 16, after=up).wait(10)

        assert fake().fake_count(b"cuMemcpyAsync") == 2 * 3
        assert (held.as_numpy()[9 : 9 + (2 << 16)] == content[100 : 100 + (2 << 16)]).all()
        assert held.address % (1 << 16) == 0


def check_a_batch_is_one_call() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(64 * 100), device.allocate_host(64 * 100)
    here.as_numpy()[:] = np.arange(6400) % 256
    places = np.random.default_rng(0).permutation(100) * 64
    with CopyEngine(device) as engine:
        engine.copy_pieces(
            [there.address + int(at) for at in places],
            [here.address + int(at) for at in places],
            [64] * 100,
            after=(),
        ).wait(10)
        assert fake().fake_count(b"cuMemcpyBatchAsync") == 1
        assert fake().fake_count(b"cuMemcpyAsync") == 0
    assert content(device, there, 6400) == here.as_numpy().tobytes()


def check_an_older_driver_copies_one_by_one() -> None:
    fake().fake_without_batches()
    batch_is_copied_one_by_one()
    assert fake().fake_count(b"cuMemcpyBatchAsync") == 0


def check_a_refused_batch_is_copied_one_by_one_from_then_on() -> None:
    with failing("cuMemcpyBatchAsync", NOT_SUPPORTED):
        batch_is_copied_one_by_one()
        batch_is_copied_one_by_one()
    assert fake().fake_count(b"cuMemcpyBatchAsync") == 1


def batch_is_copied_one_by_one() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(256), device.allocate_host(256)
    here.as_numpy()[:] = 77
    before = fake().fake_count(b"cuMemcpyAsync")
    with CopyEngine(device) as engine:
        starts = range(0, 256, 64)
        engine.copy_pieces(
            [there.address + at for at in starts],
            [here.address + at for at in starts],
            [64] * 4,
            after=(),
        ).wait(10)
    assert fake().fake_count(b"cuMemcpyAsync") == before + 4
    assert content(device, there, 256) == bytes([77]) * 256


def check_what_would_block_or_lie_is_refused() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(64), device.allocate_host(64)
    with CopyEngine(device) as engine:
        with pytest.raises(ArgumentError, match="is not pinned"):
            engine.copy(there, np.zeros(64, np.uint8))
        with pytest.raises(ArgumentError, match="both in host memory"):
            engine.copy(here, here, after=())
        with pytest.raises(ArgumentError, match="needs after="):
            engine.copy(there.address, here, 64)
        with pytest.raises(ArgumentError, match="go different ways"):
            engine.copy_pieces([there, here], [here, there], [64, 64], after=())
        assert engine.in_flight == 0


def check_a_stream_in_a_capture_is_refused() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(64), device.allocate_host(64)
    stream = device.create_stream()
    with CopyEngine(device) as engine:
        fake().fake_capture_begin(stream.handle)
        with pytest.raises(CaptureError, match="before or after the capture"):
            engine.copy(there, here, after=stream)
        # A copy beside it does not end the capture.
        copy = engine.copy(there, here, after=())
        copy.wait(10)
        assert fake().fake_capture_end() == 1


def check_a_refused_copy_raises_at_once_and_frees_its_event() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(64), device.allocate_host(64)
    ring = TransferClient(device, "tests", 64, 64)
    with CopyEngine(device) as engine:
        engine.copy(there, here, after=()).wait(10)
        events = fake().fake_count(b"cuEventCreate")
        for _ in range(50):
            buffer = ring.take(timeout_s=10)
            with failing("cuMemcpyAsync", 1), pytest.raises(DeviceError, match="cuMemcpyAsync"):
                engine.copy(there, buffer, after=())
            buffer.release()
        engine.copy(there, here, after=()).wait(10)
        assert fake().fake_count(b"cuEventCreate") == events
        engine.wait(10)  # the errors were seen
    ring.close()


def check_a_fault_reaches_every_ticket() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(64), device.allocate_host(64)
    engine, word = CopyEngine(device), Word(device)
    word.hold(engine, Direction.TO_DEVICE, 1)
    first, second = (engine.copy(there, here, after=()) for _ in range(2))
    fake().fake_fault(ILLEGAL_ADDRESS)

    for copy in (first, second):
        with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            copy.wait(10)
    engine.close()


def check_an_error_that_nobody_saw_is_raised_at_close() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(64), device.allocate_host(64)
    engine = CopyEngine(device)
    engine.copy(there, here, after=())
    fake().fake_fault(ILLEGAL_ADDRESS)

    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        engine.close()


def check_close_releases_everything_once() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(64), device.allocate_host(64)
    alive = []
    for _ in range(2):  # the events of the first one are the second one's
        engine = CopyEngine(device)
        for _ in range(40):
            engine.copy(there, here, after=())
        engine.close()
        engine.close()
        alive.append(fake().fake_live_allocations())

    assert alive[0] == alive[1]
    there.close()
    here.close()
    device.close()
    assert fake().fake_live_allocations() == 0
    assert fake().fake_context_depth() == 0


def check_copies_in_flight_are_bounded() -> None:
    cuda_copier._IN_FLIGHT_MAX, os.environ["FLASHWARP_TIMEOUT_S"] = 40, "0.05"
    device = CudaDevice(0)
    there, here = device.allocate(64), device.allocate_host(64)
    word = Word(device)
    with CopyEngine(device) as engine:
        word.hold(engine, Direction.TO_DEVICE, 1)
        while engine.in_flight < cuda_copier._IN_FLIGHT_MAX - 3:
            engine.copy(there, here, after=())
        refused = 0
        for _ in range(5):
            with contextlib.suppress(DeviceTimeout):
                engine.copy(there, here, after=())
                continue
            refused += 1
        assert refused > 0, "copies are queued without a bound"
        word.store(1)
        engine.copy(there, here, after=()).wait(10)


def check_bandwidth_comes_from_the_gpus_clock() -> None:
    device = CudaDevice(0)
    there, here = device.allocate(3 << 20), device.allocate_host(3 << 20)
    with CopyEngine(device) as engine:
        engine.copy(there, here, after=()).wait(10)
        engine.copy(there, here, 100, after=()).wait(10)

        # The fake's events are 1.5 ms apart.
        link = engine.bandwidth[Direction.TO_DEVICE]
        assert link.bytes_per_second == (3 << 20) * 10**9 // 1_500_000
        assert link.transfers == 1


def check_a_forked_child_is_refused() -> None:
    device = CudaDevice(0)
    engine = CopyEngine(device)
    child = os.fork()
    if child == 0:
        try:
            engine.copy(4096, 4096, 1, after=())
        except ForkError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


test_cuda = fake_cuda.test_of(globals())
