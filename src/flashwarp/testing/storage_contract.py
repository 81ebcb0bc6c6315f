"""What every storage must do, as tests: one subclass a backend."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    FlashwarpError,
    ForkError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.storage import Storage


def random_content(nbytes: int, seed: int = 0) -> bytes:
    """Bytes without a pattern."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def assert_raises(kind: type[BaseException], act: Callable[[], Any]) -> BaseException:
    """Return the error that `act` raises; AssertionError when it is of another kind."""
    try:
        act()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{kind.__name__} was expected, not {error!r}") from error
    raise AssertionError(f"{kind.__name__} was not raised")


class StorageContract(ABC):
    """Tests of a storage; pytest runs those of a subclass.

    A subclass says how the storage is made, and if it can, how others see its bytes and how it is
    damaged.

    Examples
    --------
    >>> from flashwarp.storage import Memory
    >>> from flashwarp.testing import StorageContract
    >>> class TestMemory(StorageContract):
    ...     def make(self, folder, content, writable=True):
    ...         return Memory(bytearray(content), writable)
    """

    nbytes: ClassVar[int] = 3 * 16384 + 777
    """Size of the storages: over several pages, and with a partial last LBA."""

    @abstractmethod
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        """Make a storage that holds `content`; `folder` is empty and goes after the test."""

    def held(self, folder: Path) -> bytes | None:
        """Return what another process would find; None when none could."""
        del folder
        return None

    def damage(self, folder: Path, storage: Storage) -> tuple[int, int] | None:
        """Make reads of the second half fail.

        Returns the errno that they must raise, and the offset in the storage's file of byte 0 of
        the storage; None when this storage cannot be damaged.
        """
        del folder, storage
        return None

    # Transfers.

    def test_reads_any_range(self, tmp_path: Path) -> None:
        """Every alignment and length, the ends included, gives exactly those bytes."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as storage:
            assert storage.nbytes == self.nbytes
            for start, stop in self._ranges(1):
                assert storage.read(start, stop - start) == content[start:stop], (start, stop)

    def test_writes_any_range_and_nothing_else(self, tmp_path: Path) -> None:
        """After each write all bytes are as written last."""
        content = bytearray(random_content(self.nbytes))
        with self.make(tmp_path, bytes(content)) as storage:
            for turn, (start, stop) in enumerate(self._ranges(2)):
                data = random_content(stop - start, turn)
                storage.write(start, data)
                content[start:stop] = data
                assert storage.read(0, self.nbytes) == content, (start, stop)
            storage.flush()
            held = self.held(tmp_path)
        assert held is None or held == content

    def test_writes_any_buffer(self, tmp_path: Path) -> None:
        """Contiguous buffers of every kind; others are refused before anything is written."""
        with self.make(tmp_path, bytes(self.nbytes)) as storage:
            numbers = np.arange(1000, dtype=np.int32)
            for buffer in (numbers, memoryview(numbers.tobytes()), bytearray(numbers.tobytes())):
                storage.write(3, buffer)
                assert storage.read(3, 4000) == numbers.tobytes()
                storage.write(3, bytes(4000))
            assert_raises(ArgumentError, lambda: storage.write(0, numbers[::2]))
            assert storage.read(0, self.nbytes) == bytes(self.nbytes)

    def test_requests_of_no_bytes(self, tmp_path: Path) -> None:
        """They succeed anywhere up to the end, and change nothing."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as storage:
            for offset in (0, 1, 4096, self.nbytes):
                assert storage.read(offset, 0) == b""
                storage.write(offset, b"")
                storage.discard(offset, 0)
                storage.write_zeroes(offset, 0)
            assert storage.read(0, self.nbytes) == content

    def test_bytes_outside_are_refused(self, tmp_path: Path) -> None:
        """A request that ends beyond the storage touches nothing, not even its part inside."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as storage:
            for offset, nbytes in (
                (self.nbytes, 1),
                (self.nbytes - 1, 2),
                (0, self.nbytes + 1),
                (1 << 62, 1),
                (-1, 1),
            ):
                for act in (storage.read, storage.discard, storage.write_zeroes):
                    assert_raises(BoundsError, functools.partial(act, offset, nbytes))
                data = bytes(nbytes)
                assert_raises(BoundsError, functools.partial(storage.write, offset, data))
            # The same below Python, where the controller calls.
            native = storage.native
            for offset, nbytes in ((self.nbytes, 1), ((1 << 64) - 1, 2), (1, (1 << 64) - 1)):
                for refused in (native.write_zeroes, native.discard, native.read):
                    assert_raises(ValueError, functools.partial(refused, offset, nbytes))
            assert_raises(ValueError, lambda: storage.native.write(self.nbytes - 1, b"ab"))
            assert storage.read(0, self.nbytes) == content

    def test_discard_and_write_zeroes_clear_their_range_only(self, tmp_path: Path) -> None:
        """Zeros are zeros; discarded bytes are zeros or as before."""
        content = bytearray(random_content(self.nbytes))
        with self.make(tmp_path, bytes(content)) as storage:
            for start, stop in self._ranges(3):
                storage.write_zeroes(start, stop - start)
                content[start:stop] = bytes(stop - start)
                assert storage.read(0, self.nbytes) == content
            content[:] = random_content(self.nbytes, 4)
            storage.write(0, bytes(content))
            for start, stop in self._ranges(4):
                before = bytes(content[start:stop])
                storage.discard(start, stop - start)
                after = storage.read(start, stop - start)
                assert after in (before, bytes(stop - start)) or all(
                    new in (0, old) for new, old in zip(after, before, strict=True)
                )
                content[start:stop] = after
                assert storage.read(0, self.nbytes) == content

    def _ranges(self, seed: int) -> list[tuple[int, int]]:
        """Ranges around every boundary that a storage may treat specially, and random ones."""
        chooser = np.random.default_rng(seed)
        edges = [0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, 16384, 20000]
        edges += [self.nbytes - 778, self.nbytes - 777, self.nbytes - 1, self.nbytes]
        pairs = [(0, self.nbytes), (0, 1), (self.nbytes - 1, self.nbytes)]
        pairs += [(a, b) for a in edges for b in edges if a < b and chooser.random() < 0.3]
        for _ in range(20):
            start, stop = sorted(int(n) for n in chooser.integers(0, self.nbytes + 1, 2))
            pairs.append((start, stop))
        return pairs

    # Users.

    def test_threads_share_a_storage(self, tmp_path: Path) -> None:
        """Each writes and reads its own pages, while all read everything."""
        failures: list[BaseException] = []
        part = 8192
        count = self.nbytes // part

        def use(storage: Storage, number: int) -> None:
            try:
                for turn in range(10):
                    data = random_content(part, 100 * number + turn)
                    storage.write(number * part, data)
                    storage.flush()
                    assert storage.read(number * part, part) == data
                    assert len(storage.read(0, self.nbytes)) == self.nbytes
            except BaseException as error:  # raised below, in the caller's thread
                failures.append(error)

        with self.make(tmp_path, bytes(self.nbytes)) as storage:
            threads = [threading.Thread(target=use, args=(storage, i)) for i in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]
            expected = b"".join(random_content(part, 100 * i + 9) for i in range(count))
            assert storage.read(0, count * part) == expected

    def test_forked_child_is_refused(self, tmp_path: Path) -> None:
        """A child raises ForkError, the parent goes on."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as storage:
            child = _fork()
            if child == 0:
                _exit_with(_refuses_in_child(storage))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == 0, f"operation {status} of read, write, flush was not refused"
            assert storage.read(0, self.nbytes) == content

    # Refusals, failures, and the end.

    def test_read_only_storage_refuses_changes(self, tmp_path: Path) -> None:
        """Whatever would change a byte raises ReadOnlyError; flush has nothing to do."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content, writable=False) as storage:
            assert not storage.writable
            for act in (
                lambda: storage.write(0, b"x"),
                lambda: storage.discard(0, 1),
                lambda: storage.write_zeroes(0, 1),
            ):
                assert_raises(ReadOnlyError, act)
            for native_act in (
                lambda: storage.native.write(0, b"x"),
                lambda: storage.native.discard(0, 1),
                lambda: storage.native.write_zeroes(0, 1),
            ):
                assert_raises(OSError, native_act)
            storage.flush()
            assert storage.read(0, self.nbytes) == content

    def test_failure_names_its_place(self, tmp_path: Path) -> None:
        """A failed read carries errno, path and offset; what is not damaged can be read."""
        content = random_content(self.nbytes)
        with self.make(tmp_path, content) as storage:
            expected = self.damage(tmp_path, storage)
            if expected is None:
                import pytest

                pytest.skip("this storage has no way to be damaged")
            number, file_offset = expected
            start = self.nbytes - 4096
            error = assert_raises(StorageError, lambda: storage.read(start, 4096))
            assert isinstance(error, StorageError)
            assert error.errno == number
            assert error.filename, "a path, or what stands for one"
            assert error.offset is not None
            assert error.offset <= start + file_offset < error.offset + self.nbytes
            # Never fewer bytes, nor zeros for those that are lost.
            middle = self.nbytes // 2 - 2048
            assert_raises(StorageError, lambda: storage.read(middle, 4096))
            assert storage.read(0, 4096) == content[:4096]

    def test_closes_twice_and_is_refused_afterwards(self, tmp_path: Path) -> None:
        """After close every use raises ClosedError, whatever else is wrong with it."""
        storage = self.make(tmp_path, bytes(self.nbytes))
        storage.close()
        storage.close()
        assert storage.closed
        for act in (
            lambda: storage.read(0, 1),
            lambda: storage.write(0, b"x"),
            lambda: storage.discard(0, 1),
            lambda: storage.write_zeroes(0, 1),
            lambda: storage.flush(),
            lambda: storage.describe(),
            lambda: storage.native,
        ):
            assert_raises(ClosedError, act)
        assert str(self.nbytes) in repr(storage)

    def test_describes_itself(self, tmp_path: Path) -> None:
        """Kind, size and whether it is writable, for `explain` and `flashwarp doctor`."""
        with self.make(tmp_path, bytes(self.nbytes)) as storage:
            facts = storage.describe()
            assert isinstance(facts["kind"], str)
            assert facts["nbytes"] == self.nbytes
            assert facts["writable"] is True
            assert storage.path is None or os.path.exists(storage.path)


def _fork() -> int:
    # The library is made for being forked beside threads: children are refused, not supported.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _refuses_in_child(storage: Storage) -> int:
    """0, or the number of the operation that was not refused."""
    acts: list[Callable[[], Any]] = [
        lambda: storage.read(0, 1),
        lambda: storage.write(0, b"x"),
        lambda: storage.flush(),
    ]
    for number, act in enumerate(acts, 1):
        try:
            act()
        except ForkError:
            continue
        except (FlashwarpError, OSError):
            return number
        return number
    return 0


def _exit_with(status: int) -> None:
    # Without the interpreter's end, which belongs to the parent.
    os._exit(status)
