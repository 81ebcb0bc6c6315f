"""Storages: what is particular to each kind; what all must do is in testing/test_contracts.py."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import _native
from flashwarp.errors import StorageError
from flashwarp.storage import Replicated, Striped
from flashwarp.storage.file import Mapping
from flashwarp.testing.rings import AlignedMemory as Memory

PAGE = mmap.PAGESIZE


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def make_file(path: Path, nbytes: int, seed: int = 0) -> bytes:
    content = random_bytes(nbytes, seed)
    path.write_bytes(content)
    return content


def direct_works(path: Path) -> bool:
    probe = path / "probe"
    probe.write_bytes(bytes(8192))
    return not isinstance(_native.direct_io_alignment(str(probe)), str)


@pytest.fixture(params=["buffered", "direct"])
def mode(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "direct" and not direct_works(tmp_path):
        pytest.skip("the file system of the test directory has no direct I/O")
    return str(request.param)


def test_memory_is_its_own_mapping() -> None:
    memory = Memory(1 << 16)
    storage = _native.MemoryStorage(memory.address, memory.nbytes, True, memory)

    storage.write(100, b"flash")

    assert bytes(memory.view[100:105]) == b"flash"
    assert storage.read(98, 9) == b"\0\0flash\0\0"
    assert storage.mapped_base == memory.address


@pytest.mark.parametrize("offset", [0, 128])
def test_reads_longer_than_the_scratch_of_direct_ones(
    tmp_path: Path, mode: str, offset: int
) -> None:
    content = make_file(tmp_path / "f", 3_000_001)[offset:]
    storage = _native.FileStorage(str(tmp_path / "f"), offset=offset, mode=mode)

    for start, stop in [(0, len(content)), (3, 2 << 20), (511, 2_500_001)]:
        assert storage.read(start, stop - start) == content[start:stop]


def test_open_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    path = tmp_path / "f"
    make_file(path, 100)

    with pytest.raises(FileNotFoundError) as missing:
        _native.FileStorage(str(tmp_path / "none"))
    assert missing.value.filename == str(tmp_path / "none")
    with pytest.raises(OSError, match="beyond the end"):
        _native.FileStorage(str(path), offset=101)
    with pytest.raises(OSError, match="ends beyond"):
        _native.FileStorage(str(path), offset=1, nbytes=100)
    with pytest.raises(OSError, match="is a directory"):
        _native.FileStorage(str(tmp_path))
    with pytest.raises(ValueError, match="mode"):
        _native.FileStorage(str(path), mode="fast")
    with pytest.raises(ValueError, match="read-only"):
        _native.FileStorage(str(path), writable=True, map_address=4096)


def test_mapped_file_notices_truncation(tmp_path: Path) -> None:
    path = tmp_path / "f"
    make_file(path, 1 << 20)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = np.frombuffer(mapping, dtype=np.uint8)
    storage = _native.FileStorage(str(path), offset=128, map_address=view.ctypes.data)

    storage.validate(0, storage.nbytes)
    assert storage.mapped_base == view.ctypes.data + 128
    os.truncate(path, 1 << 19)
    storage.validate(0, 0)

    # The size is looked up at most once a millisecond.
    time.sleep(0.002)
    with pytest.raises(OSError, match="truncated"):
        storage.validate(0, storage.nbytes)
    storage.validate(0, (1 << 19) - 128)


def test_file_size_limit_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 20)
    storage = _native.FileStorage(str(path), writable=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        with pytest.raises(OSError) as failed:
            storage.write((1 << 19) + 4096, b"x" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert failed.value.errno == errno.EFBIG


def test_striped_checks_its_geometry() -> None:
    memory = Memory(1 << 16)
    member = _native.MemoryStorage(memory.address, memory.nbytes, True, memory)

    assert _native.StripedStorage([member, member], 4096, nbytes=5000).nbytes == 5000
    with pytest.raises(ValueError, match="4096"):
        _native.StripedStorage([member], 1000)
    with pytest.raises(ValueError, match="nbytes=1048576, but whole stripes"):
        _native.StripedStorage([member], 4096, nbytes=1 << 20)
    with pytest.raises(ValueError, match="65536 bytes, less than a stripe of 131072"):
        _native.StripedStorage([member], 1 << 17)
    with pytest.raises(ValueError, match="at least one"):
        _native.StripedStorage([], 4096)


def test_replicas_all_get_writes_and_any_can_be_read(tmp_path: Path, mode: str) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(bytes(100_000))
    members = [_native.FileStorage(str(path), writable=True, mode=mode) for path in paths]
    storage = _native.ReplicatedStorage(members)
    content = random_bytes(100_000)

    storage.write(0, content)
    assert [path.read_bytes() for path in paths] == [content, content]
    os.truncate(paths[0], 1000)

    for _ in range(4):
        assert storage.read(50_000, 5000) == content[50_000:55_000]


def test_replicas_of_different_size_are_refused() -> None:
    memory = Memory(1 << 16)
    small = _native.MemoryStorage(memory.address, 100, True, memory)
    large = _native.MemoryStorage(memory.address, 200, True, memory)

    with pytest.raises(ValueError, match="differ"):
        _native.ReplicatedStorage([small, large])


def test_describe_says_what_it_is(tmp_path: Path, mode: str) -> None:
    make_file(tmp_path / "f", 5000)
    storage = _native.FileStorage(str(tmp_path / "f"), offset=128, mode=mode)

    facts = storage.describe()
    striped = _native.StripedStorage([storage], 4096).describe()

    assert facts["kind"] == "file"
    assert facts["path"] == str(tmp_path / "f")
    assert facts["o_direct"] is (mode == "direct")
    assert facts["nbytes"] == 5000 - 128
    assert striped["members"] == [facts]


def test_aligned_memory_is_aligned_and_zeroed() -> None:
    held = _native.HostMemory(100_000, 1 << 21)
    memory = _native.MemoryStorage(held.address, held.nbytes, owner=held)

    assert held.address % (1 << 21) == 0
    assert memory.read(0, 100_000) == bytes(100_000)
    with pytest.raises(ValueError, match="power of two"):
        _native.HostMemory(1, 3)


def test_residency_counts_pages_in_memory() -> None:
    memory = Memory(64 * 4096)

    assert _native.residency(memory.address, memory.nbytes) == 0.0
    memory.view[: 16 * 4096] = 1

    assert _native.residency(memory.address, memory.nbytes) == pytest.approx(0.25)


@pytest.mark.parametrize("refused", [False, True])
def test_residency_of_a_file_is_asked_by_cachestat_or_by_mincore(
    refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(64 * PAGE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # against reading ahead
        os.pread(file.fileno(), 16 * PAGE, 16 * PAGE)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if refused:
        monkeypatch.setattr(_native, "cached_pages", refuse)
    with contextlib.closing(Mapping(path, 64 * PAGE, 8 * PAGE)) as mapping:
        if mapping.residency() > 0.5:
            pytest.skip("the file system keeps pages of its own accord")

        assert mapping.residency() == pytest.approx(16 / 56)
        assert mapping.residency(8 * PAGE, 24 * PAGE) == 1.0
        assert mapping.residency(10 * PAGE + 1, 10 * PAGE + 2) == 1.0
        assert mapping.residency(0, 8 * PAGE) == 0.0
        assert mapping.residency(5, 5) == 1.0
        assert mapping.asked_by.startswith("mincore, because" if refused else "cachestat")


def test_direct_alignment_of_directory_is_an_explanation(tmp_path: Path) -> None:
    assert isinstance(_native.direct_io_alignment(str(tmp_path / "missing")), str)


# A file that others cut short while it is written.


def cut_by(path: Path, nbytes: int) -> int:
    """Make a file shorter by so many bytes, and return what is left."""
    left = path.stat().st_size - nbytes
    os.truncate(path, left)
    return left


@pytest.mark.parametrize("operation", ["write", "write_zeroes"])
@pytest.mark.parametrize("where", ["last", "before the last", "across the end"])
def test_write_does_not_extend_a_file_that_was_cut(
    tmp_path: Path, mode: str, operation: str, where: str
) -> None:
    """What was cut read as zeros then, up to what was written."""
    path = tmp_path / "f"
    content = make_file(path, 1 << 20)
    storage = _native.FileStorage(str(path), writable=True, mode=mode)
    storage.write(0, content[:4096])
    left = cut_by(path, 1 << 19)
    offset = {"last": (1 << 20) - 4096, "before the last": left, "across the end": left - 2048}

    time.sleep(0.003)  # older than a look at the size is trusted
    argument = bytes(4096) if operation == "write" else 4096
    with pytest.raises(OSError, match="truncated") as caught:
        getattr(storage, operation)(offset[where], argument)

    assert caught.value.errno == errno.ENODATA
    assert path.stat().st_size == left
    storage.write(0, content[:4096])
    assert path.read_bytes() == content[:left]


def test_last_bytes_are_never_written_on_an_old_look(tmp_path: Path, mode: str) -> None:
    """They would give the file its length back, and nobody could notice any more."""
    path = tmp_path / "f"
    make_file(path, 1 << 16)
    storage = _native.FileStorage(str(path), writable=True, mode=mode)
    for _ in range(50):
        storage.write((1 << 16) - 8192, bytes(4096))  # looks, at most once a millisecond
        os.truncate(path, 4096)
        with pytest.raises(OSError, match="truncated"):
            storage.write((1 << 16) - 4096, bytes(4096))
        assert path.stat().st_size == 4096
        os.truncate(path, 1 << 16)


def test_flush_finds_what_a_write_on_an_old_look_extended(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "f"
    make_file(path, 1 << 16)
    storage = _native.FileStorage(str(path), writable=True, mode=mode)
    extended = 0
    for _ in range(50):
        storage.write(0, bytes(4096))
        os.truncate(path, 4096)
        with contextlib.suppress(OSError):
            storage.write(1 << 15, bytes(4096))
            extended += 1
        with pytest.raises(OSError, match="truncated"):
            storage.flush()
        os.truncate(path, 1 << 16)
        storage.flush()
    assert extended, "the window of a millisecond was never met: this test shows nothing"


def test_file_that_was_cut_and_not_written_is_flushed(tmp_path: Path) -> None:
    """Nothing of ours can be lost: what was stored before is in what is left, or was cut later."""
    path = tmp_path / "f"
    rows = np.arange(1 << 15, dtype="<i8")
    rows.tofile(path)
    with fw.open(path, "r+", dtype="<i8", device="cpu", cache="64 KiB") as x:
        assert x[5] == 5
        os.truncate(path, 4096)
        with pytest.raises(StorageError, match="truncated"):
            x[len(rows) - 1]
        x.flush()
    assert path.stat().st_size == 4096


@pytest.mark.parametrize("o_direct", [False, True])
@pytest.mark.parametrize("how", ["replaced", "removed", "moved", "linked"])
def test_stores_to_a_file_that_lost_its_name(tmp_path: Path, how: str, o_direct: bool) -> None:
    """They ended with the array, and nothing said so; of a removed file that is meant."""
    path, new = tmp_path / "f", tmp_path / "new"
    np.arange(1 << 12, dtype="<i8").tofile(path)
    new.write_bytes(bytes(1 << 15))
    o_direct = o_direct and direct_works(tmp_path)
    x = fw.open(path, "r+", dtype="<i8", device="cpu", cache="64 KiB", o_direct=o_direct)
    x[:] = 1
    x.flush()
    if how == "removed":
        path.unlink()
    if how == "moved":
        path.rename(tmp_path / "elsewhere")
    if how == "linked":
        os.link(path, tmp_path / "elsewhere")
    if how != "removed":
        new.replace(path)
    x[:] = 2

    if how == "replaced":
        with pytest.raises(StorageError, match="another file has its name") as caught:
            x.flush()
        assert caught.value.errno == errno.ESTALE
        with pytest.raises(StorageError, match="another file has its name"):
            x.close()
    else:
        x.flush()
        x.close()


def test_bytes_behind_the_range_are_not_the_range(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "f"
    make_file(path, 1 << 16)
    storage = _native.FileStorage(str(path), nbytes=1 << 15, writable=True, mode=mode)

    os.truncate(path, 1 << 15)

    storage.write(0, bytes(1 << 15))
    storage.flush()
    assert path.read_bytes() == bytes(1 << 15)


@pytest.mark.parametrize("layout", ["one", "stripe", "replicate"])
@pytest.mark.parametrize("o_direct", [False, True])
def test_array_keeps_what_it_cannot_write_and_says_so(
    tmp_path: Path, layout: str, o_direct: bool
) -> None:
    rows = np.arange(1 << 16, dtype="<i8").reshape(-1, 512)
    names = [tmp_path / f"{n}" for n in range(1 if layout == "one" else 2)]
    for name in names:
        name.write_bytes(rows.tobytes())
    kinds: dict[str, Any] = {"stripe": Striped, "replicate": Replicated}
    x = fw.open(
        names[0] if layout == "one" else kinds[layout](names),
        "r+",
        dtype="<i8",
        device="cpu",
        cache="2 MiB",
        o_direct=o_direct and direct_works(tmp_path),
    )
    stored = np.arange(x.size, dtype="<i8") * -1
    x[...] = stored
    left = cut_by(names[-1], 1 << 18)
    time.sleep(0.003)

    for _ in range(2):
        with pytest.raises(StorageError, match="truncated") as caught:
            x.flush()
        assert caught.value.errno == errno.ENODATA
        assert caught.value.filename == str(names[-1])
        assert names[-1].stat().st_size == left
        assert x[x.size - 1] == stored[-1], "the line is dirty still"

    os.truncate(names[-1], rows.nbytes)
    x.flush()
    x.drop_cache()
    np.testing.assert_array_equal(x[...], stored)

    x[...] = 0
    os.truncate(names[-1], left)
    time.sleep(0.003)
    with pytest.raises(StorageError, match="truncated"):
        x.close()
    assert names[-1].stat().st_size == left
    fw.open(names[-1], "r+", dtype="<i8", device="cpu").close()


def test_line_that_makes_room_is_not_lost_in_a_file_that_was_cut(tmp_path: Path) -> None:
    rows = np.arange(1 << 16, dtype="<i8").reshape(-1, 512)
    path = tmp_path / "f"
    rows.tofile(path)
    x = fw.open(path, "r+", dtype="<i8", shape=rows.shape, device="cpu", cache="64 KiB")
    x[len(rows) - 4 :] = -1
    os.truncate(path, rows.nbytes // 2)
    time.sleep(0.003)

    with contextlib.suppress(StorageError):
        for _ in range(4):
            x.gather(np.arange(len(rows) // 2))
    with pytest.raises(StorageError, match="truncated"):
        x.flush()

    assert path.stat().st_size == rows.nbytes // 2
    with pytest.raises(StorageError, match="truncated"):
        x.close()
