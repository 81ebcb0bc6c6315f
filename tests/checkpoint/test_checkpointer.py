"""The checkpointer: what its calls promise, tier by tier, with storage that waits and fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from checkpoint.faults import WAIT_S, Faults, Opener
from flashwarp.checkpoint import flushing
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.tier import Entry
from flashwarp.errors import (
    ArgumentError,
    CheckpointError,
    ClosedError,
    DtypeError,
    ExistingVersionError,
    ForkError,
    MissingVersionError,
    ReadOnlyError,
    WaitTimeout,
)

COUNT = 2048  # float64: 16 KiB, four of which fit into the GPU cache of 64 KiB
Array = npt.NDArray[np.float64]


def history(checkpointer: Checkpointer, versions: int, count: int = COUNT) -> Array:
    """Checkpoint arrays of one number each: version n holds n + 1."""
    state = np.zeros(count)
    checkpointer.protect("state", state)
    for version in range(versions):
        state[:] = version + 1
        checkpointer.checkpoint(version)
    return state


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(1e-3)


def assert_restores(checkpointer: Checkpointer, state: Array, version: int) -> None:
    state[:] = -1
    checkpointer.restart(version)
    assert (state == version + 1).all()


# Writing and reading.


def test_the_future_is_done_when_the_version_is_durable(opened: Opener, faults: Faults) -> None:
    checkpointer = opened()
    checkpointer.protect("state", np.zeros(COUNT))
    faults.hold()

    saved = checkpointer.checkpoint(3)
    faults.until_waiting()
    assert not saved.done()
    with pytest.raises(WaitTimeout, match=r"version 3 of 'default' is not durable after 0\.01 s"):
        saved.result(timeout=0.01)
    faults.release()

    assert saved.result(timeout=WAIT_S) == 3
    checkpointer.wait(3)


def test_histories_of_different_names_are_apart(opened: Opener) -> None:
    checkpointer = opened()
    state = np.zeros(COUNT)
    checkpointer.protect("state", state)
    for name in ("forward", "backward"):
        state[:] = len(name)
        checkpointer.checkpoint(1, name=name)

    checkpointer.restart(1, name="forward")
    assert state[0] == 7
    checkpointer.restart(1, name="backward")
    assert state[0] == 8
    assert checkpointer.versions() == []
    assert checkpointer.versions("forward") == [1]


# Regions.


def test_some_regions_are_saved_and_restored(opened: Opener) -> None:
    checkpointer = opened()
    a, b = np.full(10, 1.0), np.full(20, 2)
    checkpointer.protect("a", a)
    checkpointer.protect("b", b)
    checkpointer.checkpoint(0)
    checkpointer.checkpoint(1, only=["b"])
    a[:], b[:] = 0, 0

    checkpointer.restart(0, only=["b"])
    assert (a[0], b[0]) == (0, 2)
    restored = checkpointer.restart(0)
    assert (a[0], b[0]) == (1, 2)
    assert restored["a"] is a
    assert [region.name for region in checkpointer.regions(1)] == ["b"]


def test_a_region_that_is_not_protected_is_restored_into_a_new_array(opened: Opener) -> None:
    checkpointer = opened()
    history(checkpointer, 1)
    checkpointer.unprotect("state")

    restored = checkpointer.restart(0)

    assert restored["state"].dtype == np.float64
    assert (restored["state"] == 1).all()


def test_a_callable_region_has_any_size_at_each_version(opened: Opener) -> None:
    checkpointer = opened()
    given: list[Array] = []
    checkpointer.protect("packed", lambda: np.arange(float(size)), restore=given.append)
    for size in (1, 3000, 0, 77):
        checkpointer.checkpoint(size)

    assert [checkpointer.recover_size(size, "packed") for size in (1, 3000, 0, 77)] == [
        8,
        24000,
        0,
        616,
    ]
    for size in (3000, 0, 1, 77):
        restored = checkpointer.restart(size)["packed"]
        assert (restored == np.arange(float(size))).all()
        assert given.pop() is restored


def test_a_region_that_is_protected_again_may_have_another_size(opened: Opener) -> None:
    checkpointer = opened()
    checkpointer.protect("state", np.full(10, 1.0))
    checkpointer.checkpoint(0)
    checkpointer.protect("state", np.full(99, 2.0))
    checkpointer.checkpoint(1)

    small = np.empty(checkpointer.recover_size(0, "state") // 8)
    checkpointer.protect("state", small)
    checkpointer.restart(0)

    assert (small == 1).all()
    with pytest.raises(CheckpointError, match=r"stored with shape \(99,\), 792 bytes, .* \(10,\)"):
        checkpointer.restart(1)


def test_zero_bytes_and_scalars_are_regions(opened: Opener) -> None:
    checkpointer = opened()
    empty, scalar = np.zeros((0, 3), np.int16), np.array(5.0)
    checkpointer.protect("empty", empty)
    checkpointer.protect("scalar", scalar)
    checkpointer.checkpoint(0)
    scalar[()] = 0
    checkpointer.wait(0)

    checkpointer.restart(0)

    assert scalar == 5


# Tiers.


def test_a_version_larger_than_a_cache_goes_to_the_next_tier(opened: Opener) -> None:
    checkpointer = opened("64 KiB", "1 MiB")
    for count, version in ((20_000, 0), (300_000, 1)):
        state = np.full(count, float(version))
        checkpointer.protect("state", state)
        checkpointer.checkpoint(version)
        state[:] = -1
        checkpointer.restart(version)
        assert (state == version).all()

    stats = checkpointer.stats
    assert stats.bypassed["oversized"] == 3
    assert stats.restarts_from == {"gpu": 0, "host": 1, "ssd": 1}


def test_prefetches_bring_versions_before_they_are_restored(opened: Opener) -> None:
    with opened() as first:
        history(first, 20)
    checkpointer = opened()
    state = np.zeros(COUNT)
    checkpointer.protect("state", state)
    for version in range(20):
        checkpointer.prefetch_enqueue(version)
    checkpointer.prefetch_start()
    # Four fit into the GPU cache, and sixteen into the host cache.
    until(lambda: checkpointer.stats.prefetches["gpu"] >= 4, "prefetches fill the GPU cache")

    for version in range(20):
        until(
            lambda version=version: checkpointer.stats.prefetches["gpu"] >= min(version + 3, 20),
            "a prefetch follows each restore",
        )
        assert_restores(checkpointer, state, version)

    stats = checkpointer.stats
    assert stats.restarts_from == {"gpu": 20, "host": 0, "ssd": 0}
    assert stats.hints.useful == 20
    assert stats.prefetch_distance > 1


def test_nothing_is_prefetched_before_it_was_started(opened: Opener, faults: Faults) -> None:
    with opened() as first:
        history(first, 4)
    checkpointer = opened(config={"restart_prefetches": False})
    checkpointer.protect("state", np.zeros(COUNT))
    for version in range(4):
        checkpointer.prefetch_enqueue(version)
    checkpointer.restart(0)

    assert checkpointer.stats.prefetches == {"gpu": 0, "host": 0}
    checkpointer.prefetch_start()
    until(lambda: checkpointer.stats.prefetches["gpu"] == 3, "the start begins it")


def test_what_a_hint_pinned_stays_until_it_is_restored(opened: Opener) -> None:
    checkpointer = opened("64 KiB", "1 MiB")
    state = history(checkpointer, 4)
    checkpointer.wait()
    for version in (0, 1):
        checkpointer.prefetch_enqueue(version)
    checkpointer.prefetch_start()
    until(lambda: "2 pinned" in str(checkpointer.explain()), "both are pinned")

    for version in range(4, 30):
        state[:] = version + 1
        checkpointer.checkpoint(version)
    for version in (0, 1):
        assert_restores(checkpointer, state, version)

    assert checkpointer.stats.restarts_from["gpu"] == 2


def test_a_checkpoint_does_not_wait_for_restores_of_its_own_thread(opened: Opener) -> None:
    # Both caches are full of versions that only restores can free. The printed algorithm waits.
    checkpointer = opened("64 KiB", "64 KiB")
    state = history(checkpointer, 8)
    checkpointer.wait()
    for version in (0, 1, 2, 3, 4, 5, 6, 7):
        checkpointer.prefetch_enqueue(version)
    checkpointer.prefetch_start()
    until(lambda: str(checkpointer.explain()).count("4 pinned") == 2, "all is pinned")

    for version in range(8, 12):
        state[:] = version + 1
        checkpointer.checkpoint(version)
    assert checkpointer.stats.bypassed["full"] > 0

    for version in range(12):
        assert_restores(checkpointer, state, version)


def test_a_restore_of_a_version_that_is_being_prefetched_waits_for_it(
    opened: Opener, faults: Faults
) -> None:
    with opened() as first:
        history(first, 1)
    checkpointer = opened()
    state = np.zeros(COUNT)
    checkpointer.protect("state", state)
    faults.hold_reads()
    checkpointer.prefetch_enqueue(0)
    checkpointer.prefetch_start()
    faults.until_waiting()
    timer = threading.Timer(0.05, faults.release)
    timer.start()

    assert_restores(checkpointer, state, 0)

    timer.join()
    assert faults.reads == 1


# Hints.


def test_hints_of_versions_that_never_come_stop_nobody(opened: Opener) -> None:
    checkpointer = opened()
    for version in (100, 0, 101, 1, 102, 2):
        checkpointer.prefetch_enqueue(version)
    state = history(checkpointer, 3)
    checkpointer.prefetch_start()

    for version in range(3):
        assert_restores(checkpointer, state, version)

    card = checkpointer.stats.hints
    assert (card.honoured, card.open) == (3, 3)


def test_wrong_hints_do_not_fill_the_cache_for_ever(opened: Opener) -> None:
    checkpointer = opened(config={"passed_max": 2})
    state = history(checkpointer, 20)
    checkpointer.wait()
    for version in [0, 1, 2, 3, *range(10, 20)]:
        checkpointer.prefetch_enqueue(version)
    checkpointer.prefetch_start()

    for version in range(10, 20):
        assert_restores(checkpointer, state, version)
    for version in range(20, 30):
        state[:] = version + 1
        checkpointer.checkpoint(version)

    until(lambda: " 0 pinned" in str(checkpointer.explain()), "given up hints pin nothing")
    assert checkpointer.stats.hints.open == 4


# Discarding.


def test_a_version_is_discarded_while_it_is_flushed(opened: Opener, faults: Faults) -> None:
    checkpointer = opened()
    checkpointer.protect("state", np.zeros(COUNT))
    faults.hold()
    saved = checkpointer.checkpoint(0)
    faults.until_waiting()

    checkpointer.discard(0)
    assert isinstance(saved.exception(timeout=0), CheckpointError)
    assert checkpointer.versions() == []
    faults.release()
    checkpointer.checkpoint(0).result(timeout=WAIT_S)

    assert checkpointer.versions() == [0]


def test_consumed_versions_are_discarded_if_the_settings_say_so(
    opened: Opener, faults: Faults
) -> None:
    # Condition 5: neither storage nor the flushes of what was read are needed.
    checkpointer = opened(config={"discard_consumed": True})
    faults.hold()
    state = history(checkpointer, 10)
    for version in reversed(range(10)):
        assert_restores(checkpointer, state, version)
    faults.release()

    assert checkpointer.versions() == []
    checkpointer.close()
    assert opened().versions() == []


# Bad input.


def test_unknown_versions_and_regions_are_named(opened: Opener) -> None:
    checkpointer = opened()
    with pytest.raises(MissingVersionError, match="no version 4 of 'default': there is none"):
        checkpointer.restart(4)
    history(checkpointer, 1)

    with pytest.raises(MissingVersionError, match="no version 4 of 'default': the newest is 0"):
        checkpointer.restart(4)
    with pytest.raises(ArgumentError, match="has no region 'stat'; it has 'state'"):
        checkpointer.recover_size(0, "stat")
    with pytest.raises(ArgumentError, match="has no region 'x'"):
        checkpointer.restart(0, only=["x"])
    with pytest.raises(ArgumentError, match="has no region 'y'"):
        checkpointer.restart(0, into={"y": np.zeros(1)})
    with pytest.raises(ArgumentError, match="region 'x' is not protected; protected are: 'state'"):
        checkpointer.checkpoint(1, only=["x"])
    with pytest.raises(ArgumentError, match=r"pass a list of names, \['state'\]"):
        checkpointer.checkpoint(1, only="state")
    with pytest.raises(MissingVersionError):
        checkpointer.wait(9)
    with pytest.raises(MissingVersionError):
        checkpointer.discard(9)
    assert checkpointer.test(5, name="other") is None


def test_a_version_is_written_once(opened: Opener) -> None:
    checkpointer = opened()
    history(checkpointer, 1)

    with pytest.raises(ExistingVersionError, match="version 0 of 'default' exists: discard it"):
        checkpointer.checkpoint(0)
    checkpointer.close()
    again = opened()
    again.protect("state", np.zeros(1))
    with pytest.raises(ExistingVersionError):
        again.checkpoint(0)


def test_arrays_that_do_not_fit_are_left_as_they_are(opened: Opener) -> None:
    checkpointer = opened()
    a, b = np.full(10, 1.0), np.full(10, 2.0)
    checkpointer.protect("a", a)
    checkpointer.protect("b", b)
    checkpointer.checkpoint(0)
    a[:] = 7

    with pytest.raises(CheckpointError, match=r"region 'b' was stored with shape \(10,\)"):
        checkpointer.restart(0, into={"b": np.zeros(11)})
    with pytest.raises(DtypeError, match=r"region 'b' was stored as <f8, .* has dtype <i8"):
        checkpointer.restart(0, into={"b": np.zeros(10, np.int64)})
    with pytest.raises(ArgumentError, match="not contiguous"):
        checkpointer.restart(0, into={"b": np.zeros(20)[::2]})
    frozen = np.zeros(10)
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        checkpointer.restart(0, into={"b": frozen})

    assert (a == 7).all(), "nothing was written before all was checked"


def test_an_array_resized_behind_the_checkpointer_is_found(opened: Opener) -> None:
    checkpointer = opened()
    state = np.zeros(10)
    checkpointer.protect("state", state)
    checkpointer.checkpoint(0)
    state.resize(5, refcheck=False)

    with pytest.raises(CheckpointError, match=r"was <f8 \(10,\) when .* is <f8 \(5,\) now"):
        checkpointer.checkpoint(1)
    with pytest.raises(CheckpointError, match="protect it again"):
        checkpointer.restart(0)
    assert checkpointer.versions() == [0]


def test_a_closed_array_is_found(opened: Opener) -> None:
    checkpointer = opened()
    state = checkpointer.device.empty_array((10,), "float32")
    checkpointer.protect("state", state)
    checkpointer.checkpoint(0)
    state.close()

    with pytest.raises(ClosedError, match="the array was closed"):
        checkpointer.checkpoint(1)


@pytest.mark.parametrize(
    "thing", [None, 5, 1.5, "text", b"bytes", [1, 2]], ids=lambda thing: str(type(thing))
)
def test_what_is_no_array_callable_or_state_is_refused(opened: Opener, thing: object) -> None:
    with pytest.raises(ArgumentError, match=r"region 'x' is of type .* a dict that has it"):
        opened().protect("x", thing)


def test_a_callable_that_raises_leaves_nothing_behind(opened: Opener) -> None:
    checkpointer = opened()

    def fail() -> None:
        raise KeyError("mine")

    checkpointer.protect("bad", fail)
    with pytest.raises(KeyError, match="mine"):
        checkpointer.checkpoint(0)
    assert checkpointer.versions() == []
    checkpointer.unprotect("bad")
    checkpointer.protect("good", np.zeros(1))
    checkpointer.checkpoint(0)


def test_nothing_protected_is_nothing_to_save(opened: Opener) -> None:
    with pytest.raises(CheckpointError, match="no region is protected"):
        opened().checkpoint(0)


@pytest.mark.parametrize(
    "config",
    [
        {"timeout": 1},
        {"timeout_s": -1},
        {"eviction": "mru"},
        {"transfer_memory": 0},
        {"lookahead": 1.5},
        {"discard_consumed": 1},
        7,
    ],
)
def test_settings_are_checked(tmp_path: Path, config: object) -> None:
    with pytest.raises(ArgumentError):
        Checkpointer(tmp_path, "cpu", 0, 0, config=config)  # type: ignore[arg-type]


# Processes.


def test_the_rank_comes_from_the_environment(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert opened().rank == 3
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ArgumentError, match="RANK='x'"):
        opened(path="unused")


def test_a_consumer_reads_a_history_while_it_grows(opened: Opener) -> None:
    producer = opened()
    state = history(producer, 2)
    producer.wait()
    consumer = opened(config={"read_only": True})
    seen = np.zeros(COUNT)
    consumer.protect("state", seen)
    for version in range(6):
        consumer.prefetch_enqueue(version)
    consumer.prefetch_start()
    for version in range(2, 6):
        state[:] = version + 1
        producer.checkpoint(version)
    producer.wait()

    until(lambda: consumer.stats.prefetches["host"] >= 6, "hinted versions come when they appear")
    for version in range(6):
        assert_restores(consumer, seen, version)
    with pytest.raises(ReadOnlyError):
        consumer.checkpoint(9)


def test_versions_go_to_the_remote_store(opened: Opener, tmp_path: Path) -> None:
    with opened(remote=tmp_path / "remote") as checkpointer:
        history(checkpointer, 3)
        checkpointer.wait(tier="remote")
        checkpointer.discard(1)
    with pytest.raises(ArgumentError, match="needs a remote"):
        opened().wait(tier="remote")

    elsewhere = opened(path=tmp_path / "remote")
    assert elsewhere.versions() == [0, 2]
    state = np.zeros(COUNT)
    elsewhere.protect("state", state)
    assert_restores(elsewhere, state, 2)


def test_close_waits_for_the_remote_store(opened: Opener, tmp_path: Path) -> None:
    with opened(remote=tmp_path / "remote") as checkpointer:
        history(checkpointer, 5)

    assert opened(path=tmp_path / "remote").versions() == list(range(5))


def test_close_waits_for_an_upload_that_has_begun(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    copy = flushing.Uploader._copy

    def slow(uploader: flushing.Uploader, entry: Entry) -> bool:
        began.set()
        assert go_on.wait(WAIT_S)
        return copy(uploader, entry)

    monkeypatch.setattr(flushing.Uploader, "_copy", slow)
    checkpointer = opened(remote=tmp_path / "remote")
    history(checkpointer, 1)
    assert began.wait(WAIT_S)
    timer = threading.Timer(0.1, go_on.set)
    timer.start()

    checkpointer.close()

    timer.join()
    assert opened(path=tmp_path / "remote").versions() == [0]


def test_a_forked_child_cannot_use_it_and_ends(opened: Opener) -> None:
    checkpointer = opened()
    checkpointer.protect("state", np.zeros(COUNT))
    saved = checkpointer.checkpoint(0)
    # A thread that the child has not holds the lock while the child is made.
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with checkpointer._core.changed:
            held.set()
            let_go.wait(WAIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(WAIT_S)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        refused = 0
        for call in (
            lambda: checkpointer.restart(0),
            lambda: checkpointer.checkpoint(1),
            lambda: checkpointer.stats,
            lambda: saved.result(1),
        ):
            try:
                call()
            except ForkError:
                refused += 1
        checkpointer.close()
        os._exit(0 if refused == 4 else 1)
    let_go.set()
    holder.join()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    checkpointer.wait()


@pytest.mark.parametrize("count", [1000, 1 << 20])
def test_versions_are_durable_when_the_program_just_ends(
    opened: Opener, tmp_path: Path, count: int
) -> None:
    # Large ones are written by threads, of which an interpreter that ends starts no more.
    script = (
        "import sys, numpy as np, flashwarp as fw\n"
        "c = fw.Checkpointer(sys.argv[1], 'cpu', '16 MiB', '160 MiB')\n"
        f"c.protect('state', np.arange({count}.0))\n"
        "for version in range(20): c.checkpoint(version)\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "versions")], check=True, timeout=60
    )

    assert opened().versions() == list(range(20))


def test_a_closed_checkpointer_refuses_calls(opened: Opener) -> None:
    checkpointer = opened()
    checkpointer.close()
    checkpointer.close()

    with pytest.raises(ClosedError):
        checkpointer.checkpoint(0)
    assert "closed" in repr(checkpointer)


def test_a_version_whose_flush_is_pending_can_be_restored(opened: Opener, faults: Faults) -> None:
    checkpointer = opened()
    faults.hold()
    state = history(checkpointer, 6)
    faults.until_waiting()

    for version in reversed(range(6)):
        assert_restores(checkpointer, state, version)
    assert checkpointer.stats.stored_bytes == 0


def test_small_versions_are_flushed_together(opened: Opener, faults: Faults) -> None:
    # One at a time, a process would get less of a disk than its neighbours with large versions.
    checkpointer = opened(0)
    faults.hold()
    history(checkpointer, 4)
    for _ in range(4):
        faults.until_waiting()


def test_closing_without_draining_fails_pending_futures(opened: Opener, faults: Faults) -> None:
    checkpointer = opened()
    checkpointer.protect("state", np.zeros(COUNT))
    faults.hold()
    saved = checkpointer.checkpoint(0)
    faults.until_waiting()
    timer = threading.Timer(0.05, faults.release)
    timer.start()

    checkpointer.close(drain=False)

    timer.join()
    assert saved.done()


def test_waits_have_a_limit_and_say_what_they_waited_for(opened: Opener, faults: Faults) -> None:
    checkpointer = opened("32 KiB", "32 KiB", config={"timeout_s": 0.2})
    faults.hold()
    state = np.zeros(COUNT)
    checkpointer.protect("state", state)

    def fill() -> None:
        for version in range(8):
            checkpointer.checkpoint(version)

    with pytest.raises(WaitTimeout, match=r"waited 0\.2 s for 16384 bytes in the gpu cache: it "):
        fill()
    with pytest.raises(WaitTimeout, match=r"versions are not durable in .* \(limit 0\.05 s\)"):
        checkpointer.wait(timeout_s=0.05)
    faults.release()


def test_threads_share_a_checkpointer(opened: Opener) -> None:
    checkpointer = opened()
    failures: list[BaseException] = []

    def use(thread: int) -> None:
        try:
            state = np.zeros(COUNT)
            for version in range(15):
                state[:] = thread * 100 + version
                number = thread * 100 + version
                checkpointer.protect(f"state{thread}", state)
                checkpointer.checkpoint(number, only=[f"state{thread}"])
                checkpointer.prefetch_enqueue(number)
            for version in range(15):
                number = thread * 100 + version
                checkpointer.restart(number, into={f"state{thread}": state})
                assert (state == number).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    assert failures == []
    assert len(checkpointer.versions()) == 60
