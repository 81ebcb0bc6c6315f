"""Bytes of saved storages: in pinned buffers first, then in a file without a name, and back.

What is saved last is needed first. So the oldest are written to the file when half of the buffers
are taken, and give theirs up when somebody needs one. All methods of the store may be called by any
thread.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from flashwarp import _native, _waiting, config, endings
from flashwarp.device import Device
from flashwarp.device.memory import align_up
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    FlashwarpError,
    PathError,
    StorageError,
    WaitTimeout,
)
from flashwarp.storage import files
from flashwarp.transfer import Copy, CopyEngine, Direction, TransferBuffer, TransferClient

# So much is lent, written and read at a time.
_BUFFER_BYTES = 4 << 20
_BUFFERS_MIN = 256  # the last one of a tensor is partly empty
_PAGE_BYTES = 4096
_PAUSE_S = 200e-6


class Kept:
    """One saved storage. Autograd holds it; its memory and its part of the file go with it.

    Attributes
    ----------
    restored, arrival
        The bytes on the device again, and the copy that brings them; for the caller of the store.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.restored: Any = None
        self.arrival: Any = None


class _Saved:
    """What the store knows of a `Kept`. Changed under the lock of the store."""

    def __init__(self, number: int, nbytes: int, buffers: list[TransferBuffer]) -> None:
        self.number = number
        self.nbytes = nbytes
        self.buffers = buffers
        self.saving: Copy | None = None
        self.place = -1
        self.written = False
        self.valid = True  # its buffers hold the bytes, or will when `saving` has ended
        self.task: Future[None] | None = None
        self.failure: FlashwarpError | None = None
        self.dead = False


class ActivationStore:
    """Saved storages of one device.

    `folder` is that of the file, `host` the most bytes of pinned memory; so many `threads` write,
    and as many read.
    """

    def __init__(self, device: Device, folder: str, host: int, threads: int) -> None:
        self._buffer_bytes = min(_BUFFER_BYTES, max(_PAGE_BYTES, host // _BUFFERS_MIN))
        self._buffer_bytes -= self._buffer_bytes % _PAGE_BYTES
        self._fd, self.o_direct = _open_nameless(files.check_name(folder))
        self._folder = folder
        try:
            self._engine = CopyEngine(device)
            self._pinned = TransferClient(
                device, "activations", host, self._buffer_bytes, reserved=True, ahead=True
            )
        except BaseException:
            os.close(self._fd)
            raise
        self._writers = endings.Pool(threads, "flashwarp-activations-write")
        self._readers = endings.Pool(threads, "flashwarp-activations-read")
        self._limit_s = config.current().timeout_s
        self._lock = endings.Condition()
        self._entries: dict[int, _Saved] = {}  # in the order of saving
        self._dropped: deque[int] = deque()  # by finalizers, which may run while the lock is held
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self._failure: StorageError | None = None
        self._closed = False
        self.saved = self.saved_bytes = self.written_bytes = self.read_bytes = 0
        self.waited_s = 0.0

    # Saving.

    def save(self, flat: torch.Tensor) -> Kept:
        """Save the bytes of a tensor as they are after the present work of its stream.

        Blocks while all buffers are taken.
        """
        count = -(-flat.nbytes // self._buffer_bytes)
        if count > self._pinned.buffers:
            raise ArgumentError(
                f"a tensor of {flat.nbytes} bytes exceeds the {self._pinned.budget_bytes} bytes of "
                "host memory for saved tensors: raise host_memory="
            )
        with self._lock:
            self._check_usable()
            if self._failure is not None:
                raise self._refusal(self._failure)
            entry = _Saved(self.saved, flat.nbytes, self._buffers(count))
            stream = self._engine.device.current_stream("torch")
            try:
                entry.saving = self._engine.copy_pieces(
                    entry.buffers,
                    self._parts(flat),
                    self._sizes(flat.nbytes),
                    after=stream,
                    direction=Direction.TO_HOST,
                )
            except BaseException:
                self._release(entry)
                raise
            kept = Kept(entry.number, entry.nbytes)
            self.saved += 1
            self.saved_bytes += entry.nbytes
            self._entries[entry.number] = entry
            self._kept[entry.number] = kept
            weakref.finalize(kept, self._dropped.append, entry.number).atexit = False
            self._write_oldest()
        return kept

    def _buffers(self, count: int) -> list[TransferBuffer]:
        """Take buffers, those of the oldest that are in the file if there is no other."""
        found: list[TransferBuffer] = []

        def taken() -> bool:
            self._sweep()
            while len(found) < count:
                more = self._pinned.try_take_several(count - len(found))
                found.extend(more)
                if not more and not self._give_up_oldest():
                    if self._failure is not None:
                        raise self._refusal(self._failure)  # no write will free a buffer
                    return False
            return True

        try:
            self._wait(taken, f"{count} buffers of {self._buffer_bytes} bytes")
        except BaseException:
            for buffer in found:
                buffer.release()
            raise
        return found

    def _refusal(self, failure: StorageError) -> StorageError:
        """Copy an error. Raised itself it would hold the caller's frames, and so a whole graph."""
        number, why = failure.errno or errno.EIO, failure.strerror or ""
        return StorageError(number, why, self._folder, offset=failure.offset)

    def _give_up_oldest(self) -> bool:
        """Release the buffers of the oldest entry that the file has; start to write, if none."""
        for entry in self._entries.values():
            if entry.buffers and entry.written and entry.task is None:
                self._release(entry)
                return True
        self._write_oldest(everything=True)
        return False

    def _write_oldest(self, everything: bool = False) -> None:
        """Start writes until at most half of the buffers are of entries that the file lacks."""
        pending = [e for e in self._entries.values() if e.buffers and not e.written]
        most = 0 if everything else self._pinned.buffers // 2
        left = sum(len(entry.buffers) for entry in pending)
        for entry in pending:
            if left <= most or self._failure is not None:
                return
            left -= len(entry.buffers)
            if entry.task is None and entry.failure is None:
                room = align_up(entry.nbytes, _PAGE_BYTES)
                if entry.place < 0:
                    spare = self._free.get(room)
                    entry.place = spare.pop() if spare else self._end
                    self._end = max(self._end, entry.place + room)
                entry.task = self._writers.submit(self._write, entry)

    def _write(self, entry: _Saved) -> None:
        failure: FlashwarpError | None = None
        try:
            assert entry.saving is not None
            _wait_over(entry.saving, self._limit_s)
            if not entry.dead:
                for i, buffer in enumerate(entry.buffers):
                    at = i * self._buffer_bytes
                    size = min(self._buffer_bytes, align_up(entry.nbytes - at, _PAGE_BYTES))
                    self._move(_native.write_file, buffer, size, entry.place + at)
        except FlashwarpError as error:
            failure = error
        with self._lock:
            entry.task = None
            if failure is None:
                entry.written = not entry.dead
                self.written_bytes += entry.nbytes * entry.written
            else:
                entry.failure = failure
                # The bytes are still in the buffers; only no more can be saved.
                if isinstance(failure, StorageError):
                    self._failure = self._failure or failure

    def _move(self, call: Any, buffer: TransferBuffer, nbytes: int, offset: int) -> None:
        """Read or write whole pages of a buffer."""
        try:
            moved = call(self._fd, offset, buffer.as_numpy()[:nbytes])
        except OSError as error:
            number = error.errno or errno.EIO
            hint = ""
            if number in (errno.ENOSPC, errno.EDQUOT):
                hint = ": make room, name another folder, or raise host_memory="
            raise StorageError(
                number,
                f"saved tensors: {os.strerror(number)}{hint}",
                self._folder,
                offset=getattr(error, "offset", offset),
            ) from error
        if moved is not None and moved < nbytes:
            raise StorageError(
                errno.ENODATA, "saved tensors: the file is cut short", self._folder,
                offset=offset + moved,
            )  # fmt: skip

    # Bringing back.

    def before(self, kept: Kept) -> Iterator[Kept]:
        """Yield what was saved before, the last first."""
        with self._lock:
            self._sweep()
            numbers = [n for n in self._entries if n < kept.number]
        for number in reversed(numbers):
            found = self._kept.get(number)
            if found is not None:
                yield found

    def is_on_host(self, kept: Kept) -> bool:
        """Whether the bytes can be copied to the device without a wait for the file."""
        with self._lock:
            entry = self._entry(kept)
            return bool(entry.buffers) and entry.valid

    def read_ahead(self, kept: Kept) -> bool:
        """Start to read a storage, if buffers are free; return whether it is or comes to host."""
        with self._lock:
            entry = self._entry(kept)
            if entry.buffers:
                return True
            count = -(-entry.nbytes // self._buffer_bytes)
            found = self._pinned.try_take_several(count)
            if len(found) < count:
                for each in found:
                    each.release()
                return False
            self._start_read(entry, found)
            return True

    def bring(self, kept: Kept, flat: torch.Tensor) -> Copy:
        """Copy the bytes of a storage to a tensor that no other work uses; waits for the file."""
        with self._lock:
            entry = self._entry(kept)
            if not entry.buffers:
                count = -(-entry.nbytes // self._buffer_bytes)
                self._start_read(entry, self._buffers(count))
            self._wait(lambda: entry.valid or entry.failure is not None, "a read of the file")
            if not entry.valid:
                assert entry.failure is not None
                raise entry.failure
            return self._engine.copy_pieces(
                self._parts(flat),
                entry.buffers,
                self._sizes(entry.nbytes),
                after=() if entry.saving is None else (entry.saving,),
                direction=Direction.TO_DEVICE,
            )

    def _parts(self, flat: torch.Tensor) -> list[Any]:
        """Return the sides of copies; the tensor itself stands for the first and is kept alive."""
        begin = flat.data_ptr()
        later = range(begin + self._buffer_bytes, begin + flat.nbytes, self._buffer_bytes)
        return [flat, *later]

    def _sizes(self, nbytes: int) -> list[int]:
        size = self._buffer_bytes
        return [min(size, nbytes - at) for at in range(0, nbytes, size)]

    def _start_read(self, entry: _Saved, buffers: list[TransferBuffer]) -> None:
        entry.buffers = buffers
        entry.valid = False
        entry.saving = None
        entry.failure = None
        entry.task = self._readers.submit(self._read, entry)

    def _read(self, entry: _Saved) -> None:
        failure: FlashwarpError | None = None
        try:
            for i, buffer in enumerate(entry.buffers):
                if entry.dead:
                    break
                at = i * self._buffer_bytes
                size = min(self._buffer_bytes, align_up(entry.nbytes - at, _PAGE_BYTES))
                self._move(_native.read_file, buffer, size, entry.place + at)
        except FlashwarpError as error:
            failure = error
        with self._lock:
            entry.task = None
            entry.failure = failure
            entry.valid = failure is None
            if failure is None:
                self.read_bytes += entry.nbytes
            else:
                self._release(entry)

    # Both.

    def _entry(self, kept: Kept) -> _Saved:
        self._check_usable()
        return self._entries[kept.number]

    def _release(self, entry: _Saved) -> None:
        buffers, entry.buffers = entry.buffers, []
        for buffer in buffers:
            buffer.release()

    def _sweep(self) -> None:
        """Free what autograd has dropped, once nothing reads or writes it."""
        while self._dropped:
            entry = self._entries.get(self._dropped.popleft())
            if entry is not None:
                entry.dead = True
        for entry in [e for e in self._entries.values() if e.dead and e.task is None]:
            self._release(entry)
            if entry.place >= 0:
                room = align_up(entry.nbytes, _PAGE_BYTES)
                self._free.setdefault(room, []).append(entry.place)
            del self._entries[entry.number]

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait under the lock, which is free meanwhile."""
        clock = _waiting.Waited()
        while not done():
            waited = clock.look()
            if waited >= self._limit_s:
                raise WaitTimeout(
                    f"waited {waited:.1f} s for {what} (limit {self._limit_s:g} s): the disk of "
                    f"{self._folder} is too slow, or host_memory= has no room for what one node of "
                    "the graph needs"
                )
            self._lock.wait(_PAUSE_S)
        self.waited_s += clock.look()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(
                "offload_activations has ended, and freed what was saved: call backward inside of "
                "the with statement"
            )

    def close(self) -> None:
        """End the threads, after what they do now, and free everything. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for entry in self._entries.values():
                entry.dead = True
        self._writers.close(cancel=True)
        self._readers.close(cancel=True)
        with self._lock:
            for entry in self._entries.values():
                self._release(entry)
            self._entries.clear()
        self._engine.close()
        self._pinned.close()
        os.close(self._fd)


def _wait_over(copy: Copy, limit_s: float) -> None:
    """Wait for a copy; sleeps at once, because other threads need Python's lock."""
    clock = _waiting.Waited()
    while not copy.over() and clock.look() < limit_s:
        time.sleep(_PAUSE_S)
    copy.wait(0)


def _open_nameless(folder: str) -> tuple[int, bool]:
    """Open a file that has no name in a folder; return whether it goes past the page cache."""
    if not os.path.isdir(folder):
        raise PathError(errno.ENOTDIR, "is no folder: name one for the saved tensors", folder)
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    for direct in (os.O_DIRECT, 0):
        try:
            return os.open(folder, flags | direct, 0o600), bool(direct)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                raise files.write_error(error, os.path.join(folder, "saved tensors")) from error
    descriptor, name = tempfile.mkstemp(prefix=".flashwarp-", dir=folder)
    os.unlink(name)
    return descriptor, False
