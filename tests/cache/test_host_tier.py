"""The host-memory tier: arrays against numpy through few frames and few places below them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.cache.sizes import TierShape
from flashwarp.errors import ArgumentError, CacheError, ControllerTimeout, StorageError
from flashwarp.storage import File, Memory, Storage
from flashwarp.testing import Faulty

LINE = 512
WAYS = 4


def plan(path: str = "bounce") -> fw.nvme.SoftwareController:
    return fw.nvme.SoftwareController(queue_pairs=2, depth=4, route=path)


def counted(lines: int) -> Memory:
    """Lines each of which holds its number."""
    return Memory(np.repeat(np.arange(lines, dtype="<i4"), LINE // 4))


def full_of(value: int) -> Memory:
    """32 lines of one byte."""
    return Memory(np.full(32 * LINE, value, np.uint8))


def opened(
    storage: Storage,
    dtype: str,
    shape: tuple[int, ...] | None = None,
    *,
    tier: int,
    path: str = "bounce",
    **more: Any,
) -> fw.Array:
    """An array with one set of frames, and so many lines below them; one thread unless told."""
    options = {"device": fw.device.CpuDevice(1), **more}
    capacity, policy = options.pop("cache", WAYS * LINE), options.pop("policy", "clock")
    return fw.open(
        storage,
        "r+",
        dtype,
        shape,
        cache=fw.Cache(capacity, LINE, policy=policy, host_memory=tier * LINE),
        controller=plan(path),
        **options,
    )


def small_cache(device: Any = "cpu") -> fw.Cache:
    """One set of frames and 64 lines below them, for arrays to share."""
    return fw.Cache(WAYS * LINE, line=LINE, device=device, host_memory=64 * LINE)


def read_lines(x: fw.Array, *lines: int) -> None:
    """Read one element of each line, one after the other, and check it."""
    for line in lines:
        assert x[line * LINE // 4] == line


@pytest.mark.parametrize("path", ["bounce", "direct"])
def test_a_line_that_made_room_comes_back_without_the_storage(path: str) -> None:
    storage = Faulty(counted(8))
    with opened(storage, "<i4", tier=4, path=path) as x:
        read_lines(x, *range(8))
        assert x.stats.tier_lines == 4
        assert x.stats.tier_hits == 0
        reads = storage.operations()["read"]

        # All eight are in the frames or the tier: they change places.
        for _ in range(5):
            read_lines(x, *range(8))

        assert storage.operations()["read"] == reads == 8
        assert x.stats.tier_hits == 40 - x.stats.hits
        assert x.stats.tier_hits > 0
        assert x.stats.bytes_read == 8 * LINE


def test_the_line_that_came_first_leaves_first() -> None:
    storage = Faulty(counted(12))
    with opened(storage, "<i4", tier=4, policy="fifo") as x:
        # Frames: 8..11; the tier: 4..7; 0..3 are gone.
        read_lines(x, *range(12))
        before = storage.operations()["read"]
        read_lines(x, 7, 6, 5, 4)
        assert storage.operations()["read"] == before
        read_lines(x, 0)
        assert storage.operations()["read"] == before + 1


def test_dirty_lines_enter_when_they_are_clean() -> None:
    storage = Memory(64 * LINE)
    with opened(storage, "u1", tier=32) as x:
        for line in range(32):
            x[line * LINE] = line + 1
        # What is in the tier is in the storage.
        stats = x.stats
        assert stats.tier_lines >= 24
        assert stats.write_backs >= stats.tier_lines
        for line in range(32):
            assert x[line * LINE] == line + 1
        assert x.stats.tier_hits > 0
        for line in range(32):
            x[line * LINE] = 100 + line
        for line in range(32):
            assert x[line * LINE] == 100 + line
    assert storage.read(31 * LINE, 1) == bytes([131])


def test_whole_lines_are_stored_over_copies_in_the_tier() -> None:
    storage = Faulty(counted(8))
    with opened(storage, "<i4", (8, LINE // 4), tier=8) as x:
        held = np.asarray(x[:])
        for turn in range(20):
            row = np.array([turn % 8])
            x.scatter(row, np.full((1, LINE // 4), 1000 + turn, "<i4"))
            held[row] = 1000 + turn
            np.testing.assert_array_equal(x[:], held)
        assert storage.operations()["read"] == 8


def test_prefetches_come_from_the_tier() -> None:
    storage = Faulty(counted(8))
    with opened(storage, "<i4", (8, LINE // 4), tier=4) as x:
        x.gather(np.arange(8))
        reads = storage.operations()["read"]
        hits = x.stats.tier_hits
        x.prefetch(np.array([0]))
        assert x.stats.tier_hits == hits + 1
        assert x.gather(np.array([0]))[0, 0] == 0
        assert storage.operations()["read"] == reads


def test_drop_cache_empties_the_tier() -> None:
    data = np.zeros(64 * LINE, np.uint8)
    with opened(Memory(data), "u1", tier=64, path="direct", device="cpu") as x:
        assert not x[:].any()
        x.drop_cache()
        data[:] = 7
        assert (x[:] == 7).all()


def test_a_range_of_lines_is_free_of_the_array_that_had_it() -> None:
    with small_cache() as cache:
        for value in (1, 2, 3):
            drive = full_of(value)
            with fw.open(drive, "r+", "u1", cache=cache, controller=plan()) as x:
                assert (x[:] == value).all()
                assert x.stats.tier_lines > 0


def test_an_array_that_cannot_be_written_leaves_nothing_in_the_tier() -> None:
    with small_cache() as cache:
        bad = Faulty(full_of(9), "")
        x = fw.open(bad, "r+", "u1", cache=cache, controller=plan())
        assert (x[:] == 9).all()
        x[5] = 1
        bad.inject("write eio")
        with pytest.raises(StorageError):
            x.close()
        with fw.open(full_of(2), "r+", "u1", cache=cache, controller=plan()) as y:
            assert (y[:] == 2).all()


def test_a_storage_that_hangs_leaves_nothing_in_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "1.2")
    (tmp_path / "x").write_bytes(bytes([9]) * 32 * LINE)
    with small_cache(fw.device.CpuDevice(1)) as cache:
        stuck = Faulty(File(tmp_path / "x"))
        x = fw.open(stuck, "r", "u1", cache=cache, controller=plan())
        assert (x[: 16 * LINE] == 9).all()
        stuck.inject("read hang")
        with pytest.raises(ControllerTimeout):
            x[20 * LINE]
        with pytest.raises(ControllerTimeout):
            x.close()
        with fw.open(full_of(2), "r+", "u1", cache=cache, controller=plan()) as y:
            assert (y[:] == 2).all()


def test_a_failed_fill_costs_nothing_that_is_in_the_tier() -> None:
    storage = Faulty(counted(16), f"read eio bytes={8 * LINE}-{9 * LINE}")
    with opened(storage, "<i4", tier=16) as x:
        read_lines(x, *range(8))
        for _ in range(3):
            with pytest.raises(StorageError) as error:
                x[8 * LINE // 4]
            assert error.value.errno == errno.EIO
            read_lines(x, *range(8))
        storage.heal()
        read_lines(x, 8)


def test_mapped_lines_stay_out() -> None:
    with small_cache() as cache:
        mapped = fw.open(counted(32), "r+", "<i4", cache=cache)
        other = fw.open(counted(32), "r+", "<i4", cache=cache, controller=plan())
        for _ in range(2):
            read_lines(mapped, *range(32))
            read_lines(other, *range(32))
        assert mapped.explain().route == "in_place"
        assert mapped.stats.tier_hits == 0
        # Whoever evicts counts: lines of the other array left at its own reads and at ours.
        assert other.stats.tier_hits > 0
        assert "do not enter its host memory" in str(mapped.explain())
        assert "do not enter" not in str(other.explain())
        assert "host_memory=32768" in str(other.explain())
        other.close()
        mapped.drop_cache()
        mapped.close()


def test_metadata_grows_with_the_tier_only() -> None:
    with (
        fw.Cache("1 MiB", device="cpu") as without,
        fw.Cache("1 MiB", device="cpu", host_memory="4 MiB") as with_tier,
    ):
        assert with_tier.host_lines * 4096 == with_tier.host_memory
        assert with_tier.metadata_bytes == without.metadata_bytes + 8 * with_tier.host_lines
        assert without.host_memory == 0
        assert "host_memory" not in repr(without)


@pytest.mark.parametrize("each", [1, 2, 15, 16, 17, 23, 33, 100, 1000])
def test_most_of_the_capacity_is_used(each: int) -> None:
    shape = TierShape.of(each * 5 * 4096 + 4095, 5, 4096)
    assert shape.ways <= 16
    assert each * 0.9 * 5 <= shape.places <= each * 5


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(CacheError, match="at least 36864 bytes"):
        fw.Cache(9 * WAYS * 4096, device="cpu", host_memory=9 * 4096 - 1)
    with pytest.raises(CacheError, match="0 bytes"):
        fw.Cache("1 MiB", device="cpu", host_memory=0)
    with pytest.raises(ArgumentError):
        fw.Cache("1 MiB", device="cpu", host_memory="much")
    with pytest.raises(ArgumentError, match="negative"):
        fw.Cache("1 MiB", device="cpu", host_memory=-1)
    with pytest.raises(CacheError, match="use longer ones"):
        TierShape.of(1 << 62, 1, 512)


def test_threads_share_a_tier() -> None:
    """More threads than frames in a set, on lines that all belong to it."""
    content = np.random.default_rng(1).integers(0, 255, 24 * LINE, dtype=np.uint8)
    with (
        fw.device.CpuDevice(8) as device,
        opened(Memory(content.copy()), "u1", tier=12, device=device) as x,
    ):
        held = content.copy()
        random = np.random.default_rng(2)
        for turn in range(20):
            where = random.integers(0, len(held), 4000)
            np.testing.assert_array_equal(x.gather(where), held[where])
            x[turn * 50 : turn * 50 + 700] = turn
            held[turn * 50 : turn * 50 + 700] = turn
        assert x.stats.tier_hits > 0
