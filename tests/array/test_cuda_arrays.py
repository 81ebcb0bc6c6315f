"""What arrays make of the CUDA driver: asynchronous calls, order between streams, and faults.

Kernels do nothing in the fake driver, so the tests play their part.
"""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp import _native, endings
from flashwarp.array import in_flight
from flashwarp.device import DeviceArray
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    CaptureError,
    DeviceError,
    DeviceOutOfMemory,
    DeviceTimeout,
    ForkError,
    StorageError,
)
from support import fake_cuda
from support.cuda_arrays import (
    LANE,
    calls_of,
    gpu,
    note,
    open_array,
    own_kernel,
    stream_of_last_launch,
    tensor,
    torch_on,
)
from support.fake_cuda import (
    ILLEGAL_ADDRESS,
    LAUNCH_FAILED,
    OUT_OF_MEMORY,
    failing,
    fake,
)

# Asynchronous calls.


def check_async_read_is_ordered_between_streams() -> None:
    with open_array() as x:
        out = x.device.empty_array((3,), "i8")

        fake().fake_pend(1)
        read = x.gather_async(np.array([1, 2, 3]), out=out, stream=1)
        fake().fake_pend(0)
        assert stream_of_last_launch(x) == LANE
        assert fake().fake_waits(LANE, 1) == 1, "what the stream had queued comes before"
        assert not read.done()
        assert not read.cancel()
        assert read.before(1) is out
        assert fake().fake_waits(1, LANE) == 1
        fake().fake_hold(0)

        assert read.result() is out
        read.before(1)
        assert fake().fake_waits(1, LANE) == 1, "it is done"


def check_rows_for_the_host_are_copied_when_they_have_come() -> None:
    with open_array() as x:
        read = x.gather_async(slice(4, 7))
        (call,) = calls_of(x)
        x.device.upload(call.rows.held.address, np.array([40, 50, 60]))
        with pytest.raises(ArgumentError, match="host memory"):
            read.before(1)
        fake().fake_hold(0)

        assert read.result().tolist() == [40, 50, 60]
        out = np.zeros(3, np.int64)
        assert x.gather_async([1, 2, 3], out=out).result() is out


def check_calls_overtake_each_other() -> None:
    with open_array() as x:
        reads = [x.gather_async([k]) for k in range(8)]

        assert all(isinstance(read.result(), np.ndarray) for read in reads[1:])
        assert not reads[0].done()
        assert x.gather_async([9]).result().shape == (1,)


def check_calls_do_not_wait_for_the_librarys_own_stream() -> None:
    """A kernel of the user's may be running there for long."""
    with open_array() as x:
        fake().fake_hold(x.device.default_stream().handle)

        assert x.gather_async([1, 2]).result().shape == (2,)
        assert x.scatter_async([1, 2], [3, 4]).result() is None
        index = x.device.empty_array((1,), "i8", x._attachment.calls._side)
        assert isinstance(x.gather_async(index, stream=1).result(), DeviceArray)
        fake().fake_hold(0)


def check_values_on_the_gpu_are_waited_for() -> None:
    with open_array() as x:
        values = x.device.empty_array((2,), "i8")
        fake().fake_pend(x.device.default_stream().handle)

        write = x.scatter_async(slice(0, 2), values)

        assert fake().fake_waits(LANE, x.device.default_stream().handle) == 1
        fake().fake_pend(0)
        fake().fake_hold(0)
        assert write.result() is None


def check_strays_are_of_the_call_in_whose_seat_they_are_noted() -> None:
    with open_array() as x:
        index = x.device.empty_array((2,), "i8")
        read = x.gather_async(index, stream=1)
        note(calls_of(x)[0].seat.volume.indices, 70, status=1)
        fake().fake_hold(0)

        with pytest.raises(BoundsError, match=r"index 70 .* length 64.*first of 1.*gather_async"):
            read.result()
        assert isinstance(x.gather_async(index, stream=1).result(), DeviceArray)


def check_next_call_raises_what_a_stream_has_noted() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        index, out = x.device.empty_array((2,), "i8"), x.device.empty_array((2,), "i8")
        indices = x._attachment.launcher.volume.indices

        assert x.gather(index, out=out, stream=1) is out
        x.check()
        note(indices, (1 << 64) - 65, status=1)
        with pytest.raises(BoundsError, match=r"index -65 .* a kernel or call on a stream"):
            x.gather(index, out=out, stream=1)
        x.check()
        note(indices, 64, status=1)
        with pytest.raises(BoundsError, match="index 64 "):
            x.check()


def check_call_on_a_stream_allocates_and_waits_for_nothing() -> None:
    with open_array() as x:
        index, out = x.device.empty_array((2,), "i8"), x.device.empty_array((2,), "i8")
        fake().fake_hold(1)
        for _ in range(2):
            x.gather(index, out=out, stream=1)
            x.scatter(index, out, stream=1)
        counted = b"cuMemAlloc cuMemFree cuEventCreate cuStreamWaitEvent cuCtxPushCurrent".split()
        events = fake().fake_count(b"cuEventRecord")
        before = [fake().fake_count(name) for name in counted]
        launches = fake().fake_count(b"cuLaunchKernel")

        for _ in range(5):
            x.gather(index, out=out, stream=1)
            x.scatter(index, out, stream=1)
            x.prefetch(index, stream=1)

        pushed = 5 * 4 + 5 + 5 * 6  # launches, clearing the count of strays, and the order
        assert fake().fake_count(b"cuEventRecord") == events + 15, "one for each access"
        assert fake().fake_count(b"cuLaunchKernel") == launches + 20, "a check before each scatter"
        assert [fake().fake_count(name) for name in counted[:4]] == before[:4]
        assert fake().fake_count(b"cuCtxPushCurrent") - before[4] <= 3 * pushed
        fake().fake_hold(0)


def check_operands_on_the_host_are_kept_for_a_stream() -> None:
    """Freeing them would wait for all kernels of the GPU."""
    with open_array() as x:
        out = x.device.empty_array((2,), "i8")
        fake().fake_hold(1)

        def use() -> None:
            x.gather([1, 2], out=out, stream=1)
            x.scatter([1, 2], [3, 4], stream=1)
            x.scatter([1, 2], out, stream=1)
            x.prefetch([1, 2], stream=1)

        before = fake().fake_count(b"cuMemFree"), fake().fake_count(b"cuMemAlloc")
        for _ in range(3):
            use()
        freed, made = fake().fake_count(b"cuMemFree"), fake().fake_count(b"cuMemAlloc")
        fake().fake_hold(0)
        assert freed == before[0]
        assert made == before[1] + 3 * 5, "none is lent twice"
        for _ in range(12):
            use()
            x.wait()
        before = fake().fake_count(b"cuMemFree"), fake().fake_count(b"cuMemAlloc")
        for _ in range(20):
            use()
        assert (fake().fake_count(b"cuMemFree"), fake().fake_count(b"cuMemAlloc")) == before
        fake().fake_hold(1)
        use()
        fake().fake_hold(0)
    assert fake().fake_live_allocations() == 0


# Tensors.


def check_async_read_of_tensors_is_launched_by_one_call() -> None:
    with open_array() as x:
        beside = x.device.create_stream()
        torch_on(beside.handle)
        index, out = tensor(x, 2), tensor(x, 2)
        fake().fake_hold(0)
        assert x.gather_async(index, out).result() is out
        fake().fake_hold(stream_of_last_launch(x))
        counted = "cuLaunchKernel", "cuEventRecord", "cuStreamQuery", "cuStreamWaitEvent"
        before = [fake().fake_count(call.encode()) for call in counted]
        strays = x.gather_async(index, out)
        made = [fake().fake_count(call.encode()) for call in counted]
        assert not strays.done()
        note(calls_of(x)[0].seat.volume.indices, 70, status=1)
        fake().fake_hold(0)
        with pytest.raises(BoundsError, match=r"index 70 .*gather_async"):
            strays.result()
        assert [now - then for now, then in zip(made, before, strict=True)] == [1, 3, 0, 1]

        fake().fake_capture_begin(beside.handle)
        with pytest.raises(CaptureError, match=r"use gather\(.., stream=\)"):
            x.gather_async(index, out)
        assert fake().fake_capture_end()


def worker_lives() -> bool:
    return any(thread.name == "flashwarp calls" for thread in threading.enumerate())


def check_async_reads_of_tensors_need_no_thread() -> None:
    with open_array() as x:
        torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        read = x.gather_async(index, out)  # its stream is held
        assert not read.done()
        with pytest.raises(TimeoutError):
            read.result(0.01)
        assert read.before(1) is out
        later = [x.gather_async(index, out) for _ in range(20)]
        fake().fake_hold(0)
        assert read.result(10) is out
        assert all(each.result(10) is out and each.exception() is None for each in later)
        # More than may be in flight: each makes room.
        assert x.scatter_async(index, out).result(10) is None
        many = [x.gather_async(index, out) for _ in range(200)]
        assert many[-1].result(10) is out
        x.flush()
        assert all(each.done() for each in many)
        assert not worker_lives()

        called = threading.Event()
        x.gather_async(index, out).add_done_callback(lambda _: called.set())
        assert called.wait(10)
        end = time.monotonic() + 10
        while worker_lives():
            assert time.monotonic() < end, "nobody needs it"
            time.sleep(1e-3)


def check_calls_are_ended_by_no_line_of_python() -> None:
    """Between its lines another thread could end the call, and this one then the next."""
    with open_array() as x:
        torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        fake().fake_hold(0)
        reads = [x.gather_async(index, out) for _ in range(3)]
        assert reads[1]._condition is reads[1]._condition
        end_calls, queues = x.device.context.calls.end_calls, x._attachment.calls._all
        lines: list[str] = []
        sys.setprofile(lambda frame, event, _: event == "call" and lines.append(str(frame.f_code)))
        left = end_calls(queues)
        sys.setprofile(None)
        assert (left, lines) == (0, [])
        assert [read.result() is out for read in reads] == [True] * 3


def check_next_call_gives_back_what_dropped_reads_keep() -> None:
    with open_array() as x:
        torch_on(1)
        index = tensor(x, 2)
        dropped = weakref.ref(out := tensor(x, 2))
        x.gather_async(index, out)
        del out
        fake().fake_hold(0)
        assert dropped() is not None
        x.check()
        assert dropped() is None


def check_next_call_raises_the_failure_of_a_dropped_future() -> None:
    with open_array() as x:
        torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        for use in (lambda: x.gather_async(index, out), x.check, x.wait, x.flush):
            fake().fake_hold(LANE)
            x.gather_async(index, out)
            (call,) = calls_of(x)
            note(call.seat.volume.indices, 70, status=1)
            del call
            x.check()  # the call is not over
            fake().fake_hold(0)
            with pytest.raises(BoundsError, match=r"index 70 .*gather_async") as caught:
                use()
            assert "dropped" in caught.value.__notes__[-1]
            x.check()


def check_threads_share_the_ending_of_calls() -> None:
    """Some ask, some wait by callbacks, and every future ends once."""
    with open_array() as x:
        torch_on(1)
        fake().fake_hold(0)
        index, out = tensor(x, 2), tensor(x, 2)
        called = []

        def use(how: int) -> int:
            for turn in range(100):
                read = x.gather_async(index, out)
                if (how + turn) % 3 == 0:
                    read.add_done_callback(lambda each: called.append(each.result(0)))
                if (how + turn) % 3 == 1:
                    assert concurrent.futures.wait([read], 10).done == {read}
                assert read.result(10) is out
            return how

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert [*pool.map(use, range(4))] == [0, 1, 2, 3]
        x.flush()
        assert called == [out] * sum((how + k) % 3 == 0 for how in range(4) for k in range(100))


def check_calls_end_with_the_interpreter() -> None:
    """When it ends, no thread can be started."""
    with open_array() as x, pytest.MonkeyPatch.context() as patch:
        torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        failed, read = x.gather_async(index, out), x.gather_async([1, 2])
        note(calls_of(x)[0].seat.volume.indices, 70, status=1)
        assert not worker_lives()
        patch.setattr(threading.Thread, "start", lambda _: pytest.fail("started"))
        patch.setattr(endings, "_ended", True)
        fake().fake_hold(0)
        assert isinstance(x._attachment.close(), BoundsError)
        assert failed.done()
        assert read.result(0).shape == (2,)


def check_future_is_ended_for_whoever_waits_for_it() -> None:
    """Nobody looks at calls for whose end nobody waits, but waits of any kind are seen at once."""
    in_flight._REST_S = 60.0
    with open_array() as x:
        fake().fake_hold(0)
        called = threading.Event()
        x.gather_async([1]).add_done_callback(lambda _: called.set())
        assert called.wait(10)
        reads = [x.gather_async([k]) for k in range(3)]
        assert not concurrent.futures.wait(reads, 10).not_done
        assert len([*concurrent.futures.as_completed([x.gather_async([1])], 10)]) == 1
        polled = x.gather_async([1])
        end = time.monotonic() + 10
        while not polled.done():
            assert time.monotonic() < end
            time.sleep(1e-3)

        async def awaits() -> Any:
            return await x.gather_async([1])

        assert asyncio.run(asyncio.wait_for(awaits(), 10)).shape == (1,)
        # More calls than may be in flight, and one whose future nobody keeps.
        kept = [x.gather_async([1]) for _ in range(100)]
        assert all(read.result(10).shape == (1,) for read in kept)


def check_call_whose_end_cannot_be_marked_is_not_lost() -> None:
    with open_array() as x:
        torch_on(LANE + 0x100)  # the stream of the call, which waits for no other then
        index, out = tensor(x, 2), tensor(x, 2)
        fake().fake_hold(0)
        x.gather_async(index, out).result()
        lane = stream_of_last_launch(x)
        fake().fake_hold(lane)
        with failing("cuEventRecord", OUT_OF_MEMORY):
            read = x.gather_async(index, out, stream=lane)
        (call,) = calls_of(x)
        note(call.seat.volume.indices, 70, status=1)
        with pytest.raises(TimeoutError):
            read.result(0.05)
        assert read.before(1) is out
        assert fake().fake_waits(1, lane) == 1
        fake().fake_hold(0)

        with pytest.raises(BoundsError, match="index 70"):
            read.result()
        assert x.gather_async(index, out).result() is out


def check_out_that_requires_a_gradient_is_refused() -> None:
    with open_array() as x:
        torch = torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        out.requires_grad = True
        torch.is_grad_enabled = lambda: True
        for call in (x.gather, x.gather_async):
            with pytest.raises(ArgumentError, match=r"out requires a gradient.*no_grad"):
                call(index, out)
        torch.is_grad_enabled = lambda: False
        assert x.gather(index, out) is out


def check_stream_of_another_gpu_is_named() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        there = x.device.create_stream().handle
        torch_on(x.device.create_stream().handle)
        kernel, index, out = own_kernel(x), tensor(x, 2), tensor(x, 2)
        fake().fake_foreign(there)
        refused = rf"stream {there:#x} is of cuda:1, and the launch is on cuda:0"
        for launch in (
            lambda: x.gather(index, out, stream=there),
            lambda: x.prefetch(index, stream=there),
            lambda: x.prefetch(slice(0, 4), stream=there),
            lambda: x.scatter(index, out, stream=there),
            lambda: kernel(x, index, out, stream=there),
        ):
            with pytest.raises(ArgumentError, match=refused):
                launch()
        assert x.gather(index, out) is out
        fake().fake_foreign(0)
        assert fake().fake_context_depth() == 0
        with pytest.raises(ArgumentError, match="stream 0x9999 does not exist"):
            x.gather(index, out, stream=0x9999)


def check_values_of_another_library_are_waited_for() -> None:
    with open_array() as x:
        torch_on(1)
        index, values = x.device.empty_array((2,), "i8"), tensor(x, 2)
        fake().fake_pend(1)
        threading.Timer(0.05, lambda: fake().fake_pend(0)).start()

        x.scatter(index, values)

        assert fake().fake_waits(x.device.default_stream().handle, 1) == 1


def check_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    with open_array() as x:
        torch_on(1)
        index = tensor(x, 2)
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with x.cache.turn:
                held.set()
                done.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()
        if not child:
            signal.alarm(10)
            try:
                for call in (x.gather, x.prefetch):
                    with pytest.raises(ForkError):
                        call(index)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        done.set()
        holder.join()


def check_close_waits_for_a_call_whose_wait_was_interrupted() -> None:
    def launches() -> int:
        return int(fake().fake_count(b"cuLaunchKernel"))

    def interrupt(before: int) -> None:
        while launches() == before:  # else there is nothing to wait for
            time.sleep(0.001)
        time.sleep(0.05)
        _thread.interrupt_main()

    def release(released: threading.Event) -> None:
        released.set()
        fake().fake_hold(0)

    with open_array() as x:
        torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        for interrupted, wait in (
            (lambda: x.gather(index, out=out), x.wait),
            (lambda: x.scatter(index, out), x.flush),
            (lambda: x.prefetch(index), x.close),
        ):
            fake().fake_hold(1)
            threading.Thread(target=interrupt, args=[launches()]).start()
            with pytest.raises(KeyboardInterrupt):
                interrupted()
            released = threading.Event()
            threading.Timer(0.2, release, [released]).start()
            wait()
            assert released.is_set()


def check_threads_that_order_streams_do_not_mix_their_events() -> None:
    with open_array() as x:
        torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        own, side = x.device.default_stream().handle, x._attachment.calls._side.handle
        beside = x.device.create_stream()
        x.gather(index, out=out, stream=1)
        fake().fake_hold(own)
        fake().fake_pend(side)
        fake().fake_record_slowly(100_000)
        calling = threading.Thread(target=lambda: x.gather(index, out=out, stream=1))
        calling.start()
        time.sleep(0.03)

        x.device.order(side, beside)
        calling.join()
        fake().fake_record_slowly(0)
        fake().fake_pend(0)
        fake().fake_hold(0)

        assert fake().fake_waits(beside.handle, side) == 1
        assert fake().fake_waits(1, own) == 1


# Errors and waits.


def check_failure_is_raised_by_the_call_that_waits_for_it() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        index, out = x.device.empty_array((2,), "i8"), x.device.empty_array((2,), "i8")
        x.gather(index, out=out, stream=1)
        fake().fake_hold(x.device.default_stream().handle)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            read = pool.submit(x.gather, np.array([1, 2]))
            time.sleep(0.05)
            note(x._attachment.launcher.volume.commands, 0, status=0x281, opcode=2)
            threading.Timer(0.1, lambda: fake().fake_hold(0)).start()

            x.check()
            assert x.gather_async([1]).exception() is None
            with pytest.raises(StorageError, match="gather failed at byte 0"):
                read.result()


def check_stream_whose_wait_failed_is_waited_for_again() -> None:
    with open_array() as x:
        index, out = x.device.empty_array((2,), "i8"), x.device.empty_array((2,), "i8")
        x.gather(index, out=out, stream=OTHER)
        with capturing(OTHER):
            for refused in (x.wait, x.flush, x.close):
                with pytest.raises(CaptureError):
                    refused()
        fake().fake_hold(OTHER)
        threading.Timer(0.1, lambda: fake().fake_hold(0)).start()
        began = time.monotonic()
        x.flush()
        assert time.monotonic() - began > 0.05


def check_captured_stream_does_not_wait_for_a_future() -> None:
    with open_array() as x:
        out = x.device.empty_array((1,), "i8")
        read = x.gather_async([1], out=out)
        with capturing(OTHER), pytest.raises(CaptureError, match="before the capture"):
            read.before(OTHER)
        fake().fake_hold(0)
        read.result()
        with capturing(OTHER):
            assert read.before(OTHER) is out, "it is done"


def check_call_that_was_launched_in_part_keeps_its_seat() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        index, values = x.device.empty_array((2,), "i8"), x.device.empty_array((2,), "i8")
        x.scatter_async(index, values).result()
        made = x._attachment.calls

        def break_off(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_native, "launch_rows", break_off)
            with pytest.raises(KeyboardInterrupt):
                x.scatter_async(index, values)
        seats = [seat for queue in made._queues for seat in queue.seats]
        ((spoiled, _),) = made._spoiled
        note(spoiled.volume.indices, 70, status=1)

        assert spoiled not in seats
        for _ in range(9):
            assert x.scatter_async(index, values).exception() is None


# Captures.

OTHER = 1  # a stream of the caller's


@contextlib.contextmanager
def capturing(stream: int) -> Iterator[None]:
    """Capture a stream; the capture must be valid at its end."""
    fake().fake_capture_begin(stream)
    yield
    assert fake().fake_capture_end(), "the capture broke"


def check_calls_are_captured() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        index, out = x.device.empty_array((2,), "i8"), x.device.empty_array((2,), "i8")
        with capturing(OTHER):
            x.gather(index, out=out, stream=OTHER)
            x.scatter(index, out, stream=OTHER)
            x.prefetch(index, stream=OTHER)
        x.flush()

        assert fake().fake_host_nodes() == 3, "each wakes the controller"
        time.sleep(0.2)  # until its threads sleep
        wakes = x.service.stats["wakes"]
        fake().fake_replay()
        assert x.service.stats["wakes"] > wakes
        fake().fake_destroy_graphs()


def check_array_does_not_close_before_its_graphs() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        index, out = x.device.empty_array((2,), "i8"), x.device.empty_array((2,), "i8")
        with capturing(OTHER):
            x.gather(index, out=out, stream=OTHER)
            x.gather(index, out=out, stream=OTHER)

        with pytest.raises(CaptureError, match=r"1 CUDA graphs .* delete them first"):
            x.close()
        with pytest.raises(CaptureError):
            x.device.close()
        assert x.gather(np.array([1])).shape == (1,), "it is open still"
        fake().fake_destroy_graphs()
        x.close()
        assert x.closed


def check_array_that_a_graph_uses_is_left_to_the_end_of_the_process() -> None:
    device = gpu()
    memory = fw.storage.Memory(np.zeros(64, np.int64))
    x = fw.open(memory, "r+", "i8", device=device, cache="64 KiB")
    index, out = device.empty_array((2,), "i8"), device.empty_array((2,), "i8")
    with capturing(OTHER):
        x.gather(index, out=out, stream=OTHER)
    lost = weakref.ref(x)

    with pytest.warns(ResourceWarning):
        del x
    gc.collect()

    assert lost() is None
    assert fake().fake_count(b"cuMemFreeHost") == 0, "a replay may still use it"


def check_what_cannot_be_captured_says_so_and_leaves_the_capture() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        index, out = x.device.empty_array((2,), "i8"), x.device.empty_array((2,), "i8")
        with capturing(OTHER):
            for refused in (
                lambda: x.gather(np.array([1, 2]), out=out, stream=OTHER),
                lambda: x.scatter(index, np.zeros(2, "i8"), stream=OTHER),
                lambda: x.gather_async(index, stream=OTHER),
                lambda: x.wait(OTHER),
                lambda: x.device.wait(OTHER),
            ):
                with pytest.raises(CaptureError, match=r"captur|CUDA graph"):
                    refused()
            x.gather(index, out=out, stream=OTHER)
        fake().fake_destroy_graphs()


def check_own_stream_is_waited_for_before_a_captured_call() -> None:
    """A captured stream cannot wait for work that is not part of the graph."""
    with open_array() as x:
        index, out = x.device.empty_array((2,), "i8"), x.device.empty_array((2,), "i8")
        fake().fake_hold(x.device.default_stream().handle)
        threading.Timer(0.1, lambda: fake().fake_hold(0)).start()
        with capturing(OTHER):
            began = time.monotonic()
            x.gather(index, out=out, stream=OTHER)
            assert time.monotonic() - began > 0.05
        assert fake().fake_waits(OTHER, x.device.default_stream().handle) == 0
        fake().fake_destroy_graphs()


def check_driver_calls_are_relaxed_during_a_capture() -> None:
    """Allocating or asking for an event would break the capture of another stream."""
    device = gpu()
    with device.context:
        assert fake().fake_capture_mode() == 2
        with device.context:
            assert fake().fake_capture_mode() == 2
    assert fake().fake_capture_mode() == 0


def check_failure_is_of_the_call_in_whose_lane_it_is_noted() -> None:
    with open_array() as x:
        read, other = x.gather_async([1]), x.gather_async([2])
        note(calls_of(x)[0].seat.volume.commands, 0, status=0x281, opcode=2)

        fake().fake_hold(0)

        failure = read.exception()
        assert isinstance(failure, StorageError)
        assert "gather_async failed at byte 0" in str(failure)
        assert other.exception() is None
        x.flush()
        assert x.gather_async([1]).exception() is None, "the lane is clean again"


def check_fault_of_a_kernel_ends_all_calls() -> None:
    with open_array() as x:
        reads = [x.gather_async([k]) for k in range(3)]

        with failing("cuEventQuery", ILLEGAL_ADDRESS):
            failures = [read.exception() for read in reads[:1]]
        fake().fake_hold(0)

        assert isinstance(failures[0], DeviceError)
        assert "ILLEGAL_ADDRESS" in str(failures[0])
        concurrent.futures.wait(reads)
        for read in reads:
            read.exception()


def check_launch_that_fails_is_raised_at_the_call() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        with failing("cuLaunchKernel", OUT_OF_MEMORY), pytest.raises(DeviceOutOfMemory):
            x.gather_async([1])

        assert x.gather_async([1]).result().shape == (1,)


def check_close_and_limit_wait_for_calls() -> None:
    os.environ["FLASHWARP_ASYNC_CALLS"] = "1"
    with open_array() as x:
        first = x.gather_async([1])
        threading.Timer(0.05, lambda: fake().fake_hold(0)).start()

        second = x.gather_async([2])

        assert first.done()
        fake().fake_hold(LANE + 256)
        threading.Timer(0.05, lambda: fake().fake_hold(0)).start()
    assert second.done()
    assert fake().fake_live_allocations() == 0
    assert fake().fake_count(b"cuStreamDestroy") == fake().fake_count(b"cuStreamCreate")


def check_close_beside_a_stuck_kernel_fails_its_calls() -> None:
    in_flight.time_limit_s = lambda: 0.05
    with open_array() as x:
        read = x.gather_async([1])
        with pytest.raises(DeviceTimeout, match="asynchronous calls"):
            x.close()
        assert isinstance(read.exception(), DeviceTimeout)


# Kernels that the driver stops.


def check_index_that_stopped_a_kernel_is_told() -> None:
    """As a kernel built for debugging leaves it: the record, then a trap."""
    with open_array() as x:
        fake().fake_hold(0)
        note(x._attachment.launcher.volume.indices, 64)
        fake().fake_fault(LAUNCH_FAILED)

        told = (
            r"index 64,.* in memory of shape \(64,\), 64 elements, where it was stopped.*LAUNCH_F"
        )
        with pytest.raises(IndexError, match=told) as caught:
            x.wait()

        assert isinstance(caught.value, BoundsError)
        assert isinstance(caught.value.__cause__, DeviceError)
        assert any("since its last flush is lost" in note for note in caught.value.__notes__)
        with pytest.raises(IndexError, match="index 64"):
            x.gather(np.array([1]))
        x.close()  # it has been told
        fake().fake_fault(0)


def check_fault_without_a_record_stays_what_it_is() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        fake().fake_fault(LAUNCH_FAILED)

        with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
            x.wait()
        x.close()
        fake().fake_fault(0)


def check_fault_that_nobody_was_told_of_is_raised_by_close() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        note(x._attachment.launcher.volume.indices, (1 << 64) - 3)
        fake().fake_fault(LAUNCH_FAILED)

        with pytest.raises(BoundsError, match="index -3,"):
            x.close()
        x.close()
        fake().fake_fault(0)


def check_calls_in_flight_end_with_a_fault() -> None:
    with open_array() as x:
        read = x.gather_async([1])
        fake().fake_fault(LAUNCH_FAILED)

        assert isinstance(read.exception(), DeviceError)
        with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
            x.gather_async([1])
        fake().fake_fault(0)
        fake().fake_hold(0)


test_cuda = fake_cuda.test_of(globals())
