"""What arrays need of every controller (`flashwarp.nvme`), as tests: one subclass a backend."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flashwarp.array.array import Array
from flashwarp.array.opening import open as open_array
from flashwarp.errors import ClosedError, ReadOnlyError, StorageError
from flashwarp.nvme import Controller
from flashwarp.nvme.queue_pair import ROUTES
from flashwarp.storage import Namespace
from flashwarp.testing.storage_contract import assert_raises, random_content


class ServiceContract(ABC):
    """Tests of a `Controller` and its services, seen from arrays; pytest runs those of a subclass.

    `ControllerContract` asks the same controller, command by command, for what the specification
    says. This suite asks for what arrays and caches need besides.
    """

    nbytes: ClassVar[int] = (1 << 18) + 256
    """Size of the namespace: its last block, and the last line of an array, are partial."""

    device: ClassVar[Any] = "cpu"
    """Whose threads submit the commands."""

    @abstractmethod
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Namespace:
        """Make a namespace that holds `content`; a second one, where this is called again."""

    @abstractmethod
    def controller(self) -> Controller:
        """Return the controller, which serves the namespaces of `make`."""

    def fail(self, namespace: Namespace) -> int | None:  # noqa: ARG002 - for subclasses
        """Make all reads of the namespace fail; return their errno. None: there is no way."""
        return None

    def open(self, namespace: Namespace, controller: Controller | None = None) -> Array:
        """Return the bytes as an array, of which a quarter fits its cache."""
        return open_array(
            namespace,
            "r+" if namespace.writable else "r",
            "u1",
            device=self.device,
            line=4096,
            cache="64 KiB",
            controller=controller or self.controller(),
        )

    # Data.

    def test_array_holds_what_was_stored(self, tmp_path: Path) -> None:
        """Rows, ranges and single bytes, with lines that make room for others all the time."""
        expected = np.frombuffer(random_content(self.nbytes), np.uint8).copy()
        chooser = np.random.default_rng(1)
        with self.make(tmp_path, expected.tobytes()) as namespace:
            with self.open(namespace) as x:
                for turn in range(60):
                    idx = chooser.integers(0, self.nbytes, 500)
                    np.testing.assert_array_equal(x.gather(idx), expected[idx])
                    begin = int(chooser.integers(0, self.nbytes))
                    values = np.frombuffer(random_content(9000, turn), np.uint8)
                    values = values[: self.nbytes - begin]
                    x[begin : begin + values.size] = values
                    expected[begin : begin + values.size] = values
                    np.testing.assert_array_equal(x[-300:], expected[-300:])
                np.testing.assert_array_equal(x[:], expected)
                x.flush()
                x[5] = expected[5] = 255 - expected[5]  # in the cache alone, until `close`
            with self.open(namespace) as x:
                np.testing.assert_array_equal(x[:], expected)

    def test_read_only_namespace_is_read(self, tmp_path: Path) -> None:
        """Its bytes come, and a store is refused before a command is made of it."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content, writable=False) as namespace, self.open(namespace) as x:
            assert x[:].tobytes() == content
            error = assert_raises(ReadOnlyError, lambda: x.scatter(np.array([0]), np.array([1])))
            assert not isinstance(error, StorageError)
            assert x[:9].tobytes() == content[:9]

    def test_threads_use_one_array(self, tmp_path: Path) -> None:
        """Each gets the rows that it asks for."""
        held: npt.NDArray[np.uint8] = np.frombuffer(random_content(self.nbytes), np.uint8)
        wrong: list[int] = []
        with self.make(tmp_path, held.tobytes()) as namespace, self.open(namespace) as x:

            def read(number: int) -> None:
                idx = np.random.default_rng(number).integers(0, self.nbytes, (10, 400))
                wrong.append(sum(int((x.gather(each) != held[each]).sum()) for each in idx))

            threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == [0] * 4

    # Settings and services.

    def test_controller_serves_several_arrays(self, tmp_path: Path) -> None:
        """Each has a service of its own, and the end of one leaves the others alone."""
        folders = [tmp_path / name for name in "ab"]
        contents = [random_content(self.nbytes, seed) for seed in (1, 2)]
        for folder in folders:
            folder.mkdir()
        settings = self.controller()
        with (
            self.make(folders[0], contents[0]) as first,
            self.make(folders[1], contents[1]) as second,
            self.open(first, settings) as x,
        ):
            with self.open(second, settings) as y:
                assert x.service is not y.service
                assert y[:].tobytes() == contents[1]
                assert x[: self.nbytes // 2].tobytes() == contents[0][: self.nbytes // 2]
            assert x[:].tobytes() == contents[0]

    def test_service_says_what_it_is(self, tmp_path: Path) -> None:
        """The facts that arrays, launches and people go by."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as namespace, self.open(namespace) as x:
            service = x.service
            assert service.route in ROUTES
            assert service.reason
            assert isinstance(service.describe()["engine"], str)
            assert service.namespace_count >= 1
            assert service.queues.count >= service.namespace_count
            assert service.queues.depth >= 2
            assert not service.queues.failed
            assert service.silent()
            assert service.changes == 0
            assert service.leased in (True, False)
            assert service.take_stale() is None
            assert service.worth_looking_ahead() in (True, False)
            assert service.needs_wake in (True, False)
            before = service.queues.counters().commands
            x.drop_cache()
            assert x[:].tobytes() == content
            lines = -(-self.nbytes // 4096)
            needed = 0 if service.plain_reads else lines
            assert service.queues.counters().commands - before >= needed
            assert x.stats.commands == service.queues.counters().commands

    def test_service_ends_with_its_array(self, tmp_path: Path) -> None:
        """Nothing is there any more to submit to, and another array finds the namespace free."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as namespace:
            x = self.open(namespace)
            service = x.service
            x.close()
            assert_raises(ClosedError, lambda: service.queues)
            assert service.take_errors() == []
            service.stop()
            with self.open(namespace) as y:
                assert y[:].tobytes() == content

    # Failures.

    def test_failure_reaches_the_call(self, tmp_path: Path) -> None:
        """With errno and status; it is told once, and what was read before stays good."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as namespace, self.open(namespace) as x:
            assert x[:9].tobytes() == content[:9]
            number = self.fail(namespace)
            if number is None:
                return
            error = assert_raises(StorageError, lambda: x[self.nbytes // 2 :])
            assert isinstance(error, StorageError)
            assert error.errno == number
            assert error.status
            assert x[:9].tobytes() == content[:9]
