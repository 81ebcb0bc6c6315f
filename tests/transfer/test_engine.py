"""The copy engine on the CPU device: copies, the order of copies, and how they end."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashwarp.device import CpuDevice
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    DeviceTimeout,
    ForkError,
)
from flashwarp.transfer import CopyEngine, Direction, TransferClient
from support.words import Word

TO_DEVICE, TO_HOST, WITHIN = Direction.TO_DEVICE, Direction.TO_HOST, Direction.WITHIN


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with CpuDevice(1) as made:
        yield made


@pytest.fixture
def engine(device: CpuDevice) -> Iterator[CopyEngine]:
    with CopyEngine(device) as made:
        yield made


@pytest.fixture
def word(device: CpuDevice) -> Word:
    return Word(device)


def some(count: int = 1000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 62, count)


def test_a_copy_has_arrived_when_its_ticket_is_done(engine: CopyEngine) -> None:
    source, target = some(), np.zeros(1000, np.int64)

    copy = engine.copy(target, source)
    copy.wait(10)

    assert copy.done()
    assert copy.error is None
    assert copy.nbytes == 8000
    np.testing.assert_array_equal(target, source)


def test_addresses_memory_buffers_and_bytes_are_taken(
    device: CpuDevice, engine: CopyEngine
) -> None:
    source = some(16)
    memory = device.allocate(128)
    out = bytearray(128)
    with TransferClient(device, "tests", 4096, 128) as ring:
        buffer = ring.take(timeout_s=10)
        first = engine.copy(memory, source, 128, after=())
        second = engine.copy(buffer, memory, after=first)
        third = engine.copy(out, buffer.address, 128, after=[second])
        third.wait(10)

    assert bytes(out) == source.tobytes()


def test_copies_of_one_direction_run_in_order(engine: CopyEngine, word: Word) -> None:
    values, target = [some(1 << 14, seed) for seed in range(20)], np.zeros(1 << 14, np.int64)
    word.hold(engine, WITHIN, 1)

    copies = [engine.copy(target, each) for each in values]
    assert not any(copy.done() for copy in copies)
    assert not target.any()
    word.store(1)
    copies[-1].wait(10)

    assert all(copy.done() for copy in copies)
    np.testing.assert_array_equal(target, values[-1])


def test_directions_do_not_wait_for_each_other(engine: CopyEngine, word: Word) -> None:
    source, target = some(), np.zeros(1000, np.int64)
    word.hold(engine, TO_HOST, 1)
    stuck = engine.copy(np.zeros(1000, np.int64), source, direction=TO_HOST)

    engine.copy(target, source, direction=TO_DEVICE).wait(10)

    assert not stuck.done()
    word.store(1)
    stuck.wait(10)


def test_a_copy_comes_after_one_of_another_direction(engine: CopyEngine, word: Word) -> None:
    source, middle, target = some(), np.zeros(1000, np.int64), np.zeros(1000, np.int64)
    word.hold(engine, TO_HOST, 5)
    first = engine.copy(middle, source, direction=TO_HOST)

    second = engine.copy(target, middle, after=first, direction=TO_DEVICE)

    with pytest.raises(DeviceTimeout, match=r"8000 bytes to device has not ended.*word"):
        second.wait(0.05)
    word.store(7)
    second.wait(10)
    np.testing.assert_array_equal(target, source)


def test_a_batch_is_one_ticket(engine: CopyEngine) -> None:
    sources = [some(100 + seed, seed) for seed in range(10)]
    targets = [np.zeros_like(each) for each in sources]

    copy = engine.copy_pieces(targets, sources, [each.nbytes for each in sources])
    copy.wait(10)

    assert copy.nbytes == sum(each.nbytes for each in sources)
    for target, source in zip(targets, sources, strict=True):
        np.testing.assert_array_equal(target, source)


def test_nothing_to_copy_is_done_at_once(engine: CopyEngine) -> None:
    empty = np.zeros(0, np.int64)

    assert engine.copy(empty, empty).done()
    assert engine.copy_pieces([], [], []).done()


def test_both_sides_live_until_the_copy_has_ended(engine: CopyEngine, word: Word) -> None:
    target = np.zeros(1 << 16, np.int64)
    expected = some(1 << 16)
    word.hold(engine, WITHIN, 1)

    copy = engine.copy(target, expected.copy())  # nobody else holds the source
    np.full(1 << 16, -1)
    word.store(1)
    copy.wait(10)

    np.testing.assert_array_equal(target, expected)


def test_a_released_buffer_is_not_lent_while_it_is_copied(
    device: CpuDevice, engine: CopyEngine, word: Word
) -> None:
    target = np.zeros(512, np.uint8)
    with TransferClient(device, "tests", 512, 512) as ring:
        buffer = ring.take(timeout_s=10)
        buffer.as_numpy()[:] = 9
        word.hold(engine, TO_DEVICE, 1)
        copy = engine.copy(target, buffer, direction=TO_DEVICE)
        buffer.release()

        assert ring.try_take() is None
        word.store(1)
        ring.take(timeout_s=10).as_numpy()[:] = 1

        assert copy.done()
        assert (target == 9).all()


def test_bandwidth_is_measured_from_large_copies(engine: CopyEngine) -> None:
    large, small = np.zeros(1 << 20, np.uint8), np.zeros(1000, np.uint8)

    engine.copy(small.copy(), small, direction=TO_HOST).wait(10)
    assert engine.bandwidth[TO_HOST].bytes_per_second is None
    engine.copy(large.copy(), large, direction=TO_HOST).wait(10)

    assert (engine.bandwidth[TO_HOST].bytes_per_second or 0) > 0
    assert engine.bandwidth[TO_HOST].transfers == 1
    assert engine.bandwidth[TO_DEVICE].transfers == 0


# Errors.


def mapped(path: Path) -> np.ndarray:
    path.write_bytes(bytes(64 << 10))
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 64 << 10), np.uint8)


def test_an_error_is_kept_until_it_is_seen(engine: CopyEngine, tmp_path: Path) -> None:
    source = mapped(tmp_path / "file")
    os.truncate(tmp_path / "file", 0)
    copy = engine.copy(bytearray(64 << 10), source)

    with pytest.raises(ArgumentError, match=r"piece 0 .* could not be read"):
        copy.wait(10)
    with pytest.raises(ArgumentError, match="could not be read"):
        copy.done()
    assert isinstance(copy.error, ArgumentError)
    engine.wait(10)  # seen, so not raised again


def test_an_error_that_nobody_saw_is_raised_at_the_end(device: CpuDevice, tmp_path: Path) -> None:
    source = mapped(tmp_path / "file")
    os.truncate(tmp_path / "file", 0)
    engine = CopyEngine(device)
    engine.copy(bytearray(64 << 10), source)

    with pytest.raises(ArgumentError, match="could not be read"):
        engine.close(10)
    engine.close()

    with pytest.raises(ClosedError, match="engine was closed"):
        engine.copy(bytearray(8), bytes(8))


def test_later_copies_run_after_one_that_failed(engine: CopyEngine, tmp_path: Path) -> None:
    source, target = mapped(tmp_path / "file"), np.zeros(1000, np.int64)
    os.truncate(tmp_path / "file", 0)

    failed = engine.copy(bytearray(64 << 10), source)
    engine.copy(target, some()).wait(10)

    np.testing.assert_array_equal(target, some())
    assert failed.error is not None


@pytest.mark.parametrize(
    ("dst", "src", "nbytes", "error", "match"),
    [
        (np.zeros(4), np.zeros(8), None, ArgumentError, "32 and 64 bytes: say nbytes="),
        (np.zeros(4), np.zeros(8), 40, BoundsError, "target has 32 bytes, and 40"),
        (np.zeros(9), np.zeros(4), 40, BoundsError, "source has 32 bytes, and 40"),
        (np.zeros(8)[::2], np.zeros(4), None, ArgumentError, "target is not contiguous"),
        (bytes(8), bytes(8), None, ArgumentError, "read-only"),
        ([0.0], np.zeros(1), None, ArgumentError, "target is a list"),
        (np.zeros(1), 0, 8, ArgumentError, "source=0"),
        (4096, 8192, None, ArgumentError, "say nbytes="),
        (np.zeros(1), np.zeros(1), -1, ArgumentError, "nbytes=-1"),
    ],
)
def test_what_cannot_be_copied_is_refused(
    engine: CopyEngine, dst: object, src: object, nbytes: int | None, error: type, match: str
) -> None:
    with pytest.raises(error, match=match):
        engine.copy(dst, src, nbytes)

    assert engine.in_flight == 0


def test_a_batch_of_unequal_lists_is_refused(engine: CopyEngine) -> None:
    with pytest.raises(ArgumentError, match="1 targets, 0 sources and 2 sizes"):
        engine.copy_pieces([bytearray(1)], [], [1, 1])


# The end.


def test_close_waits_for_copies_and_says_what_it_waited_for(device: CpuDevice, word: Word) -> None:
    engine, target = CopyEngine(device), np.zeros(1000, np.int64)
    word.hold(engine, WITHIN, 1)
    copy = engine.copy(target, some())

    with pytest.raises(DeviceTimeout, match=r"1 within the device.*not stored"):
        engine.close(timeout_s=0.05)
    assert not copy.done()

    word.store(1)
    engine.close(10)
    assert copy.done()
    np.testing.assert_array_equal(target, some())


def test_its_device_closes_it(device: CpuDevice) -> None:
    engine = CopyEngine(device)

    device.close()

    with pytest.raises(ClosedError, match="engine was closed"):
        engine.copy(bytearray(8), bytes(8))


def child(engine: CopyEngine, answers: object) -> None:
    try:
        engine.copy(bytearray(8), bytes(8))
    except ForkError as error:
        answers.put(str(error))  # type: ignore[attr-defined]
    engine.close()


def test_a_forked_child_has_no_engine(engine: CopyEngine) -> None:
    engine.copy(bytearray(8), bytes(8)).wait(10)
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    process = fork.Process(target=child, args=(engine, answers))
    process.start()

    assert "belongs to process" in answers.get()
    process.join()
    assert process.exitcode == 0


ENDS = """
import sys
import numpy as np
from flashwarp.device import CpuDevice
from flashwarp.transfer import CopyEngine, TransferClient
device = CpuDevice(1)
engine, ring = CopyEngine(device), TransferClient(device, "tests", "8 MiB", "1 MiB")
source, target = np.ones(16 << 20, np.uint8), np.zeros(16 << 20, np.uint8)
for _ in range(20):
    copy = engine.copy(target, source)
print("queued", flush=True)
"""


def test_the_end_of_the_interpreter_waits_for_copies() -> None:
    check = "import atexit\natexit.register(lambda: print(bool(target.all()), flush=True))\n"

    result = subprocess.run(
        [sys.executable, "-c", check + ENDS], capture_output=True, text=True, timeout=60
    )

    assert result.stderr == ""
    assert result.stdout.split() == ["queued", "True"]
    assert result.returncode == 0


def test_threads_copy_at_once(engine: CopyEngine) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        source, target = some(5000, number), np.zeros(5000, np.int64)
        for turn in range(100):
            source[0] = turn
            engine.copy(target, source, direction=list(Direction)[turn % 3]).wait(30)
            if not (target == source).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert engine.in_flight == 0
