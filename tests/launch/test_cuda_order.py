"""The order of loads and stores over streams, by what is asked of a driver without a GPU.

Kernels do nothing there, so these checks look at which stream is made to wait for which; tests/gpu
looks at what is read.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp._waiting import until
from flashwarp.errors import ArgumentError, CaptureError
from support import fake_cuda
from support.cuda_arrays import (
    fake,
    gpu,
    open_array,
    stream_of_last_launch,
    tensor,
    torch_on,
)


def operands(x: fw.Array) -> tuple[Any, Any, int]:
    """Ids and rows in device memory, and a stream of its own; the first lane is not held."""
    index, out = x.device.empty_array((2,), "i8"), x.device.empty_array((2,), "i8")
    kept.append(x.device.create_stream())
    fake().fake_hold(0)
    return index, out, kept[-1].handle


kept: list[Any] = []


def check_load_waits_for_the_store_of_another_stream_until_it_is_over() -> None:
    with open_array() as x:
        index, out, other = operands(x)
        own = x.device.own_stream()
        fake().fake_hold(1)
        x.scatter(index, out, stream=1)
        x.gather(index, out, stream=other)
        assert fake().fake_waits(other, 1) == 1
        x.gather(index, out, stream=other)
        assert fake().fake_waits(other, 1) == 2, "the store is still the last one"
        assert not fake().fake_waits(1, other)

        fake().fake_hold(0)
        x.gather(index, out, stream=other)
        assert x[3] == 0
        assert fake().fake_waits(other, 1) == 2
        assert fake().fake_waits(own, 1) == 0, "it was over"


def check_call_without_a_stream_comes_behind_calls_with_one() -> None:
    with open_array() as x:
        index, out, _other = operands(x)
        own = x.device.own_stream()
        fake().fake_hold(1)
        x.scatter(index, out, stream=1)
        x._attachment.finish = lambda *_: None  # nobody waits for the stream that is held
        x[3]
        assert fake().fake_waits(own, 1) == 1
        x.gather(np.array([3]))
        assert fake().fake_waits(own, 1) == 2
        x[3] = 1
        assert fake().fake_waits(own, 1) == 3
        for number, backwards in enumerate([slice(3, 2, -1), slice(0, None, -1)]):
            x[backwards]
            assert fake().fake_waits(own, 1) == 4 + number, "one row, whatever the step"
        del x._attachment.finish
        fake().fake_hold(0)


def check_store_waits_for_loads_and_loads_for_no_loads() -> None:
    with open_array() as x:
        index, out, other = operands(x)
        fake().fake_hold(1)
        x.gather(index, out, stream=1)
        x.gather(index, out, stream=other)
        assert not fake().fake_waits(other, 1)
        x.scatter(index, out, stream=other)
        assert fake().fake_waits(other, 1) == 1
        fake().fake_hold(0)


def check_calls_on_other_lines_do_not_wait() -> None:
    with open_array(rows=4096) as x:
        row = x.device.empty_array((512,), "i8")
        _, _, _other = operands(x)
        fake().fake_hold(1)
        x.gather(slice(0, 512), row, stream=1)
        x.scatter_async(slice(512, 1024), 1)
        assert not fake().fake_waits(stream_of_last_launch(x), 1)
        x.scatter_async(slice(0, 512), 1)
        assert fake().fake_waits(stream_of_last_launch(x), 1) == 1
        fake().fake_hold(0)


def check_asynchronous_calls_keep_the_order_of_stores() -> None:
    with open_array() as x:
        first = x.scatter_async(slice(0, 2), 1)  # its stream is held
        stores = stream_of_last_launch(x)
        read = x.gather_async(slice(0, 2))
        reads = stream_of_last_launch(x)
        assert reads != stores
        assert fake().fake_waits(reads, stores) == 1
        beside = x.gather_async(slice(0, 2), ordered=False)
        assert fake().fake_waits(stream_of_last_launch(x), stores) == (
            1 if stream_of_last_launch(x) == reads else 0
        )
        fake().fake_hold(0)
        assert [each.exception() for each in (first, read, beside)] == [None] * 3


def check_capture_that_would_wait_is_refused_and_goes_on() -> None:
    with open_array() as x:
        index, out, other = operands(x)
        x.gather(index, out, stream=other)
        fake().fake_hold(1)
        x.scatter(index, out, stream=1)
        fake().fake_capture_begin(other)
        with pytest.raises(CaptureError, match="another stream, outside of the capture"):
            x.gather(index, out, stream=other)
        fake().fake_hold(0)
        assert x.gather(index, out, stream=other) is out, "what was stored is there"
        assert fake().fake_capture_end()
        assert not fake().fake_waits(other, 1)
        x.scatter(index, out, stream=1)
        assert not fake().fake_waits(1, other), "replays are the caller's to order"
        fake().fake_destroy_graphs()


def check_stream_that_does_not_exist_is_refused_before_anything_is_queued() -> None:
    with open_array() as x:
        index, out, _ = operands(x)
        x.gather(index, out, stream=1)
        launches = fake().fake_count(b"cuLaunchKernel")
        torch_on(1)
        ids, rows, own = tensor(x, 2), tensor(x, 2), x.device.own_stream()
        which = index.address, 2, 8, out.address
        for call in (
            lambda: x.gather(index, out, stream=0x7777),
            lambda: x.gather(ids, rows, stream=0x7777),
            lambda: x.prefetch(ids, stream=0x7777),
            lambda: x._attachment.row_calls.queue("gather", which, 0x7777, own),  # of a table
        ):
            with pytest.raises(ArgumentError, match=r"stream 0x7777 does not exist"):
                call()
        assert fake().fake_count(b"cuLaunchKernel") == launches
        x._attachment._streams.discard(0x7777)


def check_flush_waits_for_marks_and_not_for_handles() -> None:
    with open_array() as x:
        index, out, _other = operands(x)
        fake().fake_hold(1)
        x.scatter(index, out, stream=1)
        x._attachment._streams.discard(1)  # as if its handle were gone
        order = x._attachment.launcher.order
        assert not order._done()
        fake().fake_hold(0)
        x.flush()
        assert order._done()


def check_many_streams_leave_few_marks() -> None:
    with open_array() as x:
        index, out, _other = operands(x)
        fake().fake_hold(0)
        x.gather(index, out, stream=1)
        events = fake().fake_count(b"cuEventCreate")
        for _ in range(100):
            kept.append(x.device.create_stream())
            x.gather(index, out, stream=kept[-1].handle)
        assert fake().fake_count(b"cuEventCreate") - events < 40


def check_wait_for_a_late_stream_delays_no_neighbour_on_the_cache() -> None:
    device = gpu()
    memories = [fw.storage.Memory(np.zeros(64, np.int64)) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(device)
        cache = stack.enter_context(fw.Cache("64 KiB", device=device))
        # One that is only read has no marks of its accesses: it waits for the stream itself.
        x, y, z = (
            stack.enter_context(fw.open(memory, mode, "i8", device=device, cache=cache))
            for memory, mode in zip(memories, ("r", "r+", "r+"), strict=True)
        )
        ids, rows = device.empty_array((2,), "i8"), device.empty_array((2,), "i8")
        late, other = (stack.enter_context(device.create_stream()) for _ in range(2))
        stack.callback(fake().fake_hold, 0)
        fake().fake_hold(late.handle)
        x.gather(ids, rows, stream=late)
        waiter = threading.Thread(target=x.wait)
        asked = fake().fake_count(b"cuStreamQuery")
        waiter.start()
        assert until(lambda: fake().fake_count(b"cuStreamQuery") > asked + 2, 20) is None

        y.gather(ids, rows, stream=other)
        y.flush()
        with fw.Pipeline(y, 2) as pipeline:
            pipeline.prefetch([1, 0])
            pipeline.take()
        z.gather_async(ids)
        z.close()

        assert waiter.is_alive(), "nothing above waits for what it waits for"
        fake().fake_hold(0)
        waiter.join(20)
        assert not waiter.is_alive()


test_order = fake_cuda.test_of(globals())
