"""Asynchronous calls: what futures promise, on the CPU device.

Reads are held in the storage for a while where a test needs calls in flight; what overlaps is then
counted, not timed. The same calls on a GPU are in `tests/gpu/test_futures.py`, and how they call
its driver is in `test_cuda_arrays.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.array import calls
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    DeviceTimeout,
    DtypeError,
    ForkError,
    IndexDtypeError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.storage import File
from flashwarp.testing import Faulty

ROWS = 4096  # of 8 bytes; 64 to a line
HELD = "read delay=200000us"  # long enough for everything that is counted meanwhile


@pytest.fixture
def storage(tmp_path: Path) -> Faulty:
    """ROWS int64 that count from 0, in a storage that can be made to hold and to fail."""
    np.arange(ROWS).tofile(tmp_path / "f")
    return Faulty(File(tmp_path / "f", writable=True))


def open_array(storage: Faulty) -> fw.Array:
    return fw.open(storage, "r+", "i8", device="cpu", line=512, cache="16 KiB")


@pytest.fixture
def x(storage: Faulty) -> Iterator[fw.Array]:
    with open_array(storage) as opened:
        yield opened


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


def fail_at(storage: Faulty, row: int) -> None:
    """Let reads of the line of a row fail."""
    begin = row // 64 * 512
    storage.inject(f"read eio bytes={begin}-{begin + 512}")


# Order.


def test_unordered_calls_are_waited_for_by_nobody(x: fw.Array, storage: Faulty) -> None:
    storage.inject(HELD)
    late = x.scatter_async([1], -1, ordered=False)

    assert x[ROWS - 1] == ROWS - 1, "it may have run before or behind the store"
    late.result()
    assert x[1] == -1


def test_reads_do_not_wait_for_asynchronous_reads(x: fw.Array, storage: Faulty) -> None:
    assert x[0] == 0  # in the cache from now on
    storage.inject("read delay=2000000us")
    reads = [x.gather_async([64 * line]) for line in range(8, 12)]

    assert x[0] == 0
    assert not reads[-1].done()
    for line, read in enumerate(reads, 8):
        assert read.result()[0] == 64 * line


def test_callback_that_calls_the_array_does_not_wait_for_itself(
    x: fw.Array, storage: Faulty
) -> None:
    seen: list[int] = []
    storage.inject(HELD)
    first = x.scatter_async([1], -1)
    first.add_done_callback(lambda _: seen.append(int(x[1])))
    x.scatter_async([1], -2).result()
    until(lambda: len(seen) == 1)

    assert seen[0] in (-1, -2), "the main thread's second store may be waited for"


# What is read and stored.


# At the same time.


def test_reads_in_flight_overlap(x: fw.Array, storage: Faulty) -> None:
    storage.inject(HELD)

    reads = [x.gather_async(np.arange(64 * k, 64 * k + 3)) for k in range(8)]

    until(lambda: storage.operations()["read"] == 8 or reads[0].done())
    assert storage.operations()["read"] == 8
    assert not reads[0].done(), "all were asked for before the first had come"
    assert [int(read.result()[0]) for read in reads] == [64 * k for k in range(8)]


def test_lines_fetched_ahead_leave_room_in_the_cache(x: fw.Array, storage: Faulty) -> None:
    """The cache has 31 lines; a quarter of them may be asked for ahead of need."""
    storage.inject(HELD)

    reads = [x.gather_async(np.arange(64 * k, 64 * k + 3)) for k in range(20)]

    until(reads[0].done)
    assert storage.operations()["read"] < 20
    assert [int(read.result()[0]) for read in reads] == [64 * k for k in range(20)]
    assert storage.operations()["read"] == 20, "no line was fetched twice"


def test_caller_computes_meanwhile(x: fw.Array, storage: Faulty) -> None:
    storage.inject(HELD)
    turns = 0

    read = x.gather_async(slice(0, 10))
    while not read.done():
        turns += 1

    assert turns > 1000


def test_sync_call_of_another_row_is_not_held_up_for_long(x: fw.Array, storage: Faulty) -> None:
    x.gather([1000])
    storage.inject("read delay=2000000us n=1")

    read = x.gather_async([0])

    assert not read.done()
    assert x.gather_async([1000]).result() == [1000]
    assert read.done(), "on the CPU device, calls run one after the other"


def test_limit_bounds_the_calls_in_flight(
    x: fw.Array, storage: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(x._attachment.calls, "_most", 2)
    storage.inject(HELD)

    first, second = x.gather_async([0]), x.gather_async([64])
    assert not first.done()
    third = x.gather_async([128])

    assert first.done(), "the third waited for it"
    assert not third.done()
    assert [int(f.result()[0]) for f in (first, second, third)] == [0, 64, 128]


def test_wait_for_room_has_a_limit(
    x: fw.Array, storage: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(x._attachment.calls, "_most", 1)
    monkeypatch.setattr(calls, "time_limit_s", lambda: 0.02)
    storage.inject(HELD)
    first = x.gather_async([0])

    with pytest.raises(DeviceTimeout, match=r"1 asynchronous calls.*FLASHWARP_ASYNC_CALLS.*0\.02"):
        x.gather_async([64])

    assert first.result() == [0]


# As futures of the standard library.


def test_standard_functions_take_them(x: fw.Array, storage: Faulty) -> None:
    storage.inject("read delay=20000us")
    reads = [x.gather_async([64 * k]) for k in range(5)]
    seen: list[int] = []
    reads[3].add_done_callback(lambda read: seen.append(int(read.result()[0])))

    done, rest = concurrent.futures.wait(reads, 30, concurrent.futures.FIRST_COMPLETED)
    assert reads[0] in done
    assert rest <= set(reads)
    assert {int(f.result()[0]) for f in concurrent.futures.as_completed(reads, 30)} == {
        64 * k for k in range(5)
    }

    until(lambda: seen == [192])
    assert isinstance(reads[0], concurrent.futures.Future)
    assert reads[0].exception() is None


def test_result_has_a_timeout(x: fw.Array, storage: Faulty) -> None:
    storage.inject(HELD)
    read = x.gather_async([0])

    with pytest.raises(TimeoutError):
        read.result(0.01)
    with pytest.raises(TimeoutError):
        read.exception(timeout=0)

    assert read.running() or not read.done()
    assert read.result(30) == [0]


def test_call_that_waits_can_be_cancelled_and_never_runs(x: fw.Array, storage: Faulty) -> None:
    first = x.gather_async([0])
    first.result()
    storage.inject("write delay=200000us")
    x[0:64] = 1
    x.flush()
    storage.inject(HELD)
    running = x.gather_async([640])
    until(running.running)
    waiting = x.scatter_async([3000], [1])

    assert waiting.cancel()
    assert not running.cancel()

    assert waiting.cancelled()
    assert running.result() == [640]
    assert not running.cancel(), "it has ended"
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result()
    assert x.gather([3000]) == [3000]


def test_callbacks_may_call_wait_and_raise(
    x: fw.Array, storage: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    storage.inject("read delay=20000us")
    seen: list[Any] = []

    def call_again(read: fw.Future[Any]) -> None:
        seen.append(x.gather_async([200]).result()[0])
        seen.append(later.result()[0])
        x.flush()

    def fail(_: fw.Future[Any]) -> None:
        raise ValueError("of a callback")

    def leave(_: fw.Future[Any]) -> None:
        raise SystemExit

    first = x.gather_async([0])
    first.add_done_callback(fail)
    first.add_done_callback(call_again)
    later = x.gather_async([64])
    left = x.gather_async([128])
    left.add_done_callback(leave)
    last = x.gather_async([192])

    assert last.result() == [192]
    until(lambda: seen == [200, 64])
    assert "of a callback" in caplog.text
    assert "more than an exception" in caplog.text


def test_callback_may_close_the_array(storage: Faulty) -> None:
    x = open_array(storage)
    storage.inject("read delay=20000us")
    first = x.gather_async([0])
    first.add_done_callback(lambda _: x.close())
    second = x.gather_async([64])

    assert second.result() == [64]
    until(lambda: x.closed)
    assert first.result() == [0]


def test_callbacks_find_room_under_the_limit(
    x: fw.Array, storage: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that would have to make room is the one that waits for it."""
    monkeypatch.setattr(x._attachment.calls, "_most", 1)
    chain: list[int] = []

    def follow(read: fw.Future[Any]) -> None:
        row = int(read.result()[0])
        chain.append(row)
        if row < 40:
            for _ in range(2):
                x.gather_async([row + 20]).add_done_callback(follow)

    x.gather_async([0]).add_done_callback(follow)

    until(lambda: sorted(chain) == [0, 20, 20, 40, 40, 40, 40])


# Awaited.


def test_await_does_not_block_the_loop(x: fw.Array, storage: Faulty) -> None:
    storage.inject(HELD)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def main() -> list[Any]:
        ticking = asyncio.create_task(tick())
        got = await asyncio.gather(*(x.gather_async([64 * k]) for k in range(4)))
        await x.scatter_async([0], [4])
        ticking.cancel()
        return list(got)

    assert [int(rows[0]) for rows in asyncio.run(main())] == [0, 64, 128, 192]
    assert ticks > 100
    assert x.gather([0]) == [4]


def test_await_raises_what_the_call_met(x: fw.Array, storage: Faulty) -> None:
    fail_at(storage, 128)

    async def main() -> None:
        assert await x.gather_async([0]) == [0]
        with pytest.raises(StorageError):
            await x.gather_async([128])

    asyncio.run(main())
    assert x.gather([64]) == [64], "it was observed"


def test_cancelled_task_leaves_the_call_to_end(x: fw.Array, storage: Faulty) -> None:
    storage.inject(HELD)
    out = np.zeros(1, np.int64)

    async def main() -> None:
        task = asyncio.ensure_future(asyncio.wait_for(x.gather_async([64], out=out), 0.01))
        with pytest.raises(TimeoutError):
            await task

    asyncio.run(main())
    x.flush()
    assert out.tolist() == [64]


# What goes wrong.


def test_failure_is_of_the_very_call(x: fw.Array, storage: Faulty) -> None:
    fail_at(storage, 256)

    reads = [x.gather_async([64 * k]) for k in range(8)]
    x.gather([1000])  # not its own

    for k, read in enumerate(reads):
        if k != 4:
            assert read.result() == [64 * k]
    with pytest.raises(
        StorageError, match="gather_async: read of 512 bytes at offset 2048"
    ) as caught:
        reads[4].result()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == storage.path
    assert reads[4].exception() is caught.value
    storage.heal()
    assert x.gather_async([256]).result() == [256]


def test_two_failures_have_their_own_places(x: fw.Array, storage: Faulty) -> None:
    storage.inject("read eio bytes=512-1024; read enodata bytes=4096-4608")

    one, other = x.gather_async([64]), x.gather_async([512])

    failures = [future.exception() for future in (one, other)]
    assert [f.offset for f in failures if isinstance(f, StorageError)] == [512, 4096]
    assert [f.errno for f in failures if isinstance(f, StorageError)] == [
        errno.EIO,
        errno.ENODATA,
    ]


def test_failure_names_the_storage_of_several(tmp_path: Path) -> None:
    members = []
    for name in ("a", "b"):
        np.arange(ROWS // 2).tofile(tmp_path / name)
        members.append(Faulty(File(tmp_path / name)))
    members[1].inject("read eio bytes=1024-1536")
    with fw.open(
        fw.storage.Striped(members, 4096),
        "r",
        "i8",
        device="cpu",
        line=512,
        cache="16 KiB",
    ) as x:
        reads = [x.gather_async([64 * k]) for k in range(24)]  # eight to a stripe

        failed = [k for k, read in enumerate(reads) if read.exception() is not None]

        assert failed == [10]
        failure = reads[10].exception()
        assert isinstance(failure, StorageError)
        assert (failure.filename, failure.offset) == (str(tmp_path / "b"), 1024)


def test_failure_of_a_sync_call_stays_its_own(x: fw.Array, storage: Faulty) -> None:
    fail_at(storage, 256)

    read = x.gather_async([0])
    with pytest.raises(StorageError, match="gather"):
        x.gather([256])

    assert read.result() == [0]


def test_read_that_finds_no_room_fails(storage: Faulty) -> None:
    """Its way is blocked by lines of its own array that cannot be written."""
    with fw.open(storage, "r+", "i8", device="cpu", line=512, cache=2048) as x:
        for _ in range(2):  # now all four lines are dirty
            x[:256] = 1
        storage.inject("write eio")

        read = x.gather_async([1000])

        with pytest.raises(StorageError, match="could not be written back"):
            read.result()
        storage.heal()
        with pytest.raises(StorageError, match="write"):
            x.flush()  # tells of the line, which stays dirty
        assert (x.gather_async(slice(0, 256)).result() == 1).all()
        x.flush()
    assert (np.fromfile(str(storage.path), "i8")[:256] == 1).all()


def test_dropped_failure_is_raised_by_the_next_call_once(x: fw.Array, storage: Faulty) -> None:
    fail_at(storage, 64)
    read = x.gather_async([64])
    concurrent.futures.wait([read])
    x.gather_async([0]).result()  # whoever holds the future may still look

    del read
    gc.collect()

    with pytest.raises(StorageError, match="offset 512") as caught:
        x.gather([0])
    assert "dropped" in caught.value.__notes__[0]
    assert x.gather([0]) == [0]


def test_failure_that_nobody_waited_for_is_raised(x: fw.Array, storage: Faulty) -> None:
    storage.inject("read eio")

    reads = [x.gather_async([64 * k]) for k in range(3)]
    del reads
    until(lambda: len(x._attachment.calls._lost) == 3)

    with pytest.raises(StorageError) as caught:
        x.gather_async([0])
    assert sum("another failed" in note for note in caught.value.__notes__) == 2
    storage.heal()
    assert x.gather_async([0]).result() == [0]


def test_observed_failure_is_not_raised_again(storage: Faulty) -> None:
    storage.inject("read eio")
    with open_array(storage) as x:
        read = x.gather_async([64])
        with pytest.raises(StorageError):
            read.result()
        assert x.gather_async([64]).exception() is not None
        del read
        gc.collect()
        storage.heal()
        assert x.gather([64]) == [64]


def test_close_raises_what_nobody_looked_at(storage: Faulty) -> None:
    storage.inject("read eio")
    x = open_array(storage)
    read, other = x.gather_async([64]), x.gather_async([0])

    with pytest.raises(StorageError, match="gather_async") as caught:
        x.close()

    assert x.closed
    assert len(caught.value.__notes__) == 1
    assert {read.exception(), other.exception()} > {caught.value}
    x.close()


def test_close_raises_a_lost_store_before_all(storage: Faulty) -> None:
    x = open_array(storage)
    x[0] = 1
    storage.inject("read eio; write eio")
    read = x.gather_async([64])

    with pytest.raises(StorageError, match="write") as caught:
        x.close()

    assert any("gather_async" in note for note in caught.value.__notes__)
    assert isinstance(read.exception(), StorageError)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([0, ROWS], BoundsError),
        ([-ROWS - 1], BoundsError),
        (np.zeros(3, bool), BoundsError),
        ([0.5], IndexDtypeError),
        ("name", IndexDtypeError),
        (None, IndexDtypeError),
        (slice("a", "b"), IndexDtypeError),
    ],
)
def test_bad_rows_are_refused_at_the_call(
    x: fw.Array, storage: Faulty, rows: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        x.gather_async(rows)
    with pytest.raises(error):
        x.scatter_async(rows, 1)
    assert storage.operations()["read"] == 0


def test_bad_operands_are_refused_at_the_call(x: fw.Array, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="shape"):
        x.gather_async([0, 1], out=np.zeros(3, np.int64))
    with pytest.raises(DtypeError):
        x.gather_async([0, 1], out=np.zeros(2, np.float32))
    with pytest.raises(ArgumentError, match="broadcast"):
        x.scatter_async([0, 1], [1, 2, 3])
    with fw.open(tmp_path / "f", dtype="i8", device="cpu", lock=False) as y:
        with pytest.raises(ReadOnlyError):
            y.scatter_async([0], [1])
        with pytest.raises(BoundsError, match="4096"):
            y.gather_async([ROWS])


def test_array_without_axes_has_no_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.float64(2.5))
    with fw.open(tmp_path / "x.npy", "r+", device="cpu") as x:
        with pytest.raises(BoundsError, match="no rows"):
            x.gather_async([0])
        with pytest.raises(BoundsError, match="no rows"):
            x.scatter_async(slice(None), 1)


@pytest.mark.parametrize("shape", [(0,), (5, 0)])
def test_nothing_is_read_at_once(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with fw.create(tmp_path / "x.npy", np.int32, shape, device="cpu") as x:
        assert x.gather_async(slice(None)).result(0).shape == shape
        assert x.scatter_async(slice(None), 1).done()


# Life cycle.


def test_close_waits_and_results_stay_valid(storage: Faulty) -> None:
    storage.inject(HELD)
    with open_array(storage) as x:
        reads = [x.gather_async([64 * k]) for k in range(6)]
        write = x.scatter_async([7], [70])
        assert not reads[0].done()

    assert all(future.done() for future in (*reads, write))
    assert [int(read.result()[0]) for read in reads] == [64 * k for k in range(6)]
    assert np.fromfile(str(storage.path), "i8")[7] == 70
    with pytest.raises(ClosedError):
        x.gather_async([0])
    with pytest.raises(ClosedError):
        x.scatter_async([0], 1)


def test_array_lost_with_calls_in_flight(storage: Faulty) -> None:
    storage.inject(HELD)
    x = open_array(storage)
    seen = weakref.ref(x)
    read = x.gather_async([64])

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del x
        gc.collect()

    assert seen() is None
    assert any(issubclass(warning.category, ResourceWarning) for warning in told)
    assert read.result() == [64]


def test_stream_of_the_cpu_has_waited(x: fw.Array, storage: Faulty) -> None:
    storage.inject(HELD)

    out = x.gather_async([64]).before(0)

    assert out.tolist() == [64]
    assert x.gather_async([64], stream=0).result() == [64]


def test_worker_ends_when_there_is_nothing_to_do(x: fw.Array) -> None:
    x.gather_async([0]).result()
    assert any(thread.name == "flashwarp calls" for thread in threading.enumerate())

    until(lambda: all(thread.name != "flashwarp calls" for thread in threading.enumerate()))

    assert x.gather_async([0]).result() == [0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_forked_child_cannot_wait(x: fw.Array, storage: Faulty) -> None:
    ended = x.gather_async([5])
    ended.result()
    storage.inject(HELD)
    pending = x.gather_async([64])

    child = os.fork()
    if child == 0:
        refused = 0
        try:
            assert ended.result() == [5]
            for use in (
                pending.result,
                pending.exception,
                pending.cancel,
                lambda: pending.before(0),
                lambda: x.gather_async([0]),
            ):
                try:
                    use()
                except ForkError:
                    refused += 1
        finally:
            os._exit(refused)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 5
    assert pending.result() == [64]


EXITS = """
import sys
import numpy as np, flashwarp as fw
from flashwarp.storage import File
from flashwarp.testing import Faulty
storage = Faulty(File(sys.argv[1], writable=True), "read delay=100000us")
x = fw.open(storage, "r+", "i8", device="cpu", line=512, cache=16384)
for k in range(5):
    x.gather_async([64 * k]).add_done_callback(lambda read: print(int(read.result()[0])))
"""


def test_interpreter_that_ends_waits_for_calls(tmp_path: Path) -> None:
    np.arange(ROWS).tofile(tmp_path / "f")
    done = subprocess.run(
        [sys.executable, "-c", EXITS, str(tmp_path / "f")],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "64", "128", "192", "256"]
    assert "Traceback" not in done.stderr
