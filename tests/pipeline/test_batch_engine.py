"""The engine of batches: every byte of every row, from every storage, in both directions."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashwarp as fw
from flashwarp import _native
from flashwarp.device import CpuDevice
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    ControllerTimeout,
    ForkError,
    StorageError,
)
from flashwarp.nvme.software import SoftwareController
from flashwarp.pipeline.engine import BatchEngine, Ring
from flashwarp.storage import Concatenated, File, Memory, Replicated, Storage, Striped
from flashwarp.testing.faults import FaultPlan, Faulty

KINDS = ("memory", "file", "direct", "striped", "mixed", "concatenated", "replicated", "faulty")
DEVICE = CpuDevice()
FAST = fw.nvme.SSDModel.named("P5800X")


def bytes_of(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


@contextlib.contextmanager
def opened(kind: str, data: np.ndarray, folder: Path) -> Iterator[Storage]:
    """Open a storage of a kind that holds the bytes of `data`, for reads and writes."""

    def file(name: str, part: np.ndarray, **options: Any) -> File:
        path = folder / name
        part.tofile(path)
        return File(path, writable=True, lock=False, **options)

    half = data.size // 2
    with contextlib.ExitStack() as stack:
        if kind == "memory":
            made: Storage = Memory(data.copy())
        elif kind == "file":
            made = file("a", data)
        elif kind == "direct":
            made = file("a", data, o_direct=True)
        elif kind in ("striped", "mixed"):
            parts = [
                file(f"m{i}", np.zeros(data.size + 8192, np.uint8))
                if kind == "striped" or i == 0
                else Memory(data.size + 8192)
                for i in range(3)
            ]
            made = Striped(parts, 4096, data.size)
            made.write(0, data)
        elif kind == "concatenated":
            made = Concatenated([file("a", data[:half]), Memory(data[half:].copy())])
        elif kind == "replicated":
            made = Replicated([file("a", data), Memory(data.copy())])
        else:
            made = Faulty(file("a", data, o_direct=True), FaultPlan.parse("read short p=0.2"))
        stack.callback(made.close)
        yield made


def contents(storage: Storage) -> np.ndarray:
    return np.frombuffer(storage.read(0, storage.nbytes), np.uint8)


class Consumer:
    """The stream's side of a ring, by a thread: what a GPU's copy engine does."""

    def __init__(self, engine: BatchEngine, direction: Any) -> None:
        self.engine, self.direction = engine, direction
        self.port = engine.ports[direction]
        self.copier = _native.HostCopier()
        self.q = 0

    def move(self, buffer: np.ndarray) -> int:
        """Queue the copies of one batch; return the number of the last job."""
        port, last = self.port, 0
        for begin in range(0, buffer.nbytes, port.step_bytes or 1):
            self.q += 1
            nbytes = min(port.step_bytes, buffer.nbytes - begin)
            chunk = port.ring + (self.q - 1) % port.chunks * port.chunk_bytes
            place = buffer.ctypes.data + begin
            entry = type("Entry", (), {})()
            if self.direction == "prefetch":
                self.copier.wait_word(port.filled, self.q)
                self.copier.copy_and_append([(place, chunk, nbytes)], [], entry)
                last = self.copier.write_word(port.emptied, self.q)
            else:
                self.copier.wait_word(port.emptied, max(0, self.q - port.chunks))
                self.copier.copy_and_append([(chunk, place, nbytes)], [], entry)
                last = self.copier.write_word(port.filled, self.q)
        return last

    def wait(self, last: int) -> None:
        assert last == 0 or self.copier.wait(last, 20_000_000)


@st.composite
def tables(draw: Any) -> tuple[int, int, int]:
    row_bytes = draw(st.one_of(st.integers(1, 9000), st.sampled_from([512, 4096, 300_000])))
    rows = draw(st.integers(1, max(1, min(400, 1_500_000 // row_bytes))))
    return row_bytes, rows, draw(st.integers(0, 1 << 30))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(table=tables(), route=st.sampled_from(["direct", "ring", "copies"]))
def test_a_prefetch_has_the_rows_in_their_order(
    kind: str, table: tuple[int, int, int], route: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    row_bytes, rows, seed = table
    random = np.random.default_rng(seed)
    data = bytes_of(rows * row_bytes, seed)
    expected = data.reshape(rows, row_bytes)
    with opened(kind, data, tmp_path_factory.mktemp("t")) as storage:
        ring = None if route == "direct" else Ring(8192, 3)
        with BatchEngine(
            DEVICE, storage, rows=rows, row_bytes=row_bytes, batch_rows=500,
            slots=2, ring=ring, copies=route == "copies", workers=(1, 3), timeout_s=10,
        ) as engine:  # fmt: skip
            consumer = Consumer(engine, "prefetch") if route == "ring" else None
            for count in (random.integers(1, 500), 1, rows):
                ids: Any = random.integers(0, rows, count)
                if count == rows:
                    begin = int(random.integers(0, rows))
                    ids = range(begin, rows)
                buffer = np.full((len(ids), row_bytes), 7, np.uint8)
                last = consumer.move(buffer) if consumer else 0
                ticket = engine.submit("prefetch", ids, buffer.ctypes.data)
                engine.wait("prefetch", ticket)
                if consumer:
                    consumer.wait(last)
                np.testing.assert_array_equal(buffer, expected[np.asarray(ids)])


@pytest.mark.parametrize("kind", KINDS[:-1])
@settings(max_examples=12, deadline=None)
@given(table=tables(), route=st.sampled_from(["direct", "ring", "copies"]))
def test_what_is_written_back_is_in_the_storage(
    kind: str, table: tuple[int, int, int], route: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    row_bytes, rows, seed = table
    random = np.random.default_rng(seed)
    data = bytes_of(rows * row_bytes, seed)
    expected = data.copy()
    table_of = expected.reshape(rows, row_bytes)
    with opened(kind, data, tmp_path_factory.mktemp("t")) as storage:
        ring = None if route == "direct" else Ring(8192, 3)
        with BatchEngine(
            DEVICE, storage, rows=rows, row_bytes=row_bytes, batch_rows=500,
            slots=2, directions=("prefetch", "write_back"), ring=ring, copies=route == "copies",
            workers=2, timeout_s=10,
        ) as engine:  # fmt: skip
            consumer = Consumer(engine, "write_back") if route == "ring" else None
            for count in (rows // 2, rows):
                ids: Any = random.permutation(rows)[:count] if count != rows else range(rows)
                buffer = bytes_of(count * row_bytes, int(random.integers(1 << 30)))
                last = consumer.move(buffer) if consumer else 0
                ticket = engine.submit("write_back", ids, buffer.ctypes.data)
                engine.wait("write_back", ticket)
                if consumer:
                    consumer.wait(last)
                table_of[np.asarray(ids, int)] = buffer.reshape(count, row_bytes)
                np.testing.assert_array_equal(contents(storage), expected)


def test_a_row_out_of_range_fails_alone_and_reads_as_zeros() -> None:
    data = bytes_of(640, 1).reshape(10, 64)
    buffer = np.full((4, 64), 9, np.uint8)
    with BatchEngine(DEVICE, Memory(data), rows=10, row_bytes=64, batch_rows=8) as engine:
        ticket = engine.submit("prefetch", [3, -1, 10, 9], buffer.ctypes.data)

        with pytest.raises(BoundsError, match=r"row 1 .* 10 rows; 2 rows"):
            engine.wait("prefetch", ticket)

        np.testing.assert_array_equal(buffer[[0, 3]], data[[3, 9]])
        assert not buffer[1:3].any()
        assert engine.statuses("prefetch", ticket)[:4].tolist() == [0, 0x80, 0x80, 0]
        engine.wait("prefetch", engine.submit("prefetch", range(4), buffer.ctypes.data))
        np.testing.assert_array_equal(buffer, data[:4])


@pytest.mark.parametrize("ring", [None, Ring(4096, 2)])
def test_a_storage_that_dies_in_a_batch_fails_its_rows_and_later_batches_run(
    tmp_path: Path, ring: Ring | None
) -> None:
    data = bytes_of(64 * 4096, 2).reshape(64, 4096)
    data.tofile(tmp_path / "a")
    file = File(tmp_path / "a", o_direct=True)
    faulty = Faulty(file, FaultPlan.parse("read eio bytes=40960-81920"))
    with BatchEngine(
        DEVICE, faulty, rows=64, row_bytes=4096, batch_rows=64, ring=ring, copies=bool(ring),
        workers=2,
    ) as engine:  # fmt: skip
        buffer = np.full((64, 4096), 9, np.uint8)
        ticket = engine.submit("prefetch", range(64), buffer.ctypes.data)

        with pytest.raises(StorageError, match="10 rows of the batch") as caught:
            engine.wait("prefetch", ticket)

        assert caught.value.errno == 5
        assert caught.value.filename == str(tmp_path / "a")
        failed = np.flatnonzero(engine.statuses("prefetch", ticket))
        assert failed.tolist() == list(range(10, 20))
        assert not buffer[10:20].any()
        np.testing.assert_array_equal(buffer[:10], data[:10])
        np.testing.assert_array_equal(buffer[20:], data[20:])
        engine.wait("prefetch", engine.submit("prefetch", range(30, 60), buffer.ctypes.data))
        np.testing.assert_array_equal(buffer[:30], data[30:60])


def test_writes_to_a_storage_without_space_have_its_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8 * 4096))
    faulty = Faulty(
        File(tmp_path / "a", writable=True, o_direct=True), FaultPlan.parse("write enospc n=1")
    )
    source = bytes_of(8 * 4096, 3)
    with BatchEngine(
        DEVICE, faulty, rows=8, row_bytes=4096, batch_rows=8, directions=("write_back",)
    ) as engine:
        ticket = engine.submit("write_back", [0, 2, 4], source.ctypes.data)
        with pytest.raises(StorageError, match="row 0") as caught:
            engine.wait("write_back", ticket)
        assert caught.value.errno == 28
        engine.wait("write_back", engine.submit("write_back", range(8), source.ctypes.data))
    np.testing.assert_array_equal(contents(faulty), source)


def test_a_mapped_file_that_was_cut_fails_rows_and_does_not_end_the_process(
    tmp_path: Path,
) -> None:
    from flashwarp.storage.file import Mapping

    data = bytes_of(64 * 4096, 4).reshape(64, 4096)
    data.tofile(tmp_path / "a")
    mapping = Mapping(tmp_path / "a", data.nbytes)
    file = File(tmp_path / "a", _mapping=mapping)
    os.truncate(tmp_path / "a", 32 * 4096)
    buffer = np.full((64, 4096), 9, np.uint8)
    with BatchEngine(DEVICE, file, rows=64, row_bytes=4096, batch_rows=64) as engine:
        ticket = engine.submit("prefetch", np.arange(64)[::-1], buffer.ctypes.data)
        with pytest.raises(StorageError, match="truncated"):
            engine.wait("prefetch", ticket)
        np.testing.assert_array_equal(buffer[32:], data[:32][::-1])
        assert not buffer[:32].any()
    mapping.close()


def test_a_read_that_hangs_ends_its_batch_and_says_what_it_waited_for(tmp_path: Path) -> None:
    data = bytes_of(16 * 4096, 5).reshape(16, 4096)
    data.tofile(tmp_path / "a")
    faulty = Faulty(File(tmp_path / "a", o_direct=True), FaultPlan.parse("read hang n=1"))
    buffer = np.full((16, 4096), 9, np.uint8)
    with BatchEngine(
        DEVICE, faulty, rows=16, row_bytes=4096, batch_rows=16, timeout_s=0.3
    ) as engine:
        ticket = engine.submit("prefetch", [5, 1, 9], buffer.ctypes.data)
        with pytest.raises(ControllerTimeout, match=r"0.3 s without progress.*has not read 4096"):
            engine.wait("prefetch", ticket)
        np.testing.assert_array_equal(buffer[1:3], data[[1, 9]])
        engine.wait("prefetch", engine.submit("prefetch", range(16), buffer.ctypes.data))
        np.testing.assert_array_equal(buffer, data)


@pytest.mark.parametrize("direction", ["prefetch", "write_back"])
def test_a_stream_that_does_not_move_its_chunks_ends_the_batch(direction: Any) -> None:
    memory = Memory(100 * 4096)
    with BatchEngine(
        DEVICE, memory, rows=100, row_bytes=4096, batch_rows=100, ring=Ring(4096, 2),
        directions=(direction,), timeout_s=0.2,
    ) as engine:  # fmt: skip
        ticket = engine.submit(direction, range(5))
        with pytest.raises(ControllerTimeout, match="waits for a chunk of the ring"):
            engine.wait(direction, ticket)
        port = engine.ports[direction]
        # The words are stored all the same, so that a stream that comes late does not hang.
        word = port.filled if direction == "prefetch" else port.emptied
        assert _native.load_word(word) == 5
        # And the chunks of the next batch are those behind.
        consumer = Consumer(engine, direction)
        consumer.q = 5
        _native.store_word(port.emptied if direction == "prefetch" else port.filled, 5)
        buffer = bytes_of(3 * 4096, 6)
        last = consumer.move(buffer)
        engine.wait(direction, engine.submit(direction, range(3)))
        consumer.wait(last)
        np.testing.assert_array_equal(buffer, contents(memory)[: 3 * 4096])


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("drives", [1, 4])
def test_modelled_drives_serve_both_directions(drives: int, threads: int) -> None:
    row_bytes, rows = 4096, 256
    data = bytes_of(rows * row_bytes, 7)
    members = [Memory(rows * row_bytes // drives) for _ in range(drives)]
    storage: Storage = members[0] if drives == 1 else Striped(members, 8192)
    storage.write(0, data)
    expected = data.reshape(rows, row_bytes).copy()
    random = np.random.default_rng(8)
    with BatchEngine(
        DEVICE, storage, rows=rows, row_bytes=row_bytes, batch_rows=256,
        directions=("prefetch", "write_back"), workers=(1, 2), timeout_s=20,
        controller=SoftwareController(model=FAST, threads=threads or None),
    ) as engine:  # fmt: skip
        assert engine.controllers == drives
        for _ in range(5):
            ids = random.permutation(rows)[:200]
            source = bytes_of(200 * row_bytes, int(random.integers(1 << 30)))
            engine.wait("write_back", engine.submit("write_back", ids, source.ctypes.data))
            expected[ids] = source.reshape(200, row_bytes)
            ids = random.integers(0, rows, 256)
            buffer = np.zeros((256, row_bytes), np.uint8)
            engine.wait("prefetch", engine.submit("prefetch", ids, buffer.ctypes.data))
            np.testing.assert_array_equal(buffer, expected[ids])
        ids = np.array([1, rows, 2])
        with pytest.raises(BoundsError):
            engine.wait("prefetch", engine.submit("prefetch", ids, buffer.ctypes.data))


@pytest.mark.parametrize("ids", [range(100_000), list(range(100_000))], ids=["range", "list"])
def test_neighbours_are_moved_as_one(ids: Any) -> None:
    data = np.arange(100_000)
    buffer = np.zeros_like(data)
    with BatchEngine(
        DEVICE, Memory(data), rows=data.size, row_bytes=8, batch_rows=data.size, workers=1
    ) as engine:
        engine.wait("prefetch", engine.submit("prefetch", ids, buffer.ctypes.data))

        # 800,000 bytes, dealt in parts of 256 KiB.
        assert engine.stats["transfers"] == 4
    np.testing.assert_array_equal(buffer, data)


def test_stretches_of_neighbours_end_with_the_array_and_at_rows_that_are_none() -> None:
    data = np.arange(1, 1001)
    ids = np.array([997, 998, 999, 1000, 1001, 0, 1, 2, 2, 3, -1, 0, 5, 4, 3, 1 << 62, 998, 999])
    buffer = np.full(ids.size, 7)
    with BatchEngine(
        DEVICE, Memory(data), rows=1000, row_bytes=8, batch_rows=ids.size, workers=1
    ) as engine:
        ticket = engine.submit("prefetch", ids, buffer.ctypes.data)
        with pytest.raises(BoundsError, match="4 rows of the batch have failed"):
            engine.wait("prefetch", ticket)
    there = (ids >= 0) & (ids < 1000)
    np.testing.assert_array_equal(buffer, np.where(there, (ids + 1) * there, 0))


@pytest.mark.parametrize("threads", [None, 1])
def test_a_drive_that_hangs_ends_its_batch_and_the_next_one_runs(
    tmp_path: Path, threads: int | None
) -> None:
    data = bytes_of(16 * 4096, 11).reshape(16, 4096)
    for member in range(2):
        data[member::2].tofile(tmp_path / str(member))
    drives = [File(tmp_path / str(member), o_direct=True) for member in range(2)]
    hangs = Faulty(drives[1], FaultPlan.parse("read hang n=2"))
    buffer = np.full((16, 4096), 9, np.uint8)
    with BatchEngine(
        DEVICE,
        Striped([drives[0], hangs], 4096),
        rows=16,
        row_bytes=4096,
        batch_rows=16,
        workers=2,
        timeout_s=0.3,
        controller=SoftwareController(model=FAST, threads=threads),
    ) as engine:
        # Rows 3 and 5 are neighbours on their drive, so they are one command.
        ticket = engine.submit("prefetch", [0, 1, 2, 3, 5], buffer.ctypes.data)
        with pytest.raises(ControllerTimeout, match="; 2 rows have failed"):
            engine.wait("prefetch", ticket)
        engine.wait("prefetch", engine.submit("prefetch", range(16), buffer.ctypes.data))
        np.testing.assert_array_equal(buffer, data)


@pytest.mark.parametrize("row_bytes", [1, 3, 1000, 4096, 300_000])
@pytest.mark.parametrize("drives", [1, 3])
def test_runs_of_narrow_rows_are_cut_where_stripes_and_the_array_end(
    row_bytes: int, drives: int
) -> None:
    rows = max(12, 600_000 // row_bytes)
    data = bytes_of(-(-rows * row_bytes // (3 * 4096)) * 3 * 4096, 12)
    expected = data[: rows * row_bytes].reshape(rows, row_bytes)
    members = [Memory(data.nbytes // drives) for _ in range(drives)]
    storage: Storage = members[0] if drives == 1 else Striped(members, 4096)
    storage.write(0, data)
    with BatchEngine(
        DEVICE, storage, rows=rows, row_bytes=row_bytes, batch_rows=rows, workers=(1, 2),
        controller=SoftwareController(model=FAST) if drives > 1 else None,
    ) as engine:  # fmt: skip
        buffer = np.full((rows, row_bytes), 9, np.uint8)
        engine.wait("prefetch", engine.submit("prefetch", range(1, rows), buffer.ctypes.data))
        np.testing.assert_array_equal(buffer[:-1], expected[1:])

        # Two runs that overlap, the second of which leaves the array, and one that goes down.
        ids = np.r_[0:4, rows - 3 : rows + 1, 3, 2, -1, 0]
        ticket = engine.submit("prefetch", ids, buffer.ctypes.data)
        with pytest.raises(BoundsError, match=r"row 7 .*; 2 rows"):
            engine.wait("prefetch", ticket)
        inside = (ids >= 0) & (ids < rows)
        statuses = engine.statuses("prefetch", ticket)[: len(ids)]
        np.testing.assert_array_equal(statuses != 0, ~inside)
        np.testing.assert_array_equal(buffer[: len(ids)][inside], expected[ids[inside]])
        assert not buffer[: len(ids)][~inside].any()


def test_a_fault_in_a_stripe_fails_those_of_its_narrow_rows_that_it_hits(tmp_path: Path) -> None:
    data = bytes_of(16 * 4096, 13)
    stripes = data.reshape(-1, 4096)
    for member in range(2):
        stripes[member::2].tofile(tmp_path / str(member))
    drives = [File(tmp_path / str(member)) for member in range(2)]
    # Bytes 20992 to 21504 of both drives together.
    faulty = Faulty(drives[1], FaultPlan.parse("read eio bytes=8704-9216"))
    expected = data[:64_000].reshape(64, 1000)
    buffer = np.full((64, 1000), 9, np.uint8)
    with BatchEngine(
        DEVICE, Striped([drives[0], faulty], 4096), rows=64, row_bytes=1000, batch_rows=64,
        workers=2, controller=SoftwareController(model=FAST),
    ) as engine:  # fmt: skip
        ticket = engine.submit("prefetch", range(64), buffer.ctypes.data)
        with pytest.raises(StorageError, match="2 rows of the batch"):
            engine.wait("prefetch", ticket)
        assert np.flatnonzero(engine.statuses("prefetch", ticket)).tolist() == [20, 21]
    np.testing.assert_array_equal(np.delete(buffer, [20, 21], 0), np.delete(expected, [20, 21], 0))


def test_decisions_about_workers_are_in_the_stats_and_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffer = np.zeros((64, 4096), np.uint8)
    with (
        caplog.at_level("INFO", "flashwarp.pipeline.engine"),
        BatchEngine(
            DEVICE, Memory(64 * 4096), rows=64, row_bytes=4096, batch_rows=64, workers=(1, 4)
        ) as engine,
    ):
        assert engine.stats["workers"] == 4
        for _ in range(60):
            engine.wait("prefetch", engine.submit("prefetch", range(64), buffer.ctypes.data))
            time.sleep(0.003)
        stats = engine.stats
    first = stats["decisions"][0]
    assert (first["from"], first["reason"]) == (4, "fewer are enough")
    assert first["io_s"] < 0.5 * first["idle_s"]
    assert len(stats["decisions"]) == stats["decision_count"]
    lines = [record for record in caplog.records if "workers instead of 4" in record.message]
    assert lines


def test_rows_that_are_no_blocks_are_not_written_to_modelled_drives() -> None:
    with pytest.raises(ArgumentError, match="whole blocks of 512"):
        BatchEngine(
            DEVICE, Memory(4096), rows=4, row_bytes=100, batch_rows=4, directions=("write_back",),
            controller=SoftwareController(model=FAST),
        )  # fmt: skip


def test_a_full_pipeline_is_refused_and_says_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(4096))
    plan = FaultPlan.parse("read delay=300000us")
    faulty = Faulty(File(tmp_path / "a", o_direct=True), plan)
    buffer = np.zeros(4096, np.uint8)
    with BatchEngine(DEVICE, faulty, rows=1, row_bytes=4096, batch_rows=1, slots=2) as engine:
        for _ in range(2):
            last = engine.submit("prefetch", [0], buffer.ctypes.data)
        with pytest.raises(ArgumentError, match="2 batches of prefetch have not ended"):
            engine.submit("prefetch", [0], buffer.ctypes.data)
        engine.wait("prefetch", last)
        engine.wait("prefetch", engine.submit("prefetch", [0], buffer.ctypes.data))


def test_close_in_the_middle_of_batches_ends_them_and_is_quick(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(64 * 4096))
    faulty = Faulty(File(tmp_path / "a", o_direct=True), FaultPlan.parse("read hang"))
    buffer = np.zeros((64, 4096), np.uint8)
    engine = BatchEngine(DEVICE, faulty, rows=64, row_bytes=4096, batch_rows=64, timeout_s=60)
    tickets = [engine.submit("prefetch", range(64), buffer.ctypes.data) for _ in range(3)]
    failures: list[Exception] = []

    def wait() -> None:
        try:
            engine.wait("prefetch", tickets[-1])
        except Exception as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    start = time.monotonic()
    engine.close()
    waiter.join()
    assert time.monotonic() - start < 15
    assert isinstance(failures[0], ClosedError)
    engine.close()
    with pytest.raises(ClosedError):
        engine.submit("prefetch", [0], buffer.ctypes.data)


def test_no_rows_may_begin_anywhere() -> None:
    with BatchEngine(DEVICE, Memory(4096), rows=8, row_bytes=512, batch_rows=8) as engine:
        engine.wait("prefetch", engine.submit("prefetch", range(-1, -1), 0))


def test_a_closed_engine_leaves_no_thread() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def open_and_close() -> None:
        BatchEngine(DEVICE, Memory(4096), rows=8, row_bytes=512, batch_rows=8, workers=4).close()

    open_and_close()  # the first one may start what the process keeps
    before = threads()
    for _ in range(20):
        open_and_close()

    # One of another test may end meanwhile.
    assert threads() <= before


def test_an_idle_engine_sleeps() -> None:
    buffer = np.zeros(512, np.uint8)
    with BatchEngine(
        DEVICE, Memory(4096), rows=8, row_bytes=512, batch_rows=8, workers=2
    ) as engine:
        engine.wait("prefetch", engine.submit("prefetch", [1], buffer.ctypes.data))
        time.sleep(0.1)
        before = engine.stats
        time.sleep(0.5)
        after = engine.stats
        assert after["worker_cpu_s"] - before["worker_cpu_s"] < 0.01
        assert after["polling_cpu_s"] - before["polling_cpu_s"] < 0.01


def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    data = bytes_of(4096, 10)
    buffer = np.zeros(512, np.uint8)
    engine = BatchEngine(DEVICE, Memory(data), rows=8, row_bytes=512, batch_rows=8)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            engine.submit("prefetch", [1], buffer.ctypes.data)
        except ForkError:
            engine.close()
            del engine
            code = 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    engine.wait("prefetch", engine.submit("prefetch", [3], buffer.ctypes.data))
    np.testing.assert_array_equal(buffer, data[3 * 512 : 4 * 512])
    engine.close()


def test_a_killed_process_leaves_whole_blocks_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(256 * 4096))
    program = f"""
import numpy as np
from flashwarp.device import CpuDevice
from flashwarp.pipeline.engine import BatchEngine
from flashwarp.storage import File
engine = BatchEngine(CpuDevice(), File({str(path)!r}, writable=True), rows=256, row_bytes=4096,
                     batch_rows=256, directions=("write_back",))
print("on", flush=True)
n = 0
while True:
    n = n % 255 + 1
    source = np.full((256, 4096), n, np.uint8)
    engine.wait("write_back", engine.submit("write_back", range(256), source.ctypes.data))
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
    found = np.fromfile(path, np.uint8).reshape(256, 4096)
    assert (found == found[:, :1]).all()


def test_a_request_for_too_many_rows_fails_whole_and_the_next_one_runs() -> None:
    data = bytes_of(4096, 12)
    buffer = np.zeros(512, np.uint8)
    with BatchEngine(DEVICE, Memory(data), rows=8, row_bytes=512, batch_rows=8) as engine:
        # As a kernel writes it: ready, buffer, rows, first, kind.
        request = np.array([0, buffer.ctypes.data, 9, 0, 1], np.uint64)
        port = engine.ports["prefetch"]
        slot = port.requests + 64 * (1 % port.slots)
        ctypes.memmove(slot, request.ctypes.data, request.nbytes)
        engine.kernels_begin()
        _native.store_word(slot, 1)
        with pytest.raises(ArgumentError, match="9 rows, more than 8; 9 rows have failed"):
            engine.wait("prefetch", 1)
        request[2:4] = 1, 5
        slot = port.requests + 64 * (2 % port.slots)
        ctypes.memmove(slot, request.ctypes.data, request.nbytes)
        _native.store_word(slot, 2)
        engine.wait("prefetch", 2)
        engine.kernels_end()
    np.testing.assert_array_equal(buffer, data[5 * 512 : 6 * 512])


@pytest.mark.parametrize(
    "changes",
    [
        {"row_bytes": 0},
        {"rows": 100},
        {"batch_rows": 0},
        {"workers": 0},
        {"workers": (3, 2)},
        {"timeout_s": 0},
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"rows": 8, "row_bytes": 512, "batch_rows": 8} | changes
    with pytest.raises((ArgumentError, BoundsError)):
        BatchEngine(DEVICE, Memory(4096), **arguments)


def test_an_engine_without_lists_takes_ranges_alone() -> None:
    data = np.arange(512, dtype=np.int64)
    into = np.zeros(4, np.int64)
    with BatchEngine(
        DEVICE, Memory(data), rows=512, row_bytes=8, batch_rows=1 << 24, lists=False
    ) as engine:
        with pytest.raises(ArgumentError, match="without lists"):
            engine.submit("prefetch", [3, 1], into.ctypes.data)
        engine.wait("prefetch", engine.submit("prefetch", range(7, 11), into.ctypes.data))
    assert into.tolist() == [7, 8, 9, 10]


def test_a_read_only_storage_takes_no_writes() -> None:
    with pytest.raises(ArgumentError, match="read-only"):
        BatchEngine(
            DEVICE, Memory(bytes(4096)), rows=8, row_bytes=512, batch_rows=8,
            directions=("write_back",),
        )  # fmt: skip
