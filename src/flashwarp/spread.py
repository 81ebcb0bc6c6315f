"""Several controllers under one array: stripes or replicas that device code itself chooses among.

Mirrors `cache/spread.cuh`. Each storage is a namespace with a controller and queue pairs of its
own; the pairs of all lie in one table, in the order of the namespaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from flashwarp.controller import SoftwareController
from flashwarp.device import Device, DeviceMemory
from flashwarp.endings import NotCopied
from flashwarp.errors import ArgumentError, ClosedError, ControllerError, StorageError
from flashwarp.queue_pair import QueueTable
from flashwarp.storage import Replicated, Storage, Striped

__all__ = ["NAMESPACES_MAX", "AnyController", "ControllerGroup", "Spread", "spread_storage"]

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


class ControllerGroup(NotCopied):
    """The controllers of an array's storages, attached and closed together.

    Stands where an array of one storage has its `SoftwareController`.

    Parameters
    ----------
    settings : SoftwareController or sequence of SoftwareController, optional
        One plan for each storage, or one whose settings all of them get.
    """

    def __init__(
        self, settings: SoftwareController | Sequence[SoftwareController] | None, count: int
    ) -> None:
        if settings is None or isinstance(settings, SoftwareController):
            plan = settings or SoftwareController()
            if plan.storage is not None:
                raise ArgumentError("the controller has a storage of its own: give settings only")
            self.controllers = [plan.like() for _ in range(count)]
        else:
            self.controllers = list(settings)
            if len(self.controllers) != count:
                raise ArgumentError(f"{len(self.controllers)} controllers for {count} storages")
            if len({id(c) for c in self.controllers}) != count:
                raise ArgumentError("a controller is named twice: each serves one storage")
        self._table: QueueTable | None = None
        self._counts: DeviceMemory | None = None
        self._storage: Striped | Replicated | None = None
        self._paths_checked = False

    @property
    def path(self) -> str:
        """The data path of all; "bounce" as soon as one of them has left "in_place" for it."""
        if not self._paths_checked:
            return ""
        paths = {controller.path for controller in self.controllers}
        return paths.pop() if len(paths) == 1 else "bounce"

    @property
    def reason(self) -> str:
        """Why the data goes this way."""
        return "; ".join(dict.fromkeys(c.reason for c in self.controllers))

    @property
    def asked_path(self) -> str | None:
        """The data path that was asked for, if any."""
        return self.controllers[0].asked_path

    @property
    def changes(self) -> int:
        """How often files may have changed under the array; see `SoftwareController`."""
        return sum(controller.changes for controller in self.controllers)

    def take_stale(self) -> StorageError | None:
        """Return and forget what went wrong when files' pages were left: the first."""
        told = [controller.take_stale() for controller in self.controllers]
        return next(filter(None, told), None)

    def attach(
        self,
        storage: Storage,
        device: Device,
        line_bytes: int,
        frames: tuple[int, int],
        *,
        owners: Sequence[object] = (),
    ) -> QueueTable:
        """Start one controller for each member of `storage`; see `SoftwareController.attach`."""
        if not isinstance(storage, Striped | Replicated):
            raise ArgumentError("several controllers need storages in stripes or replicas")
        if any(controller.serving for controller in self.controllers):
            raise ControllerError("a controller serves another array: make one for each")
        for n, (controller, member) in enumerate(
            zip(self.controllers, storage.members, strict=True)
        ):
            if controller.storage is not None and controller.storage is not member:
                raise ArgumentError(f"controller {n} has another storage than storage {n}")
        self._storage = storage
        try:
            members = [
                controller.attach(
                    member,
                    device,
                    line_bytes,
                    frames,
                    owners=owners,
                    together=len(self.controllers),
                )
                for controller, member in zip(self.controllers, storage.members, strict=True)
            ]
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
            self.detach()
            raise
        return self._table

    def _check_paths(self) -> None:
        paths = [controller.path for controller in self.controllers]
        if len(set(paths)) != 1:
            raise ArgumentError(
                f"the storages' data would go different ways ({', '.join(paths)}): give their "
                "controllers the same data_path"
            )
        self._paths_checked = True

    # What an array does with it; as SoftwareController has it.

    @property
    def queues(self) -> QueueTable:
        """The queue pairs of all; ClosedError when they serve none."""
        if self._table is None:
            raise ClosedError("the controllers serve no array")
        return self._table

    @property
    def in_place(self) -> int:
        """Nothing lies in one piece: see `SoftwareController.in_place`."""
        return 0

    @property
    def natives(self) -> tuple[Any, ...]:
        """The native controllers, for launches whose waiting threads serve them."""
        return tuple(native for controller in self.controllers for native in controller.natives)

    def wake(self) -> None:
        """Wake the threads of all: work is about to be submitted."""
        for controller in self.controllers:
            controller.wake()

    def worth_looking_ahead(self) -> bool:
        """Tell whether a CPU thread gains by submitting ahead of need, on any of them."""
        # All are asked: each judges by the commands since it was asked last.
        told = [controller.worth_looking_ahead() for controller in self.controllers]
        return any(told)

    def take_errors(self) -> Sequence[dict[str, Any]]:
        """Return and forget the failures of all; `lba` counts in the array, `storage` says whose.

        `offset` and `path` stay those of the storage.
        """
        return [
            {**error, "storage": n, "lba": self._array_lba(n, int(error.get("lba", 0)))}
            for n, controller in enumerate(self.controllers)
            for error in controller.take_errors()
        ]

    def _array_lba(self, member: int, lba: int) -> int:
        if not isinstance(self._storage, Striped):
            return lba
        stripe = self._storage.stripe_bytes // _LBA_BYTES
        return (lba // stripe * len(self.controllers) + member) * stripe + lba % stripe

    def silent(self) -> str:
        """Name the storages that did not answer in time."""
        names = [
            f"storage {n} ({member.path or 'in memory'})"
            for n, (controller, member) in enumerate(self._served())
            if controller.queues.failed
        ]
        return " and ".join(names) or "a storage"

    def _served(self) -> list[tuple[SoftwareController, Storage]]:
        members = () if self._storage is None else self._storage.members
        return list(zip(self.controllers, members, strict=False))

    def describe(self) -> dict[str, Any]:
        """Return facts for people: engine, and the facts of each controller."""
        each = [controller.describe() for controller in self.controllers]
        engines = dict.fromkeys(str(facts.get("engine", "stopped")) for facts in each)
        return {"engine": f"{len(each)} controllers: {'; '.join(engines)}", "controllers": each}

    def stats(self) -> dict[str, Any]:
        """Return the counters of each controller, in the order of the storages."""
        return {"controllers": [controller.stats() for controller in self.controllers]}

    def detach(self) -> None:
        """Stop all, then free what they share. May be called twice."""
        for controller in self.controllers:
            controller.detach()
        if self._table is not None:
            self._table.close()
            self._table = None
        if self._counts is not None:
            self._counts.close()
            self._counts = None


AnyController: TypeAlias = SoftwareController | ControllerGroup
"""What an array has: one controller, or those of its storages."""
