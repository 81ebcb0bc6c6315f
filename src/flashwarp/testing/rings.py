"""The host's side of NVMe queue pairs, written from the specification, to drive a controller.

It shares no code with the rest of the library: two ends that agree by accident of one header prove
nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from flashwarp import _native

LBA = 512
FLUSH, WRITE, READ, WRITE_ZEROES, DATASET_MANAGEMENT = 0x00, 0x01, 0x02, 0x08, 0x09
IDENTIFY = 0x06

SUCCESS = 0x000
INVALID_OPCODE = 0x001
INVALID_FIELD = 0x002
DATA_TRANSFER_ERROR = 0x004
COMMAND_ABORTED = 0x007
INVALID_NAMESPACE = 0x00B
PRP_OFFSET_INVALID = 0x013
WRITE_PROTECTED = 0x020
LBA_OUT_OF_RANGE = 0x080
CAPACITY_EXCEEDED = 0x081
WRITE_FAULT = 0x280
UNRECOVERED_READ = 0x281

_FORCE_UNIT_ACCESS = 0x40000000

SQE = np.dtype(
    {
        "names": ["opcode", "flags", "cid", "nsid", "cdw2", "cdw3", "prp1", "prp2"]
        + ["cdw10", "cdw11", "cdw12", "cdw13", "cdw14", "cdw15"],
        "formats": ["u1", "u1", "<u2", "<u4", "<u4", "<u4", "<u8", "<u8"] + ["<u4"] * 6,
        "offsets": [0, 1, 2, 4, 8, 12, 24, 32, 40, 44, 48, 52, 56, 60],
        "itemsize": 64,
    }
)
CQE = np.dtype(
    [
        ("dw0", "<u4"),
        ("dw1", "<u4"),
        ("sqhd", "<u2"),
        ("sqid", "<u2"),
        ("cid", "<u2"),
        ("st", "<u2"),
    ]
)


class AlignedMemory:
    """Zero-filled aligned host memory with a numpy view; freed with the object."""

    def __init__(self, nbytes: int, alignment: int = 4096) -> None:
        self.nbytes = nbytes
        self._memory = _native.HostMemory(nbytes, alignment)
        self.address = self._memory.address
        array_type = ctypes.c_uint8 * nbytes
        self.view: npt.NDArray[np.uint8] = np.frombuffer(
            memoryview(array_type.from_address(self.address)), dtype=np.uint8
        )


class Completion(NamedTuple):
    """What a completion queue entry says; `status` is status code type and status code."""

    cid: int
    status: int
    sqhd: int
    sqid: int


class Ring:
    """One queue pair in host memory. One thread at a time."""

    def __init__(self, depth: int, queue_id: int = 1) -> None:
        self.depth, self.id = depth, queue_id
        self._sq = AlignedMemory(64 * depth)
        self._cq = AlignedMemory(16 * depth)
        self._bells = AlignedMemory(4096)
        self.sq: npt.NDArray[Any] = self._sq.view.view(SQE)
        self.cq: npt.NDArray[Any] = self._cq.view.view(CQE)
        self.bells: npt.NDArray[Any] = self._bells.view.view("<u4")
        self.tail = self.head = 0
        self.phase = 1
        self.pair = _native.QueuePair(
            sq=self._sq.address,
            cq=self._cq.address,
            sq_doorbell=self._bells.address,
            cq_doorbell=self._bells.address + 64,
            depth=depth,
            id=queue_id,
        )

    def write(self, opcode: int, cid: int, **fields: int) -> None:
        """Write one entry at the tail; `ring` makes it known."""
        entry = self.sq[self.tail : self.tail + 1]
        entry.view(np.uint8)[:] = 0
        entry["opcode"], entry["cid"], entry["nsid"] = opcode, cid, fields.pop("nsid", 1)
        lba = fields.pop("lba", None)
        if lba is not None:
            entry["cdw10"], entry["cdw11"] = lba & 0xFFFFFFFF, lba >> 32
        blocks = fields.pop("blocks", None)
        if blocks is not None:
            entry["cdw12"] = (blocks - 1) | (_FORCE_UNIT_ACCESS if fields.pop("fua", 0) else 0)
        for name, value in fields.items():
            entry[name] = value
        self.tail = (self.tail + 1) % self.depth

    def ring(self) -> None:
        """Ring the submission doorbell."""
        self.bells[0] = self.tail

    def consume(self, release: bool = True) -> Completion | None:
        """Take the next completion, or None; moves the CQ head doorbell unless told not to."""
        entry = self.cq[self.head]
        if (int(entry["st"]) & 1) != self.phase:
            return None
        # Without the flags More and Do Not Retry.
        status = int(entry["st"]) >> 1 & 0x7FF
        got = Completion(int(entry["cid"]), status, int(entry["sqhd"]), int(entry["sqid"]))
        self.head = (self.head + 1) % self.depth
        if self.head == 0:
            self.phase ^= 1
        if release:
            self.release()
        return got

    def release(self) -> None:
        """Move the CQ head doorbell: what was consumed may be overwritten."""
        self.bells[16] = self.head


class Host:
    """A controller, its rings and one data buffer.

    Parameters
    ----------
    storage : native storage
        What the controller serves.
    depth, queues : int
        Of the rings; `admin` adds one with id 0 in front.
    buffer_nbytes : int
        Memory that commands may name, unless `regions` says otherwise.
    threads : int
        Of the controller. 0: the caller serves it, in `poll`.
    make : callable
        Makes the controller; called as ``_native.SoftwareController`` is.
    **options
        For `make`.

    Notes
    -----
    A context manager; its end stops the controller.
    """

    def __init__(
        self,
        storage: Any,
        *,
        depth: int = 16,
        queues: int = 1,
        admin: bool = False,
        buffer_nbytes: int = 1 << 20,
        threads: int = 0,
        make: Callable[..., Any] = _native.SoftwareController,
        **options: Any,
    ) -> None:
        first = 0 if admin else 1
        self.rings = [Ring(depth, first + i) for i in range(queues + (1 if admin else 0))]
        self.buffer = AlignedMemory(buffer_nbytes, 2 << 20)
        regions: Sequence[tuple[int, int]] = options.pop(
            "regions", [(self.buffer.address, buffer_nbytes)]
        )
        self.controller = make(
            storage, [ring.pair for ring in self.rings], list(regions), threads=threads, **options
        )
        self.threads = threads
        self.controller.start()
        self._cid = 0

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The buffer."""
        return self.buffer.view

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.stop()

    def poll(self) -> None:
        """Serve the controller once, if it has no threads for that."""
        if self.threads == 0:
            self.controller.serve_some(0)

    def wait(self, ring: Ring | None = None, limit_s: float = 20.0) -> Completion:
        """Return the next completion of a ring; AssertionError when none comes in time."""
        ring = ring or self.rings[-1]
        end = time.monotonic() + limit_s
        while True:
            got = ring.consume()
            if got is not None:
                return got
            self.poll()
            assert time.monotonic() < end, "no completion"

    def do(self, opcode: int, ring: Ring | None = None, **fields: int) -> int:
        """Run one command to its end; returns its status field."""
        ring = ring or self.rings[-1]
        self._cid = (self._cid + 1) & 0xFFFF
        fields.setdefault("prp1", self.buffer.address)
        ring.write(opcode, self._cid, **fields)
        ring.ring()
        got = self.wait(ring)
        assert got.cid == self._cid, f"the completion of command {got.cid}, not {self._cid}"
        assert got.sqid == ring.id, f"a completion of queue {got.sqid} in queue {ring.id}"
        return got.status

    def read(self, lba: int, blocks: int, **fields: int) -> int:
        """Read into the buffer; returns the status field."""
        return self.do(READ, None, lba=lba, blocks=blocks, **fields)

    def write(self, lba: int, blocks: int, **fields: int) -> int:
        """Write from the buffer; returns the status field."""
        return self.do(WRITE, None, lba=lba, blocks=blocks, **fields)
