"""The contract of NVMe controllers: what an array and its cache need of one, and nothing else.

A `Controller` is settings, which a user gives as ``controller=``. For each array, `attach` returns
a `Service`, which serves the array's namespace until it is stopped. A driver of real drives
implements these two; arrays, caches and launches do not know which controller serves them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flashwarp import _native
from flashwarp._names import renamed
from flashwarp.device import Device, OwnedStream
from flashwarp.endings import NotCopied
from flashwarp.errors import FlashwarpError, StorageError
from flashwarp.nvme.queue_pair import QueueCounters
from flashwarp.storage import Namespace


@dataclass(frozen=True)
class Destination:
    """Where a controller's data goes: the cache of an array in device memory.

    Attributes
    ----------
    device : Device
        Whose kernels submit commands.
    line_bytes : int
        The most bytes that a command transfers.
    frames : tuple of int
        Address and size of the cache's frames. By the direct route data goes there.
    owners : tuple
        What holds the frames. A service keeps it until it has stopped.
    controllers : int
        How many controllers serve the array, and share the cores.
    in_place_refusal : str
        Why data must not be read in place, for people; empty: it may be.
    """

    device: Device
    line_bytes: int
    frames: tuple[int, int]
    owners: tuple[object, ...] = ()
    controllers: int = 1
    in_place_refusal: str = ""


class Queues(Protocol):
    """A table of queue pairs in device memory, as kernels use it; `QueuePairs` is one.

    Attributes
    ----------
    address : int
        Device address of `count` structs ``nvme::queue_pair``, one after the other.
    count : int
    depth : int
        Entries of the shortest ring.
    route : str
        How data moves: one of `flashwarp.nvme.queue_pair.ROUTES`.
    """

    address: int
    count: int
    depth: int
    route: str

    @property
    def failed(self) -> bool:
        """Whether a wait of device code for one of the pairs ran out of time."""

    @property
    def unanswered(self) -> bool:
        """Whether a command of device code has no completion."""

    def volume_fields(self) -> dict[str, Any]:
        """Return the fields of ``cache::volume`` that say how lines lie on several namespaces."""

    def counters(self, stream: OwnedStream | None = None) -> QueueCounters:
        """Read the sums over all pairs, in the order of a stream; not one snapshot."""


@renamed
class Service(NotCopied, ABC):
    """A namespace that a controller serves for one array.

    Notes
    -----
    Made by `Controller.attach`, and stopped by the array. Methods may be called by any thread, but
    `stop` by one. None of them blocks, except `stop`.

    Each command that kernels ring in `queues` must get exactly one completion, as the NVMe base
    specification has it: phase tag, SQ head, status field. A read's data must be visible to the
    device before its completion is. Namespace 1 is addressed in blocks of 512 bytes.
    """

    # What an array cannot do without.

    @property
    @abstractmethod
    def queues(self) -> Queues:
        """The queue pairs that kernels submit to; raises ClosedError after `stop`."""

    @property
    @abstractmethod
    def route(self) -> str:
        """How data moves, as in `ROUTES` of `queue_pair`. It may become "bounce" later."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why data takes this route, for people."""

    @abstractmethod
    def take_errors(self) -> Sequence[dict[str, Any]]:
        """Return and forget the failures since the last call, oldest first; [] after `stop`.

        A failure has "op" ("read", "write" or "flush"), "errno", "offset" and "nbytes" (in the file
        or namespace), "lba" (in the array, in blocks of 512 bytes), "status" (of NVMe), and, if
        they are known, "path" and "reason".
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return facts for people: "engine" says what serves the commands."""

    @abstractmethod
    def stop(self) -> None:
        """End all service and free the queue pairs. Blocks for what is in flight, for seconds.

        Called when no kernel uses `queues` any more. May be called twice.
        """

    # What some controllers can do better.

    @property
    def in_place_refusal(self) -> str:
        """Why the device does not read the namespace in place although it lies in memory."""
        return ""

    @property
    def natives(self) -> tuple[Any, ...]:
        """C++ controllers that threads of the CPU device serve while they wait for commands.

        Objects of `flashwarp._native.Controller`. Default: none, so such threads only wait.
        """
        return ()

    @property
    def namespace_count(self) -> int:
        """How many namespaces the array lies on, each of which a flush must reach."""
        return 1

    @property
    def in_place(self) -> int:
        """Device address at which kernels may read the namespace past the cache; 0: none."""
        return 0

    @property
    def plain_reads(self) -> bool:
        """Whether kernels read the namespace in place without commands: `queues` says so to them.

        Prefetches are such reads, too: the line is in the cache when the prefetch has returned.
        """
        return False

    @property
    def leased(self) -> bool:
        """Whether kernels look at an epoch as they begin, because others may change the namespace.

        If so, a graph needs the built-in kernel `refresh_lines` before each kernel of a user that
        does not call ``fw::refresh`` itself.
        """
        return False

    @property
    def makes_warps_wait(self) -> bool:
        """Whether a few warps of a GPU suffice to keep the storage busy.

        If so, large launches leave their misses to a few blocks, and other kernels run meanwhile.
        """
        return True

    @property
    def waits_for_disk(self) -> bool:
        """Whether commands wait for a disk; else for threads of the host that copy."""
        return True

    @property
    def changes(self) -> int:
        """How often others may have changed the namespace, so that cached lines may be old."""
        return 0

    def take_stale(self) -> StorageError | None:
        """Return and forget what went wrong when others changed the namespace."""
        return None

    def failure(self) -> FlashwarpError | None:
        """Return why no command completes any more; None while they do, or nobody knows."""
        return None

    def silent(self) -> str:
        """Name what did not answer in time, for people."""
        return "the storage"

    @property
    def needs_wake(self) -> bool:
        """Whether a launch must call `wake`. False while kernels can submit no commands."""
        return True

    def wake(self) -> None:
        """Prepare for commands that are about to be submitted. Costs microseconds at most.

        Raises ControllerError if no kernel may be launched any more.
        """

    def wake_call(self) -> _native.WakeCall | None:
        """Return a C function that wakes the threads, for callers without an interpreter.

        ``function`` is the address of a ``void (*)(void *)``, and ``argument`` what it takes; a
        host node of a CUDA graph calls it so. Any thread may make the call, as long as the returned
        object lives, also after `stop`: then it does nothing. It neither waits nor calls CUDA, and
        takes tens of nanoseconds if the threads are awake, else about ten microseconds.

        None: the service has no thread in C++, and kernels' first commands wait until it looks.
        """
        natives = self.natives
        return _native.WakeCall(natives) if natives else None

    def worth_looking_ahead(self) -> bool:
        """Whether a CPU thread gains by submitting commands before it needs their data."""
        return True

    @property
    def stats(self) -> dict[str, Any]:
        """The controller's own counters."""
        return {}


class Controller(ABC):
    """Settings of what serves an array's namespace, given as ``controller=``.

    Notes
    -----
    It has no state of its own: one object may be given to any number of arrays.
    """

    asked_route: str | None = None
    """The only route that it may choose; None: any."""

    serves_members: bool = False
    """Whether an array on a striped or replicated storage attaches it to each member in turn.

    Device code then chooses among the members. Such services have `QueuePairs` as `queues`. False:
    it is attached once, to the whole storage.
    """

    @abstractmethod
    def attach(self, storage: Namespace, destination: Destination) -> Service:
        """Make queue pairs for kernels, and start to serve `storage` through them.

        Raises
        ------
        ArgumentError
            If it cannot serve this namespace, or not to this device.
        ControllerError
            If it cannot start.
        """
