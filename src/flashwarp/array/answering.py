"""The answers of the owner of a shared cache to one client's requests for lines.

A thread waits for what the client's threads write into the table of requests, which both processes
map (`cache/owner_requests.cuh`). It makes the accesses by the owner's arrays, as any call does, and
copies lines to the table, and bytes to store from it. It believes nothing that it reads there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from flashwarp import _native, config, endings
from flashwarp.array.array import Array
from flashwarp.array.filling import Filling
from flashwarp.cache.shared import Facts
from flashwarp.device import Device, shared_memory
from flashwarp.errors import (
    BoundsError,
    ClosedError,
    FlashwarpError,
    ReadOnlyError,
    SharedCacheError,
)
from flashwarp.launch.launcher import Launcher
from flashwarp.launch.operands import Index
from flashwarp.launch.rows import RowFormat
from flashwarp.nvme.software import SoftwareService
from flashwarp.storage import File, files

_log = logging.getLogger(__name__)

_BYTES = np.dtype(np.uint8)

# Threads that read for clients on a GPU, most of which wait for the disk; and what one of them
# copies out of the page cache at a time.
_READ_THREADS = 16
_READ_BYTES = 64 << 10

# Launches on one array that are kept prepared, by the size of their rows.
_WIDTHS_MAX = 16

# `cache::asked_request`, `cache::owner_operation`, and the statuses of answers.
_ASKED = np.dtype([("begin", "<u8"), ("bytes", "<u8"), ("slot", "<u4"), ("operation", "<u4")])
_READ, _STORE, _PREFETCH = 1, 2, 3
_DONE, _FAILED = 0, 0x7FD

Requests = npt.NDArray[np.void]
T = TypeVar("T")


class Export:
    """An array of the owner's that clients read.

    It is used beside other calls, with errors of its own: on the CPU device by one thread, on a GPU
    on a stream of its own. It waits for no turn, and no worker of the CPU device: in the turn, and
    on the workers, a kernel of this process may run that waits for the answer of another owner, or
    of this one.

    Attributes
    ----------
    file : File or None
        What host threads may read for clients on a GPU. None if the owner stores to it: then only
        the cache has all bytes.
    """

    def __init__(self, array: Array, opened_here: bool, stamp: files.Stamp) -> None:
        self.array, self.device = array, array.device
        self.opened_here = opened_here
        self.stamp = stamp
        self.users = 0
        self._attachment = attachment = array._attachment
        self._launchers: dict[int, Launcher] = {}
        self._guard = endings.Lock()  # of launches
        self._reads = endings.Lock()  # of reads by host threads, which wait for no launch
        self._ended = False
        self.nbytes = attachment.storage.nbytes
        # Where its lines begin, in bytes counted from line number 0.
        self._volume = volume = attachment.launcher.volume
        self.begin = volume.line_begin * volume.cache.line_bytes
        self._threads = 1 if attachment.launcher.on_cpu else None
        self._side = attachment.device.create_stream()
        self._volume = volume.with_own_errors(self._side)
        storage, service = attachment.storage, attachment.launcher.service
        plain = isinstance(service, SoftwareService) and service.model is None
        readable = self._threads is None and not array.writable and plain
        self.file = storage if readable and isinstance(storage, File) else None
        attachment.dependents.append(self)

    @property
    def closed(self) -> bool:
        """Whether the owner has closed it."""
        return self._ended or self._attachment.closed

    @property
    def capacity(self) -> int:
        """Bytes of the cache's frames."""
        return self._attachment.cache.capacity

    def act(self, act: Callable[[], None]) -> None:
        """Act on the array; raises what its kernels have noted."""
        self._act(self._guard, act)

    def read(self, act: Callable[[], bool]) -> bool:
        """Read `file` while it is open, by no launch; returns what `act` does."""
        return self._act(self._reads, act)

    def _act(self, guard: endings.Lock, act: Callable[[], T]) -> T:
        attachment = self._attachment
        if attachment.launcher.service.changes != attachment.row_calls.changes:
            self.array._turns.act(lambda: None)  # drops old lines, or refuses
        with guard:
            if self._ended:
                raise ClosedError(f"the array {attachment.place} is closed")
            return act()

    def move(self, verb: str, row_bytes: int, chosen: range | Index, buffer: int = 0) -> None:
        """Launch the moving of rows of so many bytes, and wait."""
        launcher = self._launcher(row_bytes)
        stream = None
        if not self._threads:
            stream = self._side.handle
            self._attachment.note_stream(stream)
        several = isinstance(chosen, Index) and len(chosen) > 1  # a range is of one line
        if verb == "prefetch" or (verb == "gather" and launcher.on_cpu and several):
            # So all transfers are under way at once.
            launcher.prefetch(chosen, stream, self._threads)
        if verb == "gather":
            launcher.move("gather", chosen, buffer, stream, sms=self._threads)
        elif verb == "scatter":
            launcher.move("scatter", chosen, buffer, stream, sms=self._threads)
        if stream is not None:
            self._attachment.device.wait(self._side, timeout_s=config.time_limit_s())
            self._attachment._streams.discard(stream)
        failure = self._attachment._failures.take("a request of a client", self._volume)
        if failure is not None:
            raise failure

    def _launcher(self, row_bytes: int) -> Launcher:
        found = self._launchers.get(row_bytes)
        if found is None:
            if len(self._launchers) >= _WIDTHS_MAX:
                self.let_go()
            own = self._attachment.launcher
            rows = RowFormat(_BYTES, (self.nbytes // row_bytes, row_bytes))
            found = self._launchers[row_bytes] = Launcher(self._volume, own.service, rows)
            found.order = own.order
        return found

    def let_go(self) -> None:
        """Hold nothing for launches any more."""
        for each in self._launchers.values():
            each.let_go()
        self._launchers.clear()

    def close(self) -> None:
        """End its use, when what is under way has ended. May be called twice."""
        with self._guard, self._reads:
            if self._ended:
                return
            self._ended = True
            self.let_go()
            self._attachment.dependents.remove(self)
            self._volume.release()
            self._attachment.end_stream(self._side)


class Readers(NamedTuple):
    """What reads files for the clients of a cache on a GPU."""

    threads: _native.Gatherer
    filling: Filling

    @classmethod
    def of(cls, device: Device, facts: Facts) -> Readers:
        """Start the threads."""
        return cls(_native.Gatherer(_READ_THREADS), Filling(device, facts.lines, facts.line))

    def close(self) -> None:
        """End the threads; no client is left."""
        self.filling.close()
        self.threads.stop()


class Answering:
    """Answers one client's requests, in a thread of its own, until it is closed.

    Parameters
    ----------
    device : Device
    facts : Facts
        Of the cache.
    mapped : Mapped
        The memory of the requests.
    opened : dict
        The arrays that the client has open, which changes meanwhile.
    readers : Readers or None
        On a GPU, what reads for clients past the cache.
    """

    def __init__(
        self,
        device: Device,
        facts: Facts,
        mapped: shared_memory.Mapped,
        opened: dict[int, Export],
        readers: Readers | None,
    ) -> None:
        self._readers = readers
        self._line = facts.line
        self._opened = opened
        self._mapped = mapped
        self._slots = facts.slots
        bell = device.kind == "cpu"
        self._server = _native.RequestServer(mapped.address, facts.slots, facts.line, bell)
        # What rows pass through, and their numbers.
        self._memory = device.allocate_host(facts.slots * facts.line)
        self._indices = device.allocate_host(8 * facts.slots)
        self._numbers = self._indices.as_numpy().view(np.int64)
        self._failure: Exception | None = None
        self._thread = endings.Thread(self._answer_all, "flashwarp sharing requests")
        self._thread.start()

    def raise_failure(self) -> NoReturn:
        """Raise what made the last request fail."""
        raise self._failure or SharedCacheError("no request has failed")

    def close(self) -> None:
        """End the thread: no array of the client is closed before."""
        self._server.stop()
        self._thread.join(config.time_limit_s())
        if not self._thread.is_alive():  # else its access is yet to end
            self._memory.close()
            self._indices.close()

    def _answer_all(self) -> None:
        while asked := self._server.wait():
            requests = np.frombuffer(asked, _ASKED)
            operations = requests["operation"].tolist()
            if _PREFETCH in operations:
                # First: their transfers go on while the others are waited for.
                hints = requests["operation"] == _PREFETCH
                self._server.answer(requests["slot"][hints].tolist(), _DONE)
                self._each_array(requests[hints], self._prefetch)
                requests = requests[~hints]
                operations = requests["operation"].tolist()
            kinds = set(zip(operations, requests["bytes"].tolist(), strict=True))
            # Mostly all are of one kind, and each operation of numpy takes as long as a copy.
            for operation, nbytes in sorted(kinds, reverse=True):
                alike = requests
                if len(kinds) > 1:
                    of = (requests["operation"] == operation) & (requests["bytes"] == nbytes)
                    alike = requests[of]
                self._each_array(alike, partial(self._move, operation, nbytes))

    def _each_array(self, requests: Requests, act: Callable[[Export, Requests], None]) -> None:
        """Act on the requests for each array that the client has open; refuse all others."""
        for export in dict.fromkeys(self._opened.copy().values()):
            # Those below wrap around.
            ours = requests["begin"] - np.uint64(export.begin) < export.nbytes
            if ours.all():
                return act(export, requests)
            if ours.any():
                act(export, requests[ours])
                requests = requests[~ours]
        if act != self._prefetch:
            self._refuse(requests, BoundsError("a client asks for lines of no array that it has"))
        return None

    def _refuse(self, requests: Requests, why: Exception) -> None:
        if len(requests):
            self._failure = why
            self._server.answer(requests["slot"].tolist(), _FAILED)

    def _prefetch(self, export: Export, requests: Requests) -> None:
        lines = [np.empty(0, np.int64)]
        last = export.nbytes // self._line
        for begin, nbytes in zip(
            requests["begin"].tolist(), requests["bytes"].tolist(), strict=True
        ):
            # More than the cache has would evict itself.
            first = begin - export.begin
            end = min(first + nbytes, first + export.capacity, export.nbytes)
            lines.append(np.arange(first // self._line, -(-end // self._line)))
        chosen = np.unique(np.concatenate(lines))
        whole = chosen[chosen < last]
        parts = [whole[i : i + self._slots] for i in range(0, len(whole), self._slots)]
        if export.file is not None and self._readers is not None:
            for part in parts:
                self._readers.filling.add(export, part)  # reads must not wait for a launch
            return

        def prefetch() -> None:
            for part in parts:
                export.move("prefetch", self._line, self._index(part))
            if len(whole) != len(chosen):
                export.move("prefetch", 1, range(last * self._line, export.nbytes))

        self._try(export, prefetch)

    def _try(self, export: Export, act: Callable[[], None]) -> bool:
        """Act on an array; note a failure, and return whether there was none."""
        try:
            export.act(act)
        except FlashwarpError as error:
            self._failure = error
        except Exception as error:
            _log.exception("a request of a client")
            self._failure = error
        else:
            return True
        return False

    def _move(self, operation: int, nbytes: int, export: Export, requests: Requests) -> None:
        """Make accesses of one size to one array, together if they are rows of it."""
        offsets = requests["begin"] - np.uint64(export.begin)
        known = operation in (_READ, _STORE) and 0 < nbytes <= self._line
        if not known or int(offsets.max()) + nbytes > export.nbytes:
            fits = offsets + np.uint64(nbytes) <= export.nbytes if known else offsets < 0
            self._refuse(requests[~fits], BoundsError("a client asks for bytes that are no line's"))
            requests, offsets = requests[fits], offsets[fits]
        if operation == _READ and self._read(export, requests["slot"].tolist(), offsets, nbytes):
            return None
        if operation == _STORE and not export.array.writable:
            why = ReadOnlyError('the array is read-only: open it with mode="r+"')
            return self._refuse(requests, why)
        rows = offsets % np.uint64(nbytes or 1) == 0
        if rows.all():
            return self._move_rows(export, operation, requests, nbytes)
        self._move_rows(export, operation, requests[rows], nbytes)
        for each in np.flatnonzero(~rows):
            self._move_rows(export, operation, requests[each : each + 1], nbytes)
        return None

    def _read(
        self, export: Export, slots: list[int], offsets: npt.NDArray[np.uint64], nbytes: int
    ) -> bool:
        """Answer reads from the file of an array that nobody stores to, if it can be read so."""
        file, readers = export.file, self._readers
        if file is None or readers is None or not slots:
            return False

        def read() -> bool:
            # Each thread waits for one read at a time of a disk.
            step = 1 if file.disks else max(1, _READ_BYTES // nbytes)
            places = offsets.tolist()
            return self._server.read(readers.threads, file.native, slots, places, nbytes, step)

        try:
            if not export.read(read):
                return False  # the cache's own access says why
        except Exception as error:
            if not isinstance(error, FlashwarpError):
                _log.exception("a request of a client")
            self._failure = error
            self._server.answer(slots, _FAILED)
            return True
        self._server.answer(slots, _DONE)
        lines = offsets.astype(np.int64) // self._line
        readers.filling.add(export, lines[lines < export.nbytes // self._line])
        return True

    def _move_rows(self, export: Export, operation: int, requests: Requests, nbytes: int) -> None:
        """Make accesses of one size, and answer them; one that fails fails alone."""
        if not len(requests):
            return
        slots = requests["slot"].tolist()
        offsets = (requests["begin"] - np.uint64(export.begin)).astype(np.int64)
        row_bytes = nbytes if len(slots) > 1 or not offsets[0] % nbytes else 1
        chosen: range | Index = range(int(offsets[0]), int(offsets[0]) + nbytes)
        if row_bytes == nbytes:
            chosen = self._index(offsets // nbytes)

        def move() -> None:
            address = self._memory.address
            if operation == _STORE:
                self._server.collect(slots, nbytes, address)
                export.move("scatter", row_bytes, chosen, address)
                return
            export.move("gather", row_bytes, chosen, address)
            self._server.hand_out(slots, nbytes, address)

        if self._try(export, move):
            self._server.answer(slots, _DONE)
        elif len(slots) == 1:
            self._server.answer(slots, _FAILED)
        else:
            for i in range(len(slots)):
                self._move_rows(export, operation, requests[i : i + 1], nbytes)

    def _index(self, numbers: npt.NDArray[np.int64]) -> Index:
        """Put the numbers of rows where kernels read them; there is one such index at a time."""
        here = self._numbers[: len(numbers)]
        here[:] = numbers
        return Index(self._indices.address, here.shape, 8, "numpy", here)
