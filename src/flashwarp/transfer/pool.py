"""One pool of pinned transfer buffers a device, and what each of its clients may take.

A client has a guaranteed minimum, and a budget. It takes more than its minimum as long as the
clients together leave the others theirs, so no client waits for ever for another one. A thread that
holds a buffer never waits for one: it is refused. What a client needs for long is reserved: it has
its budget for itself.

A floor stays pinned between uses. A block above it is given back when nobody has used it for a
while and the device is idle, piece by piece.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from functools import partial
from typing import TypeVar

from flashwarp import _waiting, endings
from flashwarp.config import integer, parse_bytes, time_limit_s
from flashwarp.device import Device, DeviceMemory, Registration
from flashwarp.errors import (
    ArgumentError,
    DeviceError,
    DeviceTimeout,
    FlashwarpError,
)
from flashwarp.transfer.buffer import Block, InFlight, TransferBuffer
from flashwarp.transfer.room import Room

_log = logging.getLogger(__name__)

Pinned = TypeVar("Pinned", DeviceMemory, Registration)

_MOST = 1 << 48
_BUFFER_BYTES = 16 << 20
# A block that is larger than this many times what is asked for is not lent for it.
_WASTE = 2
_SMALL_BYTES = 1 << 20
_LENT_BYTES_MAX = 1 << 30
_FLOOR_BYTES = 256 << 20
_AHEAD_BYTES = 512 << 20
BOUNDS = (
    f"transfers have at most {_LENT_BYTES_MAX >> 30} GiB of a GPU's, or the largest budget of one "
    f"of them, besides what is reserved; {_FLOOR_BYTES >> 20} MiB stay pinned between them"
)
"""Of what is lent to all clients of a device at a time, and of what a load and a checkpoint pass
through; for people."""
# A block is given back when nobody has used it for so long; looked at from time to time.
_IDLE_S = 10.0
_LOOK_S = 0.1
_PAUSE_S = 100e-6
_PAUSE_MAX_S = 1e-3


class Pool:
    """The pinned memory of one device that transfers pass through; see `pool_of`.

    Any thread may use it. On the CPU device the memory is ordinary, and nothing stays allocated.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pid = os.getpid()
        self.lock = endings.Lock()
        self.shared = Room(_LENT_BYTES_MAX)
        self._reserved: dict[str, weakref.WeakSet[DeviceMemory | Registration]] = {}
        self._reserving: list[TransferClient] = []
        self._out: weakref.WeakSet[TransferBuffer] = weakref.WeakSet()
        # Came back, and some copy may still use it. Appended to without the lock, because a buffer
        # may be lost while this thread holds it.
        self.returned: deque[tuple[TransferClient, Block, list[InFlight]]] = deque()
        self._sorting = False
        self._ahead: deque[TransferClient] = deque()
        self._pinning: TransferClient | None = None
        self._keeper: endings.Thread | None = None

    @property
    def pinned_bytes(self) -> dict[str, int]:
        """Bytes of host memory by use: buffers that are lent and free, and what is reserved."""
        with self.lock:
            self.sort_returned()
            found = {"transfer buffers": self.shared.lent + self.shared.free_bytes}
            for client in self._reserving:
                found[client.name] = found.get(client.name, 0) + client.allocated_bytes
            for use, memories in self._reserved.items():
                kept = sum(each.nbytes for each in memories if not each.closed)
                found[use] = found.get(use, 0) + kept
        return {use: nbytes for use, nbytes in found.items() if nbytes}

    def note(self, before: str = "") -> str:
        """Say for people what is pinned, after some text; empty on the CPU device."""
        if not self._floor:
            return ""
        uses = ", ".join(f"{use} {nbytes}" for use, nbytes in self.pinned_bytes.items())
        return f"{before}pinned bytes: {uses or 0}; at most {self.shared.limit} lent to transfers"

    def reserve(self, use: str, nbytes: int, alignment: int = 4096) -> DeviceMemory:
        """Allocate pinned memory that a part of the library keeps, zero-filled.

        Raises DeviceOutOfMemory. `pinned_bytes` shows it by its use until it is closed.
        """
        return self.count(use, self.device.allocate_host(nbytes, alignment))

    def count(self, use: str, memory: Pinned) -> Pinned:
        """Count memory that was pinned for a use, until it is closed; return it."""
        with self.lock:
            self._reserved.setdefault(use, weakref.WeakSet()).add(memory)
        return memory

    # Of clients.

    def enter(self, client: TransferClient) -> None:
        """Add a client; pin its first buffers in the background, if it wants them ahead."""
        client.asked_ahead = client.wanted_ahead
        with self.lock:
            client.room.clients.append(client)
            if client.room is self.shared:
                self.shared.limit = max(self.shared.limit, client.budget_bytes)
            else:
                self._reserving.append(client)
            if client.ahead:
                self._ahead.append(client)
                self._start_keeper()

    def leave(self, client: TransferClient) -> None:
        """Remove a client; what it has reserved is free for others."""
        with self.lock:
            client.ahead = False
            while client in self._ahead:
                self._ahead.remove(client)
        # The device may be closed next.
        _waiting.until(lambda: self._pinning is not client, time_limit_s())
        with self.lock:
            self.sort_returned()
            client.room.clients.remove(client)
            if client.reserved:
                self._reserving.remove(client)
                self.shared.free |= client.room.free
                self.shared.lent += client.lent_bytes
                client.room = self.shared
            # Ordinary memory is cheaper to allocate than to keep.
            keeps = self._floor or self.shared.clients
            removed = [] if keeps else self.shared.surplus(self.shared.lent)
            self._start_keeper()
        for block in removed:
            block.close()

    def lend(self, client: TransferClient, nbytes: int, taker: int) -> TransferBuffer | None:
        """Lend a buffer, pinning one if the client may have more; None if it may not."""
        with self.lock:
            self.sort_returned()
            client._check_usable()
            block = self._find(client, nbytes)
            if block is not None:
                return self._lent(client, block, nbytes, taker)
            if not client.may_pin(nbytes):
                return None
            room = client.room
            removed = room.surplus(max(room.limit, room.lent + room.free_bytes) - nbytes)
            self._take(client, nbytes)
        for each in removed:
            each.close()
        try:
            block = Block(self.device, nbytes)
        except FlashwarpError as error:
            with self.lock:
                self._take(client, -nbytes)
                client.note_failure(error)
            if not client.lent_bytes:
                raise
            return None
        with self.lock:
            self._take(client, -nbytes)
            self._start_keeper()
            return self._lent(client, block, nbytes, taker)

    def _find(self, client: TransferClient, nbytes: int) -> Block | None:
        room, most = client.room, max(nbytes * _WASTE, _SMALL_BYTES)
        found: Block | None = None
        for each in reversed(room.free.values()):  # so that those not needed grow old
            if nbytes <= each.nbytes <= most and (found is None or each.nbytes < found.nbytes):
                if room.allows(client, each.nbytes):
                    found = each
                if each.nbytes == nbytes:
                    break
        return found

    def _lent(
        self, client: TransferClient, block: Block, nbytes: int, taker: int
    ) -> TransferBuffer:
        buffer = TransferBuffer(client, block, nbytes, taker)
        client.room.free.pop(block.address, None)
        self._take(client, block.nbytes)
        if not client.reserved:
            self._out.add(buffer)
        return buffer

    def _take(self, client: TransferClient, nbytes: int) -> None:
        client.lent_bytes += nbytes
        client.room.lent += nbytes
        if client.ahead and client.lent_bytes > client.most_bytes:
            client.most_bytes = client.lent_bytes
            if client.wanted_ahead > client.asked_ahead:
                client.asked_ahead = client.wanted_ahead + client.wanted_ahead // 8
                self._ahead.append(client)
                self._start_keeper()

    def sort_returned(self) -> None:
        """Free what came back and no copy uses; look at each once. Under the lock."""
        if not self._sorting:  # else a finalizer came in between
            self._sorting = True
            try:
                self._sort_returned()
            finally:
                self._sorting = False

    def _sort_returned(self) -> None:
        for _ in range(len(self.returned)):
            client, block, copies = self.returned[0]
            if not all(copy.over() for copy in copies):
                self.returned.rotate(-1)
                continue
            self._take(client, -block.nbytes)
            block.used_s = time.monotonic()
            if not client._closed:
                client.room.free[block.address] = block
            elif self._floor:
                self.shared.free[block.address] = block
            else:
                block.close()
            self.returned.popleft()

    def check_holds_none(self, client: TransferClient, thread: int) -> None:
        """Refuse the wait of a thread that holds a buffer others may wait for."""
        with self.lock:
            held = [each for each in self._out if each.taker == thread and not each.released]
        if held:
            raise DeviceError(
                f"a thread that holds {len(held)} transfer buffers would wait for another one, of "
                f"{client.name}, and others may wait for those: release them first"
            )

    # In the background.

    @property
    def _floor(self) -> int:
        return _FLOOR_BYTES if self.device.kind == "cuda" else 0

    @property
    def _has_much(self) -> bool:
        """Whether more is pinned than stays, now or once it has come back."""
        return 0 < self._floor < self.shared.lent + self.shared.free_bytes

    def _start_keeper(self) -> None:
        """Let a thread pin and give back, if there is something to do. Under the lock."""
        if self._keeper is None and (self._ahead or self._has_much):
            self._keeper = endings.Thread(self._keep, "flashwarp-pinning")
            self._keeper.start()

    def _keep(self) -> None:
        try:
            while self._goes_on():
                with self.lock:
                    self.sort_returned()
                    client = self._pinning = self._next_ahead()
                    if client is None and not self._has_much:
                        self._keeper = None
                        return
                if client is not None:
                    self._pin_for(client)
                elif not self._give_back():
                    time.sleep(_LOOK_S)
        except BaseException:  # which the interpreter prints
            with self.lock:
                self._keeper = None  # the next call starts another one
            raise

    def _goes_on(self) -> bool:
        return not endings.ended() and not self.device._closed

    def _next_ahead(self) -> TransferClient | None:
        """Return for whom a buffer is to be pinned, and count it as lent meanwhile."""
        while self._ahead:
            client = self._ahead[0]
            nbytes, room = client.buffer_bytes, client.room
            kept = sum(each.nbytes for each in room.free.values() if each.nbytes == nbytes)
            fits = client.lent_bytes + kept + nbytes <= client.wanted_ahead
            if fits and not client.failure and room.lent + room.free_bytes + nbytes <= room.limit:
                client.lent_bytes += nbytes
                room.lent += nbytes
                return client
            self._ahead.popleft()
        return None

    def _pin_for(self, client: TransferClient) -> None:
        block, failure = None, None
        try:
            block = Block(self.device, client.buffer_bytes)
        except FlashwarpError as error:
            failure = error
        finally:
            with self.lock:
                self._take(client, -client.buffer_bytes)
                if block is not None:
                    client.room.free[block.address] = block
                elif failure is not None:
                    client.note_failure(failure)
                self._pinning = None

    def _give_back(self) -> bool:
        """Give back the block that has been free for longest, if nobody has used it for a while."""
        with self.lock:
            block = next(iter(self.shared.free.values()), None)
        if block is None or time.monotonic() - block.used_s < _IDLE_S or not self.device.idle():
            return False
        with self.lock:
            if self.shared.free.pop(block.address, None) is None:  # somebody has it again
                return False
        block.close(self._until_idle)
        return True

    def _until_idle(self) -> None:
        """Wait until no work is known to run: the end of a registration waits for all of it.

        And keeps other threads from copies meanwhile. A device that is never idle keeps its memory;
        one that works again within a block ends the wait when somebody wants memory pinned.
        """
        while self._goes_on() and not self._ahead and not self.device.idle():
            time.sleep(_LOOK_S)


def pool_of(device: Device) -> Pool:
    """Return the pool of a device in this process. A forked child's is its own, and empty."""
    pools, pid = device.pools, os.getpid()
    found: Pool | None = pools.get(pid)
    return found or pools.setdefault(pid, Pool(device))


class TransferClient(endings.OfProcess):
    """What one part of a program may take of a device's pool of transfer buffers.

    Parameters
    ----------
    device : Device
        Whose copies pass through the buffers. On a GPU they are pinned; on the CPU ordinary.
    name : str
        Who takes them, for people.
    budget : int or str
        The most bytes that it ever has: 1 << 30, or "4 GiB".
    buffer : int or str
        Bytes of a buffer, if no other size is asked for. Default: 16 MiB, which a copy engine needs
        0.3 ms for.
    minimum : int, optional
        Bytes that it can always have, whatever others hold. Default: two buffers.
    reserved : bool
        Whether it has the whole budget for itself. It may then hold buffers while it waits.
    ahead : bool
        Whether a thread pins buffers before they are taken: 512 MiB of the budget, and then a
        quarter more than were ever taken at a time. (Pinning takes 0.3 s for each GiB, ten times as
        long as a copy, and while it lasts other calls of the driver wait.)

    Raises
    ------
    ArgumentError
        If the budget has no room for one buffer.

    Examples
    --------
    >>> from flashwarp.device import CpuDevice
    >>> from flashwarp.transfer import TransferClient
    >>> with TransferClient(CpuDevice(), "an example", "1 MiB", "256 KiB") as client:
    ...     buffer = client.take(timeout_s=10)
    ...     buffer.as_numpy()[:4] = 7
    ...     buffer.release()
    ...     client.buffers
    4
    """

    _when_closed = "the transfer buffers of {0.name} were closed"
    _when_forked = "this pool belongs to process {0._pid}: a forked child must make its own"

    def __init__(
        self,
        device: Device,
        name: str,
        budget: int | str,
        buffer: int | str = _BUFFER_BYTES,
        *,
        minimum: int | None = None,
        reserved: bool = False,
        ahead: bool = False,
    ) -> None:
        super().__init__()
        self.device = device
        self.name = name
        self.buffer_bytes = integer("buffer", parse_bytes(buffer, "buffer"), 1, _MOST)
        self.budget_bytes = integer("budget", parse_bytes(budget, "budget"), 1, _MOST)
        self.buffers = self.budget_bytes // self.buffer_bytes
        if self.buffers == 0:
            raise ArgumentError(
                f"a budget of {self.budget_bytes} bytes has no room for one buffer of "
                f"{self.buffer_bytes} bytes: raise the budget, or take smaller buffers"
            )
        self.minimum_bytes = 2 * self.buffer_bytes if minimum is None else minimum
        self.minimum_bytes = min(self.minimum_bytes, self.budget_bytes)
        self.reserved = reserved
        self.failure: FlashwarpError | None = None
        """Why no more was pinned before the budget was reached; None if nothing failed."""
        self.lent_bytes = 0
        self.ahead = ahead
        self.most_bytes = self.asked_ahead = 0
        """For the pool: the most that was lent at a time, and up to where its thread was to pin."""
        self._line: deque[object] = deque()  # who waits for a buffer
        self._pool = pool_of(device)
        self.lock = self._pool.lock
        self.room = Room(self.budget_bytes) if reserved else self._pool.shared
        endings.uninterrupted(self._enter, lambda _: self.close())

    def _enter(self) -> None:
        endings.remember(self)
        self._pool.enter(self)

    @property
    def wanted_ahead(self) -> int:
        """For the pool: bytes to have pinned, those that are lent among them."""
        return min(self.budget_bytes, max(_AHEAD_BYTES, self.most_bytes + self.most_bytes // 4))

    @property
    def allocated_bytes(self) -> int:
        """Bytes that it has: lent, in copies, or kept for it."""
        return self.lent_bytes + (self.room.free_bytes if self.reserved else 0)

    def take(self, nbytes: int | None = None, timeout_s: float | None = None) -> TransferBuffer:
        """Lend a buffer, with any content; blocks until one is free. Who asked first gets it first.

        Raises
        ------
        ArgumentError
            More than the whole budget.
        DeviceTimeout
            None was free in time. The message says what the others are waiting for.
        DeviceOutOfMemory, DeviceError
            Not one buffer could be pinned; or this thread would wait while it holds a buffer.
        ClosedError, ForkError
            The client was closed, or belongs to the parent process.
        """
        nbytes = self._size(nbytes)
        place, waited, limit_s = object(), None, time_limit_s(timeout_s)
        try:
            self._line.append(place)
            while True:
                buffer = self._try(nbytes) if self._line[0] is place else None
                if buffer is not None:
                    return buffer
                if waited is None:
                    if not self.reserved:
                        self._pool.check_holds_none(self, threading.get_ident())
                    waited = _waiting.Waited()
                seconds = waited.look()
                if seconds >= limit_s:
                    break
                # Sleeps at once: other threads need Python's lock.
                time.sleep(min(max(_PAUSE_S, seconds / 50), _PAUSE_MAX_S))
        finally:
            with contextlib.suppress(ValueError):
                self._line.remove(place)
        raise DeviceTimeout(
            f"no transfer buffer of {nbytes} bytes was free for {seconds:.1f} s (limit "
            f"{limit_s:g} s): {self._account(nbytes)}"
        )

    def try_take(self, nbytes: int | None = None) -> TransferBuffer | None:
        """Lend a buffer if one is free and nobody waits for it; waits for no other holder.

        Raises as `take` does.
        """
        return None if self._line else self._try(self._size(nbytes))

    def try_take_several(self, count: int) -> list[TransferBuffer]:
        """Lend up to so many buffers in one step, as many as `try_take` would."""
        found: list[TransferBuffer] = []

        def lend() -> None:
            thread = threading.get_ident()
            while len(found) < count:
                buffer = self._pool.lend(self, self.buffer_bytes, thread)
                if buffer is None:
                    return
                found.append(buffer)

        def give_back(_: object) -> None:
            while found:
                found.pop().release()

        self._check_usable()
        if not self._line:
            try:
                endings.uninterrupted(lend, give_back)
            except FlashwarpError:
                if not found:
                    raise
        return found

    def _size(self, nbytes: int | None) -> int:
        size = self.buffer_bytes if nbytes is None else integer("nbytes", nbytes, 1, _MOST)
        if size > self.budget_bytes:
            raise ArgumentError(
                f"{size} bytes are more than the budget of {self.budget_bytes} bytes of transfer "
                "buffers: raise it"
            )
        return size

    def _try(self, nbytes: int) -> TransferBuffer | None:
        self._check_usable()
        lend = partial(self._pool.lend, self, nbytes, threading.get_ident())
        return endings.uninterrupted(lend, _release_if_any)

    def may_pin(self, nbytes: int) -> bool:
        """For the pool: whether it may pin a buffer more. What stopped it may do so again."""
        return self.room.allows(self, nbytes) and (self.failure is None or not self.lent_bytes)

    def note_failure(self, error: FlashwarpError) -> None:
        """For the pool: note why no more could be pinned."""
        if self._closed:
            return
        self.failure = error
        _log.warning(
            "pinning stopped at %d of %d bytes, with which %s goes on: %s",
            self.allocated_bytes,
            self.budget_bytes,
            self.name,
            error,
        )

    def take_back(self, block: Block, copies: list[InFlight]) -> None:
        """For buffers: take a block back, which copies may still use."""
        self._pool.returned.append((self, block, copies))
        if self._closed and not self._in_child:
            endings.holding([self.lock], self._pool.sort_returned)

    def _account(self, nbytes: int) -> str:
        """Say where the buffers are, for an error."""
        with self.lock:
            mine = [block.nbytes for client, block, _ in self._pool.returned if client is self]
        copied = sum(mine)
        parts = [f"of {self.budget_bytes} bytes {self.lent_bytes - copied} are held"]
        if copied:
            parts.append(f"{copied} are released and in copies that have not ended")
        if self.lent_bytes + nbytes <= self.budget_bytes:
            parts.append(f"others have {self.room.lent - self.lent_bytes} of {self.room.limit}")
        if self.failure is not None:
            parts.append(f"pinning more failed ({self.failure})")
        return ", ".join(parts) + ": release buffers earlier, or raise the budget"

    def close(self) -> None:
        """Give everything back; what is held or in a copy comes back later. May be called twice."""
        if not self._closed and not self._in_child:
            endings.uninterrupted(self._release)

    def _release(self) -> None:
        with self.lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._pool.leave(self)
            endings.forget(self)

    def __repr__(self) -> str:
        if self._closed:
            return f"<TransferClient {self.name}, closed>"
        return (
            f"<TransferClient {self.name}, {self.allocated_bytes} of {self.budget_bytes} bytes on "
            f"{self.device.name}>"
        )


def _release_if_any(buffer: TransferBuffer | None) -> None:
    if buffer is not None:
        buffer.release()
