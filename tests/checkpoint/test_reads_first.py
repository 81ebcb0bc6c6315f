"""If what is restored is discarded, storage is read before it is written, and written little."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from checkpoint.faults import WAIT_S, Faults, FaultyDirectory, Opener
from checkpoint.test_checkpointer import assert_restores, history, until
from flashwarp.checkpoint import flushing, mover, system
from flashwarp.checkpoint.pieces import QUEUED_MAX

VERSION_BYTES = 16 << 10  # of `history`
CONSUMED = {"discard_consumed": True}


def noting_begun(monkeypatch: pytest.MonkeyPatch, note: Callable[[int], object]) -> None:
    """Call `note` with the number of each version whose flush to storage begins."""
    begin = FaultyDirectory.begin

    def noted(self: FaultyDirectory, name: str, version: int, *rest: Any, **options: Any) -> Any:
        note(version)
        return begin(self, name, version, *rest, **options)

    monkeypatch.setattr(FaultyDirectory, "begin", noted)


@pytest.mark.parametrize(
    ("order", "flushed"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], [0, 7, 6, 5, 4, 3, 2, 1]),
        ([7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([2, 6, 1, 5], [0, 3, 4, 7, 5, 1, 6, 2]),  # first those that no hint names
    ],
)
def test_what_is_restored_last_is_flushed_first(
    opened: Opener,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    order: list[int],
    flushed: list[int],
) -> None:
    monkeypatch.setattr(flushing, "TOGETHER_BYTES", 1)
    begun: list[int] = []
    noting_begun(monkeypatch, begun.append)
    checkpointer = opened(0, 8 * VERSION_BYTES, config=CONSUMED)
    for version in order:
        checkpointer.prefetch_enqueue(version)
    faults.hold()
    state = np.zeros(VERSION_BYTES // 8)
    checkpointer.protect("state", state)
    checkpointer.checkpoint(0)
    faults.until_waiting()  # the flush of version 0 has begun, before there was another one
    for version in range(1, 8):
        checkpointer.checkpoint(version)
    faults.release()
    checkpointer.wait()

    assert begun == flushed


def test_what_must_leave_for_a_version_that_waits_is_flushed_before_the_rest(
    opened: Opener, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "TOGETHER_BYTES", 1)
    begun: list[int] = []
    noting_begun(monkeypatch, begun.append)
    checkpointer = opened(0, 8 * VERSION_BYTES, config=CONSUMED)
    # Of all neighbours, 4 and 5 are restored last; alone, 2 is.
    for version in (3, 0, 6, 1, 7, 4, 5, 2):
        checkpointer.prefetch_enqueue(version)
    faults.hold()
    checkpointer.protect("state", np.zeros(VERSION_BYTES, np.uint8))
    checkpointer.checkpoint(0)
    faults.until_waiting()  # the flush of version 0 has begun, before there was another one
    for version in range(1, 8):
        checkpointer.checkpoint(version)
    checkpointer.protect("state", np.zeros(2 * VERSION_BYTES, np.uint8))
    host = checkpointer._core.tiers[0]
    writing = threading.Thread(target=checkpointer.checkpoint, args=(8,))
    writing.start()
    until(lambda: len(host.demands) == 1, "version 8 waits for room")
    faults.release()
    writing.join(WAIT_S)
    checkpointer.wait()

    assert begun[:3] == [0, 5, 4]
    assert host.awaited == {}


def test_no_flush_begins_between_two_reads_of_storage(
    opened: Opener, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "TOGETHER_BYTES", 1)
    first = opened(0, 0)
    state = history(first, 4)
    first.close()
    checkpointer = opened(0, 8 * VERSION_BYTES, config=CONSUMED)
    checkpointer.protect("state", state)
    faults.hold()
    for version in range(4, 8):
        state[:] = version + 1
        checkpointer.checkpoint(version)
    faults.until_waiting()  # the first flush has begun; the others follow it
    read: list[int] = []
    noting_begun(monkeypatch, lambda _: read.append(checkpointer.stats.prefetches["host"]))
    faults.hold_reads()
    for version in range(4):
        checkpointer.prefetch_enqueue(version)
    checkpointer.prefetch_start()
    faults.until_waiting()
    core = checkpointer._core
    # A prefetch cannot follow the one before at once if its version's manifest was not read yet.
    until(lambda: len(core.entries) == 8, "all manifests have been read")
    faults.release()
    until(lambda: len(read) == 3, "the other flushes have begun")

    assert read == [4, 4, 4]
    for version in range(8):
        assert_restores(checkpointer, state, version)


def test_a_flush_under_way_waits_while_storage_is_read(
    opened: Opener, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "_STORED_BYTES", 1 << 20)
    pieces = 2 * QUEUED_MAX
    first = opened(0, 0)
    state = history(first, 1)
    first.close()
    checkpointer = opened(0, 2 * pieces << 20, config=CONSUMED)
    checkpointer.protect("state", np.ones(pieces << 20, np.uint8))
    faults.hold()
    faults.writes = 0
    saved = checkpointer.checkpoint(1)
    faults.until_waiting()
    faults.hold_reads()
    reading = threading.Thread(
        target=checkpointer.restart, args=(0,), kwargs={"into": {"state": state}}
    )
    reading.start()
    until(lambda: len(checkpointer._core.storage_reads) == 1, "storage is being read")
    faults.release_writes()
    time.sleep(0.2)

    assert faults.writes <= QUEUED_MAX + 1  # what was queued, and what was being queued
    assert not saved.done()
    faults.release()
    reading.join(WAIT_S)
    assert saved.result(WAIT_S) == 1


def test_a_checkpoint_that_waits_for_room_has_its_flush(opened: Opener, faults: Faults) -> None:
    # Otherwise it would wait as long as storage is read.
    first = opened(0, 0)
    state = history(first, 1)
    first.close()
    checkpointer = opened(0, VERSION_BYTES, config=CONSUMED)
    checkpointer.protect("state", state)
    faults.hold_reads()
    reading = threading.Thread(
        target=checkpointer.restart, args=(0,), kwargs={"into": {"state": np.zeros_like(state)}}
    )
    reading.start()
    faults.until_waiting()
    checkpointer.checkpoint(1)

    checkpointer.checkpoint(2)  # waits until version 1 is flushed

    faults.release()
    reading.join(WAIT_S)
    checkpointer.wait()
    assert checkpointer.versions() == [1, 2]


def test_a_flush_past_the_host_cache_waits_too(opened: Opener, faults: Faults) -> None:
    first = opened(0, 0)
    state = history(first, 1)
    first.close()
    checkpointer = opened(4 * VERSION_BYTES, VERSION_BYTES // 2, config=CONSUMED)
    checkpointer.protect("state", state)
    faults.hold_reads()
    reading = threading.Thread(
        target=checkpointer.restart, args=(0,), kwargs={"into": {"state": np.zeros_like(state)}}
    )
    reading.start()
    faults.until_waiting()
    writes = faults.writes
    saved = checkpointer.checkpoint(1)
    until(lambda: checkpointer.stats.bypassed["oversized"] == 1, "it passes the host cache by")
    time.sleep(0.1)

    assert faults.writes == writes
    faults.release()
    reading.join(WAIT_S)
    assert saved.result(WAIT_S) == 1


def test_a_wait_for_a_flush_does_not_wait_for_reads(opened: Opener, faults: Faults) -> None:
    first = opened(0, 0)
    state = history(first, 1)
    first.close()
    checkpointer = opened(0, 8 * VERSION_BYTES, config=CONSUMED)
    checkpointer.protect("state", state)
    faults.hold_reads()
    reading = threading.Thread(
        target=checkpointer.restart, args=(0,), kwargs={"into": {"state": np.zeros_like(state)}}
    )
    reading.start()
    faults.until_waiting()
    checkpointer.checkpoint(1)

    checkpointer.wait(1)

    assert reading.is_alive()
    faults.release()
    reading.join(WAIT_S)


def test_a_flush_that_waits_for_room_lets_prefetches_have_it(
    opened: Opener, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a thread of the user's that waits for the flush comes before them.
    monkeypatch.setattr(flushing, "TOGETHER_BYTES", 1)  # version 1 is being written, and no other
    first = opened(0, 0)
    state = history(first, 1)
    first.close()
    faults.hold()
    checkpointer = opened(2 * VERSION_BYTES, 2 * VERSION_BYTES, config=CONSUMED)
    checkpointer.protect("state", state)
    for version in (1, 2):
        checkpointer.checkpoint(version)
    host = checkpointer._core.tiers[1]
    until(lambda: len(host.lives) == 2, "the host cache is full")
    checkpointer.protect("state", np.zeros(2 * len(state)))  # which needs all of it
    checkpointer.checkpoint(3)
    until(
        lambda: len(host.flushes_waiting) == 1, "the flush of the GPU cache waits for host memory"
    )
    for version in (3, 0):
        checkpointer.prefetch_enqueue(version)

    assert not host.demanded
    checkpointer.restart(2, into={"state": state})  # which makes room for version 0, not for 3
    until(lambda: checkpointer.stats.prefetches["host"] == 1, "the prefetch has taken it")
    faults.release()
    checkpointer.wait()
    assert checkpointer.versions() == [0, 1, 3]


def test_removals_wait_for_reads_and_share_a_sync(
    opened: Opener, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[list[int]] = []
    discard_all = FaultyDirectory.discard_all

    def noted(self: FaultyDirectory, name: str, versions: Any) -> list[int]:
        removed.append(list(versions))
        return discard_all(self, name, removed[-1])

    monkeypatch.setattr(FaultyDirectory, "discard_all", noted)
    first = opened(0, 0)
    state = history(first, 1)
    first.close()
    checkpointer = opened(0, 8 * VERSION_BYTES, config=CONSUMED)
    checkpointer.protect("state", state)
    for version in range(1, 5):
        checkpointer.checkpoint(version)
    checkpointer.wait()
    faults.hold_reads()
    reading = threading.Thread(
        target=checkpointer.restart, args=(0,), kwargs={"into": {"state": np.zeros_like(state)}}
    )
    reading.start()
    faults.until_waiting()
    for version in (3, 1, 2):
        checkpointer.restart(version)
    assert removed == []
    faults.release()
    reading.join(WAIT_S)
    checkpointer.close()

    assert sorted(map(sorted, removed)) in ([[0], [1, 2, 3]], [[0, 1, 2, 3]])


def test_a_number_that_is_wanted_again_does_not_wait_for_reads(
    opened: Opener, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_REMOVED_AFTER_S", 2 * WAIT_S)
    first = opened(0, 0)
    state = history(first, 1)
    first.close()
    checkpointer = opened(0, 8 * VERSION_BYTES, config=CONSUMED)
    checkpointer.protect("state", state)
    checkpointer.checkpoint(1).result(WAIT_S)
    faults.hold_reads()
    reading = threading.Thread(
        target=checkpointer.restart, args=(0,), kwargs={"into": {"state": np.zeros_like(state)}}
    )
    reading.start()
    faults.until_waiting()
    checkpointer.restart(1)

    began = time.monotonic()
    checkpointer.checkpoint(1)
    assert time.monotonic() - began < WAIT_S
    faults.release()
    reading.join(WAIT_S)
