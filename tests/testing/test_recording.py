"""The record of a storage, and the images that a power cut may leave of it."""

from __future__ import annotations

import errno

import pytest

from flashwarp.errors import StorageError
from flashwarp.storage import Memory
from flashwarp.testing import Event, Faulty, Recording
from flashwarp.testing.recording import crash_states

SECTOR = 512


def letters(image: bytes) -> str:
    """One letter a sector; a sector that is mixed shows as '?'."""
    sectors = [image[i : i + SECTOR] for i in range(0, len(image), SECTOR)]
    return "".join(
        "." if s[:1] == b"\0" else chr(s[0]) if set(s) == {s[0]} else "?" for s in sectors
    )


def recorded(sectors: int) -> Recording:
    return Recording(Memory(sectors * SECTOR))


def left(storage: Recording, limit: int = 1000) -> set[str]:
    return {letters(state.image) for state in storage.crash_states(limit)}


def test_record_keeps_order_and_bytes() -> None:
    storage = recorded(4)
    storage.write(0, b"abc")
    storage.discard(512, 512)
    storage.write_zeroes(1024, 5)
    storage.mark(7)
    storage.flush()

    events = storage.events
    assert [(e.kind, e.offset, e.nbytes, e.data) for e in events] == [
        ("write", 0, 3, b"abc"),
        ("discard", 512, 512, b""),
        ("write_zeroes", 1024, 5, b""),
        ("mark", 7, 0, b""),
        ("flush", 0, 0, b""),
    ]
    times = [t for e in events for t in (e.begin, e.end)]
    assert times == sorted(set(times))
    assert storage.read(0, 3) == b"abc"
    storage.restart()
    assert storage.events == []
    assert storage.initial[:3] == b"abc"


def test_nothing_written_is_one_state() -> None:
    storage = recorded(2)
    storage.flush()
    assert [s.image for s in storage.crash_states()] == [bytes(2 * SECTOR)]


def test_write_is_torn_at_sectors_only() -> None:
    storage = recorded(3)
    storage.write(0, b"a" * 3 * SECTOR)
    assert left(storage) == {x + y + z for x in ".a" for y in ".a" for z in ".a"}


def test_flush_makes_what_came_before_durable() -> None:
    storage = recorded(2)
    storage.write(0, b"a" * SECTOR)
    storage.flush()
    storage.mark(1)
    storage.write(SECTOR, b"b" * SECTOR)

    states = {(letters(s.image), s.mark) for s in storage.crash_states()}
    assert states == {("..", 0), ("a.", 0), ("a.", 1), ("ab", 1)}


def test_later_write_may_land_without_the_earlier() -> None:
    storage = recorded(2)
    storage.write(0, b"a" * SECTOR)
    storage.write(SECTOR, b"b" * SECTOR)
    assert left(storage) == {"..", "a.", ".b", "ab"}


def test_sector_never_goes_back() -> None:
    storage = recorded(1)
    for letter in (b"a", b"b", b"c"):
        storage.write(0, letter * SECTOR)
        if letter == b"b":
            storage.flush()
            storage.mark(1)
    after = {letters(s.image) for s in storage.crash_states() if s.mark == 1}
    assert after == {"b", "c"}


def test_part_of_a_sector_is_written_over_what_was_there() -> None:
    storage = recorded(1)
    storage.write(0, b"a" * 256)
    storage.write(256, b"a" * 256)
    images = {s.image for s in storage.crash_states()}
    assert images == {bytes(512), b"a" * 256 + bytes(256), b"a" * 512}


def test_forced_unit_access_covers_its_range_only() -> None:
    storage = recorded(2)
    events = [
        Event("write", False, 0, 1, 0, SECTOR, b"a" * SECTOR),
        Event("write", False, 2, 3, SECTOR, SECTOR, b"b" * SECTOR),
        Event("flush_range", False, 4, 5, SECTOR, SECTOR, b""),
        Event("mark", False, 6, 7, 1, 0, b""),
    ]
    after = {letters(s.image) for s in crash_states(storage.initial, events) if s.mark == 1}
    assert after == {".b", "ab"}


def test_flush_that_began_before_a_write_ended_does_not_cover_it() -> None:
    events = [
        Event("write", False, 0, 3, 0, SECTOR, b"a" * SECTOR),
        Event("flush", False, 2, 5, 0, 0, b""),
        Event("mark", False, 6, 7, 1, 0, b""),
    ]
    after = {letters(s.image) for s in crash_states(bytes(SECTOR), events) if s.mark == 1}
    assert after == {".", "a"}


def test_failed_flush_promises_nothing_and_is_not_made_good_by_the_next() -> None:
    storage = Recording(Faulty(Memory(2 * SECTOR), "flush eio n=1"))
    storage.write(0, b"a" * SECTOR)
    with pytest.raises(StorageError):
        storage.flush()
    storage.write(SECTOR, b"b" * SECTOR)
    storage.flush()
    storage.mark(1)
    after = {letters(s.image) for s in storage.crash_states() if s.mark == 1}
    assert after == {".b", "ab"}


def test_states_are_bounded_and_replayed_by_a_seed() -> None:
    storage = recorded(40)
    for i in range(40):
        storage.write(i * SECTOR, bytes([97 + i % 26]) * SECTOR)

    first = [s.image for s in storage.crash_states(100, seed=5)]
    assert len(first) == len(set(first)) == 100
    assert first == [s.image for s in storage.crash_states(100, seed=5)]
    assert first != [s.image for s in storage.crash_states(100, seed=6)]
    kinds = {letters(image) for image in first}
    assert "." * 40 in kinds
    assert any("." not in kind for kind in kinds)
    assert left(recorded(1), 0) == set()


def test_record_has_a_bound() -> None:
    storage = Recording(Memory(4096), capacity=1000)
    storage.write(0, bytes(1000))
    with pytest.raises(StorageError) as caught:
        storage.write(0, b"a")
    assert caught.value.errno == errno.ENOMEM
