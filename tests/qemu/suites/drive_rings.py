"""The host's side of queue pairs in a drive, command by command, as `flashwarp.testing.rings`.

Only the memory differs: the doorbells are the drive's registers, and commands name IO virtual
addresses, so `buffer.address` is one.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from flashwarp import _native
from flashwarp.nvme.drive_namespace import DriveNamespace
from flashwarp.nvme.queue_pair import DriveAddressingStruct
from flashwarp.testing.rings import CQE, LBA, READ, SQE, WRITE, AlignedMemory, Host, Ring

PAGE = 4096


def aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class DriveRing(Ring):
    """A queue pair in a drive; see `Ring`."""

    def __init__(
        self, depth: int, queue_id: int, memory: Any, address: int, bells: tuple[int, int]
    ) -> None:
        self.depth, self.id = depth, queue_id
        sq_bytes = aligned(64 * depth)
        self.sq = memory[: 64 * depth].view(SQE)
        self.cq = memory[sq_bytes : sq_bytes + 16 * depth].view(CQE)
        self.sq_bell, self.cq_bell = (ctypes.c_uint32.from_address(bell) for bell in bells)
        self.tail = self.head = 0
        self.phase = 1
        self.pair = _native.QueuePair(
            sq=address,
            cq=address + sq_bytes,
            sq_doorbell=bells[0],
            cq_doorbell=bells[1],
            depth=depth,
            id=queue_id,
        )
        self.lists = 0  # of the buffer's pages, from `begin` on
        self.begin = 0
        self.nsid = 1

    def write(self, opcode: int, cid: int, **fields: int) -> None:
        """Write one entry; what takes more than a page gets its second PRP entry."""
        prp1 = fields.get("prp1", 0)
        nbytes = fields.get("blocks", 0) * LBA if opcode in (READ, WRITE) else 0
        if "prp2" not in fields and prp1 % PAGE + nbytes > PAGE:
            second = prp1 // PAGE * PAGE + PAGE
            within_two = prp1 + nbytes <= second + PAGE
            listed = self.lists + (prp1 - self.begin) // PAGE * 8
            fields["prp2"] = second if within_two else listed
        fields.setdefault("nsid", self.nsid)
        super().write(opcode, cid, **fields)

    def ring(self) -> None:
        self.sq_bell.value = self.tail

    def release(self) -> None:
        self.cq_bell.value = self.head


class DriveHost(Host):
    """A drive's queue pairs for one namespace, and a buffer; see `Host`."""

    def __init__(
        self,
        namespace: DriveNamespace,
        *,
        depth: int = 16,
        queues: int = 1,
        buffer_nbytes: int = 1 << 20,
        **_: Any,
    ) -> None:
        drive = namespace.drive
        lease = _native.QueueLease(drive, queues)
        each = aligned(64 * depth) + aligned(16 * depth)
        self._memory = AlignedMemory(each * queues)
        self._data = AlignedMemory(buffer_nbytes, 2 << 20)
        region = _native.DriveData(drive, (self._data.address, buffer_nbytes), buffer_nbytes)
        names = DriveAddressingStruct.from_buffer_copy(region.addressing(namespace.nsid, 9))
        begin = (self._data.address + names.iova_offset) % (1 << 64)
        self.buffer: Any = SimpleNamespace(address=begin, view=self._data.view)
        self.rings = []
        for i, (number, bells) in enumerate(zip(lease.ids, lease.doorbells, strict=True)):
            place = slice(each * i, each * (i + 1))
            address = self._memory.address + each * i
            ring = DriveRing(depth, number, self._memory.view[place], address, bells)
            ring.lists, ring.begin, ring.nsid = names.lists, begin, namespace.nsid
            self.rings.append(ring)
        self.controller = _native.DriveQueues(
            lease,
            [ring.pair for ring in self.rings],
            (self._memory.address, each * queues),
            region,
            (self._memory, self._data),
        )
        self.threads = 1
        self._cid = 0
        self.controller.start()
