"""What every controller must do, as tests seen from its rings: one subclass a backend."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flashwarp.storage import Storage
from flashwarp.testing.rings import (
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
    WRITE,
    WRITE_PROTECTED,
    WRITE_ZEROES,
    Host,
)
from flashwarp.testing.storage_contract import random_content

_MIB = 1 << 20
_DEALLOCATE = 4
_DATASET_RANGE = np.dtype([("attributes", "<u4"), ("blocks", "<u4"), ("lba", "<u8")])

# For a namespace of `ControllerContract.nbytes`; see `ControllerContract.bad_commands`.
_BAD_COMMANDS: list[tuple[int, int, dict[str, int]]] = [
    (INVALID_OPCODE, 0x7F, {}),
    (INVALID_OPCODE, IDENTIFY, {}),
    (INVALID_NAMESPACE, READ, {"lba": 0, "blocks": 1, "nsid": 2}),
    (INVALID_NAMESPACE, FLUSH, {"nsid": 0}),
    (INVALID_NAMESPACE, WRITE_ZEROES, {"lba": 0, "blocks": 1, "nsid": 0xFFFFFFFF}),
    (INVALID_FIELD, READ, {"lba": 0, "blocks": 1, "flags": 0x40}),
    (INVALID_FIELD, READ, {"lba": 0, "blocks": 1, "flags": 0x01}),
    (INVALID_FIELD, READ, {"lba": 0, "blocks": 129}),
    (INVALID_FIELD, WRITE, {"lba": 0, "blocks": 129}),
    (LBA_OUT_OF_RANGE, READ, {"lba": 2050, "blocks": 1}),
    (LBA_OUT_OF_RANGE, READ, {"lba": 2049, "blocks": 2}),
    (LBA_OUT_OF_RANGE, READ, {"lba": 2**64 - 1, "blocks": 2}),
    (LBA_OUT_OF_RANGE, WRITE, {"lba": 2**55, "blocks": 1}),
    (LBA_OUT_OF_RANGE, WRITE_ZEROES, {"lba": 0, "blocks": 2051}),
    (DATA_TRANSFER_ERROR, READ, {"lba": 0, "blocks": 1, "prp1": 4096}),
    (DATA_TRANSFER_ERROR, WRITE, {"lba": 0, "blocks": 1, "prp1": 2**63}),
    (DATA_TRANSFER_ERROR, DATASET_MANAGEMENT, {"cdw10": 0, "cdw11": _DEALLOCATE, "prp1": 8}),
    (PRP_OFFSET_INVALID, READ, {"lba": 0, "blocks": 1, "prp1": 4098}),
]


class ControllerContract(ABC):
    """Tests of a controller over one kind of storage; pytest runs those of a subclass.

    A subclass makes the storage, and where it is about another controller, overrides `host`.
    """

    nbytes: ClassVar[int] = _MIB + 777
    """Size of the namespace: 2050 LBAs, the last one partial."""

    keeps_log: ClassVar[bool] = True
    """Whether the controller counts failures and says why. A drive's log is the drive's affair."""

    bad_commands: ClassVar[Sequence[tuple[int, int, dict[str, int]]]] = _BAD_COMMANDS
    """Status, opcode and fields of commands that fail; MDTS is 64 KiB."""

    refuses_ranges: ClassVar[bool] = True
    """Whether a Deallocate beyond the namespace fails as a whole; some drives skip that range."""

    shifts: ClassVar[Sequence[int]] = (0, 4, 8)
    """Bytes behind a page at which data may begin. Few drives take other than a multiple of 4."""

    @abstractmethod
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        """Make a storage that holds `content`; `folder` is empty and goes after the test."""

    def host(self, storage: Storage, **options: Any) -> Host:
        """Return a host that drives the controller to be tested; see `rings.Host` for options."""
        return Host(storage.native, **options)

    # Commands and their statuses.

    def test_transfers_of_every_size_and_place(self, tmp_path: Path) -> None:
        """Reads and writes, with and without FUA, to the partial last block, at any address."""
        expected = bytearray(random_content(self.nbytes))
        chooser = np.random.default_rng(1)
        with self.make(tmp_path, bytes(expected)) as storage, self.host(storage) as host:
            blocks_total = -(-self.nbytes // LBA)
            for turn in range(120):
                blocks = int(chooser.integers(1, 1024 if turn % 20 == 7 else 64))
                lba = int(chooser.integers(0, blocks_total - blocks + 1))
                if turn % 10 == 9:
                    lba = blocks_total - blocks
                held = min(blocks * LBA, self.nbytes - lba * LBA)
                shift = self.shifts[int(chooser.integers(0, len(self.shifts)))]
                data = host.data[shift : shift + blocks * LBA]
                prp1 = host.buffer.address + shift
                if turn % 3 == 0:
                    data[:] = np.frombuffer(random_content(blocks * LBA, turn), np.uint8)
                    assert host.write(lba, blocks, fua=turn % 2, prp1=prp1) == SUCCESS
                    expected[lba * LBA : lba * LBA + held] = data[:held].tobytes()
                else:
                    data[:] = 99
                    assert host.read(lba, blocks, prp1=prp1) == SUCCESS
                    assert data[:held].tobytes() == expected[lba * LBA : lba * LBA + held]
                    assert not data[held:].any(), "beyond the namespace there are zeros"
            assert host.do(FLUSH) == SUCCESS
            assert host.do(FLUSH, nsid=0xFFFFFFFF) == SUCCESS
            if self.keeps_log:
                assert host.controller.stats["errors"] == 0
            assert storage.read(0, self.nbytes) == expected

    def test_write_zeroes_and_deallocate_clear_their_ranges(self, tmp_path: Path) -> None:
        """Deallocate is a hint, here one that is taken; a range outside spoils the command."""
        expected = bytearray(random_content(self.nbytes))
        with self.make(tmp_path, bytes(expected)) as storage, self.host(storage) as host:
            assert host.do(WRITE_ZEROES, lba=1, blocks=2) == SUCCESS
            assert host.do(WRITE_ZEROES, lba=2049, blocks=1) == SUCCESS
            expected[LBA : 3 * LBA] = bytes(2 * LBA)
            expected[2049 * LBA :] = bytes(len(expected) - 2049 * LBA)
            assert storage.read(0, self.nbytes) == expected

            ranges: npt.NDArray[Any] = host.data[:32].view(_DATASET_RANGE)
            ranges["blocks"], ranges["lba"] = [2, 1], [10, 20]
            assert host.do(DATASET_MANAGEMENT, cdw10=1, cdw11=0) == SUCCESS
            assert storage.read(0, self.nbytes) == expected
            assert host.do(DATASET_MANAGEMENT, cdw10=1, cdw11=_DEALLOCATE) == SUCCESS
            after = storage.read(0, self.nbytes)
            for lba, blocks in ((10, 2), (20, 1)):
                place = slice(lba * LBA, (lba + blocks) * LBA)
                assert after[place] in (bytes(blocks * LBA), expected[place])
                expected[place] = after[place]
            assert after == expected

            if self.refuses_ranges:
                ranges["lba"] = [30, 2050]
                assert host.do(DATASET_MANAGEMENT, cdw10=1, cdw11=_DEALLOCATE) == LBA_OUT_OF_RANGE
                assert storage.read(0, self.nbytes) == expected

    def test_bad_command_gets_its_status(self, tmp_path: Path) -> None:
        """As the specification numbers them; nothing is changed, and the queue goes on."""
        content = random_content(self.nbytes)
        with (
            self.make(tmp_path, content) as storage,
            self.host(storage, max_transfer_bytes=65536) as host,
        ):
            for count, (status, opcode, fields) in enumerate(self.bad_commands, 1):
                got = host.do(opcode, None, **fields)
                assert got == status, f"{got:#x}, not {status:#x}: opcode {opcode}, {fields}"
                if self.keeps_log:
                    (error,) = host.controller.take_errors()
                    assert error["status"] == status
                    assert error["reason"]
                    assert host.controller.stats["errors"] == count
                assert host.read(0, 1) == SUCCESS
            assert storage.read(0, self.nbytes) == content

    def test_read_only_namespace_is_write_protected(self, tmp_path: Path) -> None:
        """Every command that would write is refused."""
        content = random_content(self.nbytes)
        with (
            self.make(tmp_path, content, writable=False) as storage,
            self.host(storage) as host,
        ):
            assert host.write(0, 1) == WRITE_PROTECTED
            assert host.do(WRITE_ZEROES, lba=0, blocks=1) == WRITE_PROTECTED
            got = host.do(DATASET_MANAGEMENT, cdw10=0, cdw11=_DEALLOCATE)
            assert got == WRITE_PROTECTED
            assert host.read(0, 2) == SUCCESS
            assert host.data[: 2 * LBA].tobytes() == content[: 2 * LBA]

    # Rings.

    def test_phase_flips_over_many_laps(self, tmp_path: Path) -> None:
        """Rings of every depth, down to two entries."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as storage:
            for depth in (2, 3, 16):
                with self.host(storage, depth=depth) as host:
                    for i in range(7 * depth + 1):
                        assert host.read(i, 1) == SUCCESS
                        assert host.data[:LBA].tobytes() == content[i * LBA : (i + 1) * LBA]

    def test_completion_carries_identifiers(self, tmp_path: Path) -> None:
        """Each command identifier comes once, with the queue's own and an SQ head that counts."""
        with (
            self.make(tmp_path, bytes(self.nbytes)) as storage,
            self.host(storage, depth=8, queues=3) as host,
        ):
            ring = host.rings[2]
            for cid in (500, 0, 65535):
                ring.write(READ, cid, lba=0, blocks=1, prp1=host.buffer.address)
            ring.ring()
            got = [host.wait(ring) for _ in range(3)]
            assert sorted(c.cid for c in got) == [0, 500, 65535]
            assert {(c.status, c.sqid) for c in got} == {(SUCCESS, ring.id)}
            heads = [c.sqhd for c in got]
            assert heads == sorted(heads)
            assert heads[-1] == 3
            assert all(i + 1 <= head <= 3 for i, head in enumerate(heads))

    def test_full_completion_queue_is_never_overrun(self, tmp_path: Path) -> None:
        """Commands wait until the host has consumed what was posted; none is lost."""
        with (
            self.make(tmp_path, bytes(self.nbytes)) as storage,
            self.host(storage, depth=4) as host,
        ):
            (ring,) = host.rings
            posted: list[int] = []
            for lap in range(10):
                for i in range(3):
                    ring.write(READ, 3 * lap + i, lba=8 * i, blocks=8, prp1=host.buffer.address)
                ring.ring()
                end = time.monotonic() + 20
                while len(posted) < 3:
                    host.poll()
                    if got := ring.consume(release=False):
                        posted.append(got.cid)
                    assert time.monotonic() < end, "no completion"
                for _ in range(50):
                    host.poll()
                assert ring.consume(release=False) is None
                assert sorted(posted) == [3 * lap, 3 * lap + 1, 3 * lap + 2]
                # The next three are rung before these are released.
                posted = []
                if lap < 9:
                    for i in range(3):
                        ring.write(READ, 1000 + i, lba=0, blocks=1, prp1=host.buffer.address)
                    ring.ring()
                    for _ in range(50):
                        host.poll()
                    assert ring.consume(release=False) is None, "overrun"
                    ring.release()
                    late = sorted(host.wait(ring).cid for _ in range(3))
                    assert late == [1000, 1001, 1002]

    def test_invalid_doorbell_stops_only_its_queue(self, tmp_path: Path) -> None:
        """A tail or head outside of the ring is recorded once, and other queues go on."""
        with self.make(tmp_path, bytes(self.nbytes)) as storage:
            for bell, value in ((0, 16), (0, 2**32 - 1), (16, 16)):
                with self.host(storage, depth=16, queues=2) as host:
                    bad, good = host.rings
                    bad.bells[bell] = value
                    for cid in range(2):
                        if bell == 16:
                            # The CQ doorbell is looked at when room runs out.
                            for _ in range(15):
                                bad.write(READ, cid, lba=0, blocks=1, prp1=host.buffer.address)
                            bad.ring()
                        for _ in range(2000):
                            host.poll()
                    (error,) = host.controller.take_errors()
                    assert error["op"] == "doorbell"
                    assert error["queue"] == bad.id
                    assert str(value) in error["reason"]
                    assert host.do(READ, good, lba=0, blocks=1) == SUCCESS

    # PRP entries.

    def test_prp2_and_lists_scatter_a_transfer(self, tmp_path: Path) -> None:
        """Two pages by PRP1 and PRP2; a hundred by a list with a link, in and out."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as storage, self._paged_host(storage) as host:
            base = host.buffer.address
            assert host.read(1, 8, prp1=base + 2048, prp2=base + 3 * 4096) == SUCCESS
            assert host.data[2048:4096].tobytes() == content[LBA : LBA + 2048]
            got = host.data[3 * 4096 : 3 * 4096 + 2048].tobytes()
            assert got == content[LBA + 2048 : LBA + 4096]

            # Pages in reverse order, from the last entries of a page on: the list needs a link.
            pages = [(2 * _MIB + 4096 * i) for i in range(100)][::-1]
            first_list, second_list = 8 * 4096 - 16, 16 * 4096
            host.data[first_list : first_list + 16].view("<u8")[:] = [
                base + pages[1],
                base + second_list,
            ]
            host.data[second_list : second_list + 8 * 98].view("<u8")[:] = [
                base + page for page in pages[2:]
            ]
            fields = {"prp1": base + pages[0], "prp2": base + first_list}
            assert host.read(16, 800, **fields) == SUCCESS
            moved = b"".join(host.data[page : page + 4096].tobytes() for page in pages)
            assert moved == content[16 * LBA : 816 * LBA]
            assert host.write(1000, 800, **fields) == SUCCESS
            assert storage.read(1000 * LBA, 800 * LBA) == moved

    def test_bad_prp_entries(self, tmp_path: Path) -> None:
        """Entries and lists outside of the registered memory, or not aligned, move nothing."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as storage, self._paged_host(storage) as host:
            base = host.buffer.address
            entries = host.data[4096 : 4096 + 32].view("<u8")
            last_entry = host.data[8192 - 8 : 8192].view("<u8")
            assert host.read(0, 16, prp1=base, prp2=base + 4096 + 512) == PRP_OFFSET_INVALID
            assert host.read(0, 16, prp1=base, prp2=0) == DATA_TRANSFER_ERROR
            assert host.read(0, 24, prp1=base, prp2=base + 4) == PRP_OFFSET_INVALID
            assert host.read(0, 24, prp1=base, prp2=8) == DATA_TRANSFER_ERROR
            entries[:2] = [base + 8192, base + 8]
            assert host.read(0, 24, prp1=base, prp2=base + 4096) == PRP_OFFSET_INVALID
            entries[:2] = [base + 8192, base + 4 * _MIB]
            assert host.write(0, 24, prp1=base, prp2=base + 4096) == DATA_TRANSFER_ERROR
            # A link that leads nowhere: the list's page ends after one entry.
            last_entry[0] = 64
            assert host.read(0, 24, prp1=base, prp2=base + 8192 - 8) == PRP_OFFSET_INVALID
            last_entry[0] = 4096
            assert host.read(0, 24, prp1=base, prp2=base + 8192 - 8) == DATA_TRANSFER_ERROR
            assert storage.read(0, self.nbytes) == content

    def _paged_host(self, storage: Storage) -> Host:
        return self.host(storage, page_bytes=4096, max_transfer_bytes=_MIB, buffer_nbytes=4 * _MIB)

    # Life.

    def test_errors_are_bounded(self, tmp_path: Path) -> None:
        """The log keeps the first 64 failures and counts the others."""
        with self.make(tmp_path, bytes(self.nbytes)) as storage, self.host(storage) as host:
            for _ in range(100):
                assert host.read(1 << 40, 1) == LBA_OUT_OF_RANGE
            assert len(host.controller.take_errors()) == 64
            assert host.controller.take_errors() == []
            assert host.controller.stats["errors_dropped"] == 36

    def test_stop_aborts_what_was_rung_and_may_be_repeated(self, tmp_path: Path) -> None:
        """Commands that nobody fetched complete as aborted; start serves the rings again."""
        with self.make(tmp_path, bytes(self.nbytes)) as storage:
            host = self.host(storage, depth=8)
            (ring,) = host.rings
            for cid in range(5):
                ring.write(READ, cid, lba=0, blocks=1, prp1=host.buffer.address)
            ring.ring()
            host.controller.stop()
            host.controller.stop()
            got = [ring.consume() for _ in range(5)]
            assert [(c.cid, c.status) for c in got if c] == [
                (cid, COMMAND_ABORTED) for cid in range(5)
            ]
            assert host.controller.serve_some() == -1
            host.controller.start()
            assert host.read(0, 1) == SUCCESS
            host.controller.stop()

    def test_stop_with_commands_in_flight_completes_each_once(self, tmp_path: Path) -> None:
        """Whenever the stop comes, every command has one completion: done or aborted."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as storage:
            for turn in range(8):
                with self.host(storage, depth=128, threads=2, queues=2) as host:
                    for ring in host.rings:
                        for cid in range(100):
                            ring.write(READ, cid, lba=16 * cid, blocks=16, prp1=host.buffer.address)
                        ring.ring()
                    time.sleep(0.0002 * turn)
                for ring in host.rings:
                    got = [c for c in (ring.consume() for _ in range(101)) if c]
                    assert sorted(c.cid for c in got) == list(range(100))
                    assert {c.status for c in got} <= {SUCCESS, COMMAND_ABORTED}

    def test_threads_and_helpers_complete_each_command_once(self, tmp_path: Path) -> None:
        """Controller threads and waiting callers serve the same queues at the same time."""
        content = random_content(self.nbytes)
        with (
            self.make(tmp_path, content) as storage,
            self.host(storage, depth=64, queues=4, threads=2) as host,
        ):
            done = threading.Event()

            def help_out(first: int) -> None:
                while not done.is_set():
                    host.controller.serve_some(first)

            helpers = [threading.Thread(target=help_out, args=(i,)) for i in range(2)]
            for helper in helpers:
                helper.start()
            try:
                for lap in range(10):
                    self._read_everywhere(host, content, lap)
            finally:
                done.set()
                for helper in helpers:
                    helper.join()

    def _read_everywhere(self, host: Host, content: bytes, lap: int) -> None:
        """Fifty commands in each queue at once, each of which is checked."""

        def lba_of(slot: int) -> int:
            return (lap * 7 + slot * 8) % 2040

        for q, ring in enumerate(host.rings):
            for cid in range(50):
                slot = q * 50 + cid
                address = host.buffer.address + 4096 * slot
                ring.write(READ, cid, lba=lba_of(slot), blocks=8, prp1=address)
            ring.ring()
        for q, ring in enumerate(host.rings):
            assert sorted(host.wait(ring).cid for _ in range(50)) == list(range(50))
            for cid in range(50):
                slot = q * 50 + cid
                start = lba_of(slot) * LBA
                got = host.data[4096 * slot : 4096 * (slot + 1)].tobytes()
                assert got == content[start : start + 4096], f"command {cid} of queue {q}"

    def test_idle_controller_sleeps_and_wakes(self, tmp_path: Path) -> None:
        """Idle threads cost next to nothing, and see a doorbell within milliseconds."""
        with (
            self.make(tmp_path, bytes(self.nbytes)) as storage,
            self.host(storage, queues=4, threads=2) as host,
        ):
            time.sleep(0.02)
            before = os.times()
            time.sleep(0.1)
            after = os.times()
            # Expected: 1 % of a core; the margin is for other machines' timers.
            assert after.user + after.system - before.user - before.system < 0.05
            # Expected: 1 ms, each time; on a busy machine the best of many.
            late = float("inf")
            end = time.monotonic() + 20
            while late >= 0.01 and time.monotonic() < end:
                time.sleep(0.002)
                start = time.monotonic()
                assert host.read(0, 1) == SUCCESS
                late = time.monotonic() - start
            assert late < 0.01
            assert host.controller.stats["sleeps"] > 0
