"""A cache that is made before its device is known, and what arrays need to agree with it."""

from __future__ import annotations

import gc
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.cache.structs import LineCacheStruct
from flashwarp.errors import ArgumentError, CacheError, ClosedError, DeviceError, ReadOnlyError
from flashwarp.storage import Memory

CONTENT = np.arange(4096 * 8, dtype=np.int64).reshape(4096, 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", CONTENT)
    return tmp_path / "rows.npy"


def test_a_cache_takes_the_device_of_its_first_array(path: Path) -> None:
    device = fw.device.CpuDevice(1)
    with fw.Cache("64 KiB", line=512, policy="lru") as cache:
        assert cache.capacity == 64 * 1024 - 4 * 512
        assert "device=None" in repr(cache)

        with fw.open(path, device=device, cache=cache) as x:
            assert x.device is cache.device is device
            assert (x[5:9] == CONTENT[5:9]).all()
        with fw.open(path, cache=cache) as again:
            assert again.device is device


def test_a_cache_without_a_capacity_takes_that_of_its_first_array(path: Path) -> None:
    with fw.Cache("auto", policy="sieve", device="cpu") as cache:
        assert "auto" in repr(cache)
        with fw.open(path, cache=cache) as x:
            assert cache.capacity >= CONTENT.nbytes
            assert (x[...] == CONTENT).all()


@pytest.mark.parametrize("name", ["device", "capacity", "geometry", "address"])
def test_what_a_device_decides_is_refused_before(name: str) -> None:
    with fw.Cache("auto") as cache, pytest.raises(CacheError, match=f"no {name} before"):
        getattr(cache, name)
    with fw.Cache("auto") as cache:
        assert not hasattr(cache, name)


@pytest.mark.parametrize("name", ["frames", "lines", "owners"])
def test_properties_of_a_cache_without_memory_are_refused_too(name: str) -> None:
    with fw.Cache("auto") as cache, pytest.raises(CacheError, match=f"no {name} before"):
        getattr(cache, name)


def test_names_that_no_cache_has_are_attribute_errors() -> None:
    with fw.Cache("auto") as cache:
        assert not hasattr(cache, "capcity")
        assert cache.refusals == 0


def test_an_array_on_another_device_is_refused(path: Path) -> None:
    one, other = fw.device.CpuDevice(1), fw.device.CpuDevice(1)
    with fw.Cache("64 KiB", device=one) as cache:
        with pytest.raises(ArgumentError, match="the cache is on"):
            fw.open(path, device=other, cache=cache)
        with fw.open(path, device=one, cache=cache) as x:
            assert x[3, 1] == CONTENT[3, 1]


def test_a_line_that_the_cache_does_not_have_is_refused(path: Path) -> None:
    with fw.Cache("64 KiB", line=512, device="cpu") as cache:
        with pytest.raises(ArgumentError, match="line=4096, but the lines of the cache have 512"):
            fw.open(path, cache=cache, line=4096)
        fw.open(path, cache=cache, line="512 B").close()


def test_a_failed_open_leaves_the_cache_usable(path: Path, tmp_path: Path) -> None:
    with fw.Cache("64 KiB") as cache:
        with pytest.raises(FileNotFoundError):
            fw.open(tmp_path / "absent.npy", device="cpu", cache=cache)
        with fw.open(path, device=fw.device.CpuDevice(1), cache=cache) as x:
            assert x[7, 7] == CONTENT[7, 7]


def test_arrays_that_open_at_once_share_one_memory(path: Path) -> None:
    device = fw.device.CpuDevice(1)
    cache = fw.Cache("auto")
    opened: list[fw.Array] = []
    start = threading.Barrier(4)

    def open_one() -> None:
        start.wait()
        opened.append(fw.open(path, device=device, cache=cache))

    threads = [threading.Thread(target=open_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(opened) == 4
    assert all((x[11] == CONTENT[11]).all() for x in opened)
    for x in opened:
        x.close()
    cache.close()


def test_a_cache_that_nobody_holds_is_freed_with_its_array(path: Path) -> None:
    with fw.device.CpuDevice(1) as device:
        x = fw.open(path, device=device, cache=fw.Cache("1 MiB", policy="fifo"))
        assert len(device.carries) == 1
        x.close()
        del x
        gc.collect()
        assert len(device.carries) == 0


def test_a_cache_made_in_the_call_gives_its_memory_back_when_its_array_closes(path: Path) -> None:
    with fw.device.CpuDevice(1) as device:
        x = fw.open(path, device=device, cache=fw.Cache("1 MiB", host_memory="1 MiB"))
        assert (x[...] == CONTENT).all()
        assert len(device._owned) > 0

        x.close()

        assert len(device._owned) == 0, "though x still has the cache"
        assert x.cache.capacity == (1 << 20) - 4 * 4096
        assert not hasattr(x.cache, "address")
        assert "closed" in repr(x)
        assert x.device is device


@pytest.mark.parametrize("capacity", ["64 KiB", "auto"])
def test_a_cache_that_gave_its_memory_back_serves_the_next_array(path: Path, capacity: str) -> None:
    cache = fw.Cache(capacity, line=512)
    for device in (fw.device.CpuDevice(1), fw.device.CpuDevice(2)):
        with fw.open(path, device=device, cache=cache) as x, fw.open(path, cache=cache) as y:
            assert x.cache.device is y.device is device
            assert (x[...] == CONTENT).all()
            x.close()
            assert (y[...] == CONTENT).all(), "the memory is kept for y"
        assert not hasattr(cache, "device")
        assert device._owned == {}
    cache.close()
    with pytest.raises(ClosedError):
        fw.open(path, device="cpu", cache=cache)


def test_refusals_are_counted_across_memories(path: Path) -> None:
    cache = fw.Cache("64 KiB")
    for _ in range(2):
        with fw.open(path, device="cpu", cache=cache):
            LineCacheStruct.from_address(cache.address).refusals = 3

    assert cache.refusals == 6


@pytest.mark.parametrize("made", ["with", "device"])
def test_a_cache_that_its_user_keeps_has_one_memory_for_all_arrays(path: Path, made: str) -> None:
    device = fw.device.CpuDevice(1)
    cache = fw.Cache("64 KiB", device=device if made == "device" else None)
    with cache:
        addresses = set()
        for _ in range(3):
            with fw.open(path, device=device, cache=cache) as x:
                assert x[9, 2] == CONTENT[9, 2]
            addresses.add(cache.address)
        assert len(addresses) == 1
    assert device._owned == {}


def test_a_share_table_keeps_the_memory_of_its_cache(path: Path) -> None:
    device, cache = fw.device.CpuDevice(1), fw.Cache("64 KiB")
    with fw.open(path, device=device, cache=cache) as x:
        table = fw.array.ShareTable(x)
    assert cache.device is device

    table.close()

    assert device._owned == {}


def test_a_failed_open_gives_back_what_it_bound(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, cache = fw.device.CpuDevice(1), fw.Cache("64 KiB")

    def refuse() -> None:
        raise DeviceError("no stream")

    with monkeypatch.context() as patch:
        patch.setattr(device, "create_stream", refuse)
        with pytest.raises(DeviceError, match="no stream"):
            fw.open(path, device=device, cache=cache)
    assert not hasattr(cache, "device")

    with fw.open(path, device=device, cache=cache) as x:
        assert x[7, 7] == CONTENT[7, 7]


def test_threads_that_open_and_close_never_find_a_cache_without_memory(path: Path) -> None:
    device, cache = fw.device.CpuDevice(1), fw.Cache("64 KiB")
    failures: list[BaseException] = []

    def use() -> None:
        try:
            for row in range(30):
                with fw.open(path, device=device, cache=cache) as x:
                    assert (x[row] == CONTENT[row]).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert device._owned == {}


def test_a_pickled_array_has_a_cache_of_the_same_kind(path: Path) -> None:
    cache = fw.Cache("64 KiB", line=512, ways=8, policy="s3_fifo", host_memory="128 KiB")
    with fw.open(path, device="cpu", cache=cache) as x:
        sent = pickle.dumps(x)
        capacity, host_memory = cache.capacity, cache.host_memory

    got = pickle.loads(sent)
    with got:
        assert (got[40:44] == CONTENT[40:44]).all()
        mine = got.cache
        assert (mine.line_bytes, mine.ways, mine.policy.name) == (512, 8, "s3_fifo")
        assert (mine.capacity, mine.host_memory) == (capacity, host_memory)
    assert mine.closed, "nobody else can close it"


def test_a_closed_array_is_pickled_with_a_cache_that_has_no_memory_any_more(path: Path) -> None:
    cache = fw.Cache("auto", policy="lru", host_memory="128 KiB")
    with fw.open(path, device="cpu", cache=cache) as x:
        x.gather(np.arange(3))

    with pickle.loads(pickle.dumps(x)) as got:
        assert (got[40:44] == CONTENT[40:44]).all()
        assert got.cache.policy.name == "lru"
        assert got.cache.host_memory > 0


# Storages, by the same door.


def test_a_storage_is_only_read_unless_the_mode_says_more() -> None:
    storage = Memory(CONTENT.copy())
    with (
        fw.open(storage, dtype="i8", device="cpu") as x,
        fw.open(storage, "r", "i8", (4096, 8), device="cpu") as same,
    ):
        assert not x.writable
        with pytest.raises(ReadOnlyError):
            x[0] = 1
        assert (same[2] == CONTENT[2]).all()
    with fw.open(storage, "r+", "i8", device="cpu") as x:
        x[0] = -1
    assert storage.read(0, 8) == np.int64(-1).tobytes()


def test_a_storage_that_takes_no_writes_is_refused_for_writing() -> None:
    storage = Memory(CONTENT.copy(), writable=False)

    with pytest.raises(ReadOnlyError, match='use mode="r"'):
        fw.open(storage, "r+", "i8", device="cpu")


def test_a_storage_needs_a_dtype() -> None:
    with pytest.raises(ArgumentError, match="give its dtype"):
        fw.open(Memory(4096), device="cpu")


@pytest.mark.parametrize(
    "option", [{"o_direct": True}, {"offset": 0}, {"lock": False}, {"immutable": True}]
)
def test_what_is_for_paths_is_refused_for_storages(option: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match="is for paths"):
        fw.open(Memory(4096), "r", "i8", device="cpu", **option)  # type: ignore[arg-type]


def test_a_storage_may_hold_one_element() -> None:
    with fw.open(Memory(np.array([7])), "r", "i8", (), device="cpu") as x:
        assert x.shape == ()
        assert x[...] == 7
