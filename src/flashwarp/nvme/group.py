"""A controller for each member of a striped or replicated storage; device code chooses among them.

Mirrors `cache/placement.cuh`. Each member is a namespace with a controller and queue pairs of its
own; the pairs of all lie in one table, in the order of the members.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from flashwarp.device import Device
from flashwarp.errors import ArgumentError, ClosedError, FlashwarpError, StorageError
from flashwarp.nvme.controller import Controller, Destination, Service
from flashwarp.nvme.queue_pair import QueuePairs, QueueTable
from flashwarp.nvme.software import SoftwareController
from flashwarp.storage import Namespace, Striped
from flashwarp.storage.composite import Composite, Concatenated
from flashwarp.storage.routes import route_of

NAMESPACES_MAX = 16
"""Most namespaces of an array; `kNamespacesMax` of the headers."""

# `cache::spread` of the headers.
_STRIPED, _REPLICATED = 1, 2


def choose_controllers(
    controller: Controller, storage: Namespace, device: Device, line_bytes: int
) -> tuple[Controller, str]:
    """Choose between one controller for a storage and one for each of its members.

    Returns the one to attach to the storage, and why, for people; empty if there is no choice.
    Raises ArgumentError for a `ControllerGroup` that does not fit the storage.
    """
    if not isinstance(storage, Composite):
        return controller, ""
    count = len(storage.members)
    obstacle = _obstacle(controller, storage, device, line_bytes)
    if isinstance(controller, ControllerGroup):
        if obstacle:
            raise ArgumentError(f"the storage cannot have a controller for each member: {obstacle}")
        if len(controller.controllers) != count:
            raise ArgumentError(f"{controller!r} is for a storage of {count} members")
        return controller, f"a controller for each of {count} members, as asked for"
    if obstacle:
        return controller, f"one controller for all {count} members: {obstacle}"
    return ControllerGroup(
        [controller] * count
    ), f"a controller for each of {count} members, which device code chooses among"


def _obstacle(controller: Controller, storage: Composite, device: Device, line_bytes: int) -> str:
    """Return why the members cannot have a controller each; empty if they can."""
    members = storage.members
    if len(members) > NAMESPACES_MAX:
        return f"an array has at most {NAMESPACES_MAX} controllers"
    if any(isinstance(member, Composite) for member in members):
        return "a member is itself striped or replicated"
    if isinstance(storage, Concatenated):
        return "a line may hold the end of one member and the beginning of the next"
    if isinstance(storage, Striped) and storage.stripe_bytes % line_bytes:
        return f"stripes of {storage.stripe_bytes} bytes are no multiple of a line, {line_bytes}"
    if isinstance(controller, ControllerGroup):
        return ""
    if not controller.serves_members:
        return f"{controller!r} serves a storage as a whole"
    if isinstance(controller, SoftwareController) and controller.asked_route is None:
        routes = {route_of(member, device, None)[0] for member in members}
        if len(routes) > 1:
            return f"their data would take different routes, {' and '.join(sorted(routes))}"
    return ""


class ControllerGroup(Controller):
    """A controller for each member of a striped or replicated storage, each with its own settings.

    An array needs it only if the settings differ: any other `Controller` that serves members is
    attached to each of them.

    Parameters
    ----------
    controllers : sequence of Controller
        In the order of the members. Their services must take one route.
    """

    serves_members = True

    def __init__(self, controllers: Sequence[Controller]) -> None:
        given = tuple(controllers) if isinstance(controllers, Sequence) else ()
        if not given or not all(isinstance(each, Controller) for each in given):
            raise ArgumentError(f"controllers={controllers!r} is not a sequence of controllers")
        self.controllers = given
        self.asked_route = self.controllers[0].asked_route

    def attach(self, storage: Namespace, destination: Destination) -> GroupService:
        """Start one controller for each member of `storage`; see `Controller.attach`."""
        if not isinstance(storage, Composite):
            raise ArgumentError(f"{self!r} is for a Striped or Replicated storage")
        return GroupService(self.controllers, storage, destination)

    def __repr__(self) -> str:
        return f"<a group of {len(self.controllers)} controllers>"


def _of_all(name: str, combine: Callable[[Iterator[Any]], Any]) -> Any:
    """Make a property of `Service` from those of the services."""
    return property(lambda group: combine(getattr(each, name) for each in group.services))


class GroupService(Service):
    """The storages of one array, each served by a controller; stopped together."""

    in_place_refusal = _of_all("in_place_refusal", lambda found: next(filter(None, found), ""))
    plain_reads = _of_all("plain_reads", all)
    leased = _of_all("leased", any)
    makes_warps_wait = _of_all("makes_warps_wait", all)
    waits_for_disk = _of_all("waits_for_disk", any)
    needs_wake = _of_all("needs_wake", any)
    changes = _of_all("changes", sum)

    def __init__(
        self,
        controllers: Sequence[Controller],
        storage: Composite,
        destination: Destination,
    ) -> None:
        self.services: list[Service] = []
        self._storage = storage
        self._table: QueueTable | None = None
        self._shared = contextlib.ExitStack()
        try:
            shared = replace(destination, controllers=destination.controllers * len(controllers))
            self._attach(controllers, storage, shared)
            refusals = [service.in_place_refusal for service in self.services]
            refusal = next(filter(None, refusals), "")
            if refusal and not all(refusals):
                # The device reads only some of the members in place: all take the other route.
                for service in self.services:
                    service.stop()
                self.services.clear()
                self._attach(controllers, storage, replace(shared, in_place_refusal=refusal))
            pairs = []
            for service in self.services:
                queues = service.queues
                if not isinstance(queues, QueuePairs):
                    raise ArgumentError(
                        f"{service!r} has queues of type {type(queues).__name__}: a controller "
                        "under several storages makes them as flashwarp.nvme.queue_pair.QueuePairs"
                    )
                pairs.append(queues)
            routes = [service.route for service in self.services]
            if len(set(routes)) != 1:
                raise ArgumentError(
                    f"the members' data would take different routes ({', '.join(routes)}): give "
                    "their controllers the same route"
                )
            device, lines = destination.device, destination.frames[1] // destination.line_bytes
            fields = {"spread": _REPLICATED}
            if isinstance(storage, Striped):
                fields = {
                    "spread": _STRIPED,
                    "stripe_lines": storage.stripe_bytes // destination.line_bytes,
                }
            elif storage.writable:
                counts = self._shared.enter_context(device.allocate(lines * 4))
                fields["replica_writes"] = counts.address
            self._table = QueueTable(device, pairs, fields)
            self._shared.callback(self._table.close)
        except BaseException:
            self.stop()
            raise

    def _attach(
        self, controllers: Sequence[Controller], storage: Composite, destination: Destination
    ) -> None:
        for controller, member in zip(controllers, storage.members, strict=True):
            self.services.append(controller.attach(member, destination))

    @property
    def route(self) -> str:
        """The route of all; "bounce" from the moment at which one has left "in_place"."""
        routes = {service.route for service in self.services}
        return routes.pop() if len(routes) == 1 else "bounce"

    @property
    def reason(self) -> str:
        """Why the data goes this way."""
        return "; ".join(dict.fromkeys(service.reason for service in self.services))

    def take_stale(self) -> StorageError | None:
        """Return and forget what went wrong when files' pages were left: the first error."""
        errors = [service.take_stale() for service in self.services]
        return next(filter(None, errors), None)

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
        """Whether a CPU thread gains by submitting ahead of need, on any of them."""
        # Each judges by the commands since its last call, so all are called.
        worth = [service.worth_looking_ahead() for service in self.services]
        return any(worth)

    def take_errors(self) -> Sequence[dict[str, Any]]:
        """Return and forget the failures of all.

        `lba` counts in the array, `offset` and `path` in the member, whose number is `storage`.
        """
        return [
            {**error, "storage": n, "lba": self._array_lba(n, int(error.get("lba", 0)))}
            for n, service in enumerate(self.services)
            for error in service.take_errors()
        ]

    def _array_lba(self, member: int, lba: int) -> int:
        if not isinstance(self._storage, Striped):
            return lba
        stripe = self._storage.stripe_bytes // Namespace.lba_bytes
        return (lba // stripe * len(self.services) + member) * stripe + lba % stripe

    def failure(self) -> FlashwarpError | None:
        """Return why one of them completes no command any more."""
        return next(filter(None, (service.failure() for service in self.services)), None)

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

    @property
    def stats(self) -> dict[str, Any]:
        """The counters of each controller, in the order of the storages."""
        return {"controllers": [service.stats for service in self.services]}

    def stop(self) -> None:
        """Stop all, then free what they share. May be called twice."""
        for service in self.services:
            service.stop()
        self._shared.close()
        self._table = None
