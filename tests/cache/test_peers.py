"""A cache that GPUs share; they are `support.fake_cuda`, and their kernels run on the host."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from copy import copy as copy_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp.device import CudaDevice
from flashwarp.errors import ArgumentError, CacheError, DeviceOutOfMemory, ForkError
from flashwarp.policy import POLICIES
from flashwarp.storage import Memory
from support import fake_cuda, host_kernels
from support.fake_cuda import fake

ROWS, WIDTH = 600, 256
LOAD = """
#include "flashwarp/array.cuh"
FW_KERNEL load(fw::array<const int32_t> x, int32_t* out, uint64_t n) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) out[i] = x[i];
}
"""


def content() -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)


def gpus(count: int = 2, *, reach: int = 1) -> list[CudaDevice]:
    """Make GPUs that do not reach each other, do, or do without atomics: 0, 1, 2."""
    fake().fake_devices(count, reach)
    return [host_kernels.gpu(), *(CudaDevice(i) for i in range(1, count))]


def file() -> Path:
    path = Path(tempfile.mkdtemp()) / "a.npy"
    np.save(path, content())
    return path


def on_each(cache: fw.Cache, devices: list[CudaDevice], given: Any, **how: Any) -> list[fw.Array]:
    return [fw.open(given, device=each, cache=cache, **how) for each in devices]


def each_line_is_read_once() -> None:
    devices = gpus(3)
    rng = np.random.default_rng(1)
    for way in ({}, {"controller": fw.nvme.SoftwareController(route="bounce")}):
        with fw.Cache("1 MiB", peers=devices) as cache:
            assert (3 << 20) - (1 << 16) <= cache.capacity <= 3 << 20
            arrays = on_each(cache, devices, file(), **way)
            for _ in range(3):
                for x in arrays:
                    index = rng.integers(0, ROWS, 400)
                    assert (x.gather(index) == content()[index]).all()
            assert sum(x.stats.misses for x in arrays) == 150, "no line is read twice"
            for x in arrays:
                assert (x[:] == content()).all()
            assert "each once" in str(arrays[1].explain())
            arrays[0].close()
            assert (arrays[1].gather(np.arange(50)) == content()[:50]).all()
            with pytest.raises(CacheError, match="arrays use the cache"):
                cache.close()
            for x in arrays[1:]:
                x.close()


def a_prefetch_keeps_no_other_gpu_waiting() -> None:
    """By commands it starts nothing: no launch of its GPU may come that drains the queues."""
    devices, path = gpus(), file()
    with fw.Cache("1 MiB", peers=devices) as cache, contextlib.ExitStack() as opened:
        x, y = (
            opened.enter_context(
                fw.open(
                    path,
                    device=each,
                    cache=cache,
                    controller=fw.nvme.SoftwareController(route="bounce"),
                )
            )
            for each in devices
        )
        y.prefetch(np.arange(0, ROWS, 3))
        assert (x[:] == content()).all()
        assert y.stats.misses == 0


def threads_of_all_gpus_read_more_than_the_caches_hold() -> None:
    devices = gpus(2)
    wrong: list[object] = []
    with fw.Cache("64 KiB", peers=devices, line=512, policy="sieve") as cache:
        arrays = on_each(cache, devices, Memory(content(), writable=False), dtype="i4",
                         shape=(ROWS, WIDTH))  # fmt: skip

        def read(x: fw.Array, seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(40):
                index = rng.integers(0, ROWS, 60)
                if not (x.gather(index) == content()[index]).all():
                    wrong.append(index)

        running = [threading.Thread(target=read, args=(x, k)) for k, x in enumerate(arrays * 2)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        assert not wrong
        for x in arrays:
            x.close()


def kernels_are_compiled_for_it() -> None:
    devices = gpus(2)
    with fw.Cache("1 MiB", peers=devices) as cache:
        arrays = on_each(cache, devices, file())
        assert arrays[0].cache.policy == arrays[1].cache.policy != POLICIES["clock"]
        plain = fw.compile(LOAD, devices[1])
        out = devices[1].empty_array((1000,), np.int32)
        with pytest.raises(ArgumentError, match=r"policy=x\.cache\.policy"):
            plain["load"](arrays[1], out, 1000)
        program = fw.compile(LOAD, devices[1], policy=arrays[1].cache.policy)
        program["load"](arrays[1], out, 1000)
        arrays[1].wait()
        found = np.frombuffer(devices[1].download(out.address, 4000), np.int32)
        assert (found == np.arange(1000)).all()
        out.close()
        for x in arrays:
            x.close()


def a_file_that_was_rewritten_is_another() -> None:
    devices = gpus(2)
    path = file()
    with fw.Cache("1 MiB", peers=devices) as cache:
        with fw.open(path, device=devices[0], cache=cache) as x:
            assert (x[:] == content()).all()
        np.save(path, content() + 7)
        with fw.open(path, device=devices[1], cache=cache) as y:
            assert (y[:] == content() + 7).all()
        # Different files at a time have different lines.
        with (
            fw.open(path, device=devices[0], cache=cache) as x,
            fw.open(file(), device=devices[1], cache=cache) as y,
        ):
            assert (x[:] == content() + 7).all()
            assert (y[:] == content()).all()


def lines_are_gone_when_all_arrays_are() -> None:
    """Also if they close at the same time; another file gets the numbers."""
    devices = gpus(2)
    with fw.Cache("1 MiB", peers=devices) as cache:
        for k in range(20):
            rows = content() + k
            arrays = on_each(cache, devices, Memory(rows, writable=False), dtype="i4",
                             shape=(ROWS, WIDTH))  # fmt: skip
            for x in arrays:
                assert (x.gather(np.arange(0, ROWS, 3)) == rows[::3]).all()
            closing = [threading.Thread(target=x.close) for x in arrays]
            for each in closing:
                each.start()
            for each in closing:
                each.join()
            assert not cache._peers._lines._taken


def without_access_each_has_its_own() -> None:
    for reach in (0, 2):
        devices = gpus(2, reach=reach)
        with fw.Cache("1 MiB", peers=devices) as cache:
            x, y = on_each(cache, devices, file())
            assert x.cache.policy == y.cache.policy == POLICIES["clock"]
            assert (x[:] == content()).all()
            assert (y[:] == content()).all()
            assert "do not reach" in str(y.explain())
            x.close()
            y.close()


def what_cannot_be_is_refused() -> None:
    devices = gpus(2)
    third = host_kernels.gpu()
    for peers, match in (
        ([], "name the GPUs"),
        ("cuda:0", "name the GPUs"),
        (["cpu"], "the CPU device has all memory"),
        ([devices[0], devices[0]], "name each GPU once"),
    ):
        with pytest.raises(CacheError, match=match):
            fw.Cache("1 MiB", peers=peers)
    for more in ({"host_memory": "1 MiB"}, {"device": devices[0]}):
        with pytest.raises(CacheError, match="peers= is for caches"):
            fw.Cache("1 MiB", peers=devices, **more)
    with pytest.raises(CacheError):
        fw.Cache("auto", peers=devices)
    with fw.Cache("1 MiB", peers=devices) as cache:
        with pytest.raises(ArgumentError, match="only read"):
            fw.open(file(), "r+", device=devices[0], cache=cache)
        with pytest.raises(ArgumentError, match="has the cache on cuda:0 and cuda:1"):
            fw.open(file(), device=third, cache=cache)
        with pytest.raises(ArgumentError, match="has the cache on"):
            fw.open(file(), device="cpu", cache=cache)


def memory_is_given_back() -> None:
    devices = gpus(2)

    def use(close: bool) -> None:
        cache = fw.Cache("1 MiB", peers=devices)
        arrays = on_each(cache, devices, file())
        assert (arrays[1][:5] == content()[:5]).all()
        if close:
            for x in arrays:
                x.close()
            cache.close()

    use(True)
    gc.collect()
    before = fake().fake_live_allocations()
    for close in (True, True, False):
        use(close)
        gc.collect()
    assert fake().fake_live_allocations() == before


def copies_children_and_the_end_of_the_process() -> None:
    """A copy has a cache of its own; a child has nothing; what is left open ends with the rest."""
    devices = gpus(2)
    cache = fw.Cache("1 MiB", peers=devices)
    arrays = on_each(cache, devices, file())
    with pickle.loads(pickle.dumps(arrays[1])) as copy:
        assert (copy[:4] == content()[:4]).all()
        assert copy.cache.capacity <= 1 << 20
        assert copy.cache.policy == POLICIES["clock"]
    with pytest.raises(fw.errors.CopyError):
        copy_of(cache)
    child = os.fork()
    if child == 0:
        try:
            arrays[0].gather([1])
        except ForkError:
            cache.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert (arrays[0].gather([1, 2]) == content()[1:3]).all()
    with (
        fake_cuda.failing("cuMemCreate", fake_cuda.OUT_OF_MEMORY),
        pytest.raises(DeviceOutOfMemory, match="over 2 GPUs"),
    ):
        fw.Cache("512 MiB", peers=devices)
    assert "peers=['cuda:0', 'cuda:1']" in repr(cache)
    _left_open.extend([cache, *arrays])


_left_open: list[object] = []


@pytest.mark.parametrize(
    "check",
    [
        each_line_is_read_once,
        a_prefetch_keeps_no_other_gpu_waiting,
        threads_of_all_gpus_read_more_than_the_caches_hold,
        kernels_are_compiled_for_it,
        a_file_that_was_rewritten_is_another,
        lines_are_gone_when_all_arrays_are,
        without_access_each_has_its_own,
        what_cannot_be_is_refused,
        memory_is_given_back,
        copies_children_and_the_end_of_the_process,
    ],
)
def test_peers(check: Callable[[], None], tmp_path: Path) -> None:
    fake_cuda.run(check, fake_cuda.build(tmp_path))
