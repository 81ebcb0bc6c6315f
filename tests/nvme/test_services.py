"""Every controller keeps the contract of `flashwarp.nvme`, one that is not the library's too."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, LockedError
from flashwarp.nvme import Controller, Destination, Queues, Service
from flashwarp.nvme.group import ControllerGroup
from flashwarp.storage import File, Memory, Namespace, Replicated, Storage, Striped
from flashwarp.testing import Faulty, ServiceContract


class Served(ServiceContract):
    """A storage of memory that can be made to fail, by the software controller."""

    settings: ClassVar[dict[str, Any]] = {}

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Namespace:
        return Faulty(Memory(bytearray(content), writable))

    def controller(self) -> Controller:
        return fw.nvme.SoftwareController(**self.settings)

    def fail(self, namespace: Namespace) -> int | None:
        assert isinstance(namespace, Faulty)
        namespace.inject("read eio")
        return errno.EIO


class TestInPlace(Served):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Namespace:
        return Memory(bytearray(content), writable)

    def fail(self, namespace: Namespace) -> int | None:
        return None  # memory that a kernel reads does not fail


class TestBounce(Served):
    settings: ClassVar[dict[str, Any]] = {"route": "bounce", "queue_pairs": 2, "depth": 4}


class TestDirect(Served):
    settings: ClassVar[dict[str, Any]] = {"route": "direct", "threads": 2}


class TestFile(Served):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Namespace:
        (folder / "f").write_bytes(content)
        return Faulty(File(folder / "f", writable=writable))


class TestModelledDrive(Served):
    settings: ClassVar[dict[str, Any]] = {"model": "P5800X", "threads": 1}


class TestGroup(Served):
    """Two storages, each with a controller and queue pairs of its own, in stripes."""

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Namespace:
        stripes = [content[i : i + 4096] for i in range(0, len(content), 4096)]
        half = -(-len(stripes) // 2) * 4096
        members = [
            Faulty(Memory(bytearray(b"".join(stripes[n::2]).ljust(half, b"\xee")), writable))
            for n in range(2)
        ]
        return Striped(members, 4096, len(content))

    def controller(self) -> Controller:
        return ControllerGroup([super().controller()] * 2)

    def fail(self, namespace: Namespace) -> int | None:
        assert isinstance(namespace, Striped)
        for member in namespace.members:
            super().fail(member)
        return errno.EIO


class TestReplicas(TestGroup):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Namespace:
        return Replicated([Faulty(Memory(bytearray(content), writable)) for _ in range(2)])

    def fail(self, namespace: Namespace) -> int | None:
        assert isinstance(namespace, Replicated)
        for member in namespace.members:
            assert isinstance(member, Faulty)
            member.inject("read eio")
        return errno.EIO


class Warehouse(Controller):
    """Not the library's: it alone knows where the bytes of a namespace are.

    It has them served by a software controller, and stands between that and the array.
    """

    def __init__(self) -> None:
        self.shelves: dict[str, Storage] = {}

    def attach(self, storage: Namespace, destination: Destination) -> Service:
        assert storage.path is not None
        inner = fw.nvme.SoftwareController(route="bounce", threads=1).attach(
            self.shelves[storage.path], destination
        )
        return Errand(inner)


class Errand(Service):
    """What it must have and nothing else: waiting threads do not serve it, for one."""

    def __init__(self, inner: Service) -> None:
        self.inner = inner

    @property
    def queues(self) -> Queues:
        return self.inner.queues

    @property
    def route(self) -> str:
        return self.inner.route

    @property
    def reason(self) -> str:
        return "the warehouse has no other"

    def take_errors(self) -> Sequence[dict[str, Any]]:
        return self.inner.take_errors()

    def describe(self) -> dict[str, Any]:
        return {"engine": "errand boys"}

    def wake(self) -> None:
        self.inner.wake()

    def stop(self) -> None:
        self.inner.stop()


class TestControllerOfOnesOwn(ServiceContract):
    """Arrays and caches go by the contract alone: neither knows this controller, nor has bytes."""

    @pytest.fixture(autouse=True)
    def _warehouse(self) -> None:
        self.warehouse = Warehouse()

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Namespace:
        self.warehouse.shelves[str(folder)] = Faulty(Memory(bytearray(content), writable))
        return Namespace(len(content), writable, str(folder))

    def controller(self) -> Controller:
        return self.warehouse

    def fail(self, namespace: Namespace) -> int | None:
        held = self.warehouse.shelves[str(namespace.path)]
        assert isinstance(held, Faulty)
        held.inject("read eio")
        return errno.EIO


def test_array_explains_a_controller_that_it_does_not_know() -> None:
    warehouse = Warehouse()
    warehouse.shelves["crate"] = Memory(bytearray(8192))
    with fw.open(
        Namespace(8192, path="crate"), "r+", "i4", device="cpu", controller=warehouse
    ) as x:
        x[3] = 7
        told = x.explain()
        assert (told.route, told.facts["engine"]) == ("bounce", "errand boys")
        assert told.facts["storage"] == {"kind": "namespace", "nbytes": 8192, "writable": True}
        assert "errand boys" in str(told)
        assert x.service.stats == {}
    assert warehouse.shelves["crate"].read(12, 1) == b"\x07"


def test_software_controller_needs_the_bytes() -> None:
    with pytest.raises(ArgumentError, match="describes a namespace without its bytes"):
        fw.open(Namespace(8192), "r+", "i4", device="cpu")


def test_namespaces_may_be_empty_and_stripes_not() -> None:
    assert Namespace(0).nbytes == 0
    members = [Memory(bytearray(4096)) for _ in range(2)]
    with pytest.raises(ArgumentError, match="give a shorter stripe"):
        Striped(members, 8192)


def test_two_arrays_do_not_store_to_one_namespace() -> None:
    warehouse = Warehouse()
    warehouse.shelves["crate"] = Memory(bytearray(8192))
    crate = Namespace(8192, path="crate")
    with fw.open(crate, "r+", "i4", device="cpu", controller=warehouse) as x:
        with pytest.raises(LockedError, match="another array serves this storage"):
            fw.open(crate, "r+", "i4", device="cpu", controller=warehouse)
        assert x[:9].tolist() == [0] * 9


class Forgetful(fw.nvme.SoftwareController):
    """Serves what the namespace held when this was made, which is not what was stored since."""

    def attach(self, storage: Namespace, destination: Destination) -> Any:
        assert isinstance(storage, Storage)
        copy = Memory(bytearray(storage.read(0, storage.nbytes)))
        return super().attach(copy, destination)


class Shared(fw.nvme.SoftwareController):
    """Serves all arrays by the service of the first."""

    service: Any = None

    def attach(self, storage: Namespace, destination: Destination) -> Any:
        self.service = self.service or super().attach(storage, destination)
        return self.service


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Forgetful, "test_array_holds_what_was_stored"),
        (Shared, "test_controller_serves_several_arrays"),
    ],
)
def test_service_contract_notices(
    kind: type[fw.nvme.SoftwareController],
    test: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An array whose service has stopped waits for its commands until they time out.
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "4")

    class Broken(TestInPlace):
        one = kind()

        def controller(self) -> Controller:
            return self.one

    with pytest.raises((AssertionError, fw.errors.FlashwarpError)):
        getattr(Broken(), test)(tmp_path)


def test_group_needs_queue_pairs_that_a_table_takes_in() -> None:
    class Queueless(Errand):
        @property
        def queues(self) -> Any:
            return object()

    class Odd(Warehouse):
        def attach(self, storage: Namespace, destination: Destination) -> Service:
            return Queueless(fw.nvme.SoftwareController().attach(storage, destination))

    drives = [Memory(np.zeros(8192, np.uint8)) for _ in range(2)]
    odd = ControllerGroup([Odd(), Odd()])
    with pytest.raises(ArgumentError, match="queues of type object"):
        fw.open(Replicated(drives), "r+", "u1", device="cpu", controller=odd)
