"""Arrays against numpy: every operation on tiny caches, over every storage and route.

Caches here are as small as they may be (down to one set of four lines), rings as shallow, and rows
cross lines at every offset, so that eviction, write-back and waiting are the rule. All on the CPU
device, which runs the device code of the GPU.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import flashwarp as fw
from flashwarp import _native
from flashwarp.errors import ArgumentError, BoundsError, RouteError
from flashwarp.storage import Memory

Reference = npt.NDArray[Any]

RECORD = np.dtype([("key", "<i8"), ("weight", "<f4"), ("name", "S5")])  # 17 bytes


def random_array(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Reference:
    """Values without pattern, none of which is NaN."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    random = np.random.default_rng(seed)
    if kind.names is not None:
        array = np.zeros(count, kind)
        for name in kind.names:
            array[name] = random_array((count,), kind[name], seed + 1)
    elif kind.kind in "fc":
        array = random.random(count).astype(kind)
    elif kind.kind == "b":
        array = random.integers(0, 2, count) == 1
    else:
        array = random.integers(1, 255, count * kind.itemsize, dtype=np.uint8).view(kind)
    return array.reshape(shape)


def churn(x: fw.Array, reference: Reference, rounds: int = 6, seed: int = 1) -> None:
    """Read, write and compare at random; `reference` follows the array."""
    random = np.random.default_rng(seed)
    length = len(reference)
    for turn in range(rounds):
        some = random.integers(-length, length, int(random.integers(1, 40)))
        np.testing.assert_array_equal(x.gather(some), reference[some])
        if x.writable:
            where = random.choice(length, min(length, 9), replace=False)
            values = random_array((len(where), *reference.shape[1:]), reference.dtype, turn + 5)
            x.scatter(where, values)
            reference[where] = values
            start = int(random.integers(0, length))
            part = slice(start, start + 7)
            block = random_array(reference[part].shape, reference.dtype, turn + 50)
            x[part] = block
            reference[part] = block
        if turn % 2:
            x.prefetch(random.integers(0, length, 5))
    np.testing.assert_array_equal(x[...], reference)


@pytest.fixture
def numbers(tmp_path: Path) -> Iterator[tuple[fw.Array, Reference]]:
    """300 rows of 7 float32 behind a cache of one set."""
    reference = random_array((300, 7), np.float32)
    np.save(tmp_path / "numbers.npy", reference)
    with fw.open(tmp_path / "numbers.npy", "r+", device="cpu", line=512, cache=2048) as x:
        yield x, reference


# Element types and shapes.


def test_array_without_axes(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.float64(2.5))
    with fw.open(tmp_path / "x.npy", "r+", device="cpu") as x:
        assert (x.shape, x.ndim, x.size, x.nbytes) == ((), 0, 1, 8)
        assert x[...] == 2.5
        assert x[()] == 2.5
        x[...] = -1.25
        with pytest.raises(TypeError):
            len(x)
        with pytest.raises(BoundsError):
            x.gather([0])
    assert np.load(tmp_path / "x.npy") == -1.25


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 2)])
def test_arrays_of_no_bytes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "x.npy"
    with fw.create(path, np.int32, shape, device="cpu") as x:
        assert (x.shape, x.nbytes, len(x)) == (shape, 0, shape[0])
        assert x[...].shape == shape
        assert x.gather(np.empty((0,), np.int64)).shape == (0, *shape[1:])
        x[...] = 1
        x.prefetch(slice(None))
        x.flush()
    assert np.load(path).shape == shape


# Keys.


def test_rows_are_looked_ahead_for_only_where_the_storage_waits(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", random_array((4096, 128), np.float32))
    if isinstance(_native.direct_io_alignment(str(tmp_path / "x.npy")), str):
        pytest.skip("the file system of the test directory has no direct I/O")
    index = np.random.default_rng(0).permutation(4096)
    for o_direct in (False, True):
        with fw.open(
            tmp_path / "x.npy",
            device="cpu",
            line=512,
            cache="64 KiB",
            o_direct=o_direct,
            controller=fw.nvme.SoftwareController(commands=True),
        ) as x:
            assert x._attachment.launcher.look_ahead() > 0, "nothing is known before the first rows"

            x.gather(index)
            assert (x._attachment.launcher.look_ahead() > 0) == o_direct
            x.gather(index)
            assert (x._attachment.launcher.look_ahead() > 0) == o_direct


def test_prefetched_rows_come_without_another_call(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", random_array((64, 128), np.float32))
    with fw.open(
        tmp_path / "x.npy",
        device="cpu",
        line=512,
        cache="256 KiB",
        controller=fw.nvme.SoftwareController(commands=True),
    ) as x:
        x.prefetch(slice(0, 32))

        end = time.monotonic() + 10
        while x.service.stats["commands"]["read"] < 32:
            assert time.monotonic() < end
            time.sleep(0.001)


def test_prefetched_rows_are_hits(tmp_path: Path) -> None:
    reference = random_array((64, 128), np.float32)
    np.save(tmp_path / "x.npy", reference)
    with fw.open(tmp_path / "x.npy", device="cpu", line=512, cache="256 KiB") as x:
        x.prefetch(slice(0, 32))
        x.prefetch([40, 41])
        np.testing.assert_array_equal(x[:32], reference[:32])
        before = x.stats
        assert before.misses == 34
        np.testing.assert_array_equal(x[:32], reference[:32])
        assert x.stats.misses == 34
        assert x.stats.hits == before.hits + 32


# Durability.


# What it tells.


def test_stats_add_up(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", random_array((256, 128), np.float32))  # a row is a line
    controller = fw.nvme.SoftwareController(commands=True)
    with fw.open(
        tmp_path / "x.npy", "r+", device="cpu", line=512, cache="256 KiB", controller=controller
    ) as x:
        assert x.stats.commands == 0
        x.gather(np.arange(256))
        cold = x.stats
        assert cold.misses == 256
        assert cold.bytes_read == cold.bytes_used == 256 * 512
        assert cold.io_amplification == 1
        assert cold.commands == 256
        assert 1 <= cold.doorbells <= cold.commands
        assert cold.evictions == cold.write_backs == cold.errors == 0
        x.gather(np.arange(256))
        warm = x.stats
        assert warm.commands == 256
        assert warm.hits - cold.hits == 256
        assert 0 < warm.hit_rate < 1
        x[:16] = 1
        x.flush()
        assert x.stats.write_backs == 16
        assert x.stats.bytes_written == 16 * 512
        assert x.stats.as_dict()["hits"] == x.stats.hits


def test_whole_rows_are_stored_without_reading(tmp_path: Path) -> None:
    with fw.create(tmp_path / "x.npy", "f4", (64, 128), device="cpu", line=512, cache=2048) as x:
        x.scatter(np.arange(64), np.ones((64, 128), "f4"))
        assert x.stats.bytes_read == 0
        x[...] = 2
        assert x.stats.bytes_read == 0
    assert (np.load(tmp_path / "x.npy") == 2).all()


def test_explain_tells_the_path(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10))
    with fw.open(tmp_path / "x.npy", device="cpu", o_direct=False) as x:
        told = x.explain()
        assert told.route == "direct"
        assert told.facts["storage"]["path"] == str(tmp_path / "x.npy")
        text = str(told)
        for word in ("route", "storage", "engine", "cache", "device", "page cache"):
            assert word in text
    with fw.open(Memory(4096), "r+", "u1", device="cpu") as x:
        assert x.explain().route == "in_place"


def test_strict_refuses_another_path(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10))
    with pytest.raises(RouteError, match="strict='bounce', but the data would go direct"):
        fw.open(tmp_path / "x.npy", device="cpu", strict="bounce")


def test_cache_metadata_is_under_a_percent() -> None:
    with fw.Cache("16 MiB", "4 KiB", device="cpu") as held:
        assert held.metadata_bytes <= held.capacity // 100


def test_fifteen_tebibytes_open_like_one_gibibyte(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    costs = {}
    for nbytes in (1 << 30, 15 << 40):
        path.write_bytes(b"")
        try:
            os.truncate(path, nbytes)
        except OSError as error:
            if error.errno in (errno.EFBIG, errno.ENOSPC, errno.EINVAL):
                pytest.skip(f"no sparse file of {nbytes} bytes here: {error}")
            raise
        before = resource.getrusage(resource.RUSAGE_SELF)
        with fw.open(path, "r+", np.int64, device="cpu", cache="1 MiB") as x:
            last = len(x) - 1
            assert last == nbytes // 8 - 1
            x[last] = 42
            assert x.gather([0, last, last // 2]).tolist() == [0, 42, 0]
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        costs[nbytes] = (seconds, after.ru_maxrss - before.ru_maxrss)
        with path.open("rb") as file:
            file.seek(nbytes - 8)
            assert int.from_bytes(file.read(), "little") == 42
        path.unlink()
    small, large = costs.values()
    assert large[0] < small[0] + 0.5
    assert large[1] < 64 << 10, "ru_maxrss counts KiB"


def test_a_waiter_drains_every_queue(tmp_path: Path) -> None:
    """Waiters once met two queues of eight only, and lines prefetched by others never came."""
    content = np.arange(4096 * 1024, dtype=np.uint32).reshape(4096, 1024)
    np.save(tmp_path / "a.npy", content)
    index = np.random.default_rng(5).permutation(4096)
    with fw.device.CpuDevice(4) as device:
        controller = fw.nvme.SoftwareController(queue_pairs=8, depth=8)
        path = tmp_path / "a.npy"
        with fw.open(path, device=device, cache="1 MiB", controller=controller) as x:
            for _ in range(4):
                x.prefetch(index[:200])
                assert (x.gather(index) == content[index]).all()


def test_array_explains_itself_after_its_storage_was_closed():
    with fw.storage.Memory("64 KiB") as storage:
        x = fw.open(storage, "r+", "i4", device="cpu")

    with x:
        assert x.explain().facts["storage"] == {"closed": True}
        assert x[3] == 0


def test_arrays_that_are_each_others_operands_do_not_wait_for_each_other(tmp_path: Path) -> None:
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for path in paths:
        np.save(path, np.arange(200) % 100)

    def use(mine: fw.Array, other: fw.Array) -> None:
        for _ in range(100):
            mine.scatter(other, other)
            mine.gather(idx=other)

    with (
        fw.open(paths[0], "r+", device="cpu", cache="16 KiB") as a,
        fw.open(paths[1], "r+", device="cpu", cache="16 KiB") as b,
    ):
        threads = [
            threading.Thread(target=use, args=pair, daemon=True) for pair in ((a, b), (b, a))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: 2.0 * x,
        lambda x: x - x,
        lambda x: x / 3,
        lambda x: x < 3,
        lambda x: x.mean(),
        lambda x: x.cuda(),
        lambda x: x.numpy(),
        lambda x: x.astype("f8"),
        lambda x: x.T,
    ],
)
def test_what_only_memory_can_do_names_the_way(tmp_path: Path, use: Callable[[Any], Any]) -> None:
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    with fw.open(tmp_path / "x.npy", device="cpu") as x:
        with pytest.raises((TypeError, AttributeError), match=r"x\[a:b\].*numpy.asarray.*kernel"):
            use(x)
        assert not hasattr(x, "mean")
        with pytest.raises(AttributeError, match=r"no attribute 'meen'$"):
            _ = x.meen


@pytest.mark.parametrize("mode", ["w", "w+", "x"])
def test_modes_that_make_files_are_answered_by_what_makes_one(tmp_path: Path, mode: Any) -> None:
    with pytest.raises(ArgumentError, match=f"mode='{mode[:1]}.*flashwarp.create"):
        fw.open(tmp_path / "x.npy", mode)


def test_arithmetic_with_arrays_of_numpy_reads_all(tmp_path: Path) -> None:
    values = np.arange(6.0).reshape(3, 2)
    np.save(tmp_path / "x.npy", values)
    with fw.open(tmp_path / "x.npy", device="cpu") as x:
        for found, wanted in (
            (values + x, 2 * values),
            (x - values, 0 * values),
            (x < values + 1, values > -1),
            (x @ values.T, values @ values.T),
            (np.float64(2) * x, 2 * values),
        ):
            np.testing.assert_array_equal(found, wanted)
