"""Several controllers under one array: stripes or replicas that device code itself chooses among.

Mirrors `cache/placement.cuh`. Each storage is a namespace with a controller and queue pairs of its
own; the pairs of all lie in one table, in the order of the namespaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from flashwarp.device import Device, DeviceMemory
from flashwarp.errors import ArgumentError, ClosedError, StorageError
from flashwarp.nvme import Controller, Service
from flashwarp.nvme.queue_pair import QueuePairs, QueueTable
from flashwarp.nvme.software import SoftwareController
from flashwarp.storage import Namespace, Replicated, Storage, Striped

__all__ = ["NAMESPACES_MAX", "ControllerGroup", "GroupService", "Spread", "spread_storage"]

NAMESPACES_MAX = 16
"""Most storages under one array; `kNamespacesMax` of the headers."""

Spread: TypeAlias = Literal["stripe", "replicate"]

_SPREADS = {"stripe": 1, "replicate": 2}
_LBA_BYTES = 512


def spread_storage(
    members: Sequence[Storage], layout: str | None, stripe_bytes: int | None, line_bytes: int
) -> Striped | Replicated:
    """Return the storages as one, as the host sees them.

    Raises
    ------
    ArgumentError
        For a layout, a number of storages or a size of stripes that cannot be.
    """
    if layout not in _SPREADS:
        raise ArgumentError(f"layout={layout!r}: several storages are 'stripe' or 'replicate'")
    if not 1 <= len(members) <= NAMESPACES_MAX:
        raise ArgumentError(f"{len(members)} storages: an array has 1 to {NAMESPACES_MAX}")
    if len({id(member) for member in members}) != len(members):
        raise ArgumentError("a storage is named twice")
    if layout == "replicate":
        if stripe_bytes is not None:
            raise ArgumentError("stripe_bytes is for layout='stripe'")
        return Replicated(members)
    stripe = max(128 << 10, line_bytes) if stripe_bytes is None else stripe_bytes
    if stripe < line_bytes or stripe % line_bytes:
        raise ArgumentError(f"stripes of {stripe} bytes are no multiple of a line, {line_bytes}")
    return Striped(members, stripe)


class ControllerGroup(Controller):
    """A controller for each storage of an array.

    Stands where an array of one storage has its `Controller`.

    Parameters
    ----------
    settings : Controller or sequence of Controller, optional
        One for each storage, or one for all of them.
    count : int
        How many storages there are.
    """

    def __init__(self, settings: Controller | Sequence[Controller] | None, count: int) -> None:
        if settings is None or isinstance(settings, Controller):
            plan = settings or SoftwareController()
            if plan.storage is not None:
                raise ArgumentError("the controller has a storage of its own: give settings only")
            self.controllers = [plan] * count
        else:
            self.controllers = list(settings)
            if len(self.controllers) != count:
                raise ArgumentError(f"{len(self.controllers)} controllers for {count} storages")
            if len({id(c) for c in self.controllers}) != count:
                raise ArgumentError("a controller is named twice: each serves one storage")
        self.asked_path = self.controllers[0].asked_path

    def attach(
        self,
        storage: Namespace,
        device: Device,
        line_bytes: int,
        frames: tuple[int, int],
        *,
        owners: Sequence[object] = (),
        together: int = 1,
    ) -> GroupService:
        """Start one controller for each member of `storage`; see `Controller.attach`."""
        if not isinstance(storage, Striped | Replicated):
            raise ArgumentError("several controllers need storages in stripes or replicas")
        for n, (controller, member) in enumerate(
            zip(self.controllers, storage.members, strict=True)
        ):
            if controller.storage is not None and controller.storage is not member:
                raise ArgumentError(f"controller {n} has another storage than storage {n}")
        return GroupService(
            self.controllers,
            storage,
            device,
            line_bytes,
            frames,
            owners=owners,
            together=together * len(self.controllers),
        )


class GroupService(Service):
    """The storages of one array, each served by a controller; stopped together.

    Parameters
    ----------
    controllers : sequence of Controller
        In the order of the storages.
    storage, device, line_bytes, frames, owners, together
        As `Controller.attach` has them.

    Attributes
    ----------
    services : list of Service
        In the order of the storages.
    """

    def __init__(
        self,
        controllers: Sequence[Controller],
        storage: Striped | Replicated,
        device: Device,
        line_bytes: int,
        frames: tuple[int, int],
        *,
        owners: Sequence[object],
        together: int,
    ) -> None:
        self.services: list[Service] = []
        self._storage = storage
        self._table: QueueTable | None = None
        self._counts: DeviceMemory | None = None
        try:
            for controller, member in zip(controllers, storage.members, strict=True):
                self.services.append(
                    controller.attach(
                        member,
                        device,
                        line_bytes,
                        frames,
                        owners=owners,
                        together=together,
                    )
                )
            members = [_pairs_of(service) for service in self.services]
            self._check_paths()
            fields: dict[str, Any] = {"spread": _SPREADS["replicate"]}
            if isinstance(storage, Striped):
                fields["spread"] = _SPREADS["stripe"]
                fields["stripe_lines"] = storage.stripe_bytes // line_bytes
            elif storage.writable:
                self._counts = device.allocate(frames[1] // line_bytes * 4)
                fields["replica_writes"] = self._counts.address
            self._table = QueueTable(device, members, fields)
        except BaseException:
            self.stop()
            raise

    def _check_paths(self) -> None:
        paths = [service.path for service in self.services]
        if len(set(paths)) != 1:
            raise ArgumentError(
                f"the storages' data would go different ways ({', '.join(paths)}): give their "
                "controllers the same data_path"
            )

    @property
    def path(self) -> str:
        """The data path of all; "bounce" as soon as one of them has left "in_place" for it."""
        paths = {service.path for service in self.services}
        return paths.pop() if len(paths) == 1 else "bounce"

    @property
    def reason(self) -> str:
        """Why the data goes this way."""
        return "; ".join(dict.fromkeys(service.reason for service in self.services))

    @property
    def changes(self) -> int:
        """How often files may have changed under the array; see `Service`."""
        return sum(service.changes for service in self.services)

    def take_stale(self) -> StorageError | None:
        """Return and forget what went wrong when files' pages were left: the first."""
        told = [service.take_stale() for service in self.services]
        return next(filter(None, told), None)

    @property
    def queues(self) -> QueueTable:
        """The queue pairs of all; ClosedError when they serve none."""
        if self._table is None:
            raise ClosedError("the controllers serve no array")
        return self._table

    @property
    def natives(self) -> tuple[Any, ...]:
        """The native controllers, for launches whose waiting threads serve them."""
        return tuple(native for service in self.services for native in service.natives)

    @property
    def namespace_count(self) -> int:
        """How many namespaces the array lies on."""
        return len(self.services)

    def wake(self) -> None:
        """Wake the threads of all: work is about to be submitted."""
        for service in self.services:
            service.wake()

    def worth_looking_ahead(self) -> bool:
        """Tell whether a CPU thread gains by submitting ahead of need, on any of them."""
        # All are asked: each judges by the commands since it was asked last.
        told = [service.worth_looking_ahead() for service in self.services]
        return any(told)

    def take_errors(self) -> Sequence[dict[str, Any]]:
        """Return and forget the failures of all; `lba` counts in the array, `storage` says whose.

        `offset` and `path` stay those of the storage.
        """
        return [
            {**error, "storage": n, "lba": self._array_lba(n, int(error.get("lba", 0)))}
            for n, service in enumerate(self.services)
            for error in service.take_errors()
        ]

    def _array_lba(self, member: int, lba: int) -> int:
        if not isinstance(self._storage, Striped):
            return lba
        stripe = self._storage.stripe_bytes // _LBA_BYTES
        return (lba // stripe * len(self.services) + member) * stripe + lba % stripe

    def silent(self) -> str:
        """Name the storages that did not answer in time."""
        names = [
            f"storage {n} ({member.path or 'in memory'})"
            for n, (service, member) in enumerate(
                zip(self.services, self._storage.members, strict=True)
            )
            if service.queues.failed
        ]
        return " and ".join(names) or "a storage"

    def describe(self) -> dict[str, Any]:
        """Return facts for people: engine, and the facts of each controller."""
        each = [service.describe() for service in self.services]
        engines = dict.fromkeys(str(facts.get("engine", "stopped")) for facts in each)
        return {"engine": f"{len(each)} controllers: {'; '.join(engines)}", "controllers": each}

    def stats(self) -> dict[str, Any]:
        """Return the counters of each controller, in the order of the storages."""
        return {"controllers": [service.stats() for service in self.services]}

    def stop(self) -> None:
        """Stop all, then free what they share. May be called twice."""
        for service in self.services:
            service.stop()
        if self._table is not None:
            self._table.close()
            self._table = None
        if self._counts is not None:
            self._counts.close()
            self._counts = None


def _pairs_of(service: Service) -> QueuePairs:
    """Return the queue pairs of one storage, which a table can take in."""
    queues = service.queues
    if not isinstance(queues, QueuePairs):
        raise ArgumentError(
            f"{service!r} has queues of type {type(queues).__name__}: a controller under several "
            "storages makes them as flashwarp.nvme.queue_pair.QueuePairs"
        )
    return queues
