"""Which lines extents of a drive allow, and how their use ends."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashwarp.errors import ArgumentError, StorageError
from flashwarp.nvme.drive_extents import DriveExtents, on_drive
from flashwarp.nvme.queue_pair import NamespacePart
from flashwarp.storage import Memory
from support.extents import check_arrays_by_extents

KIB = 1024


def extents_of(*ends: int, block_bytes: int = 512) -> DriveExtents:
    """Extents that end at these bytes, and lie apart."""
    namespace: Any = SimpleNamespace(block_bytes=block_bytes)
    parts = [NamespacePart(end, number << 30) for number, end in enumerate(ends, 1)]
    return DriveExtents(namespace, parts, "a.bin")


def stale() -> StorageError:
    return StorageError(errno.EREMCHG, "stale", "a.bin")


def test_parts_that_lie_one_behind_the_other_are_one() -> None:
    namespace: Any = SimpleNamespace(block_bytes=512)
    parts = [NamespacePart(*each) for each in ((8, 100), (16, 100), (24, 50), (32, 100))]

    assert DriveExtents(namespace, parts).parts == ((16, 100), (24, 50), (32, 100))


@pytest.mark.parametrize(
    ("ends", "longest"),
    [
        ((4 * KIB, 12 * KIB), 4 * KIB),
        ((64 * KIB, 192 * KIB, 193 * KIB), 64 * KIB),
        ((24 * KIB, 32 * KIB, 100 * KIB), 8 * KIB),
    ],
)
def test_longest_line_ends_where_extents_do(ends: tuple[int, ...], longest: int) -> None:
    extents = extents_of(*ends)

    extents.check_line(longest)
    with pytest.raises(ArgumentError, match=rf"a\.bin ends at .* take line={longest} or"):
        extents.check_line(2 * longest)


def test_one_extent_allows_every_line() -> None:
    extents_of(20 * KIB).check_line(2 << 20)


def test_line_shorter_than_a_block_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"line=512, but the blocks of .* have 4096 bytes"):
        extents_of(8 * KIB, block_bytes=4096).check_line(512)


def test_last_block_in_part_can_be_read_only() -> None:
    extents = extents_of(8 * KIB)

    extents.check_end(5000, writable=False)
    extents.check_end(5120, writable=True)
    with pytest.raises(ArgumentError, match=r"a\.bin has 5000 bytes, no multiple of the drive's"):
        extents.check_end(5000, writable=True)


def test_end_retires_users_and_refuses_others() -> None:
    extents = extents_of(8 * KIB)
    retired: list[str] = []
    with extents.using(lambda: retired.append("first")):
        pass
    with extents.using(lambda: retired.append("second")) as ended:
        pass
    ended()
    assert extents.ended is None

    extents.end(stale)
    extents.end(stale)

    assert retired == ["first"]
    assert str(extents.ended) == str(stale())
    with pytest.raises(StorageError, match="stale"), extents.using(lambda: None):
        pytest.fail("was used")


def test_user_that_fails_keeps_no_other_from_its_end() -> None:
    extents = extents_of(8 * KIB)
    retired: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError

    for retire in (lambda: retired.append("first"), fail, lambda: retired.append("third")):
        with extents.using(retire):
            pass

    with pytest.raises(ZeroDivisionError):
        extents.end(stale)

    assert sorted(retired) == ["first", "third"]


def test_use_that_cannot_start_is_not_retired() -> None:
    extents = extents_of(8 * KIB)

    with pytest.raises(ZeroDivisionError), extents.using(lambda: pytest.fail("retired")):
        raise ZeroDivisionError

    extents.end(stale)


def test_end_waits_for_a_use_that_starts() -> None:
    extents = extents_of(8 * KIB)
    retired = threading.Event()
    with extents.using(retired.set):
        ending = threading.Thread(target=extents.end, args=(stale,))
        ending.start()
        assert not retired.wait(0.05), "it would have missed the queues that start"
    ending.join(10)

    assert retired.is_set()


def test_storage_in_memory_lies_on_no_drive() -> None:
    with Memory(4 * KIB) as storage:
        assert on_drive(storage) is None


@pytest.mark.parametrize("line", [512, 4096, 8192])
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_kernels_look_extents_up(tmp_path: Path, line: int, count: int) -> None:
    check_arrays_by_extents(tmp_path, "cpu", "direct", line, count)
