"""A drive's queue pairs, command by command: QEMU's controller keeps the contract of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashwarp.storage import Storage
from flashwarp.testing import ControllerContract, Host
from flashwarp.testing.rings import (
    COMMAND_ABORTED,
    FLUSH,
    IDENTIFY,
    INVALID_FIELD,
    INVALID_NAMESPACE,
    INVALID_OPCODE,
    LBA_OUT_OF_RANGE,
    PRP_OFFSET_INVALID,
    READ,
    SUCCESS,
    WRITE,
    WRITE_ZEROES,
)
from flashwarp.testing.storage_contract import random_content
from qemu.machine import Drive, Machine, Namespace
from qemu.suites.drive_rings import DriveHost
from qemu.suites.drives import drive

NBYTES = 2050 * 512
# The second drive takes transfers of at most 64 KiB.
MACHINE = Machine((Drive((Namespace(NBYTES),)), Drive((Namespace(NBYTES),), mdts=4)))

_UNKNOWN_NAMESPACE = 0xFFFFFFFE


class TestDrive(ControllerContract):
    nbytes = NBYTES
    keeps_log = False
    refuses_ranges = False
    bad_commands = (
        (INVALID_OPCODE, 0x7F, {}),
        (INVALID_OPCODE, IDENTIFY, {}),
        (INVALID_NAMESPACE, READ, {"lba": 0, "blocks": 1, "nsid": _UNKNOWN_NAMESPACE}),
        (INVALID_FIELD, READ, {"lba": 0, "blocks": 1, "flags": 0x01}),
        (INVALID_FIELD, READ, {"lba": 0, "blocks": 129}),
        (INVALID_FIELD, WRITE, {"lba": 0, "blocks": 129}),
        (LBA_OUT_OF_RANGE, READ, {"lba": 2050, "blocks": 1}),
        (LBA_OUT_OF_RANGE, READ, {"lba": 2049, "blocks": 2}),
        (LBA_OUT_OF_RANGE, READ, {"lba": 2**64 - 1, "blocks": 2}),
        (LBA_OUT_OF_RANGE, WRITE, {"lba": 2**55, "blocks": 1}),
        (LBA_OUT_OF_RANGE, WRITE_ZEROES, {"lba": 0, "blocks": 2051}),
    )

    @pytest.fixture(autouse=True)
    def _drive(self, request: pytest.FixtureRequest) -> Iterator[None]:
        index = 1 if "bad_command" in request.node.name else 0
        with drive(index, allow_raw_writes=True) as self.opened:
            yield

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        namespace = self.opened.namespace(1)
        namespace.write(0, content)
        return namespace

    def host(self, storage: Storage, **options: Any) -> Host:
        return DriveHost(storage, **options)  # type: ignore[arg-type]

    # What a drive does in another way.

    def test_stop_aborts_what_was_rung_and_may_be_repeated(self, tmp_path: Path) -> None:
        """The deletion of a queue ends its commands; nothing touches the rings after it."""
        with self.make(tmp_path, bytes(self.nbytes)) as storage:
            host = self.host(storage, depth=8)
            (ring,) = host.rings
            for cid in range(5):
                ring.write(READ, cid, lba=0, blocks=1, prp1=host.buffer.address)
            ring.ring()
            host.controller.stop()
            host.controller.stop()
            got = [c for c in (ring.consume() for _ in range(8)) if c]
            assert {c.status for c in got} <= {SUCCESS, COMMAND_ABORTED}
            assert host.controller.serve_some() == -1
            with pytest.raises(ValueError, match="cannot be started again"):
                host.controller.start()
            with self.host(storage, depth=8) as again:
                assert again.read(0, 1) == SUCCESS

    def test_stop_with_commands_in_flight_completes_each_once(self, tmp_path: Path) -> None:
        """Whenever the deletion comes, no command completes twice, and none after it."""
        with self.make(tmp_path, bytes(self.nbytes)) as storage:
            for turn in range(8):
                with self.host(storage, depth=128, queues=2) as host:
                    for ring in host.rings:
                        for cid in range(100):
                            ring.write(READ, cid, lba=16 * cid, blocks=16, prp1=host.buffer.address)
                        ring.ring()
                        if turn % 2:
                            host.wait(ring)
                host.data[:] = 77
                for ring in host.rings:
                    got = [c.cid for c in (ring.consume() for _ in range(101)) if c]
                    assert len(got) == len(set(got))
                assert (host.data == 77).all()

    def test_bad_prp_entries(self, tmp_path: Path) -> None:
        """An entry that is not aligned moves nothing."""
        content = bytes(self.nbytes)
        with self.make(tmp_path, content) as storage, self._paged_host(storage) as host:
            base = host.buffer.address
            assert host.read(0, 16, prp1=base, prp2=base + 4096 + 512) == PRP_OFFSET_INVALID
            host.data[4096 : 4096 + 16].view("<u8")[:] = [base + 8192, base + 8]
            assert host.read(0, 24, prp1=base, prp2=base + 4096) == PRP_OFFSET_INVALID
            assert storage.read(0, self.nbytes) == content
            assert host.do(FLUSH) == SUCCESS

    def test_memory_that_is_not_mapped_is_out_of_reach(self, tmp_path: Path) -> None:
        """The IOMMU keeps the drive out, whatever status the command gets, and it goes on."""
        with self.make(tmp_path, random_content(self.nbytes)) as storage:
            with self.host(storage) as gone:
                address = gone.buffer.address
            # The memory is this process's still; its mapping has ended.
            gone.data[:] = 77
            with self.host(storage, buffer_nbytes=4096) as host:
                assert host.read(0, 8) == SUCCESS
                assert host.buffer.address != address + (512 << 10)
                host.read(0, 8, prp1=address + (512 << 10))
                assert host.read(0, 8) == SUCCESS
            assert (gone.data == 77).all()

    # What is the software controller's own: its log, its threads, its view of bad doorbells (a
    # drive reports these by events, which nobody asks for), and namespaces that it protects.
    test_errors_are_bounded = None  # type: ignore[assignment]
    test_idle_controller_sleeps_and_wakes = None  # type: ignore[assignment]
    test_invalid_doorbell_stops_only_its_queue = None  # type: ignore[assignment]
    test_read_only_namespace_is_write_protected = None  # type: ignore[assignment]
