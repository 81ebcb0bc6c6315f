"""Indices out of bounds in your own kernels: never followed, and raised after the launch."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import BoundsError, StorageError
from flashwarp.storage import File
from flashwarp.testing import Faulty

SOURCE = """
#include "flashwarp/array.cuh"
FW_KERNEL add_up(fw::array<const int64_t> data, const int64_t* idx, uint64_t n, int64_t* sum) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) {
    fw::atomic::add(reinterpret_cast<uint64_t*>(sum), uint64_t(data[idx[i]]));
  }
}
FW_KERNEL put(fw::array<int64_t> data, const int64_t* idx, uint64_t n, int64_t value) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) {
    data.store(idx[i], value);
  }
}
"""


@pytest.fixture(scope="module")
def program() -> fw.program.Program:
    return fw.compile(SOURCE, device="cpu")


@pytest.fixture
def storage(tmp_path: Path) -> Faulty:
    np.arange(1000).tofile(tmp_path / "f")
    return Faulty(File(tmp_path / "f", writable=True))


@pytest.fixture
def x(storage: Faulty) -> Iterator[fw.Array]:
    with fw.open(storage, "r+", "i8", (100, 10), device="cpu", line=512, cache=4096) as opened:
        yield opened


def add_up(program: fw.program.Program, x: fw.Array, idx: list[int]) -> int:
    total = np.zeros(1, np.int64)
    program["add_up"](x, np.array(idx, np.int64), len(idx), total, warps=1)
    return int(total[0])


def test_stray_loads_read_zero_and_are_raised_with_their_number(
    program: fw.program.Program, x: fw.Array, storage: Faulty
) -> None:
    assert add_up(program, x, [5, 1000, 7, 1 << 40, -1]) == 12

    with pytest.raises(BoundsError) as caught:
        x.wait()

    told = str(caught.value)
    assert f"index 1000, which is out of bounds for the array {storage.path}" in told
    assert "shape (100, 10), 1000 elements, the first of 3 such" in told
    x.wait()  # once
    assert add_up(program, x, [-2]) == 0
    with pytest.raises(BoundsError, match=r"index -2,.*the first of 1 such"):
        x.wait()


def test_stray_stores_change_nothing(program: fw.program.Program, x: fw.Array) -> None:
    program["put"](x, np.array([3, 1000, -1]), 3, 77, warps=1)

    with pytest.raises(IndexError, match="first of 2 such"):
        x.gather([0])

    expected = np.arange(1000).reshape(100, 10)
    expected[0, 3] = 77
    assert (x[...] == expected).all()


def test_stray_index_that_nobody_waited_for_is_raised_by_close(
    program: fw.program.Program, storage: Faulty
) -> None:
    x = fw.open(storage, "r+", "i8", device="cpu")
    add_up(program, x, [2000])

    with pytest.raises(BoundsError, match="index 2000"):
        x.close()

    assert x.closed


def test_stray_index_beside_a_failed_transfer(
    program: fw.program.Program, x: fw.Array, storage: Faulty
) -> None:
    storage.inject("read eio")

    add_up(program, x, [1, 5000])

    with pytest.raises(StorageError) as caught:
        x.wait()
    assert "index 5000" in caught.value.__notes__[0]
    storage.heal()
    assert add_up(program, x, [1]) == 1
    x.wait()


def test_stray_index_is_of_its_array(
    program: fw.program.Program, x: fw.Array, tmp_path: Path
) -> None:
    np.arange(10).tofile(tmp_path / "g")
    with fw.open(tmp_path / "g", dtype="i8", cache=x.cache) as y:
        add_up(program, y, [10])

        x.wait()
        with pytest.raises(BoundsError, match=r"/g of shape \(10,\)"):
            y.wait()


def test_stray_index_is_not_of_an_asynchronous_call(
    program: fw.program.Program, x: fw.Array
) -> None:
    add_up(program, x, [1000])

    with pytest.raises(BoundsError, match="index 1000"):
        x.gather_async([1])  # the next call raises it, and no future does
    assert (x.gather_async([1]).result() == np.arange(10, 20)).all()
    x.wait()


def test_nothing_that_is_noted_while_somebody_reads_gets_lost(
    program: fw.program.Program, x: fw.Array
) -> None:
    """The host cleared the record after it had read it: what came in between was gone."""
    each, rounds = 20_000, 0
    stray = np.full(each, 1000, np.int64)
    total = np.zeros(1, np.int64)
    ended = threading.Event()

    def note() -> None:
        nonlocal rounds
        # On a busy machine this thread may have long turns.
        while rounds < 20 or (reads < 3 and rounds < 2000):
            program["add_up"](x, stray, each, total, warps=1)
            rounds += 1
        ended.set()

    told, reads = 0, 0
    writer = threading.Thread(target=note)
    writer.start()
    while True:
        last = ended.is_set()
        failure = x._attachment._failures.take(
            "a read", x._attachment.launcher.volume, lambda: True
        )
        if failure is not None:
            told += int(re.findall("first of (.*) such", str(failure))[0])
            reads += 1
        if last:
            break
    writer.join()

    assert told == each * rounds
    assert reads > 1


def test_failure_that_comes_while_another_is_read_is_told_next(
    program: fw.program.Program, x: fw.Array, storage: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found the record taken, and what it should have read passed as zeros."""
    storage.inject("read eio")
    add_up(program, x, [1])
    for name in ("upload", "fill"):  # by which the host lets kernels know that it has read
        real = getattr(x.device, name)

        def meanwhile(*arguments: Any, real: Any = real) -> None:
            monkeypatch.undo()
            assert add_up(program, x, [500, 1000]) == 0
            real(*arguments)

        monkeypatch.setattr(x.device, name, meanwhile)

    with pytest.raises(StorageError, match="at offset 0 ") as caught:
        x.wait()
    assert "index 1000" in caught.value.__notes__[0], "indices are read after commands"
    with pytest.raises(StorageError, match="at offset 3584 "):
        x.wait()
    x.wait()  # once


def test_failures_after_the_first_are_told_too(x: fw.Array, storage: Faulty) -> None:
    """They were not even counted."""
    storage.inject("read eio")

    with pytest.raises(StorageError) as caught:
        x.gather(np.arange(100))

    notes = "".join(caught.value.__notes__)
    assert re.search(r"and \d+ more commands failed: on bytes \d+\.\., ", notes)
    assert re.search(r", and \d+ of which no more is known", notes)
    storage.heal()
    assert (x.gather(np.arange(100)) == np.arange(1000).reshape(100, 10)).all()
