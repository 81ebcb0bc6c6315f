"""`BatchEngine`: host threads that move batches of rows between a storage and buffers or a ring."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from flashwarp import _native, config, endings
from flashwarp.config import cores, integer, number
from flashwarp.device import CudaDevice, Device
from flashwarp.device.layouts import size_of
from flashwarp.device.memory import DeviceMemory, Owned, host_only
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    ControllerError,
    ControllerTimeout,
    DeviceError,
    FlashwarpError,
    StorageError,
)
from flashwarp.nvme.software import SoftwareController
from flashwarp.storage import Storage, Striped
from flashwarp.transfer import TransferBuffer, TransferClient

_log = logging.getLogger(__name__)

BatchDirection = Literal["prefetch", "write_back"]

_LINE = 64
_ROWS_MAX = (1 << 32) - 1
_WORKERS_MAX = 256
# Entries of each worker's queue pair with each controller. 128 keep a drive of 1.5 M commands per
# second busy that takes 80 us for each.
_DEPTH = 128
_LBA_OUT_OF_RANGE = 0x080


class Ring(NamedTuple):
    """The size of a pinned ring: `chunks` buffers of `chunk_bytes` each."""

    chunk_bytes: int
    chunks: int


@dataclass(frozen=True)
class BatchPort:
    """Where the four regions and the ring of one direction lie: addresses for host and device.

    The regions are those of ``flashwarp/batch/regions.cuh``, `slots` of each: so many tickets, a
    power of two, have memory apart, for batches of at most `rows_max` rows.

    Without a ring (0) workers use the buffer of a request themselves. Chunk q (1, 2, ... for ever)
    lies at ``ring + (q - 1) % chunks * chunk_bytes``, and has `step_bytes` of its batch, the last
    one what is left. The words `filled` and `emptied` count chunks: up to this one they have data,
    and were taken.
    """

    requests: int
    results: int
    lists: int
    statuses: int
    slots: int
    rows_max: int
    ring: int = 0
    chunk_bytes: int = 0
    chunks: int = 0
    step_bytes: int = 0
    filled: int = 0
    emptied: int = 0


def worker_limits(controllers: int, given: int | tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the least and the most workers for a storage behind so many controllers.

    A quarter and a half of the controllers, or of the cores if there is one; the most is also
    limited by the cores. `given` replaces both: a number is a fixed count.
    """
    if given is not None:
        low, high = (given, given) if isinstance(given, int) else given
        high = integer("workers", high, 1, _WORKERS_MAX)
        return integer("workers", low, 1, high), high
    count = controllers if controllers > 1 else cores()
    low = -(-count // 4)
    high = min(max(low, min(-(-count // 2), cores())), _WORKERS_MAX)
    return min(low, high), high


class BatchEngine(endings.OfProcess):
    """Moves batches of rows, in the order of their lists, by threads that call no driver.

    A request says which of the `rows` rows, of any number of bytes, and for an engine without a
    ring where row 0 goes or comes from. It comes from `submit`, from a stream that fills the
    regions (then call `announce`), or from kernels (between `kernels_begin` and `kernels_end`).
    Tickets of a direction are 1, 2, ... in the order of their requests, and end in this order;
    `slots` of them, a power of two, may be under way. The caller keeps the storage open.

    With a ring, one for each direction, data passes pinned memory, and the caller's stream moves it
    on: chunk by chunk, it waits for ``filled >= q``, copies, and stores ``emptied = q``. Writing
    back, it waits for ``emptied >= q - chunks``, copies, and stores ``filled = q``. If the engine
    `copies`, as kernels' batches need, it moves the chunks itself, to and from the buffers of the
    requests. Without a ring, workers read and write these buffers, which are host memory.

    The number of `workers` follows the load between limits; see `worker_limits`. Drives of a
    `controller` with a model serve the storage, or each member of a striped one: by its `threads`
    for each, or else by the workers. One without a model leaves the storage to the workers. Without
    `lists`, batches are sequences only, and no memory is pinned for lists.

    A row that fails, as one out of range does, has an NVMe status, reads as zeros, and leaves the
    others as they are; `check` raises its error. If a batch makes no progress for `timeout_s`, its
    rows that have not been moved fail, and their memory keeps what it had.

    A row of a batch waits until all earlier batches have ended that store it, and if it is stored
    also those that load it; the other rows go on. Rows that share a block of 512 bytes may count as
    one. Batches are ordered by their submissions, those of kernels by what a block has seen. While
    no write is in flight this costs nothing; otherwise it takes some 60 ns for each row of a list,
    and 64 to 128 bytes of host memory for each one or two rows in flight. If a row is in a batch of
    writes more than once, one of them is stored, or parts of several.

    Transfers are commands of 512-byte blocks, which read around rows that are no whole blocks.
    Written rows that are none go through the page cache of a file, one call each; to modelled
    drives they are refused.
    """

    _kind = "engine"

    def __init__(
        self,
        device: Device,
        storage: Storage,
        *,
        rows: int,
        row_bytes: int,
        batch_rows: int,
        slots: int = 8,
        directions: Sequence[BatchDirection] = ("prefetch",),
        ring: Ring | None = None,
        copies: bool = False,
        workers: int | tuple[int, int] | None = None,
        timeout_s: float | None = None,
        controller: SoftwareController | None = None,
        lists: bool = True,
    ) -> None:
        super().__init__()
        self.device = device
        self._late_errors: list[dict[str, Any]] = []
        self._decisions_logged = 0
        self.row_bytes = integer("row_bytes", row_bytes, 1, _ROWS_MAX)
        self.rows = rows
        batch_rows = integer("batch_rows", batch_rows, 1, _ROWS_MAX)
        limit_s = config.time_limit_s(timeout_s)
        self.timeout_s = number("timeout_s", limit_s, 1e-3, 1e6)
        drives, threads = _drives_of(storage, controller)
        self.controllers = max(1, len(drives))
        self.worker_limits = worker_limits(self.controllers, workers)
        self._lists = lists
        self._memory: list[DeviceMemory] = []
        self._rings: list[tuple[TransferClient, TransferBuffer]] = []
        self._streams: list[Owned] = []
        self.ports: dict[BatchDirection, BatchPort] = {}
        try:
            natives = [self._lay_out(each, slots, batch_rows, ring, copies) for each in directions]
            rings = [each.owners for _, each in self._rings]
            try:
                self._native = _native.BatchEngine(
                    storage.native,
                    self.row_bytes,
                    self.rows,
                    natives,
                    self.worker_limits,
                    int(self.timeout_s * 1e9),
                    drives,
                    threads,
                    _DEPTH,
                    *self._stream_side(copies),
                    (storage, [*(each.owners for each in self._memory), *rings], device),
                )
            except ValueError as error:
                raise ArgumentError(str(error)) from error
            except RuntimeError as error:
                raise ControllerError(
                    f"{self.worker_limits[1]} workers cannot be started ({error}): raise the limit "
                    "of processes (ulimit -u), or ask for fewer"
                ) from error
        except BaseException:
            self._free()
            raise
        endings.remember(self)

    def _stream_side(self, copies: bool) -> tuple[_native.CudaContext | None, int, int]:
        """Return the context, stream and event with which the engine copies on a GPU."""
        if not copies or not isinstance(self.device, CudaDevice):
            return None, 0, 0
        context = self.device.context
        stream = self.device.create_stream()
        self._streams.append(stream)
        event = context.create_event(timing=False)
        self._streams.append(Owned(self.device, context.releasing("cuEventDestroy", event)))
        return context.calls, stream.handle, event

    def _lay_out(
        self, direction: BatchDirection, slots: int, rows: int, ring: Ring | None, copies: bool
    ) -> _native.BatchPort:
        """Allocate the regions of one direction, and its ring."""

        def allocate(nbytes: int, *, shared: bool = True) -> int:
            make = self.device.allocate_host if shared else partial(host_only, self.device)
            self._memory.append(make(nbytes, _LINE))
            return int(self._memory[-1].address)

        port: dict[str, int] = {
            "requests": allocate(slots * size_of("batch_request")),
            "results": allocate(slots * size_of("batch_result")),
            # Of narrow rows these two are larger than the ring.
            "lists": allocate(slots * rows * 8, shared=self._lists),
            # Only kernels read them on the device, whose engines have copies.
            "statuses": allocate(slots * rows * 2, shared=copies),
            "slots": slots,
            "rows_max": rows,
        }
        step_bytes = 0
        if ring is not None:
            chunk_bytes, chunks = ring
            nbytes = chunk_bytes * chunks
            client = TransferClient(self.device, "rings of batches", nbytes, nbytes, reserved=True)
            self._rings.append((client, client.take()))
            port |= {
                "ring": self._rings[-1][1].address,
                "chunk_bytes": chunk_bytes,
                "chunks": chunks,
                "filled": allocate(_LINE),
                "emptied": allocate(_LINE),
            }
            whole = chunk_bytes // self.row_bytes * self.row_bytes
            step_bytes = whole or chunk_bytes
        self.ports[direction] = BatchPort(**port, step_bytes=step_bytes)
        return _native.BatchPort(is_write=direction == "write_back", **port, copies=copies)

    # Batches.

    def submit(
        self,
        direction: BatchDirection,
        ids: Sequence[int] | npt.NDArray[Any] | range,
        buffer: int = 0,
    ) -> int:
        """Submit a batch of the host, and return its ticket. Never waits.

        `ids` are the rows, in the order of the buffer, and are copied; a range with step 1 is a
        sequence, which has no list. `buffer` is the address of the first row; 0 for an engine with
        a ring whose chunks the caller moves. Raises ArgumentError for more rows than `batch_rows`,
        or if the ticket that has the slot has not ended.
        """
        self._check_usable()
        port = self.ports[direction]
        if isinstance(ids, range) and ids.step == 1 and (not ids or ids.start >= 0):
            address, count, first = 0, len(ids), ids.start if ids else 0
        elif not self._lists:
            raise ArgumentError("an engine without lists takes ranges with step 1")
        else:
            found = np.ascontiguousarray(ids, np.int64)
            address, count, first = found.ctypes.data if found.size else 0, found.size, 0
        if count > port.rows_max:
            raise ArgumentError(f"a batch of {count} rows, at most {port.rows_max}")
        ticket = self._call(
            self._native.submit, direction == "write_back", address, count, first, buffer
        )
        if not ticket:
            raise ArgumentError(
                f"{port.slots} batches of {direction} have not ended: wait for the oldest one, or "
                "ask for more slots"
            )
        return ticket

    def announce(self, direction: BatchDirection, ticket: int) -> None:
        """Say that a stream will submit tickets up to this one, so that the engine looks for them.

        The stream writes the list and the request of the slot, and `ready` last.
        """
        self._check_usable()
        self._native.announce(direction == "write_back", ticket)

    def kernels_begin(self) -> None:
        """Look for requests of kernels from now on, at intervals of 100 us at most."""
        self._check_usable()
        self._native.kernels_begin()

    def kernels_end(self) -> None:
        """End one `kernels_begin`."""
        self._native.kernels_end()

    def ended(self, direction: BatchDirection, ticket: int) -> bool:
        """Return whether a ticket has ended, well or not."""
        return self._native.ended(direction == "write_back", ticket)

    def wait(self, direction: BatchDirection, ticket: int, timeout_s: float | None = None) -> None:
        """Block until a ticket has ended, and raise its error, as `check` does.

        Raises ControllerTimeout if it has not ended in time.
        """
        self._check_usable()
        limit_s = 2 * self.timeout_s + 30 if timeout_s is None else timeout_s
        if not self._native.wait(direction == "write_back", ticket, int(limit_s * 1e9)):
            raise ControllerTimeout(
                f"ticket {ticket} of {direction} has not ended after {limit_s:g} s: it was not "
                "submitted, or a batch in front of it waits"
            )
        self.check(direction, ticket)

    def check(self, direction: BatchDirection, ticket: int) -> None:
        """Raise the error of a ticket that has ended, if it has one. Never waits.

        BoundsError: a row number is out of range. StorageError: a transfer failed; it names the
        first such row. ControllerTimeout: no progress for `timeout_s`. ArgumentError: a kernel
        asked for more rows than `batch_rows`. DeviceError: the driver failed to copy rows between
        ring and buffer. ClosedError: the engine was closed first.
        """
        self._log_decisions()
        fate = self._native.outcome(direction == "write_back", ticket)
        if fate is None:
            return
        failed, row, status, reason = fate
        if failed and reason:
            kinds: dict[str, type[FlashwarpError]] = {
                "the engine was stopped": ClosedError,
                "a batch of": ArgumentError,
                "the stream that copies": DeviceError,
            }
            kind = next((k for text, k in kinds.items() if reason.startswith(text)), None)
            text = f"{direction}, ticket {ticket}: {reason}; {failed} rows have failed"
            raise (kind or ControllerTimeout)(text)
        if failed:
            raise self._failure(direction, ticket, failed, row, status)

    def _failure(
        self, direction: BatchDirection, ticket: int, failed: int, row: int, status: int
    ) -> FlashwarpError:
        what = f"{direction}, ticket {ticket}: row {row} of the batch"
        others = f"; {failed} rows of the batch have failed" if failed > 1 else ""
        if status == _LBA_OUT_OF_RANGE:
            return BoundsError(
                f"{what} names a row that is out of bounds for {self.rows} rows{others}"
            )
        log = [*self._late_errors, *self._native.take_errors()]
        first = next((each for each in log if each["errno"] and not each["recovered"]), None)
        if first is None:
            return StorageError(
                errno.EIO, f"{what} failed with NVMe status {status:#05x}{others}", status=status
            )
        return StorageError(
            first["errno"],
            f"{what} failed: {first['op']} of {first['nbytes']} bytes at offset "
            f"{first['offset']}: {first['reason']} (NVMe status {status:#05x}){others}",
            first["path"] or None,
            offset=first["offset"],
            status=status,
        )

    def statuses(self, direction: BatchDirection, ticket: int) -> npt.NDArray[np.uint16]:
        """Return the statuses of a slot's rows, by row; valid if `check` says that some failed."""
        port = self.ports[direction]
        memory = next(each for each in self._memory if each.address == port.statuses)
        all_rows = memory.as_numpy()[: 2 * port.slots * port.rows_max].view(np.uint16)
        return np.array(all_rows.reshape(port.slots, port.rows_max)[ticket % port.slots])

    @property
    def stats(self) -> dict[str, Any]:
        """Counters: batches, rows and bytes by direction, times, CPU time and decisions.

        ``io_s`` is the time in which workers had something to move, and ``idle_s`` the time between
        batches in which they had not. A decision has the window that it was made from.
        """
        self._log_decisions()
        return self._native.stats

    def _log_decisions(self) -> None:
        count = self._native.decision_count
        fresh = count - self._decisions_logged
        if fresh <= 0:
            return
        self._decisions_logged = count
        for each in self._native.stats["decisions"][-fresh:]:
            _log.info(
                "%d workers instead of %d: %s (I/O %.3g s, pauses %.3g s)",
                each["to"],
                each["from"],
                each["reason"],
                each["io_s"],
                each["idle_s"],
            )

    # Ends.

    def close(self) -> None:
        """End the threads within seconds; batches that have not ended fail. May be called twice."""
        if self._closed or self._in_child:
            return
        endings.uninterrupted(self._release)

    def _release(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._streams and isinstance(self.device, CudaDevice):
            # Kernels that its threads serve may still run.
            self.device.context.outlast_served()
        self._native.stop()
        endings.forget(self)
        if self._native.leaked:
            _log.warning("a call of the storage does not return: its thread and memory remain")
            _abandoned.append((self._native, self._memory, self._rings, self._streams))
            return
        # What is asked for later needs no storage, and the file may be opened again.
        self._late_errors = self._native.take_errors()
        self._native.let_go()
        self._free()

    def _free(self) -> None:
        # The engine's own stream may not have ended. Of others their callers have seen the end.
        ended = all(self.device.done(each) for each in self._streams[:1])
        for each in (*self._streams, *self._memory):
            each.close()
        if not ended:
            _log.warning("copies of a batch do not end: their ring remains pinned")
            _abandoned.append(self._rings)
            return
        for client, ring in self._rings:
            ring.release()
            client.close()
        self._rings.clear()

    def _call(self, act: Callable[..., int], *arguments: Any) -> int:
        try:
            return act(*arguments)
        except RuntimeError as error:
            raise ClosedError(str(error)) from error

    def __repr__(self) -> str:
        return "<BatchEngine, closed>" if self._closed else f"<BatchEngine of {self.rows} rows>"


_abandoned: list[object] = []
"""What threads may use that did not end."""


def _drives_of(
    storage: Storage, controller: SoftwareController | None
) -> tuple[list[tuple[Any, Any]], int]:
    """Return the drives behind controllers, each a storage and its model, and their threads."""
    if controller is None or controller.model is None:
        return [], 0
    model = controller.model
    members = storage.members if isinstance(storage, Striped) else (storage,)
    drives = []
    for drive, member in enumerate(members):
        # Each drive has service times of its own.
        own = replace(model, seed=(model.seed + drive) % (1 << 64) or 1)
        drives.append((member.native, own.native_parameters()))
    return drives, controller.threads or 0
