"""What prefetches and restores leave behind in slower places."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.faults import WAIT_S, Faults, FaultyDirectory, Opener
from checkpoint.test_checkpointer import until
from flashwarp.checkpoint import flushing, mover, pieces
from flashwarp.checkpoint.buffer import ALIGNMENT
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.directory import Directory, VersionWriter
from flashwarp.checkpoint.mover import Mover
from flashwarp.checkpoint.region import Region
from flashwarp.checkpoint.tier import Entry
from flashwarp.device import CpuDevice
from flashwarp.errors import StorageError

BLOCK = 16 << 10


def history(checkpointer: Checkpointer, versions: int) -> np.ndarray:
    state = np.zeros(BLOCK, np.uint8)
    checkpointer.protect("state", state)
    for version in range(versions):
        state[:] = version + 1
        checkpointer.checkpoint(version)
    return state


def held(checkpointer: Checkpointer, *tiers: str) -> set[int]:
    """The versions that some of these caches hold: fetched, or never given up."""
    core = checkpointer._core
    with core.changed:
        return {
            entry.key[1]
            for tier in core.tiers
            for entry in core.entries.values()
            if tier.name in tiers and tier.holds(entry)
        }


def test_the_host_cache_gives_up_what_the_gpu_cache_holds_for_a_hint(opened: Opener) -> None:
    # The two caches hold four versions each: eight of them without one that both have. Which
    # ones the host cache had before depends on how fast they were written.
    checkpointer = opened(4 * BLOCK, 4 * BLOCK)
    state = history(checkpointer, 8)
    checkpointer.wait()
    for version in reversed(range(8)):
        checkpointer.prefetch_enqueue(version)
    checkpointer.prefetch_start()
    until(lambda: held(checkpointer, "host") >= {0, 1, 2, 3}, "they are fetched into the host")

    for version in reversed(range(8)):
        checkpointer.restart(version)
        assert (state == version + 1).all()

    assert checkpointer.stats.restarts_from["ssd"] == 0


def test_a_version_that_both_caches_have_is_restored_without_its_host_copy(
    opened: Opener, faults: Faults
) -> None:
    # The GPU cache keeps what the host cache has given up, though its hint is restored last.
    checkpointer = opened(4 * BLOCK, 4 * BLOCK)
    state = history(checkpointer, 8)
    checkpointer.wait()
    order = [0, 1, 2, 3, 7, 6, 5, 4]
    for version in order:
        checkpointer.prefetch_enqueue(version)
    checkpointer.prefetch_start()
    until(lambda: 0 in held(checkpointer, "gpu", "host"), "the first one is fetched")

    for version in order:
        checkpointer.restart(version)
        assert (state == version + 1).all()


def test_files_of_consumed_versions_are_gone_when_it_is_closed(
    opened: Opener, tmp_path: Path
) -> None:
    checkpointer = opened(config={"discard_consumed": True})
    state = history(checkpointer, 20)
    checkpointer.wait()
    for version in reversed(range(20)):
        checkpointer.restart(version)
        assert (state == version + 1).all()

    # Its number is free at once, and the removal of the old files takes nothing of the new ones.
    checkpointer.checkpoint(3).result(WAIT_S)
    checkpointer.close()

    with Directory(tmp_path / "versions", writable=False) as directory:
        assert directory.versions("default") == [3]
        with directory.open("default", 3) as reader:
            reader.verify()


class Written:
    """Notes what is written; fails from some byte on."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.data = bytearray(64 << 20)
        self.fails_at = fails_at
        self.under_way = 0

    def write(self, region: Region, offset: int, buffer: memoryview) -> None:
        self.under_way += 1
        try:
            time.sleep(0.005)
            if self.fails_at is not None and offset >= self.fails_at:
                raise StorageError(5, "no more", "here")
            begin = offset + (0 if region.name == "a" else 32 << 20)
            self.data[begin : begin + len(buffer)] = buffer
        finally:
            self.under_way -= 1


class Block:
    """A tier with one version's block in it."""

    on_host = True

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    def block(self, _: Entry) -> int:
        return int(self.memory.ctypes.data)


def block_of(*nbytes: int) -> tuple[Entry, Block]:
    regions = tuple(
        Region(name, "|u1", (size,), size) for name, size in zip("ab", nbytes, strict=True)
    )
    entry = Entry(("default", 0), regions)
    memory = np.random.default_rng(1).integers(0, 256, entry.nbytes + ALIGNMENT, np.uint8)
    return entry, Block(memory)


def test_all_pieces_of_a_version_are_written() -> None:
    entry, tier = block_of(31 << 20, (8 << 20) + 5)
    written = Written()
    with Mover(CpuDevice(), 8192, WAIT_S) as moves:
        assert moves.store_block(tier, entry, written, lambda: True)

    for name, begin in (("a", 0), ("b", 32 << 20)):
        region = entry.region(name)
        assert region is not None
        offset = entry.offsets[name]
        expected = tier.memory[offset : offset + region.nbytes]
        assert written.data[begin : begin + region.nbytes] == expected.tobytes()


@pytest.mark.parametrize("wanted", [True, False])
def test_nothing_reads_the_block_after_a_write_has_ended(wanted: bool) -> None:
    entry, tier = block_of(31 << 20, 1 << 20)
    written = Written(fails_at=8 << 20 if wanted else None)
    looks = iter([True, True, True, wanted] + [wanted] * 100)
    with Mover(CpuDevice(), 8192, WAIT_S) as moves:
        if wanted:
            with pytest.raises(StorageError):
                moves.store_block(tier, entry, written, lambda: next(looks))
        else:
            assert not moves.store_block(tier, entry, written, lambda: next(looks))
        assert written.under_way == 0


class Read:
    """Gives bytes once as many reads as `together` wait for them."""

    def __init__(self, together: int) -> None:
        self._barrier = threading.Barrier(together)

    def read_into(self, region: Region, offset: int, buffer: memoryview) -> None:
        self._barrier.wait(WAIT_S)
        buffer[:] = bytes([offset >> 22 & 255 | (64 if region.name == "b" else 0)]) * len(buffer)


def test_several_pieces_of_a_version_are_read_at_a_time() -> None:
    # One at a time leaves the disk idle between two of them.
    entry, tier = block_of(16 << 20, 16 << 20)
    with Mover(CpuDevice(), 8192, WAIT_S) as moves:
        assert moves.load_block(tier, entry, Read(together=4), lambda: True)

    for name, mark in (("a", 0), ("b", 64)):
        found = tier.memory[entry.offsets[name] :][: 16 << 20].reshape(4, -1)
        assert (found == np.arange(4)[:, None] + mark).all()


def test_a_large_version_begins_while_the_one_before_is_committed(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One megabyte counts as large here.
    monkeypatch.setattr(flushing, "TOGETHER_BYTES", 1)
    begun: list[int] = []
    second_begins = threading.Event()
    begin, commit = FaultyDirectory.begin, VersionWriter.commit

    def noted(self: FaultyDirectory, name: str, version: int, *rest: Any, **options: Any) -> Any:
        begun.append(version)
        if version == 1:
            second_begins.set()
        return begin(self, name, version, *rest, **options)

    def waiting(writer: VersionWriter) -> None:
        assert writer.version != 0 or second_begins.wait(WAIT_S)
        commit(writer)

    monkeypatch.setattr(FaultyDirectory, "begin", noted)
    monkeypatch.setattr(VersionWriter, "commit", waiting)
    checkpointer = opened("4 MiB", "4 MiB")
    checkpointer.protect("state", np.ones(1 << 17))
    for version in range(3):
        checkpointer.checkpoint(version)
    checkpointer.wait()

    assert begun == [0, 1, 2]


def test_a_version_is_opened_while_the_last_pieces_of_the_one_before_are_read(
    opened: Opener, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = np.zeros(8 << 20, np.uint8)  # two pieces
    first = opened(0, 0)
    first.protect("state", state)
    for version in range(3):
        state[:] = version + 1
        first.checkpoint(version)
    first.close()
    checkpointer = opened(0, 4 * state.nbytes)
    checkpointer.protect("state", state)
    for version in range(3):
        checkpointer.prefetch_enqueue(version)
    core = checkpointer._core
    until(lambda: len(core.entries) == 3, "all manifests have been read")
    asked: list[int] = []
    opens = FaultyDirectory.open

    def noted(self: FaultyDirectory, name: str, version: int, **options: Any) -> Any:
        asked.append(version)
        return opens(self, name, version, **options)

    monkeypatch.setattr(FaultyDirectory, "open", noted)
    faults.hold_reads()
    checkpointer.prefetch_start()
    until(lambda: len(asked) == 2, "the second version is opened while the first one is read")
    until(lambda: faults.reads == 4, "the pieces of both are read")
    time.sleep(0.05)
    assert asked == [0, 1], "two at a time, so that none takes the disk from those before it"
    faults.release()

    for version in range(3):
        checkpointer.restart(version)
        assert (state == version + 1).all()
    assert asked == [0, 1, 2]
    assert checkpointer.stats.restarts_from["ssd"] == 0


def test_a_version_begins_once_all_pieces_of_the_one_before_are_on_their_way(
    opened: Opener, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "_STORED_BYTES", 1 << 20)
    state = np.zeros((pieces.QUEUED_MAX + 2) << 20, np.uint8)
    first = opened(0, 0)
    first.protect("state", state)
    for version in range(2):
        state[:] = version + 1
        first.checkpoint(version)
    first.close()
    checkpointer = opened(0, 3 * state.nbytes)
    checkpointer.protect("state", state)
    for version in range(2):
        checkpointer.prefetch_enqueue(version)
    core = checkpointer._core
    until(lambda: len(core.entries) == 2, "all manifests have been read")
    faults.hold_reads()
    checkpointer.prefetch_start()
    until(lambda: faults.reads == pieces.AT_A_TIME, "pieces of the first version are read")
    time.sleep(0.05)

    assert len(core.storage_reads) == 1, "two pieces of it are not on their way yet"
    faults.release()
    for version in range(2):
        checkpointer.restart(version)
        assert (state == version + 1).all()
