"""Storages by a block map, below Python: which maps are refused, and how transfers end."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest

from flashwarp import _native
from flashwarp.storage import Memory, Storage
from flashwarp.testing import Faulty, StorageContract
from support.file_writer import wait_until

BLOCK = 4096
DEVICE_BLOCKS = 64


class Mapped(Storage):
    """A map over a storage in memory, without a file."""

    def __init__(
        self, device: Storage, extents: list[tuple[int, int, int]], nbytes: int, writable: bool
    ) -> None:
        self.device = device  # which the native storage uses
        super().__init__(
            _native.MappedStorage(device.native, extents, nbytes, writable, "/dev/null")
        )

    @property
    def path(self) -> str:
        return "/dev/null"


def shuffled(nbytes: int, seed: int) -> list[tuple[int, int, int]]:
    """Blocks of a file in any order and any places, one extent each."""
    count = -(-nbytes // BLOCK)
    places = np.random.default_rng(seed).permutation(DEVICE_BLOCKS)[:count]
    return [(i * BLOCK, int(place) * BLOCK, BLOCK) for i, place in enumerate(places)]


class TestMapOverMemory(StorageContract):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        self.extents = shuffled(len(content), 3)
        self.memory = bytearray(b"\xee" * (DEVICE_BLOCKS * BLOCK))
        self._place(content)
        self.device = Faulty(Memory(self.memory))
        return Mapped(self.device, self.extents, len(content), writable)

    def damage(self, folder: Path, storage: Storage) -> tuple[int, int]:
        lost = [place for logical, place, _ in self.extents if logical >= self.nbytes // 2 - BLOCK]
        rules = [f"read eio bytes={place}-{place + BLOCK}" for place in lost]
        self.device.inject("; ".join(rules))
        return errno.EIO, 0

    def _place(self, content: bytes) -> None:
        for logical, physical, _ in self.extents:
            part = content[logical : logical + BLOCK]
            self.memory[physical : physical + len(part)] = part

    def held(self, folder: Path) -> bytes:
        parts = [self.memory[physical : physical + n] for _, physical, n in self.extents]
        used = {physical for _, physical, _ in self.extents}
        for place in range(0, len(self.memory), BLOCK):
            if place not in used:
                assert self.memory[place : place + BLOCK] == b"\xee" * BLOCK
        content = b"".join(parts)
        assert set(content[self.nbytes :]) == {0xEE}, "bytes behind the file's end were changed"
        return content[: self.nbytes]


@pytest.mark.parametrize(
    ("extents", "nbytes", "match"),
    [
        ([(0, 0, BLOCK)], BLOCK + 1, "cover 4096 of 4097"),
        ([], 1, "cover 0 of 1"),
        ([(BLOCK, 0, BLOCK)], BLOCK, "does not follow"),
        ([(0, 0, BLOCK), (2 * BLOCK, BLOCK, BLOCK)], 3 * BLOCK, "does not follow"),
        ([(0, 512, BLOCK)], BLOCK, "whole number"),
        ([(0, 0, 512)], 512, "whole number"),
        ([(0, 0, 0)], 0, "whole number"),
        ([(0, DEVICE_BLOCKS * BLOCK, BLOCK)], BLOCK, "ends beyond"),
        ([(0, (DEVICE_BLOCKS - 1) * BLOCK, 2 * BLOCK)], 2 * BLOCK, "ends beyond"),
        ([(0, (1 << 64) - BLOCK, 2 * BLOCK)], 2 * BLOCK, "ends beyond"),
        ([(0, BLOCK, (1 << 64) - BLOCK)], BLOCK, "ends beyond"),
        ([(0, 0, 2 * BLOCK), (2 * BLOCK, BLOCK, BLOCK)], 3 * BLOCK, "overlaps"),
        ([(0, 0, BLOCK), (BLOCK, 0, BLOCK)], 2 * BLOCK, "overlaps"),
        ([(0, 0, 2 * BLOCK)], 1, "beyond the end of the file"),
    ],
)
def test_maps_that_cannot_be_are_refused(
    extents: list[tuple[int, int, int]], nbytes: int, match: str
) -> None:
    with Memory(DEVICE_BLOCKS * BLOCK) as device, pytest.raises(ValueError, match=match):
        _native.MappedStorage(device.native, extents, nbytes, False, "f")


def test_device_that_takes_no_writes_makes_no_writable_map() -> None:
    with (
        Memory(bytearray(BLOCK), writable=False) as device,
        pytest.raises(ValueError, match="takes no writes"),
    ):
        _native.MappedStorage(device.native, [(0, 0, BLOCK)], BLOCK, True, "f")


def test_threads_that_write_parts_of_one_block_lose_nothing() -> None:
    """Blocks are read and written anew for each part."""
    parts, part_bytes = 8, BLOCK // 8
    with Memory(DEVICE_BLOCKS * BLOCK) as device:
        storage = Mapped(device, shuffled(BLOCK, 1), BLOCK, True)

        def write(number: int) -> None:
            for turn in range(1, 200):
                storage.write(number * part_bytes, bytes([turn]) * part_bytes)

        threads = [threading.Thread(target=write, args=(i,)) for i in range(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert storage.read(0, BLOCK) == bytes([199]) * BLOCK
        storage.close()


def test_revoked_map_refuses_everything_and_may_be_revoked_again() -> None:
    with Memory(DEVICE_BLOCKS * BLOCK) as device:
        storage = Mapped(device, shuffled(BLOCK, 1), BLOCK, True)
        native = storage.native
        native.revoke(1000)
        native.revoke(1000)
        for act in (
            lambda: native.read(0, 1),
            lambda: native.write(0, b"x"),
            lambda: native.write_zeroes(0, 1),
            native.flush,
        ):
            with pytest.raises(OSError, match="stale block map") as refused:
                act()
            assert refused.value.errno == errno.EREMCHG
        assert device.read(0, device.nbytes) == bytes(device.nbytes)


def test_revoke_waits_for_transfers_in_flight() -> None:
    with Memory(DEVICE_BLOCKS * BLOCK) as memory:
        device = Faulty(memory, "write delay=300000us")
        storage = Mapped(device, [(0, 0, BLOCK)], BLOCK, True)
        writer = threading.Thread(target=lambda: storage.write(0, b"x" * BLOCK))
        writer.start()
        wait_until(lambda: device.hits()[0], "the write has begun")

        with pytest.raises(TimeoutError):
            storage.native.revoke(1)
        assert memory.read(0, 1) == b"\0"
        storage.native.revoke(10_000)
        assert memory.read(0, 1) == b"x"

        writer.join()
