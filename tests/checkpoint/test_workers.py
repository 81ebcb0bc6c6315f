"""Background threads: few of them, each error raised, and pieces that are moved without them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoint.faults import WAIT_S, Faults, Opener
from checkpoint.test_checkpointer import until
from flashwarp import endings
from flashwarp.checkpoint.pieces import AT_A_TIME, STORAGE_THREADS, Pieces
from flashwarp.checkpoint.workers import Crew
from flashwarp.errors import WaitTimeout


def threads_of_checkpointers() -> list[str]:
    names = [each.name for each in threading.enumerate()]
    return [name for name in names if name.startswith("flashwarp-checkpoint")]


def test_a_checkpointer_with_all_kinds_of_work_has_few_threads(
    opened: Opener, faults: Faults, tmp_path: Path
) -> None:
    checkpointer = opened("64 MiB", "128 MiB", remote=tmp_path / "remote")
    faults.hold()  # writes do not end, so every thread that may write has begun to
    for name, nbytes in (("large", 48 << 20), ("small", 1000)):
        checkpointer.protect("state", np.zeros(nbytes, np.uint8))
        for version in range(1 if name == "large" else 2 * STORAGE_THREADS):
            checkpointer.checkpoint(version, name)
    checkpointer.prefetch_enqueue(0, "large")
    checkpointer.prefetch_start()
    until(lambda: faults.writes >= AT_A_TIME, "pieces are written side by side")

    names = threads_of_checkpointers()
    assert len([name for name in names if "storage" in name]) <= STORAGE_THREADS == 10
    assert len(names) <= 21, names
    faults.release()
    checkpointer.wait(name="large")
    checkpointer.wait(name="small")
    checkpointer.close()
    assert not threads_of_checkpointers()


def test_a_checkpointer_at_rest_has_one_thread_for_storage(opened: Opener) -> None:
    opened()

    names = threads_of_checkpointers()
    assert [name for name in names if "storage" in name] == ["flashwarp-checkpoint-storage-0"]


def test_pieces_are_moved_by_whoever_waits_if_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew("storage", endings.Lock(), STORAGE_THREADS)
    pieces = Pieces(crew, WAIT_S)
    crew.stop()
    assert not crew.join(WAIT_S)
    moved: list[int] = []

    jobs = ((1 << 20, lambda n=number: moved.append(n)) for number in range(30))
    assert pieces.move(jobs, lambda: True)

    assert moved == list(range(30))


def test_a_piece_that_fails_ends_the_others_and_is_raised() -> None:
    crew = Crew("storage", endings.Lock(), STORAGE_THREADS)
    pieces = Pieces(crew, WAIT_S)
    under_way, moved = threading.Semaphore(AT_A_TIME), []

    def act(number: int) -> None:
        assert under_way.acquire(blocking=False), "more than are moved at a time"
        if number == 5:
            raise OSError(f"piece {number}")
        time.sleep(1e-3)  # or others could move all the rest before the failure is noted
        moved.append(number)
        under_way.release()

    jobs = ((1 << 20, lambda n=number: act(n)) for number in range(100))
    with pytest.raises(OSError, match="piece 5"):
        pieces.move(jobs, lambda: True)

    assert len(moved) < 99
    crew.stop()
    assert not crew.join(WAIT_S)


def test_pieces_that_do_not_end_are_an_error_in_time() -> None:
    crew = Crew("storage", endings.Lock(), STORAGE_THREADS)
    told: list[BaseException] = []
    crew.broken = told.append
    pieces = Pieces(crew, 0.3)
    taken, answer = threading.Event(), threading.Event()
    stuck: list[int] = []

    def act(number: int) -> None:
        if threading.current_thread().name.startswith("flashwarp-checkpoint"):
            stuck.append(number)
            taken.set()
            answer.wait(WAIT_S)
        else:
            assert taken.wait(WAIT_S), "no thread of the crew takes a piece"

    jobs = ((1 << 20, lambda n=number: act(n)) for number in range(100))
    with pytest.raises(WaitTimeout, match="none of them has ended") as caught:
        pieces.move(jobs, lambda: True)

    assert told == [caught.value]
    assert len(stuck) <= AT_A_TIME
    answer.set()
    crew.stop()
    assert not crew.join(WAIT_S)
    assert len(stuck) <= AT_A_TIME, "a piece that was given up was moved"


def test_an_error_of_a_thread_itself_is_told(caplog: pytest.LogCaptureFixture) -> None:
    crew = Crew("tested", endings.Lock())
    told: list[BaseException] = []
    crew.broken = told.append

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    jobs = [broken]
    crew.add(lambda: jobs.pop() if jobs else None)
    crew.join(WAIT_S)

    assert [str(each) for each in told] == ["a bug"]
    assert "has failed" in caplog.text
