"""The software controller, seen from the rings: every opcode, every status, every pressure."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwarp import _native
from ring_host import (
    CAPACITY_EXCEEDED,
    COMMAND_ABORTED,
    DATA_TRANSFER_ERROR,
    DATASET_MANAGEMENT,
    FLUSH,
    IDENTIFY,
    INVALID_FIELD,
    INVALID_NAMESPACE,
    INVALID_OPCODE,
    LBA,
    LBA_OUT_OF_RANGE,
    PRP_OFFSET_INVALID,
    READ,
    SUCCESS,
    UNRECOVERED_READ,
    WRITE,
    WRITE_FAULT,
    WRITE_PROTECTED,
    WRITE_ZEROES,
    Host,
    Memory,
    Ring,
)

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


def test_read_and_write_move_blocks_of_memory() -> None:
    storage, content = random_memory()
    with Host(storage) as host:
        assert host.read(3, 16) == SUCCESS
        assert (host.data[: 16 * LBA] == content[3 * LBA : 19 * LBA]).all()

        host.data[: 2 * LBA] = 7
        assert host.write(100, 2) == SUCCESS
        assert (content[100 * LBA : 102 * LBA] == 7).all()
        assert host.do(FLUSH) == SUCCESS
        assert host.do(FLUSH, nsid=0xFFFFFFFF) == SUCCESS
        assert host.controller.take_errors() == []


def test_write_zeroes_and_deallocate_clear_their_ranges() -> None:
    storage, content = random_memory()
    expected = content.copy()
    expected[LBA : 3 * LBA] = 0
    expected[10 * LBA : 12 * LBA] = 0
    expected[20 * LBA : 21 * LBA] = 0
    with Host(storage) as host:
        assert host.do(WRITE_ZEROES, lba=1, blocks=2) == SUCCESS
        ranges = host.data[:32].view([("attributes", "<u4"), ("blocks", "<u4"), ("lba", "<u8")])
        ranges["blocks"], ranges["lba"] = [2, 1], [10, 20]
        assert host.do(DATASET_MANAGEMENT, cdw10=1, cdw11=0) == SUCCESS
        assert not (content == expected).all()
        assert host.do(DATASET_MANAGEMENT, cdw10=1, cdw11=4) == SUCCESS
        assert (content == expected).all()

        ranges["lba"] = [10, MIB // LBA]
        assert host.do(DATASET_MANAGEMENT, cdw10=1, cdw11=4) == LBA_OUT_OF_RANGE


@pytest.mark.parametrize(
    ("status", "opcode", "fields"),
    [
        (INVALID_OPCODE, 0x7F, {}),
        (INVALID_OPCODE, IDENTIFY, {}),
        (INVALID_NAMESPACE, READ, {"lba": 0, "blocks": 1, "nsid": 2}),
        (INVALID_NAMESPACE, FLUSH, {"nsid": 0}),
        (INVALID_NAMESPACE, WRITE_ZEROES, {"lba": 0, "blocks": 1, "nsid": 0xFFFFFFFF}),
        (INVALID_FIELD, READ, {"lba": 0, "blocks": 1, "flags": 0x40}),
        (INVALID_FIELD, READ, {"lba": 0, "blocks": 1, "flags": 0x01}),
        (INVALID_FIELD, READ, {"lba": 0, "blocks": 129}),
        (INVALID_FIELD, WRITE, {"lba": 0, "blocks": 129}),
        (LBA_OUT_OF_RANGE, READ, {"lba": 2048, "blocks": 1}),
        (LBA_OUT_OF_RANGE, READ, {"lba": 2047, "blocks": 2}),
        (LBA_OUT_OF_RANGE, READ, {"lba": 2**64 - 1, "blocks": 2}),
        (LBA_OUT_OF_RANGE, WRITE, {"lba": 2**55, "blocks": 1}),
        (LBA_OUT_OF_RANGE, WRITE_ZEROES, {"lba": 0, "blocks": 2049}),
        (DATA_TRANSFER_ERROR, READ, {"lba": 0, "blocks": 1, "prp1": 4096}),
        (DATA_TRANSFER_ERROR, WRITE, {"lba": 0, "blocks": 1, "prp1": 2**63}),
        (DATA_TRANSFER_ERROR, DATASET_MANAGEMENT, {"cdw10": 0, "cdw11": 4, "prp1": 8}),
        (PRP_OFFSET_INVALID, READ, {"lba": 0, "blocks": 1, "prp1": 4098}),
    ],
)
def test_bad_command_gets_its_status(status: int, opcode: int, fields: dict[str, int]) -> None:
    storage, content = random_memory()
    before = content.copy()
    with Host(storage, max_transfer_bytes=65536) as host:
        assert host.do(opcode, **fields) == status

        (error,) = host.controller.take_errors()
        assert error["status"] == status
        assert error["reason"]
        assert host.controller.stats()["errors"] == 1
        assert host.read(0, 1) == SUCCESS
    assert (content == before).all()


def test_read_only_namespace_is_write_protected() -> None:
    memory = Memory(MIB)
    with Host(_native.MemoryStorage(memory.address, MIB, False, memory)) as host:
        assert host.write(0, 1) == WRITE_PROTECTED
        assert host.do(WRITE_ZEROES, lba=0, blocks=1) == WRITE_PROTECTED
        assert host.do(DATASET_MANAGEMENT, cdw10=0, cdw11=4) == WRITE_PROTECTED
        assert host.read(0, 1) == SUCCESS


def test_identity_prp_moves_nothing_and_is_still_validated() -> None:
    storage, content = random_memory()
    base = storage.mapped_base
    before = content.copy()
    with Host(storage, regions=[]) as host:
        assert host.read(5, 8, prp1=base + 5 * LBA) == SUCCESS
        assert host.write(5, 8, prp1=base + 5 * LBA) == SUCCESS
        assert host.read(5, 8, prp1=base + 6 * LBA) == DATA_TRANSFER_ERROR
        assert host.read(2048, 1, prp1=base + 2048 * LBA) == LBA_OUT_OF_RANGE
        assert host.controller.stats()["bytes_read"] == 8 * LBA
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


# --- rings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3, 16])
def test_phase_flips_over_many_laps(depth: int) -> None:
    storage, content = random_memory()
    with Host(storage, depth=depth) as host:
        for i in range(7 * depth + 1):
            assert host.read(i, 1) == SUCCESS
            assert (host.data[:LBA] == content[i * LBA : (i + 1) * LBA]).all()


def test_completion_carries_sq_head_and_identifiers() -> None:
    storage, _ = random_memory()
    with Host(storage, depth=8, queues=3) as host:
        ring = host.rings[2]
        for cid in [500, 0, 65535]:
            ring.write(READ, cid, lba=0, blocks=1, prp1=host.buffer.address)
        ring.ring()

        got = [host.wait(ring) for _ in range(3)]

        assert [(c.cid, c.status, c.sqid) for c in got] == [
            (500, 0, 3),
            (0, 0, 3),
            (65535, 0, 3),
        ]
        assert [c.sqhd for c in got] == [1, 2, 3]


def test_full_completion_queue_holds_commands_back() -> None:
    storage, _ = random_memory()
    with Host(storage, depth=4) as host:
        (ring,) = host.rings
        for cid in range(3):
            ring.write(READ, cid, lba=0, blocks=1, prp1=host.buffer.address)
        ring.ring()
        host.poll()
        for cid in range(3, 6):
            ring.write(READ, cid, lba=0, blocks=1, prp1=host.buffer.address)
        ring.ring()
        for _ in range(5):
            host.poll()

        assert [ring.consume(release=False).cid for _ in range(3)] == [0, 1, 2]
        assert ring.consume(release=False) is None
        host.poll()
        assert ring.consume(release=False) is None
        ring.release()
        host.poll()
        assert [ring.consume().cid for _ in range(3)] == [3, 4, 5]


def test_full_completion_queue_holds_asynchronous_commands_back(tmp_path: Path, mode: str) -> None:
    random_file(tmp_path / "f", MIB)
    storage = _native.FileStorage(str(tmp_path / "f"), mode=mode)
    with Host(storage, depth=4) as host:
        (ring,) = host.rings
        seen = []
        for lap in range(20):
            for i in range(3):
                ring.write(READ, 3 * lap + i, lba=8 * i, blocks=8, prp1=host.buffer.address)
            ring.ring()
            for _ in range(100):
                host.poll()
            seen += [host.wait(ring).cid for _ in range(3)]

        assert sorted(seen) == list(range(60))


@pytest.mark.parametrize(("bell", "value"), [(0, 16), (0, 2**32 - 1), (16, 16)])
def test_invalid_doorbell_stops_only_its_queue(bell: int, value: int) -> None:
    storage, _ = random_memory()
    with Host(storage, depth=16, queues=2) as host:
        bad, good = host.rings
        bad.bells[bell] = value
        for cid in range(2):
            if bell == 16:
                # The CQ doorbell is looked at when room runs out.
                for _ in range(15):
                    bad.write(READ, cid, lba=0, blocks=1, prp1=host.buffer.address)
                bad.ring()
            for _ in range(3):
                host.poll()

        (error,) = host.controller.take_errors()
        assert error["op"] == "doorbell"
        assert error["queue"] == bad.id
        assert str(value) in error["reason"]
        assert host.do(READ, good, lba=0, blocks=1) == SUCCESS


# --- PRP entries -------------------------------------------------------------------------------


def prp_host(storage: Any, **options: Any) -> Host:
    return Host(storage, page_bytes=4096, max_transfer_bytes=MIB, buffer_nbytes=4 * MIB, **options)


@pytest.mark.parametrize("kind", ["memory", "buffered", "direct"])
def test_prp2_and_lists_scatter_a_transfer(tmp_path: Path, kind: str) -> None:
    content = random_file(tmp_path / "f", 2 * MIB)
    if kind == "memory":
        storage: Any = _native.MemoryStorage(content.ctypes.data, content.nbytes, True, content)
    else:
        try:
            storage = _native.FileStorage(str(tmp_path / "f"), mode=kind, writable=True)
        except OSError as error:
            pytest.skip(str(error))
    content = content.copy()
    with prp_host(storage) as host:
        base = host.buffer.address
        # Two pages, the first from its middle on.
        assert host.read(1, 8, prp1=base + 2048, prp2=base + 3 * 4096) == SUCCESS
        assert (host.data[2048:4096] == content[LBA : LBA + 2048]).all()
        assert (host.data[3 * 4096 : 3 * 4096 + 2048] == content[LBA + 2048 : LBA + 4096]).all()

        # A list of pages in reverse order, from the last entries of a page on: it needs a link.
        pages = [(2 * MIB + 4096 * i) for i in range(100)][::-1]
        first_list, second_list = 8 * 4096 - 16, 16 * 4096
        host.data[first_list : first_list + 16].view("<u8")[:] = [
            base + pages[1],
            base + second_list,
        ]
        host.data[second_list : second_list + 8 * 98].view("<u8")[:] = [base + p for p in pages[2:]]
        fields = {"prp1": base + pages[0], "prp2": base + first_list}
        assert host.read(16, 800, **fields) == SUCCESS
        got = np.concatenate([host.data[p : p + 4096] for p in pages])
        assert (got == content[16 * LBA : 816 * LBA]).all()

        # And the same way out.
        assert host.write(1000, 800, **fields) == SUCCESS
        assert storage.read(1000 * LBA, 800 * LBA) == got.tobytes()


def test_prp_errors() -> None:
    storage, content = random_memory()
    before = content.copy()
    with prp_host(storage) as host:
        base = host.buffer.address
        entries = host.data[4096 : 4096 + 32].view("<u8")
        assert host.read(0, 16, prp1=base, prp2=base + 4096 + 512) == PRP_OFFSET_INVALID
        assert host.read(0, 16, prp1=base, prp2=0) == DATA_TRANSFER_ERROR
        assert host.read(0, 24, prp1=base, prp2=base + 4) == PRP_OFFSET_INVALID
        assert host.read(0, 24, prp1=base, prp2=8) == DATA_TRANSFER_ERROR
        entries[:2] = [base + 8192, base + 8]
        assert host.read(0, 24, prp1=base, prp2=base + 4096) == PRP_OFFSET_INVALID
        entries[:2] = [base + 8192, base + 4 * MIB]
        assert host.write(0, 24, prp1=base, prp2=base + 4096) == DATA_TRANSFER_ERROR
        # A link that leads nowhere: the list's page ends after one entry.
        host.data[8192 - 8 : 8192].view("<u8")[0] = 64
        assert host.read(0, 24, prp1=base, prp2=base + 8192 - 8) == PRP_OFFSET_INVALID
        host.data[8192 - 8 : 8192].view("<u8")[0] = 4096
        assert host.read(0, 24, prp1=base, prp2=base + 8192 - 8) == DATA_TRANSFER_ERROR
    assert (content == before).all()


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 128])
def test_random_reads_and_writes_of_a_file(
    tmp_path: Path, mode: str, engine: str, offset: int
) -> None:
    content = random_file(tmp_path / "f", 2 * MIB + 777)
    expected = content[offset:].copy()
    rng = np.random.default_rng(1)
    storage = _native.FileStorage(str(tmp_path / "f"), offset=offset, writable=True, mode=mode)
    blocks_total = -(-len(expected) // LBA)
    with Host(storage) as host:
        assert engine.split("_")[0] in host.controller.describe()["engine"]
        for turn in range(150):
            blocks = int(rng.integers(1, 64))
            lba = int(rng.integers(0, blocks_total - blocks + 1))
            if turn % 10 == 9:
                lba = blocks_total - blocks  # the partial last block
            held = min(blocks * LBA, len(expected) - lba * LBA)
            place = slice(lba * LBA, lba * LBA + held)
            shift = int(rng.integers(0, 3)) * 4  # memory that direct I/O cannot use in place
            data = host.data[shift : shift + blocks * LBA]
            prp1 = host.buffer.address + shift
            if turn % 3 == 0:
                data[:] = random_bytes(blocks * LBA, turn)
                assert host.write(lba, blocks, prp1=prp1, fua=turn % 2) == SUCCESS
                expected[place] = data[:held]
            else:
                data[:] = 99
                assert host.read(lba, blocks, prp1=prp1) == SUCCESS
                assert (data[:held] == expected[place]).all()
                assert not data[held:].any()
        assert host.do(WRITE_ZEROES, lba=5, blocks=1000) == SUCCESS
        expected[5 * LBA : 1005 * LBA] = 0
        assert host.do(FLUSH) == SUCCESS
        assert host.controller.take_errors() == []
    after = np.fromfile(tmp_path / "f", np.uint8)
    assert (after[:offset] == content[:offset]).all()
    assert (after[offset:] == expected).all()


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
        stats = host.controller.stats()
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
        cold = host.controller.stats()["engine_operations"]
        for lba in range(0, 8192, 512):
            assert host.read(lba, 64) == SUCCESS
        if cold == 0:
            pytest.skip("the file system keeps its files in memory")
        assert host.controller.stats()["engine_operations"] == cold


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
sys.path.insert(0, sys.argv[2])
os.environ.pop("FLASHWARP_IO_ENGINE", None)
from ring_host import FLUSH, Host
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
    here = str(Path(__file__).parent)
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "f"), here], check=False, timeout=60
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


def test_yielding_threads_leave_the_work_to_a_visitor_until_it_leaves() -> None:
    storage, view = random_memory()
    with Host(storage, threads=2, yields=True) as host:
        host.controller.visitor_comes()
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
        host.controller.visitor_leaves()

        assert host.wait(ring).status == SUCCESS
        assert (host.data[: 8 * LBA] == view[16 * LBA : 24 * LBA]).all()


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


@contextlib.contextmanager
def small_file_system(path: Path) -> Iterator[None]:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_full_file_system_is_capacity_exceeded(tmp_path: Path) -> None:
    with small_file_system(tmp_path):
        with (tmp_path / "f").open("wb") as file:
            file.truncate(4 * MIB)
        storage = _native.FileStorage(str(tmp_path / "f"), writable=True)
        with Host(storage, buffer_nbytes=2 * MIB) as host:
            assert host.write(0, 1024) == SUCCESS
            assert host.write(1024, 4096) == CAPACITY_EXCEEDED
        del storage, host


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


def test_striped_round_trip(tmp_path: Path, mode: str, engine: str) -> None:
    for i in range(3):
        random_file(tmp_path / f"s{i}", MIB + 128, i)
    members = [
        _native.FileStorage(str(tmp_path / f"s{i}"), offset=128 * i, writable=True, mode=mode)
        for i in range(3)
    ]
    storage = _native.StripedStorage(members, stripe_bytes=16384)
    rng = np.random.default_rng(3)
    expected = np.frombuffer(storage.read(0, storage.nbytes), np.uint8).copy()
    with Host(storage, buffer_nbytes=2 * MIB) as host:
        for turn in range(60):
            # Up to 512 KiB: 32 stripes are more than a command can have in flight.
            blocks = int(rng.integers(1, 1024))
            lba = int(rng.integers(0, storage.nbytes // LBA - blocks))
            place = slice(lba * LBA, (lba + blocks) * LBA)
            data = host.data[: blocks * LBA]
            if turn % 2:
                data[:] = random_bytes(blocks * LBA, turn)
                assert host.write(lba, blocks) == SUCCESS
                expected[place] = data
            else:
                assert host.read(lba, blocks) == SUCCESS
                assert (data == expected[place]).all()
        assert host.do(FLUSH) == SUCCESS
        assert host.controller.take_errors() == []
    assert storage.read(0, storage.nbytes) == expected.tobytes()


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
        assert host.controller.stats()["errors"] == 0

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


def test_errors_are_bounded() -> None:
    storage, _ = random_memory()
    with Host(storage) as host:
        for _ in range(100):
            assert host.read(1 << 40, 1) == LBA_OUT_OF_RANGE
        assert len(host.controller.take_errors()) == 64
        assert host.controller.take_errors() == []
        assert host.controller.stats()["errors_dropped"] == 36


def test_stop_aborts_what_was_rung_and_may_be_repeated(tmp_path: Path) -> None:
    storage, _ = random_memory()
    host = Host(storage, depth=8)
    (ring,) = host.rings
    for cid in range(5):
        ring.write(READ, cid, lba=0, blocks=1, prp1=host.buffer.address)
    ring.ring()

    host.controller.stop()
    host.controller.stop()

    got = [ring.consume() for _ in range(5)]
    assert [(c.cid, c.status) for c in got if c] == [(cid, COMMAND_ABORTED) for cid in range(5)]
    assert host.controller.serve_some() == -1
    host.controller.start()
    assert host.read(0, 1) == SUCCESS
    host.controller.stop()


def test_stop_with_io_in_flight_completes_every_command(
    tmp_path: Path, mode: str, engine: str
) -> None:
    random_file(tmp_path / "f", 4 * MIB)
    storage = _native.FileStorage(str(tmp_path / "f"), mode=mode)
    for turn in range(10):
        with Host(storage, depth=128, threads=2, queues=2) as host:
            for ring in host.rings:
                for cid in range(100):
                    ring.write(READ, cid, lba=64 * cid, blocks=64, prp1=host.buffer.address)
                ring.ring()
            time.sleep(0.0002 * turn)
        for ring in host.rings:
            got = [ring.consume() for _ in range(100)]
            assert sorted(c.cid for c in got if c) == list(range(100))
            assert {c.status for c in got if c} <= {SUCCESS, COMMAND_ABORTED}


def test_threads_and_helpers_complete_each_command_once(tmp_path: Path, mode: str) -> None:
    content = random_file(tmp_path / "f", 4 * MIB)
    storage = _native.FileStorage(str(tmp_path / "f"), mode=mode)
    with Host(storage, depth=64, queues=4, threads=2) as host:
        done = threading.Event()

        def help_out(first: int) -> None:
            while not done.is_set():
                host.controller.serve_some(first)

        helpers = [threading.Thread(target=help_out, args=(i,)) for i in range(2)]
        for helper in helpers:
            helper.start()
        try:
            for lap in range(20):
                for q, ring in enumerate(host.rings):
                    for cid in range(50):
                        slot = q * 50 + cid
                        ring.write(
                            READ,
                            cid,
                            lba=(lap * 7 + slot * 8) % 8000,
                            blocks=8,
                            prp1=host.buffer.address + 4096 * slot,
                        )
                    ring.ring()
                for q, ring in enumerate(host.rings):
                    assert sorted(host.wait(ring).cid for _ in range(50)) == list(range(50))
                    for cid in range(50):
                        slot = q * 50 + cid
                        start = (lap * 7 + slot * 8) % 8000 * LBA
                        got = host.data[4096 * slot : 4096 * (slot + 1)]
                        assert (got == content[start : start + 4096]).all()
        finally:
            done.set()
            for helper in helpers:
                helper.join()


def test_idle_threads_sleep() -> None:
    storage, _ = random_memory()
    with Host(storage, queues=32, threads=2, depth=64):
        time.sleep(0.05)
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(2.0)
        after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Expected: under 1 % of a core; the margin is for other machines' timers.
    assert spent < 0.06


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
        stats = host.controller.stats()
    # Expected: 1 ms without wake(), 0.1 ms with it; the margin is for a busy machine.
    assert min(late) < 0.01
    assert min(woken) < 0.005
    assert stats["sleeps"] > 0
    assert stats["wakes"] >= 10


def test_controller_in_forked_child_raises_and_does_not_hang(tmp_path: Path) -> None:
    random_file(tmp_path / "f", MIB)
    program = """
import os, sys
sys.path.insert(0, sys.argv[2])
from ring_host import Host
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
        [sys.executable, "-c", program, str(tmp_path / "f"), str(Path(__file__).parent)],
        check=True,
        timeout=60,
    )


def test_constructor_refuses_what_cannot_be() -> None:
    storage, _ = random_memory()
    ring = Ring(8)

    def pair(**changes: int) -> Any:
        names = ["sq", "cq", "sq_doorbell", "cq_doorbell", "depth", "id"]
        return _native.QueuePair(**{n: changes.get(n, getattr(ring.pair, n)) for n in names})

    for pairs, options, text in [
        ([], {}, "at least one"),
        ([pair(depth=1)], {}, "depth"),
        ([pair(sq=ring.pair.sq + 4)], {}, "aligned"),
        ([pair(cq=0)], {}, "aligned"),
        ([pair(sq_doorbell=3)], {}, "aligned"),
        ([pair()], {"page_bytes": 5000}, "page_bytes"),
        ([pair()], {"max_transfer_bytes": 512}, "max_transfer"),
        ([pair()], {"threads": 1000}, "threads"),
    ]:
        with pytest.raises(ValueError, match=text):
            _native.SoftwareController(storage, pairs, **options)


def test_stats_count_commands_by_kind_and_queue() -> None:
    storage, _ = random_memory()
    with Host(storage, queues=2) as host:
        host.read(0, 8)
        host.write(0, 4)
        host.do(FLUSH, host.rings[0])
        stats = host.controller.stats()
    assert {k: v for k, v in stats["commands"].items() if v} == {"read": 1, "write": 1, "flush": 1}
    assert stats["queues"] == {1: 1, 2: 2}
    assert stats["bytes_read"] == 8 * LBA
    assert stats["bytes_written"] == 4 * LBA
    assert _native.serve_hook() != 0
    assert host.controller.address != 0
