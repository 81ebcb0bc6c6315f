"""Arrays of a client of a shared cache: kernels read the owner's lines, and ask it for the others.

`ClientAttachment` is an attachment whose volume lies in this process, and whose lines lie in the
owner's: its kernels are those of every array, and ask through the table of requests (see
`cache/owner_requests.cuh`). `Asking` is what the owner does for an array by messages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from flashwarp import config
from flashwarp.array.attachment import Attachment
from flashwarp.array.failures import Failures
from flashwarp.cache.cache import Cache
from flashwarp.cache.shared import Client
from flashwarp.cache.structs import FailureStruct
from flashwarp.cache.volume import Volume
from flashwarp.errors import (
    ClosedError,
    DeviceError,
    FlashwarpError,
    OwnerLostError,
    SharedCacheError,
)
from flashwarp.launch.rows import RowFormat
from flashwarp.nvme import Controller, Destination, Service
from flashwarp.nvme.queue_pair import QueuePairs, Transfers
from flashwarp.sharing.connection import limit_s
from flashwarp.storage import Namespace, files, npy

ROUTE = "shared"
REASON = "lines are read in the owner's memory, and the owner fetches those that are absent"

# Statuses of `cache/owner_requests.cuh`, and of a wait whose time was up.
_OWNERS_ALONE = 0x7FC
_TIMED_OUT = 0x7FF


class Asking:
    """What an array of a client asks its owner for by messages.

    Parameters
    ----------
    cache : Cache
        A client's.
    path : str
    layout : npy.Layout
        The bytes of the file, which this process may read, too.
    writable : bool

    Attributes
    ----------
    line_begin : int
        The array's first line number in the owner's cache. No other array gets its numbers while
        this one is open.
    """

    def __init__(self, cache: Cache, path: str, layout: npy.Layout, writable: bool) -> None:
        client = cache._client
        assert client is not None
        if cache.closed:
            raise ClosedError("the cache is closed")
        if not layout.nbytes:
            raise SharedCacheError(
                f"{path} has no elements, so there is nothing to share: open it without the cache"
            )
        with files.open_for_reading(path) as file:
            stamp = files.stamp(file.fileno())
        request = {
            "op": "open",
            "path": os.path.abspath(path),
            "offset": layout.offset,
            "nbytes": layout.nbytes,
            "device": stamp.device,
            "inode": stamp.inode,
            "writable": int(writable),
        }
        self.client: Client = client
        answer = client.connection.ask(request)
        self._number = answer.integer("array", 0, 1 << 62)
        self.line_begin = answer.integer("line_begin", 0, 1 << 38)

    def ask(self, op: str, **body: int) -> dict[str, Any]:
        """Ask the owner for something that it does with this array."""
        return self.client.connection.ask({"op": op, "array": self._number, **body}).body

    def why(self) -> FlashwarpError:
        """Return why the owner could not do what a request asked for last."""
        try:
            self.ask("why")
        except FlashwarpError as error:
            return error
        return SharedCacheError("the owner could not do what was asked for, and does not know why")

    def stats(self) -> dict[str, Any]:
        """Return the counters of the array, of all its clients together."""
        found = self.ask("stats").get("stats")
        return found if isinstance(found, dict) else {}

    def note(self) -> str:
        """Return for `explain` what protects the owner's memory, if the driver does not."""
        if self.client.frames.writable:
            return "; the driver maps them writable, and only flashwarp's kernels do not store"
        return ""

    def close(self, stored: bool) -> FlashwarpError | None:
        """Leave the array to the owner, whose cache keeps its lines; return what failed.

        Of a reader nothing is lost with the owner, and of a writer what it has `stored`.
        """
        try:
            self.ask("close")
        except OwnerLostError as error:
            return error if stored else None
        except FlashwarpError as error:
            return error
        return None


class _Failures(Failures):
    """The failures of a client's kernels, of which the owner knows the reasons."""

    def __init__(self, service: _OwnerService, path: str | None, shape: tuple[int, ...]) -> None:
        super().__init__(service, path, shape)
        self._asking = service.asking
        self._queues = service.queues
        self._limit_s = service.limit_s

    def take(self, what: str, volume: Volume, alone: Any = lambda: False) -> FlashwarpError | None:
        """Return what went wrong in a call; at its end also that the owner has gone.

        What a hit has read is good only if the owner lived until then: else another process could
        have given the file to another writer.
        """
        failure = super().take(what, volume, alone)
        connection = self._asking.client.connection
        try:
            connection.check()
            if failure is not None and self._queues.failed:
                connection.give_up(self._limit_s)
                connection.check()
        except OwnerLostError as error:
            return error
        return failure

    def _described(
        self, what: str, record: FailureStruct, line_bytes: int, alone: bool
    ) -> FlashwarpError:
        if record.status == _OWNERS_ALONE:
            return SharedCacheError(
                f"{what} changed elements by what they were, or waited for a write-back, which "
                "only kernels in the process of the cache's owner can"
            )
        if record.status == _TIMED_OUT:
            return super()._described(what, record, line_bytes, alone)
        return self._asking.why()


class _OwnerService(Service):
    """What serves a client's kernels, which submit nothing to its queues: waits end by them."""

    def __init__(self, asking: Asking, destination: Destination) -> None:
        self.asking = asking
        depth = 1 << (asking.client.facts.slots.bit_length() - 1)
        device = destination.device
        # On a GPU, half of what a call of the host waits for kernels: its error names the owner.
        self.limit_s = limit_s() if device.kind == "cpu" else config.time_limit_s() / 2
        self._queues = QueuePairs(device, 1, max(2, depth), Transfers("direct"), self.limit_s)

    @property
    def queues(self) -> QueuePairs:
        """The queues that no kernel submits to."""
        return self._queues

    @property
    def route(self) -> str:
        """How data moves, for people."""
        return ROUTE

    @property
    def reason(self) -> str:
        """Why data takes this route."""
        return REASON

    @property
    def needs_wake(self) -> bool:
        """False: a request wakes the owner's thread, or that looks for those of a GPU."""
        return False

    def take_errors(self) -> Sequence[dict[str, Any]]:
        """Return nothing: the owner has the log."""
        return ()

    def describe(self) -> dict[str, Any]:
        """Return facts for people."""
        return {"engine": "the owner's"}

    def silent(self) -> str:
        """Name what did not answer in time."""
        return "the owner"

    def stop(self) -> None:
        """Free the queues."""
        self._queues.close()


class _Owner(Controller):
    """Makes the service of one array."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def attach(self, storage: Namespace, destination: Destination) -> Service:  # noqa: ARG002
        """Make what kernels wait by."""
        return _OwnerService(self._asking, destination)


class _OwnersFile(Namespace):
    """A file that the owner has open."""

    _refuses = False

    def look_again(self) -> None:
        """Do nothing: the owner chooses how the file is read."""


class ClientAttachment(Attachment):
    """An array of a client; the parameters are those of `Asking`."""

    def __init__(self, cache: Cache, path: str, layout: npy.Layout, writable: bool) -> None:
        self.asking = asking = Asking(cache, path, layout, writable)
        self._written = 0  # bytes that were stored before the last flush
        try:
            super().__init__(
                _OwnersFile(layout.nbytes, writable, path),
                RowFormat(layout.dtype, layout.shape),
                writable=writable,
                cache=cache,
                owns_cache=False,
                controller=_Owner(asking),
                line_begin=asking.line_begin,
            )
        except BaseException:
            asking.close(stored=False)
            raise
        service = self.launcher.service
        assert isinstance(service, _OwnerService)
        self.row_calls.signs = asking.client.connection.signs
        asking.client.enter(self, service.queues.failed_words)

    def _make_failures(self, service: Service, format: RowFormat) -> Failures:  # noqa: A002
        assert isinstance(service, _OwnerService)
        return _Failures(service, self.storage.path, format.shape)

    def check(self) -> None:
        """Raise what kernels have noted so far, or that the owner has gone."""
        super().check()
        self.asking.client.connection.check()

    def note(self) -> str:
        """Return for `explain` what protects the owner's memory."""
        return self.asking.note()

    def _stored(self) -> int:
        return self.launcher.volume.counters()["bytes_written"]

    # What the owner does.

    def flush(self) -> None:
        """Make all stores of all clients durable."""
        self._finish_streams()
        stored = self._stored()
        self.asking.ask("flush")
        self._written = stored

    def drop_lines(self, drop_dirty: bool) -> None:
        """Remove the array's lines from the owner's cache."""
        self.asking.ask("drop", dirty=int(drop_dirty))

    def refresh(self) -> None:
        """Remove the array's lines, and check that the file is unchanged."""
        self.asking.ask("refresh")

    # The end.

    def _settle(self) -> Exception | None:
        failure: Exception | None = None
        try:
            self._finish_streams()
        except OwnerLostError:
            pass  # said below, if it matters
        except DeviceError as error:
            failure = self.reason_of(error)
        except FlashwarpError as error:
            failure = error
        left = self.asking.close(stored=self._stored() != self._written)
        self.asking.client.leave(self)
        return failure or left

    def _forget_lines(self, failure: Exception) -> None:
        """Leave the lines, which are the owner's."""
