"""The checkpointer on a GPU, for real through the driver's interface into one without a GPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")

from flashwarp.checkpoint import memory, straight, system
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.device import CudaDevice
from flashwarp.errors import DamagedVersionError, DeviceError, DeviceOutOfMemory
from flashwarp.loading import moving
from flashwarp.transfer import CopyEngine, cuda_copier, pool_of
from support import fake_cuda
from support.fake_cuda import OUT_OF_MEMORY, failing, fake

COUNT = 40_000  # float32: 160 kB
WAIT_S = 30.0


def opened(device: CudaDevice, folder: str, **options: Any) -> Checkpointer:
    options = {"gpu_memory": "640 KiB", "host_memory": "2 MiB", **options}
    config = {"timeout_s": WAIT_S, "transfer_memory": "64 KiB", **options.pop("config", {})}
    return Checkpointer(folder, device, config=config, **options)


def set_to(device: CudaDevice, state: Any, value: float) -> None:
    device.upload(state.address, np.full(COUNT, value, np.float32))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


def round_trip(**options: Any) -> Any:
    device = CudaDevice(0)
    state = device.empty_array((COUNT,), "float32")
    steps = np.zeros(1, np.int64)
    with tempfile.TemporaryDirectory() as folder:
        with opened(device, folder, **options) as checkpointer:
            checkpointer.protect("state", state)
            checkpointer.protect("steps", steps)
            for version in range(30):
                set_to(device, state, version)
                steps[0] = version
                checkpointer.checkpoint(version)
                set_to(device, state, -1)
            for version in reversed(range(30)):
                checkpointer.prefetch_enqueue(version)
            checkpointer.prefetch_start()
            for version in reversed(range(30)):
                checkpointer.restart(version)
                assert (state.copy_to_host() == version).all()
                assert steps[0] == version
            checkpointer.wait()
            stats = checkpointer.stats
            assert stats.staging_bytes <= 64 << 10
        with opened(device, folder, **options) as again:
            fresh = again.restart(7)
            assert (np.asarray(fresh["state"]) == 7).all()
    return stats


def check_copies_are_cut_where_pinned_pieces_meet() -> None:
    memory.PIECE_BYTES = cuda_copier.PIECE_BYTES = memory._PIECE_BYTES = 64 << 10
    memory._PIECES_MAX = 1 << 20
    stats = round_trip()
    assert stats.flushes["gpu"] == 30


def check_the_copy_is_in_the_order_of_the_stream() -> None:
    device = CudaDevice(0)
    state = device.empty_array((COUNT,), "float32")
    with tempfile.TemporaryDirectory() as folder, opened(device, folder) as checkpointer:
        checkpointer.protect("state", state)
        set_to(device, state, 5)
        own = device.default_stream().handle
        streams = [0x10057 + 256 * n for n in range(16)]
        before = sum(fake().fake_waits(own, each) for each in streams)
        fake().fake_hold(own)  # the user's earlier work on the stream has not ended

        saved = checkpointer.checkpoint(0)
        assert not saved.done()
        time.sleep(0.05)
        assert checkpointer.stats.flushes["gpu"] == 0, "nothing reads the version before its copy"
        # Later work on the stream waits for the copy.
        assert sum(fake().fake_waits(own, each) for each in streams) > before
        fake().fake_hold(0)

        assert saved.result(timeout=WAIT_S) == 0
        checkpointer.wait_staged()


def check_a_copy_that_fails_is_raised_and_its_version_is_gone() -> None:
    device = CudaDevice(0)
    state = device.empty_array((COUNT,), "float32")
    with tempfile.TemporaryDirectory() as folder, opened(device, folder) as checkpointer:
        checkpointer.protect("state", state)
        with failing("cuMemcpyAsync", OUT_OF_MEMORY), pytest.raises(DeviceOutOfMemory):
            checkpointer.checkpoint(0)
        assert checkpointer.versions() == []
        checkpointer.checkpoint(0).result(timeout=WAIT_S)


def check_a_signal_before_the_end_of_a_copy_is_handed_over_frees_its_block() -> None:
    device = CudaDevice(0)
    state = device.empty_array((COUNT,), "float32")
    with tempfile.TemporaryDirectory() as folder, opened(device, folder) as checkpointer:
        checkpointer.protect("state", state)
        later = checkpointer._stager._later

        for hands_over in (False, True):

            def interrupted(job: Any, hands_over: bool = hands_over) -> None:
                if hands_over:
                    later(job)
                raise KeyboardInterrupt

            checkpointer._stager._later = interrupted
            with pytest.raises(KeyboardInterrupt):
                checkpointer.checkpoint(0)
            checkpointer._stager._later = later
            checkpointer.wait_staged()
            gpu = checkpointer._core.tiers[0]
            assert not [each for each in gpu.lives if gpu.filling(each)]
        for version in range(8):  # the cache has room for four
            checkpointer.checkpoint(version)
        checkpointer.wait()


def check_a_cache_that_cannot_be_allocated_leaves_nothing() -> None:
    device = CudaDevice(0)
    with tempfile.TemporaryDirectory() as folder:
        CopyEngine(device).close()  # its events stay in the pool
        before = fake().fake_live_allocations()
        with failing("cuMemAlloc", OUT_OF_MEMORY), pytest.raises(DeviceOutOfMemory):
            opened(device, folder)
        kept = len(pool_of(device).shared.free)  # of transfer buffers, for the next one
        assert fake().fake_live_allocations() - kept == before
        opened(device, folder).close()  # the folder's lock was given back


def check_a_host_cache_that_cannot_be_pinned_is_smaller() -> None:
    device = CudaDevice(0)
    memory._PIECE_BYTES = 1 << 20
    memory._PIECES_MAX = 1 << 20
    with tempfile.TemporaryDirectory() as folder:
        with failing("cuMemHostRegister", OUT_OF_MEMORY):
            checkpointer = opened(device, folder)
            until(lambda: checkpointer._core.tiers[1].nbytes == 0)
        state = device.empty_array((COUNT,), "float32")
        checkpointer.protect("state", state)
        for version in range(10):
            checkpointer.checkpoint(version)
        checkpointer.close()
        assert system.Directory(folder, writable=False).versions("default") == list(range(10))


def check_an_array_on_another_gpu_is_refused() -> None:
    device = CudaDevice(0)
    state = device.empty_array((COUNT,), "float32")
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(folder, "cpu", 0, 0) as on_cpu,
        pytest.raises(ValueError, match="on cuda:0, and the checkpointer on cpu"),
    ):
        on_cpu.protect("state", state)


def check_a_restart_from_a_file_goes_straight_to_the_gpu() -> None:
    straight.LEAST_BYTES, moving._CHUNK_BYTES, moving._FIRST_BYTES = 0, 64 << 10, 16 << 10
    device = CudaDevice(0)
    state, steps = device.empty_array((COUNT,), "float32"), np.arange(9)
    with tempfile.TemporaryDirectory() as folder:
        with opened(device, folder) as checkpointer:
            checkpointer.protect("state", state)
            checkpointer.protect("steps", steps)
            set_to(device, state, 3)
            checkpointer.checkpoint(1)
        for o_direct in (None, False, True):
            directory = system.Directory(folder, writable=False, o_direct=o_direct)
            with directory, directory.open("default", 1) as reader:
                assert reader.o_direct is o_direct
            set_to(device, state, -1)
            steps[:] = -1
            with opened(device, folder, gpu_memory=0, host_memory=0) as again:
                again._system.directory._o_direct = o_direct
                again.protect("state", state)
                again.protect("steps", steps)
                again.restart(1)
                assert (state.copy_to_host() == 3).all()
                assert (steps == np.arange(9)).all()
        path = max(Path(folder).rglob("*.data"))
        damaged = bytearray(path.read_bytes())
        damaged[COUNT] ^= 1
        path.write_bytes(damaged)
        with opened(device, folder, gpu_memory=0, host_memory=0) as again:
            again.protect("state", state)
            again.protect("steps", steps)
            with pytest.raises(DamagedVersionError, match="of region 'state'"):
                again.restart(1)


def check_pinned_memory_of_a_closed_checkpointer_is_given_back_behind_it() -> None:
    memory._PIECE_BYTES = 1 << 20
    device = CudaDevice(0)
    state = device.empty_array((COUNT,), "float32")
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = opened(device, folder)
        until(lambda: checkpointer._core.tiers[1].grown)
        pinned = pool_of(device).pinned_bytes["checkpoint caches"]
        assert pinned == 2 << 20
        before = fake().fake_count(b"cuMemHostUnregister")
        fake().fake_hold(device.own_stream())  # the end of a registration would wait for it
        memory._PAUSE_S = 30.0
        checkpointer.protect("state", state)
        checkpointer.close()
        assert pool_of(device).pinned_bytes["checkpoint caches"] == pinned
        assert fake().fake_count(b"cuMemHostUnregister") == before
        fake().fake_hold(0)
        until(lambda: "checkpoint caches" not in pool_of(device).pinned_bytes)
        until(lambda: fake().fake_count(b"cuMemHostUnregister") > before)


def check_a_fault_of_the_gpu_keeps_what_is_on_the_host() -> None:
    device = CudaDevice(0)
    state = device.empty_array((COUNT,), "float32")
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = opened(device, folder)
        checkpointer.protect("state", state)
        checkpointer.checkpoint(0)
        checkpointer.wait()
        fake().fake_fault(fake_cuda.ILLEGAL_ADDRESS)
        with pytest.raises(DeviceError):
            checkpointer.checkpoint(1)
        assert checkpointer.versions() == [0]

        checkpointer.close(timeout_s=5)  # the only version is on storage

        fake().fake_fault(0)
        assert system.Directory(folder, writable=False).versions("default") == [0]


test_cuda = fake_cuda.test_of(globals())
