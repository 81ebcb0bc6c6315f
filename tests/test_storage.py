"""Storages: whole and exact transfers, clear refusals, and no zeros where data is missing."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flashwarp import _native
from ring_host import Memory


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


@pytest.mark.parametrize("offset", [0, 128, 4096])
def test_file_reads_any_range(tmp_path: Path, mode: str, offset: int) -> None:
    content = make_file(tmp_path / "f", 3_000_001)[offset:]
    storage = _native.FileStorage(str(tmp_path / "f"), offset=offset, mode=mode)
    rng = np.random.default_rng(offset)

    assert storage.nbytes == len(content)
    for _ in range(50):
        start = int(rng.integers(0, len(content)))
        nbytes = int(rng.integers(0, len(content) - start + 1))
        assert storage.read(start, nbytes) == content[start : start + nbytes]


@pytest.mark.parametrize("offset", [0, 128, 4096])
def test_file_writes_any_range_and_nothing_else(tmp_path: Path, mode: str, offset: int) -> None:
    content = bytearray(make_file(tmp_path / "f", 300_001))
    storage = _native.FileStorage(str(tmp_path / "f"), offset=offset, writable=True, mode=mode)
    rng = np.random.default_rng(offset)

    for turn in range(50):
        start = int(rng.integers(0, storage.nbytes))
        nbytes = int(rng.integers(0, storage.nbytes - start + 1))
        data = random_bytes(nbytes, turn)
        storage.write(start, data)
        content[offset + start : offset + start + nbytes] = data
        assert storage.read(start, nbytes) == data
    storage.flush()

    assert (tmp_path / "f").read_bytes() == content


def test_file_range_bounds_what_can_be_touched(tmp_path: Path, mode: str) -> None:
    content = make_file(tmp_path / "f", 10_000)
    storage = _native.FileStorage(
        str(tmp_path / "f"), offset=1000, nbytes=500, writable=True, mode=mode
    )

    for offset, nbytes in [(500, 1), (0, 501), (2**64 - 1, 2)]:
        with pytest.raises(ValueError, match="outside"):
            storage.read(offset, nbytes)
    with pytest.raises(ValueError, match="outside"):
        storage.write(499, b"ab")

    assert (tmp_path / "f").read_bytes() == content


def test_discard_and_write_zeroes_clear_only_their_range(tmp_path: Path, mode: str) -> None:
    content = bytearray(make_file(tmp_path / "f", 100_000))
    storage = _native.FileStorage(str(tmp_path / "f"), offset=100, writable=True, mode=mode)

    storage.discard(10_000, 20_001)
    storage.write_zeroes(50_000, 333)

    content[10_100:30_101] = bytes(20_001)
    content[50_100:50_433] = bytes(333)
    assert (tmp_path / "f").read_bytes() == content
    assert storage.read(0, storage.nbytes) == content[100:]


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
    with pytest.raises(OSError, match="neither a regular file"):
        _native.FileStorage(str(tmp_path))
    with pytest.raises(ValueError, match="mode"):
        _native.FileStorage(str(path), mode="fast")
    with pytest.raises(ValueError, match="read-only"):
        _native.FileStorage(str(path), writable=True, map_address=4096)


def test_read_only_storage_refuses_writes(tmp_path: Path) -> None:
    content = make_file(tmp_path / "f", 1000)
    storage = _native.FileStorage(str(tmp_path / "f"))

    for act in [
        lambda: storage.write(0, b"x"),
        lambda: storage.discard(0, 1),
        lambda: storage.write_zeroes(0, 1),
    ]:
        with pytest.raises(OSError) as refused:
            act()
        assert refused.value.errno == errno.EROFS

    assert (tmp_path / "f").read_bytes() == content


def test_truncated_file_is_an_error_not_zeros(tmp_path: Path, mode: str) -> None:
    content = make_file(tmp_path / "f", 100_000)
    storage = _native.FileStorage(str(tmp_path / "f"), offset=128, mode=mode)

    os.truncate(tmp_path / "f", 50_000)

    assert storage.read(0, 50_000 - 128) == content[128:50_000]
    for offset, nbytes in [(49_000, 2000), (60_000, 10)]:
        with pytest.raises(OSError, match="truncated") as failed:
            storage.read(offset, nbytes)
        assert failed.value.errno == errno.ENODATA
        assert failed.value.filename == str(tmp_path / "f")


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


def test_striped_round_trip(tmp_path: Path, mode: str) -> None:
    paths = [tmp_path / f"s{i}" for i in range(3)]
    for path in paths:
        path.write_bytes(bytes(256 * 1024))
    members = [_native.FileStorage(str(path), writable=True, mode=mode) for path in paths]
    storage = _native.StripedStorage(members, stripe_bytes=8192)
    content = random_bytes(storage.nbytes)

    storage.write(0, content)
    storage.flush()

    assert storage.nbytes == 3 * 256 * 1024
    assert storage.read(0, storage.nbytes) == content
    assert storage.read(8000, 20_000) == content[8000:28_000]
    for i, path in enumerate(paths):
        assert path.read_bytes()[8192:16384] == content[(3 + i) * 8192 : (4 + i) * 8192]


def test_striped_checks_its_geometry() -> None:
    memory = Memory(1 << 16)
    member = _native.MemoryStorage(memory.address, memory.nbytes, True, memory)

    assert _native.StripedStorage([member, member], 4096, nbytes=5000).nbytes == 5000
    with pytest.raises(ValueError, match="4096"):
        _native.StripedStorage([member], 1000)
    with pytest.raises(ValueError, match="cannot hold"):
        _native.StripedStorage([member], 4096, nbytes=1 << 20)
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
    assert facts["direct"] is (mode == "direct")
    assert facts["nbytes"] == 5000 - 128
    assert striped["members"] == [facts]


def test_storage_in_forked_child_raises(tmp_path: Path) -> None:
    make_file(tmp_path / "f", 5000)
    program = """
import os, sys
from flashwarp import _native
storage = _native.FileStorage(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        storage.read(0, 10)
    except RuntimeError as error:
        os._exit(0 if "fork" in str(error) else 2)
    os._exit(1)
assert storage.read(0, 10)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "f")], check=True, timeout=30)


def test_aligned_memory_is_aligned_zeroed_and_freed_once() -> None:
    address = _native.alloc_aligned(100_000, 1 << 21)
    memory = _native.MemoryStorage(address, 100_000)

    assert address % (1 << 21) == 0
    assert memory.read(0, 100_000) == bytes(100_000)
    _native.free_aligned(address)
    with pytest.raises(ValueError, match="free"):
        _native.free_aligned(address)
    with pytest.raises(ValueError, match="power of two"):
        _native.alloc_aligned(1, 3)


def test_residency_counts_pages_in_memory() -> None:
    memory = Memory(64 * 4096)

    assert _native.residency(memory.address, memory.nbytes) == 0.0
    memory.view[: 16 * 4096] = 1

    assert _native.residency(memory.address, memory.nbytes) == pytest.approx(0.25)


def test_direct_alignment_of_directory_is_an_explanation(tmp_path: Path) -> None:
    assert isinstance(_native.direct_io_alignment(str(tmp_path / "missing")), str)
