"""Files in kernels: reads, writes, appends and syncs by threads, warps and blocks."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import flashwarp as fw
from flashwarp.device import Device
from flashwarp.errors import ArgumentError, ClosedError, DtypeError, StorageError
from flashwarp.file.kernel_file import KernelFile
from flashwarp.testing.faults import Faulty

Bytes = npt.NDArray[np.uint8]
Call = Callable[..., tuple[npt.NDArray[Any], Bytes]]

KERNELS = Path(__file__).parents[1] / "support" / "file_kernels.cu"
REQUEST = np.dtype(
    [("offset", "u8"), ("nbytes", "u8"), ("buffer", "u8"), ("got", "i8"), ("at", "u8")]
)
READ, WRITE, APPEND, SYNC, READ_AROUND, WRITE_AROUND = range(6)
READS = (READ, READ_AROUND)
WRITES = (WRITE, WRITE_AROUND)
CALLERS = ("by_threads", "by_warps", "by_blocks")
BYTES = 100_000
BEYOND = 2**63 - 1


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with fw.device.CpuDevice(3) if request.param == "cpu" else fw.device.CudaDevice(0) as made:
        yield made


@pytest.fixture(scope="module")
def program(device: Device) -> fw.program.Program:
    return fw.compile(KERNELS, device)


@pytest.fixture
def content() -> Bytes:
    return np.random.default_rng(1).integers(0, 256, BYTES, dtype=np.uint8)


@pytest.fixture
def path(tmp_path: Path, content: Bytes) -> Path:
    """A file of this content."""
    content.tofile(tmp_path / "f")
    return tmp_path / "f"


@pytest.fixture(params=CALLERS)
def caller(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def call(program: fw.program.Program, caller: str) -> Call:
    return functools.partial(make_calls, program[caller])


def array_of(path: Path, device: Device, mode: str = "r+", **options: Any) -> fw.Array:
    options.setdefault("cache", "64 KiB")
    options.setdefault("line", "4 KiB")
    return fw.open(path, dtype=np.uint8, mode=mode, device=device, **options)


def make_calls(
    kernel: Any,
    file: KernelFile,
    what: int,
    wanted: list[tuple[int, int]],
    data: Bytes | None = None,
) -> tuple[npt.NDArray[Any], Bytes]:
    """Make a call for each offset and size; return the requests and the buffer afterwards."""
    device = file.array.device
    requests = np.zeros(len(wanted), REQUEST)
    sizes = [min(size, BYTES) for _, size in wanted]
    requests["offset"], requests["nbytes"] = np.array(wanted, np.uint64).T
    requests["buffer"] = np.cumsum([0, *sizes])[:-1]
    room = np.zeros(max(1, sum(sizes)), np.uint8) if data is None else data
    held = device.allocate(requests.nbytes), device.allocate(room.nbytes)
    device.upload(held[0].address, requests.view(np.uint8))
    device.upload(held[1].address, room)
    kernel(file, held[0], len(wanted), held[1], what)
    file.array.wait()
    ended = np.frombuffer(device.download(held[0].address, requests.nbytes), REQUEST)
    after = np.frombuffer(device.download(held[1].address, room.nbytes), np.uint8)
    return ended, after


def random_pieces(seed: int, count: int = 60, most: int = 9000) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    begins = rng.integers(0, BYTES, count)
    return [(int(b), int(min(rng.integers(0, most), BYTES - b))) for b in begins]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_unaligned_reads_return_the_bytes(
    call: Call, prefetch: int, device: Device, path: Path, content: Bytes
) -> None:
    pieces = random_pieces(2)
    with array_of(path, device, "r") as x, KernelFile(x, read_ahead=prefetch) as f:
        ended, got = call(f, READ, pieces)
    assert ended["got"].tolist() == [size for _, size in pieces]
    np.testing.assert_array_equal(got, np.concatenate([content[b : b + n] for b, n in pieces]))


@pytest.mark.parametrize("what", READS)
def test_reads_end_at_the_end_of_the_file(
    call: Call, what: int, device: Device, path: Path, content: Bytes
) -> None:
    size = BYTES - 1234
    wanted = [(size - 10, 100), (size, 5), (BYTES + 7, 5), (0, 0), (BEYOND, 1), (1, BEYOND + 9)]
    with array_of(path, device) as x, KernelFile(x, size=size) as f:
        ended, got = call(f, what, wanted)
        assert f.size == size
    assert ended["got"].tolist() == [10, 0, 0, 0, -errno.EINVAL, -errno.EINVAL]
    np.testing.assert_array_equal(got[:10], content[size - 10 : size])
    assert not got[10:100].any()


@pytest.mark.parametrize("route", [None, "bounce"])
def test_reads_around_the_cache_return_what_was_written(
    call: Call, route: Any, device: Device, path: Path, content: Bytes
) -> None:
    now = content.copy()
    controller = fw.nvme.SoftwareController(route=route)
    # Most of the lines in the cache hold what is not in the file yet.
    with array_of(path, device, controller=controller) as x, KernelFile(x) as f:
        for seed in range(3):
            begin = 20_000 * seed + 77
            now[begin : begin + 50_000] += 1
            call(f, WRITE, [(begin, 50_000)], now[begin : begin + 50_000].copy())
            pieces = random_pieces(seed)
            ended, got = call(f, READ_AROUND, pieces)
            assert ended["got"].tolist() == [size for _, size in pieces]
            np.testing.assert_array_equal(got, np.concatenate([now[b : b + n] for b, n in pieces]))


def test_reads_around_the_cache_evict_nothing(
    call: Call, device: Device, path: Path, content: Bytes
) -> None:
    controller = fw.nvme.SoftwareController(route="bounce")
    with array_of(path, device, "r", controller=controller) as x, KernelFile(x) as f:
        np.testing.assert_array_equal(x[: 8 * 4096], content[: 8 * 4096])
        before = x.stats
        # Lines 0 to 7 are resident, 17 and 18 are not.
        wanted = [(10, 8 * 4096 - 20), (17 * 4096 + 100, 4000), (18 * 4096 + 1000, 1)]
        ended, got = call(f, READ_AROUND, wanted)
        after = x.stats
        assert ended["got"].tolist() == [size for _, size in wanted]
        np.testing.assert_array_equal(got, np.concatenate([content[b : b + n] for b, n in wanted]))
        assert after.bypasses - before.bypasses == after.misses - before.misses == 3
        # Whole blocks: 8 of line 17, a byte of its neighbour's, and one of line 18.
        assert after.bytes_read - before.bytes_read == (8 + 1 + 1) * 512
        assert after.evictions == before.evictions
        np.testing.assert_array_equal(x[: 8 * 4096], content[: 8 * 4096])
        assert x.stats.misses == after.misses


@pytest.mark.parametrize("what", WRITES)
def test_writes_arrive_and_move_the_end(
    call: Call, what: int, device: Device, path: Path, content: Bytes
) -> None:
    np.zeros(BYTES, np.uint8).tofile(path)
    # Pieces of 997 bytes beside each other, so neighbours share lines.
    pieces = [(begin, min(997, 70_000 - begin)) for begin in range(0, 70_000, 997)]
    with array_of(path, device) as x, KernelFile(x, size=100) as f:
        ended, _ = call(f, what, pieces, content[:70_000].copy())
        assert ended["got"].tolist() == [size for _, size in pieces]
        assert f.size == 70_000
        x.flush()
    np.testing.assert_array_equal(np.fromfile(path, np.uint8)[:70_000], content[:70_000])


@pytest.mark.parametrize("what", WRITES)
def test_writes_that_do_not_fit_write_nothing(
    call: Call, what: int, device: Device, path: Path
) -> None:
    np.zeros(BYTES, np.uint8).tofile(path)
    wanted = [(BYTES - 10, 11), (BYTES + 1, 0), (BEYOND, 5), (BYTES, 0)]
    with array_of(path, device) as x, KernelFile(x, size=5) as f:
        ended, _ = call(f, what, wanted, np.ones(BYTES, np.uint8))
        assert ended["got"].tolist() == [-errno.ENOSPC, -errno.ENOSPC, -errno.EINVAL, 0]
        assert f.size == 5
    assert not np.fromfile(path, np.uint8).any()


@pytest.mark.parametrize("route", [None, "bounce"])
def test_writes_around_the_cache_are_seen_and_are_in_the_storage(
    call: Call, route: Any, device: Device, path: Path, content: Bytes
) -> None:
    now = content.copy()
    controller = fw.nvme.SoftwareController(route=route)
    with array_of(path, device, controller=controller) as x, KernelFile(x) as f:
        for seed in range(3):
            # No line of the file is in the cache.
            x.flush()
            x.drop_cache()
            begin = 20_000 * seed + 77
            now[begin : begin + 50_000] += 1
            data = now[begin : begin + 50_000].copy()
            ended, _ = call(f, WRITE_AROUND, [(begin, 50_000)], data)
            assert ended["got"].tolist() == [50_000]
            np.testing.assert_array_equal(np.fromfile(path, np.uint8), now)
            for what in READS:
                pieces = random_pieces(seed)
                _, got = call(f, what, pieces)
                whole = np.concatenate([now[b : b + n] for b, n in pieces])
                np.testing.assert_array_equal(got, whole)
        np.testing.assert_array_equal(x[:], now)


def test_a_write_around_the_cache_stores_to_lines_that_are_there(
    call: Call, device: Device, path: Path
) -> None:
    np.zeros(BYTES, np.uint8).tofile(path)
    with array_of(path, device) as x, KernelFile(x) as f:
        x[4096] = 1
        before = x.stats
        call(f, WRITE_AROUND, [(4097, 10)], np.full(10, 2, np.uint8))
        assert x.stats.write_backs == before.write_backs
        assert x.stats.evictions == before.evictions
        assert x[4095:4108].tolist() == [0, 1, *[2] * 10, 0]
        x.flush()
    stored = np.fromfile(path, np.uint8)
    assert stored[4095:4108].tolist() == [0, 1, *[2] * 10, 0]


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("ways", [4, 16])
def test_writes_around_the_cache_evict_one_line_of_a_set(
    call: Call, ways: int, what: int, device: Device, tmp_path: Path
) -> None:
    rounds = 10
    with (
        fw.Cache("256 KiB", line=4096, ways=ways, device=device) as cache,
        fw.create(tmp_path / "f.npy", np.uint8, (2_000_000,), cache=cache) as x,
        KernelFile(x) as f,
    ):
        lines = cache.set_count * ways
        working_set = [(4096 * k, 4096) for k in range(lines)]
        call(f, READ, working_set)
        before = x.stats
        assert before.evictions == 0
        # Many times the cache, one call after another.
        for k in range(rounds):
            wanted = [(lines * 4096 + k * BYTES, BYTES)]
            ended, _ = call(f, what, wanted, np.full(BYTES, k, np.uint8))
            assert ended["got"].tolist() == [BYTES]
        written = x.stats
        call(f, READ, working_set)
        lost = x.stats.misses - written.misses
        if what == WRITE:
            assert lost == lines
        else:
            evicted = written.evictions - before.evictions
            assert 0 < evicted <= cache.set_count
            # They come back to the frames that are empty.
            assert lost == evicted


def test_a_write_around_the_cache_that_fails_loses_nothing(
    program: fw.program.Program, device: Device, path: Path, content: Bytes
) -> None:
    storage = Faulty(fw.storage.File(path, writable=True), "write eio n=1")
    results = device.allocate(REQUEST.itemsize)
    data = device.allocate(8192)
    with (
        fw.open(
            storage, dtype=np.uint8, mode="r+", device=device, cache="64 KiB", line="4 KiB"
        ) as x,
        KernelFile(x) as f,
    ):
        device.upload(data.address, np.full(8192, 9, np.uint8))
        device.upload(results.address, np.array([(40_960, 4096, 0, 0, 0)], REQUEST).view(np.uint8))
        program["by_warps"](f, results, 1, data, WRITE_AROUND)
        with pytest.raises(StorageError):
            x.wait()
        ended = np.frombuffer(device.download(results.address, REQUEST.itemsize), REQUEST)
        assert ended["got"].tolist() == [-errno.EIO]
        # The line is dirty, and the next write-back succeeds.
        assert (x[40_960:45_056] == 9).all()
        x.flush()
    stored = np.fromfile(path, np.uint8)
    assert (stored[40_960:45_056] == 9).all()
    np.testing.assert_array_equal(stored[:40_960], content[:40_960])
    np.testing.assert_array_equal(stored[45_056:], content[45_056:])


def test_appends_do_not_overlap(call: Call, device: Device, path: Path) -> None:
    np.zeros(BYTES, np.uint8).tofile(path)
    sizes = np.random.default_rng(3).integers(1, 700, 120)
    data = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)
    with array_of(path, device) as x, KernelFile(x, size=77) as f:
        ended, _ = call(f, APPEND, [(0, int(n)) for n in sizes], data)
        assert f.size == 77 + sizes.sum()
        x.flush()
    assert ended["got"].tolist() == sizes.tolist()
    stored = np.fromfile(path, np.uint8)
    for k, (at, size) in enumerate(zip(ended["at"], sizes, strict=True)):
        assert (stored[int(at) : int(at) + size] == k).all()
    assert sorted(ended["at"])[0] == 77


def test_appends_stop_at_the_capacity(call: Call, device: Device, path: Path) -> None:
    np.zeros(1000, np.uint8).tofile(path)
    with array_of(path, device) as x, KernelFile(x, size=0) as f:
        ended, _ = call(f, APPEND, [(0, 300)] * 5, np.ones(1500, np.uint8))
        assert sorted(ended["got"].tolist()) == [-errno.ENOSPC] * 2 + [300] * 3
        assert f.size == 900


@pytest.mark.parametrize("caller", CALLERS[1:])
def test_a_sync_writes_back_and_flushes(
    caller: str, call: Call, device: Device, path: Path, content: Bytes
) -> None:
    np.zeros(BYTES, np.uint8).tofile(path)
    with array_of(path, device, cache="1 MiB") as x, KernelFile(x) as f:
        call(f, WRITE, [(500, 50_000)], content[:50_000].copy())
        ended, _ = call(f, SYNC, [(0, BYTES), (BYTES, 1)])
        assert ended["got"].tolist() == [BYTES, 0]
        # Without a flush by the host, another reader sees the bytes.
        stored = np.fromfile(path, np.uint8)
        np.testing.assert_array_equal(stored[500:50_500], content[:50_000])
        assert x.service.stats["commands"]["flush"] >= 1


def test_a_file_that_is_read_only_refuses_writes(
    call: Call, device: Device, path: Path, content: Bytes
) -> None:
    with array_of(path, device, "r") as x, KernelFile(x) as f:
        for what in (*WRITES, APPEND):
            ended, _ = call(f, what, [(0, 5)], np.ones(5, np.uint8))
            assert ended["got"].tolist() == [-errno.EBADF]


@pytest.mark.parametrize("what", READS)
def test_a_failed_transfer_is_an_error_here_and_at_the_host(
    call: Call,
    caller: str,
    what: int,
    program: fw.program.Program,
    device: Device,
    path: Path,
    content: Bytes,
) -> None:
    storage = Faulty(fw.storage.File(path), "read eio bytes=40960-40961")
    results = device.allocate(REQUEST.itemsize)
    buffer = device.allocate(8192)
    with (
        fw.open(storage, dtype=np.uint8, device=device, cache="64 KiB", line="4 KiB") as x,
        KernelFile(x) as f,
    ):
        device.upload(results.address, np.array([(40_000, 5000, 0, 0, 0)], REQUEST).view(np.uint8))
        program[caller](f, results, 1, buffer, what)
        with pytest.raises(StorageError):
            x.wait()
        ended = np.frombuffer(device.download(results.address, REQUEST.itemsize), REQUEST)
        assert ended["got"].tolist() == [-errno.EIO]
        ended, got = call(f, what, [(0, 4000)])
        assert ended["got"].tolist() == [4000]
        np.testing.assert_array_equal(got, content[:4000])


def test_sizes_that_kernels_see(program: fw.program.Program, device: Device, path: Path) -> None:
    np.zeros(1000, np.uint8).tofile(path)
    with array_of(path, device) as x, KernelFile(x, size=10) as f:
        out = device.allocate(16)
        program["sizes_of"](f, out)
        x.wait()
        assert np.frombuffer(device.download(out.address, 16), np.uint64).tolist() == [10, 1000]
        assert f.capacity == 1000


def test_what_is_no_file_for_kernels_is_refused(
    program: fw.program.Program, device: Device, path: Path
) -> None:
    np.zeros(1000, np.uint8).tofile(path)
    with array_of(path, device) as x:
        with pytest.raises(ArgumentError, match="size=1001"):
            KernelFile(x, size=1001)
        with pytest.raises(ArgumentError, match="takes a file for kernels, not Array"):
            program["sizes_of"](x, None)
        f = KernelFile(x)
        f.close()
        f.close()
        with pytest.raises(ClosedError):
            program["sizes_of"](f, None)
    with (
        fw.open(path, dtype=np.int32, device=device) as numbers,
        pytest.raises(DtypeError, match="int32"),
    ):
        KernelFile(numbers)
