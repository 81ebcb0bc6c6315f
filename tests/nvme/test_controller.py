"""The software controller: what is its own. What all controllers must do: `testing/`."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwarp import _native
from flashwarp.testing.rings import (
    CAPACITY_EXCEEDED,
    DATA_TRANSFER_ERROR,
    FLUSH,
    IDENTIFY,
    INVALID_FIELD,
    INVALID_NAMESPACE,
    INVALID_OPCODE,
    LBA,
    LBA_OUT_OF_RANGE,
    READ,
    SUCCESS,
    UNRECOVERED_READ,
    WRITE_FAULT,
    Host,
    Ring,
)
from flashwarp.testing.rings import AlignedMemory as Memory

MIB = 1 << 20


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def random_memory(nbytes: int = MIB) -> tuple[Any, np.ndarray]:
    memory = Memory(nbytes)
    memory.view[:] = random_bytes(nbytes)
    return _native.MemoryStorage(memory.address, nbytes, True, memory), memory.view


def random_file(path: Path, nbytes: int, seed: int = 0) -> np.ndarray:
    content = random_bytes(nbytes, seed)
    content.tofile(path)
    return content


@pytest.fixture(params=["buffered", "direct"])
def mode(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "probe").write_bytes(bytes(8192))
    refused = isinstance(_native.direct_io_alignment(str(tmp_path / "probe")), str)
    if request.param == "direct" and refused:
        pytest.skip("the file system of the test directory has no direct I/O")
    return str(request.param)


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "threads":
        monkeypatch.setenv("FLASHWARP_IO_ENGINE", "threads")
    else:
        monkeypatch.delenv("FLASHWARP_IO_ENGINE", raising=False)
        available, reason = _native.io_uring_available()
        if not available:
            pytest.skip(reason)
    return str(request.param)


# --- commands and their statuses ---------------------------------------------------------------


def test_identity_prp_moves_nothing_and_is_still_validated() -> None:
    storage, content = random_memory()
    base = storage.mapped_base
    before = content.copy()
    with Host(storage, regions=[]) as host:
        assert host.read(5, 8, prp1=base + 5 * LBA) == SUCCESS
        assert host.write(5, 8, prp1=base + 5 * LBA) == SUCCESS
        assert host.read(5, 8, prp1=base + 6 * LBA) == DATA_TRANSFER_ERROR
        assert host.read(2048, 1, prp1=base + 2048 * LBA) == LBA_OUT_OF_RANGE
        assert host.controller.stats["bytes_read"] == 8 * LBA
    assert (content == before).all()


def test_identify_describes_controller_and_namespace() -> None:
    storage, _ = random_memory(MIB + 100)
    with Host(storage, admin=True, max_transfer_bytes=1 << 17) as host:
        admin, io = host.rings
        assert host.do(IDENTIFY, admin, cdw10=1, nsid=0) == SUCCESS
        controller = host.data[:4096].tobytes()
        assert host.do(IDENTIFY, admin, cdw10=0) == SUCCESS
        namespace = host.data[:4096].tobytes()
        assert host.do(IDENTIFY, admin, cdw10=2, nsid=0) == SUCCESS
        assert host.data[:8].view("<u4").tolist() == [1, 0]
        assert host.do(IDENTIFY, admin, cdw10=0, nsid=9) == INVALID_NAMESPACE
        assert host.do(IDENTIFY, admin, cdw10=0x55) == INVALID_FIELD
        assert host.do(READ, admin, lba=0, blocks=1) == INVALID_OPCODE
        assert host.do(READ, io, lba=0, blocks=1) == SUCCESS

        assert controller == host.controller.identify_controller()
        assert namespace == host.controller.identify_namespace()
    assert controller[24:64].decode().strip() == "flashwarp software controller"
    assert 4096 << controller[77] == 1 << 17
    assert int.from_bytes(namespace[:8], "little") == (MIB + 100 + LBA - 1) // LBA
    assert namespace[130] == 9


# --- files -------------------------------------------------------------------------------------


def test_deep_queues_of_direct_reads_share_enters(tmp_path: Path) -> None:
    content = random_file(tmp_path / "f", 4 * MIB)
    try:
        storage = _native.FileStorage(str(tmp_path / "f"), mode="direct")
    except OSError as error:
        pytest.skip(str(error))
    with Host(storage, depth=256, buffer_nbytes=MIB) as host:
        (ring,) = host.rings
        for cid in range(255):
            ring.write(READ, cid, lba=16 * cid, blocks=8, prp1=host.buffer.address + 4096 * cid)
        ring.ring()
        assert sorted(host.wait(ring).cid for _ in range(255)) == list(range(255))
        for cid in range(255):
            expected = content[cid * 16 * LBA : cid * 16 * LBA + 4096]
            assert (host.data[4096 * cid : 4096 * (cid + 1)] == expected).all()
        stats = host.controller.stats
    assert stats["engine_operations"] == 255
    assert stats["io_uring_enters"] <= 2


def test_cold_buffered_reads_go_through_the_engine(tmp_path: Path, engine: str) -> None:
    content = random_file(tmp_path / "f", 4 * MIB)
    storage = _native.FileStorage(str(tmp_path / "f"))
    os.fsync(storage.fd)
    os.posix_fadvise(storage.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with Host(storage, depth=64) as host:
        for lba in range(0, 8192, 512):
            assert host.read(lba, 64) == SUCCESS
            assert (host.data[: 64 * LBA] == content[lba * LBA : (lba + 64) * LBA]).all()
        cold = host.controller.stats["engine_operations"]
        for lba in range(0, 8192, 512):
            assert host.read(lba, 64) == SUCCESS
        if cold == 0:
            pytest.skip("the file system keeps its files in memory")
        assert host.controller.stats["engine_operations"] == cold


def test_io_outlives_the_thread_that_submitted_it(tmp_path: Path, mode: str) -> None:
    content = random_file(tmp_path / "f", 4 * MIB)
    storage = _native.FileStorage(str(tmp_path / "f"), mode=mode)
    os.fsync(storage.fd)
    os.posix_fadvise(storage.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with Host(storage, depth=128) as host:
        (ring,) = host.rings
        for cid in range(100):
            ring.write(READ, cid, lba=64 * cid, blocks=8, prp1=host.buffer.address + 4096 * cid)
        ring.ring()
        helper = threading.Thread(target=host.controller.serve_some)
        helper.start()
        helper.join()

        got = [host.wait(ring) for _ in range(100)]

        assert sorted(c.cid for c in got) == list(range(100))
        assert {c.status for c in got} == {SUCCESS}
        for cid in range(100):
            expected = content[cid * 64 * LBA : cid * 64 * LBA + 4096]
            assert (host.data[4096 * cid : 4096 * (cid + 1)] == expected).all()


def test_refused_io_uring_falls_back_and_says_why(tmp_path: Path) -> None:
    random_file(tmp_path / "f", MIB)
    # A seccomp filter as containers install it: io_uring_setup fails with EPERM.
    program = """
import ctypes, os, struct, sys
os.environ.pop("FLASHWARP_IO_ENGINE", None)
from flashwarp.testing.rings import FLUSH, Host
from flashwarp import _native
setup, eperm = 425, 0x00050000 | 1
code = [(0x20, 0, 0, 0), (0x15, 0, 1, setup), (0x06, 0, 0, eperm), (0x06, 0, 0, 0x7FFF0000)]
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
available, reason = _native.io_uring_available()
assert not available and "EPERM" in reason and "seccomp" in reason, reason
with Host(_native.FileStorage(sys.argv[1], writable=True)) as host:
    assert host.controller.describe()["engine"] == "thread-pool: " + reason
    assert host.write(0, 8, fua=1) == 0
    assert host.read(0, 8) == 0
    assert host.do(FLUSH) == 0
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "f")], check=False, timeout=60
    )
    if result.returncode == 77:
        pytest.skip("installing a seccomp filter is not permitted")
    assert result.returncode == 0


def test_truncated_file_fails_reads_with_its_path(tmp_path: Path, mode: str, engine: str) -> None:
    random_file(tmp_path / "f", MIB)
    storage = _native.FileStorage(str(tmp_path / "f"), offset=128, mode=mode)
    with Host(storage) as host:
        os.truncate(tmp_path / "f", MIB // 2)

        assert host.read(1500, 8) == UNRECOVERED_READ
        assert host.read(MIB // 2 // LBA - 4, 8) == UNRECOVERED_READ
        assert host.read(0, 8) == SUCCESS

        error, _ = host.controller.take_errors()
        assert error["op"] == "read"
        assert error["path"] == str(tmp_path / "f")
        assert error["offset"] == 128 + 1500 * LBA
        assert error["nbytes"] == 8 * LBA
        assert "truncated" in error["reason"]
        assert error["time"] == pytest.approx(time.time(), abs=60)


def test_yielding_threads_leave_the_work_to_a_launch_until_it_ends() -> None:
    storage, view = random_memory()
    with Host(storage, threads=2, yields=True) as host:
        host.controller.launch_begins()
        ring = host.rings[0]
        time.sleep(0.02)  # whoever was looking has gone to sleep
        ring.write(READ, 1, lba=8, blocks=8, prp1=host.buffer.address)
        ring.ring()
        time.sleep(0.02)
        assert ring.consume() is None
        assert host.controller.serve_some(0) == 1
        assert ring.consume() is not None

        ring.write(READ, 2, lba=16, blocks=8, prp1=host.buffer.address)
        ring.ring()
        host.controller.launch_ends()

        assert host.wait(ring).status == SUCCESS
        assert (host.data[: 8 * LBA] == view[16 * LBA : 24 * LBA]).all()


def test_an_idle_thread_ends_and_comes_back_for_what_a_launch_leaves() -> None:
    storage, view = random_memory()
    with Host(storage, threads=1, yields=True) as host:
        threads, ring = len(os.listdir("/proc/self/task")), host.rings[0]
        host.controller.hear_launches(True)
        for turn in range(3):
            limit = time.monotonic() + 10  # it ends after 0.2 s
            while len(os.listdir("/proc/self/task")) >= threads:
                assert time.monotonic() < limit
                time.sleep(0.05)

            host.controller.launch_begins()
            ring.write(READ, turn, lba=16 * turn, blocks=8, prp1=host.buffer.address)
            ring.ring()
            host.controller.launch_ends()

            assert host.wait(ring).status == SUCCESS
            assert (host.data[: 8 * LBA] == view[16 * turn * LBA :][: 8 * LBA]).all()
        host.controller.stop()
        host.controller.start()
        assert host.read(8, 8) == SUCCESS


def test_truncated_mapped_file_fails_reads(tmp_path: Path) -> None:
    random_file(tmp_path / "f", MIB)
    with (tmp_path / "f").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    base = np.frombuffer(mapping, np.uint8).ctypes.data
    storage = _native.FileStorage(str(tmp_path / "f"), map_address=base)
    with Host(storage) as host:
        assert host.read(2000, 8, prp1=base + 2000 * LBA) == SUCCESS
        os.truncate(tmp_path / "f", MIB // 2)
        time.sleep(0.002)
        assert host.read(2000, 8, prp1=base + 2000 * LBA) == UNRECOVERED_READ
        assert host.read(2000, 8) == UNRECOVERED_READ
        assert host.read(100, 8, prp1=base + 100 * LBA) == SUCCESS
        assert host.read(100, 8) == SUCCESS


def test_system_error_becomes_fault_status(tmp_path: Path, mode: str, engine: str) -> None:
    random_file(tmp_path / "f", MIB)
    storage = _native.FileStorage(str(tmp_path / "f"), writable=True, mode=mode)
    # A descriptor that can be neither read nor written in the place of the file's own.
    broken = os.open(tmp_path, os.O_PATH)
    for fd in [storage.fd] + ([storage.direct_fd] if mode == "direct" else []):
        os.dup2(broken, fd)
    os.close(broken)
    with Host(storage) as host:
        assert host.read(0, 8) == UNRECOVERED_READ
        assert host.write(0, 8) == WRITE_FAULT
        assert host.do(FLUSH) == WRITE_FAULT
        assert [e["op"] for e in host.controller.take_errors()] == ["read", "write", "flush"]


def test_full_file_system_is_capacity_exceeded(small_disk: Path) -> None:
    with (small_disk / "f").open("wb") as file:
        file.truncate(4 * MIB)
    storage = _native.FileStorage(str(small_disk / "f"), writable=True)
    with Host(storage, buffer_nbytes=2 * MIB) as host:
        assert host.write(0, 1024) == SUCCESS
        assert host.write(1024, 4096) == CAPACITY_EXCEEDED


def test_file_size_limit_is_capacity_exceeded(tmp_path: Path, mode: str, engine: str) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.truncate(MIB)
    storage = _native.FileStorage(str(tmp_path / "f"), writable=True, mode=mode)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Host(storage) as host:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, hard))
        try:
            assert host.write(1536, 8) == CAPACITY_EXCEEDED
            assert host.write(0, 8) == SUCCESS
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_replica_takes_over_from_a_failing_one(tmp_path: Path, mode: str, engine: str) -> None:
    content = random_file(tmp_path / "a", MIB)
    random_file(tmp_path / "b", MIB)
    members = [_native.FileStorage(str(tmp_path / name), writable=True, mode=mode) for name in "ab"]
    storage = _native.ReplicatedStorage(members)
    with Host(storage) as host:
        host.data[:4096] = 5
        assert host.write(0, 8) == SUCCESS
        assert host.do(FLUSH) == SUCCESS
        os.truncate(tmp_path / "a", 4096)
        for _ in range(4):
            host.data[:4096] = 0
            assert host.read(1024, 8) == SUCCESS
            assert (host.data[:4096] == content[1024 * LBA : 1024 * LBA + 4096]).all()
        errors = host.controller.take_errors()
        assert errors
        assert all(e["recovered"] and e["path"] == str(tmp_path / "a") for e in errors)
        assert host.controller.stats["errors"] == 0

        os.truncate(tmp_path / "b", 4096)
        assert host.read(1024, 8) == UNRECOVERED_READ
        assert [e["recovered"] for e in host.controller.take_errors()] == [True, False]
    assert (tmp_path / "b").read_bytes() == bytes([5] * 4096)


def test_memory_and_files_mix_in_one_striped_namespace(tmp_path: Path, mode: str) -> None:
    content = random_file(tmp_path / "f", MIB)
    memory, held = random_memory()
    storage = _native.StripedStorage(
        [memory, _native.FileStorage(str(tmp_path / "f"), mode=mode)], 8192
    )
    with Host(storage) as host:
        assert host.read(8, 32) == SUCCESS
        expected = [held[4096:8192], content[:8192], held[8192:12288]]
        assert (host.data[: 32 * LBA] == np.concatenate(expected)).all()


# --- life --------------------------------------------------------------------------------------


def test_sleeping_controller_wakes() -> None:
    storage, _ = random_memory()
    with Host(storage, threads=2, queues=2) as host:
        late, woken = [], []
        for turn in range(20):
            time.sleep(0.005)
            start = time.monotonic()
            if turn % 2:
                host.controller.wake()
            assert host.read(0, 1) == SUCCESS
            (woken if turn % 2 else late).append(time.monotonic() - start)
        stats = host.controller.stats
    # Expected: 1 ms without wake(), 0.1 ms with it; the margin is for a busy machine.
    assert min(late) < 0.01
    assert min(woken) < 0.005
    assert stats["sleeps"] > 0
    assert stats["wakes"] >= 10


def test_wake_call_wakes_without_the_interpreter_and_outlives_the_controller() -> None:
    storage, _ = random_memory()
    threads = 32
    with Host(storage, threads=threads) as host:
        call = _native.WakeCall([host.controller])
        # Without the GIL, as a thread of CUDA makes it.
        wake = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call.function)
        took = []
        for _ in range(5):
            time.sleep(0.02)
            before = host.controller.stats
            start = time.monotonic()
            wake(call.argument)
            while host.controller.stats["sleeps"] < before["sleeps"] + threads:
                assert time.monotonic() - start < 10, "the threads sleep on"
            took.append(time.monotonic() - start)
            assert host.controller.stats["wakes"] == before["wakes"] + 1
        host.controller.stop()
        wake(call.argument)
    # All threads look for 0.1 ms and sleep again. One alone wakes by time, each millisecond.
    assert min(took) < threads * 0.001
    del host
    wake(call.argument)


def test_thread_that_is_woken_while_it_looks_goes_on_looking() -> None:
    storage, _ = random_memory()
    with Host(storage, threads=1, spin_ns=200_000_000) as host:
        host.controller.wake()
        before = host.controller.stats["sleeps"]
        for _ in range(25):
            time.sleep(0.02)
            host.controller.wake()
        assert host.controller.stats["sleeps"] == before


def test_controller_in_forked_child_raises_and_does_not_hang(tmp_path: Path) -> None:
    random_file(tmp_path / "f", MIB)
    program = """
import os, sys
from flashwarp.testing.rings import Host
from flashwarp import _native
for engine in ["", "threads"]:
    os.environ["FLASHWARP_IO_ENGINE"] = engine
    host = Host(_native.FileStorage(sys.argv[1]), threads=2)
    child = os.fork()
    if child == 0:
        try:
            host.controller.serve_some()
        except RuntimeError as error:
            host.controller.stop()
            del host
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert host.read(0, 1) == 0
    host.controller.stop()
"""
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "f")],
        check=True,
        timeout=60,
    )


def test_constructor_refuses_what_cannot_be() -> None:
    storage, _ = random_memory()
    ring = Ring(8)

    def pair(**changes: int) -> Any:
        names = ["sq", "cq", "sq_doorbell", "cq_doorbell", "depth", "id"]
        return _native.QueuePair(**{**{n: getattr(ring.pair, n) for n in names}, **changes})

    for pairs, options, text in [
        ([], {}, "at least one"),
        ([pair(depth=1)], {}, "depth"),
        ([pair(sq=ring.pair.sq + 4)], {}, "aligned"),
        ([pair(cq=0)], {}, "aligned"),
        ([pair(sq_doorbell=3)], {}, "aligned"),
        ([pair()], {"page_bytes": 5000}, "page_bytes"),
        ([pair()], {"max_transfer_bytes": 512}, "max_transfer"),
        ([pair()], {"threads": 1000}, "threads"),
        ([pair(heartbeat=6)], {}, "heartbeat"),
        ([pair(), pair(heartbeat=64)], {}, "heartbeat"),
    ]:
        with pytest.raises(ValueError, match=text):
            _native.SoftwareController(storage, pairs, **options)


def test_heart_beats_while_a_storage_hangs_and_says_when_it_stops() -> None:
    storage, _ = random_memory()
    ring, word = Ring(8), Memory(64)
    names = ["sq", "cq", "sq_doorbell", "cq_doorbell", "depth", "id"]
    pair = _native.QueuePair(**{n: getattr(ring.pair, n) for n in names}, heartbeat=word.address)
    # No thread serves, as when each is held by a storage that does not answer.
    controller = _native.SoftwareController(storage, [pair], threads=0)
    beats = word.view.view("<u4")
    assert beats[0] == 0

    controller.start()
    begin, first, seen = time.monotonic(), int(beats[0]), 0
    while seen < 20 and time.monotonic() < begin + 60:
        time.sleep(0.05)
        seen = int(beats[0]) - first
    elapsed = time.monotonic() - begin
    controller.stop()

    # Each 25 ms, however late: device code counts them for time that has passed.
    assert 20 <= seen < 2 + elapsed / 0.02
    assert beats[0] == 0


def test_stats_count_commands_by_kind_and_queue() -> None:
    storage, _ = random_memory()
    with Host(storage, queues=2) as host:
        host.read(0, 8)
        host.write(0, 4)
        host.do(FLUSH, host.rings[0])
        stats = host.controller.stats
    assert {k: v for k, v in stats["commands"].items() if v} == {"read": 1, "write": 1, "flush": 1}
    assert stats["queues"] == {1: 1, 2: 2}
    assert stats["bytes_read"] == 8 * LBA
    assert stats["bytes_written"] == 4 * LBA
