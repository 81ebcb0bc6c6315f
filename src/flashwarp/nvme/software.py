"""The software NVMe controller: host threads that serve queue pairs from any storage.

A `SoftwareController` is settings; a `SoftwareService` owns the queue pairs and threads of one
array, and stops with it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashwarp import _native, config
from flashwarp._names import renamed
from flashwarp.config import choice, flag, integer
from flashwarp.device import CpuDevice, Device
from flashwarp.device.memory import OwnedStream
from flashwarp.errors import ArgumentError, ClosedError, ControllerError, DeviceError, StorageError
from flashwarp.nvme.controller import Controller, Destination, Service
from flashwarp.nvme.queue_pair import ROUTES, NamespacePart, QueuePairs, Route, Transfers
from flashwarp.storage import File, Memory, Namespace, Storage
from flashwarp.storage.composite import members_of
from flashwarp.storage.routes import mapped_parts, register, route_of

if TYPE_CHECKING:
    from flashwarp.nvme.drive_model import SSDModel

_log = logging.getLogger(__name__)

PAGE_BYTES = 2 << 20
"""Memory page size of the controller (CC.MPS): the largest line needs no PRP list."""

# How long an idle thread watches the doorbells before it sleeps. A GPU cannot wake a host thread.
# While warps copy data, no doorbell changes for up to 2 ms; a thread asleep then notices the next
# one a timer tick late. Threads of the CPU device serve while they wait.
_SPIN_NS = {"cuda": 2_000_000, "cpu": 100_000}

# Queue pairs of a controller that serves a GPU; a CPU device gets two for each core.
_QUEUE_PAIRS = 32
# Entries of a ring on the in-place route: 32 pairs hold the 94 M commands/s of one thread.
_DEPTH = 1024
# Entries of a ring whose slots own buffers: 32 x 256 x 4 KiB pin 32 MiB. Files that are read in
# place under a lease have such rings too, in case the lease is broken.
_BOUNCE_DEPTH = 256
# Most bytes of pinned memory for the buffers of one controller; the depth shrinks to fit.
_BOUNCE_BYTES = 256 << 20

# The longest load of a GPU thread, and so the strictest alignment.
_LOAD_BYTES_MAX = 16

# One wait costs what a thousand commands ahead of their time cost: 100 us against 0.1 us.
_WAITS_COUNT_FROM = 1024


@renamed
class SoftwareController(Controller):
    """Settings of the threads of this process that serve an array's storage.

    Parameters
    ----------
    queue_pairs, depth : int, optional
        Rings and their entries; `depth` is a power of two. Default by device and route.
    threads : int, optional
        Serving threads; any number may serve any number of queue pairs. Default: one if they move
        no data, else half the cores, at most 8, shared by the controllers of an array.
    route : {"in_place", "bounce", "direct"}, optional
        How data moves. "in_place": the device reads the namespace's own memory; of a file only
        under a lease, and by "bounce" from the moment at which a writer opens it. "bounce": through
        pinned buffers. "direct": into the cache's frames; CPU device only. Default: the best that
        storage and device allow; `Array.explain` says which, and why.
    commands : bool
        Send a command for each read and write, also where the device reaches the namespace's own
        memory, or the CPU device the page cache, and needs none: for tests and figures of the queue
        pairs.
    model : SSDModel or str, optional
        A modelled drive, or the name of a built-in one, whose latency and ceilings completions keep
        to. Data moves as it does without. Default: none, as fast as the host is.

    Notes
    -----
    Each array that gets these settings has queue pairs and threads of its own, which stop with the
    array. `Array.service` is what serves an array. Each member of a striped or replicated
    storage has a controller with these settings; docs/architecture.md lists the exceptions.
    """

    serves_members = True

    def __init__(
        self,
        queue_pairs: int | None = None,
        depth: int | None = None,
        threads: int | None = None,
        *,
        route: Route | None = None,
        commands: bool = False,
        model: SSDModel | str | None = None,
    ) -> None:
        if isinstance(queue_pairs, Namespace):
            raise ArgumentError(
                f"a controller has settings, and no storage: give {queue_pairs!r} to flashwarp.open"
            )
        self.queue_pairs = (
            None if queue_pairs is None else integer("queue_pairs", queue_pairs, 1, 1024)
        )
        self.depth = None if depth is None else integer("depth", depth, 2, 32768)
        if self.depth is not None and self.depth & (self.depth - 1):
            raise ArgumentError(f"depth={depth} is not a power of two between 2 and 32768")
        self.threads = None if threads is None else integer("threads", threads, 1, 256)
        if route is not None:
            choice("route", route, ROUTES)
        if model is not None:
            from flashwarp.nvme.drive_model import SSDModel  # slow to import, and seldom needed

            model = SSDModel.named(model) if isinstance(model, str) else model
            if not isinstance(model, SSDModel):
                raise ArgumentError(f"model={model!r} is neither an SSDModel nor the name of one")
        self.asked_route = route
        self.commands = flag("commands", commands)
        self.model = model

    def attach(self, storage: Namespace, destination: Destination) -> SoftwareService:
        """Allocate queue pairs, choose the route and start threads that serve `storage`.

        See `Controller.attach`.
        """
        if not isinstance(storage, Storage):
            raise ArgumentError(
                f"{storage!r} describes a namespace without its bytes: the software controller "
                "needs a storage that holds them, see flashwarp.storage"
            )
        return SoftwareService(storage, destination, self)

    def __repr__(self) -> str:
        return "<settings of a flashwarp.nvme.SoftwareController>"


class SoftwareService(Service):
    """A storage that threads of this process serve for one array.

    `changes` counts how often a file that was read in place may have changed since it was attached:
    what the cache holds of it may be old.

    Notes
    -----
    `needs_wake` is false while the storage is read in place without commands, and only read.
    `leased` stays true after the lease has ended.
    """

    route = ""
    reason = ""
    changes = 0
    needs_wake = True
    leased = False
    in_place_refusal = ""

    def __init__(
        self, storage: Storage, destination: Destination, settings: SoftwareController
    ) -> None:
        device = destination.device
        self.model = settings.model
        self._settings = settings
        self._without_commands = self.model is None and not settings.commands
        self._served: Storage | None = storage
        self._queues: QueuePairs | None = None
        self._native: _native.SoftwareController | None = None
        self._owned = contextlib.ExitStack()
        self._side: OwnedStream | None = None
        self._stale: StorageError | None = None
        self._refusal = ""
        self._broken = False
        self._progress = (0, 0)
        self._waits = True
        route, parts = self._choose_route(storage, destination)
        files = [member for member in members_of(storage) if isinstance(member, File)]
        self._files = [file.native for file in files]
        leases = [file.lease for file in files if file.lease is not None]
        if route == "in_place" and files:
            self.reason += f"; {'a lease holds writers off' if leases else 'immutable=True'}"
        if self.model is not None:
            self.reason += f"; {self.model}"
        if route != "in_place":
            leases = []
            for file in files:
                file.leave_pages()
        self._mapped_base = int(storage.native.mapped_base) if route == "in_place" else 0
        # A file that is read in place under a lease may have to go through buffers later.
        buffered = route == "bounce" or bool(leases)
        transfers = Transfers(
            route,
            mapped_base=self._mapped_base,
            buffer_bytes=destination.line_bytes if buffered else 0,
            leased=bool(leases),
            plain_reads=self._plain_reads and not parts,
            plain_writes=self._plain_reads and storage.writable,
            parts=parts,
            cached_reads=self._reads_page_cache(storage, route),
        )
        try:
            self._start(storage, destination, transfers)
            self.route = route
            if leases:
                self.leased = True
                self._side = device.create_stream()
                self._owned.callback(self._side.close)
                # Closed first, because a break uses the rings.
                for lease in leases:
                    self._owned.callback(lease.close)
                for lease in leases:
                    lease.watch(self._leave_in_place, self._file_changed)
        except BaseException:
            self.stop()
            raise

    def _choose_route(
        self, storage: Storage, destination: Destination
    ) -> tuple[str, list[NamespacePart]]:
        """Choose how data moves, and say why; return also the parts that are read in place."""
        device, asked = destination.device, self._settings.asked_route
        refusal = destination.in_place_refusal
        if not self._without_commands and mapped_parts(storage, device):
            refusal = refusal or "commands need one address for all of its members"
            if asked == "in_place":
                raise ArgumentError(f"route='in_place' cannot be had: {refusal}")
        route, self.reason = route_of(storage, device, asked, refusal)
        if route == "in_place" and device.kind == "cuda":
            refusal = self._register(storage, device)
            if refusal:
                route, self.reason = route_of(storage, device, None, refusal)
        self.in_place_refusal = refusal
        mapped = mapped_parts(storage, device) if route == "in_place" else []
        parts = [NamespacePart(*part) for part in mapped]
        self._plain_reads = (
            route == "in_place"
            and self._without_commands
            and (bool(parts) or isinstance(storage, Memory | File))
        )
        if self._plain_reads:
            self.reason += ", without commands"
            # A flush of stores is a command.
            self.needs_wake = storage.writable
        if self._reads_page_cache(storage, route):
            self.reason += (
                "; what is in the page cache takes no commands, and leaves few lines if a gather "
                "is of 256 lines or more, none if it is larger than the cache"
            )
        return route, parts

    def _reads_page_cache(self, storage: Storage, route: str) -> bool:
        """Whether only what is not in the page cache, and writes, go through the rings."""
        by_file = isinstance(storage, File) and not storage.o_direct
        return route == "direct" and self._without_commands and by_file

    def _start(self, storage: Storage, destination: Destination, transfers: Transfers) -> None:
        """Allocate the queue pairs, and start the threads that serve them."""
        device, route = destination.device, transfers.route
        count, depth, self.threads = self._geometry(route, transfers.buffer_bytes != 0, destination)
        self._queues = QueuePairs(
            device, count, depth, transfers, config.current().command_timeout_s
        )
        self._owned.callback(self._queues.close)
        # A launch that has all cores serves itself whenever it waits; a thread of ours would only
        # take a core from it. If threads= was given, its threads work nevertheless.
        asked = self._settings.threads is not None
        self._yields = (
            isinstance(device, CpuDevice) and device.threads >= config.cores() and not asked
        )
        self._native = _native.SoftwareController(
            storage.native,
            self._queues.native,
            [destination.frames] if route == "direct" else self._queues.buffer_regions,
            self.threads,
            PAGE_BYTES,
            PAGE_BYTES,
            _SPIN_NS[device.kind],
            self._yields,
            None if self.model is None else self.model.native_parameters(),
            (*destination.owners, *self._queues.owners),
        )
        self._owned.callback(self._native.stop)
        try:
            self._native.start()
        except RuntimeError as error:
            raise ControllerError(
                f"{self.threads} threads of the controller cannot be started ({error}): raise the "
                "limit of processes (ulimit -u), or ask for fewer threads"
            ) from error

    def _register(self, storage: Storage, device: Device) -> str:
        """Let the device read the storage in place; return why it cannot."""
        with contextlib.ExitStack() as registered:
            try:
                for registration in register(storage, device):
                    registered.callback(registration.close)
            except DeviceError as error:
                if self._settings.asked_route == "in_place" or not device.alive():
                    raise
                _log.info("%r is not read in place: %s", storage, error)
                return str(error)
            self._owned.callback(registered.pop_all().close)
        return ""

    def _geometry(
        self, route: str, buffered: bool, destination: Destination
    ) -> tuple[int, int, int]:
        """Return how many queue pairs, entries of each, and threads."""
        count, depth = self._settings.queue_pairs, self._settings.depth
        threads, device = self._settings.threads, destination.device
        slot_bytes = destination.line_bytes
        cores = config.cores()
        if count is None:
            count = _QUEUE_PAIRS if device.kind == "cuda" else 2 * cores
        if depth is None:
            fixed = route == "in_place" and not buffered
            depth = _DEPTH if fixed else _BOUNCE_DEPTH
            while buffered and depth > 2 and count * depth * slot_bytes > _BOUNCE_BYTES:
                depth //= 2
        if threads is None:
            # On the CPU device the waiting threads serve too; in place nothing is moved.
            few = route == "in_place" or device.kind == "cpu"
            # They poll: more of them than cores would wait for each other.
            threads = 1 if few else max(1, min(8, cores // 2) // destination.controllers)
        return count, depth, threads

    # Leaving a file's own pages.

    def _leave_in_place(self) -> bool:
        """Let no kernel use what was read before; called by the lease's keeper, at each break."""
        self._broken = True
        if self.route != "in_place":
            self._advance_epoch()
            return False
        try:
            self.queues.leave_in_place(self._side)
            self.queues.advance_epoch(self._side)
            storage = self._served
            mapping = storage.mapping if isinstance(storage, File) else None
            if mapping is not None and self.queues.device.kind == "cpu":
                # A GPU's registration keeps the pages that it has pinned.
                mapping.leave()
            if self._native is not None:
                # Kernels that run now submit commands to threads that no launch has woken.
                self._native.wake()
        except BaseException as error:
            self._refuse(error)
            if self._native is not None:
                self._native.stop()
            raise
        finally:
            self.route = "bounce"
            self.needs_wake = True
            self.reason = (
                "a process has opened the file for writing, so it is not read in place any more"
            )
        return True

    def _file_changed(self, stale: StorageError | None) -> None:
        """Note that cached lines may be old; called by the lease's keeper.

        After a break, which has begun an epoch, or when the lease was taken again.
        """
        if stale is not None:
            self._stale = stale
        # An array compares it with what it has seen.
        self.changes += 1
        if self._broken:
            self._broken = False
        else:
            self._advance_epoch()

    def _advance_epoch(self) -> None:
        try:
            self.queues.advance_epoch(self._side)
        except BaseException as error:
            self._refuse(error)
            raise

    def _refuse(self, error: BaseException) -> None:
        """Refuse launches from now on: kernels might take old bytes for data."""
        self._refusal = f"a process has written the file, which kernels could not be told: {error}"
        self.needs_wake = True

    def take_stale(self) -> StorageError | None:
        """Return and forget what went wrong when the file's pages were left."""
        stale, self._stale = self._stale, None
        return stale

    # Introspection.

    @property
    def queues(self) -> QueuePairs:
        """The queue pairs that it serves; ClosedError when it serves none."""
        if self._queues is None:
            raise ClosedError("the controller serves no array")
        return self._queues

    @property
    def natives(self) -> tuple[Any, ...]:
        """The native controllers of the array, for launches whose waiting threads serve them."""
        if self._native is None:
            raise ClosedError("the controller serves no array")
        return (self._native,)

    @property
    def in_place(self) -> int:
        """Address at which the device may read the storage past the cache; 0: it may not.

        Only if the storage takes no writes, and no drive is modelled. A file has one only for a
        GPU, which has pinned its pages, and only if its data is aligned for any load.
        """
        if self._queues is None or self._served is None or self.route != "in_place":
            return 0
        if isinstance(self._served, File) and (
            self._queues.device.kind == "cpu" or self._mapped_base % _LOAD_BYTES_MAX
        ):
            return 0
        if self.model is not None or self._served.writable:
            return 0
        return self._mapped_base

    @property
    def plain_reads(self) -> bool:
        """Whether kernels read the namespace in place without commands."""
        return self._plain_reads and self.route == "in_place"

    @property
    def makes_warps_wait(self) -> bool:
        """Whether a few warps keep the storage busy.

        A modelled drive may need any number of commands. In place, a command is answered at once,
        and many warps must copy.
        """
        return self.model is None and (self._plain_reads or self.route != "in_place")

    @property
    def waits_for_disk(self) -> bool:
        """Whether files pass the page cache by, now."""
        return any(file.o_direct for file in self._files)

    def wake(self) -> None:
        """Wake the threads: commands are about to be submitted. Costs a microsecond.

        Does nothing if kernels can submit none. Threads that leave the work to a launch of the CPU
        device sleep on. The storage may change between page cache and O_DIRECT.

        Raises ControllerError if kernels might read old bytes.
        """
        if not self.needs_wake:
            return
        if self._refusal:
            raise ControllerError(f"{self._refusal}; close the array, and open it again")
        if self._served is not None:
            self._served.look_again()
        if not self._yields and self._native is not None:
            self._native.wake()

    def worth_looking_ahead(self) -> bool:
        """Whether a CPU thread gains by submitting commands before it needs their data.

        It does if commands wait for the storage, judged by those since the last call; if there
        were none yet; or if threads of the controller serve them in the meantime.
        """
        if not self._yields or self._native is None:
            return True
        commands, waited = self._native.progress()
        done, before = self._progress
        if commands != done:
            self._waits = (waited - before) * _WAITS_COUNT_FROM > commands - done
            self._progress = commands, waited
        return self._waits

    def take_errors(self) -> Sequence[dict[str, Any]]:
        """Return and forget the failures since the last call, oldest first (at most 64)."""
        if self._native is None:
            return []
        return [dict(e) for e in self._native.take_errors() if not e.get("recovered")]

    def describe(self) -> dict[str, Any]:
        """Return facts for people: engine, threads, queue pairs, modelled drive."""
        facts = {} if self._native is None else dict(self._native.describe())
        if self.model is not None:
            facts["model"] = str(self.model)
        return facts

    @property
    def stats(self) -> dict[str, Any]:
        """The controller's own counters."""
        return {} if self._native is None else dict(self._native.stats)

    def stop(self) -> None:
        """Stop the threads and free the rings; waits for commands in flight. See `Service`."""
        self._owned.close()
        self._native = self._served = self._queues = None
        self._files = []

    def __repr__(self) -> str:
        of = "stopped" if self._served is None else f"of {self._served}"
        return f"<flashwarp software controller {of}>"
