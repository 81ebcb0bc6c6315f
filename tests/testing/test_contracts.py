"""Every storage keeps the contract of storages, and the controller its own over each of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flashwarp import _native
from flashwarp.errors import PathError
from flashwarp.storage import Concatenated, File, Memory, Replicated, Storage, Striped
from flashwarp.testing import ControllerContract, Faulty, Host, Recording, StorageContract

STRIPE = 4096


def file_of(path: Path, content: bytes, writable: bool, *, offset: int = 0, o_direct: bool) -> File:
    """A file storage of `content`, which lies `offset` bytes from the file's beginning."""
    path.write_bytes(b"\xee" * offset + content + b"\xee" * offset)
    try:
        return File(path, offset, len(content), writable=writable, o_direct=o_direct)
    except PathError as error:
        pytest.skip(str(error))


def striped_of(
    folder: Path, content: bytes, writable: bool, *, o_direct: bool, count: int = 3
) -> Striped:
    stripes = [content[i : i + STRIPE] for i in range(0, len(content), STRIPE)]
    rows = -(-len(stripes) // count)
    members = []
    for i in range(count):
        held = b"".join(stripes[i::count]).ljust(rows * STRIPE, b"\xee")
        members.append(
            file_of(folder / f"s{i}", held, writable, offset=512 * (i % 2), o_direct=o_direct)
        )
    return Striped(members, STRIPE, len(content))


class Backend:
    """What the backends below have in common."""

    offset: ClassVar[int] = 0
    o_direct: ClassVar[bool] = False


class MemoryBackend(Backend):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        self.memory = bytearray(content)
        return Memory(self.memory, writable)


class FileBackend(Backend):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        return file_of(folder / "f", content, writable, offset=self.offset, o_direct=self.o_direct)


class StripedBackend(Backend):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        return striped_of(folder, content, writable, o_direct=self.o_direct)


class ConcatenatedBackend(Backend):
    """Three parts of uneven lengths, which end inside of blocks and of commands."""

    def ends(self, nbytes: int) -> list[int]:
        return [nbytes // 3 + 1, nbytes // 3 + 702, nbytes]

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        begin, members = 0, []
        for i, end in enumerate(self.ends(len(content))):
            part = content[begin:end]
            members.append(
                file_of(folder / f"c{i}", part, writable, offset=96 * i, o_direct=self.o_direct)
            )
            begin = end
        return Concatenated(members)


class ReplicatedBackend(Backend):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        return Replicated(
            [file_of(folder / name, content, writable, o_direct=self.o_direct) for name in "ab"]
        )


class FaultyBackend(FileBackend):
    """A file whose faults are those that nobody above may notice."""

    plan: ClassVar[str] = ""
    blocking: ClassVar[bool] = False

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        return Faulty(super().make(folder, content, writable), self.plan, blocking=self.blocking)


class RecordingBackend(MemoryBackend):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        return Recording(super().make(folder, content, writable))


# Storages.


class TestMemory(MemoryBackend, StorageContract):
    def held(self, folder: Path) -> bytes:
        return bytes(self.memory)


class TestFile(FileBackend, StorageContract):
    def held(self, folder: Path) -> bytes:
        whole = (folder / "f").read_bytes()
        head, tail = whole[: self.offset], whole[self.offset + self.nbytes :]
        assert head == tail == b"\xee" * self.offset, "bytes beside the range were written"
        return whole[self.offset : self.offset + self.nbytes]

    def damage(self, folder: Path, storage: Storage) -> tuple[int, int]:
        os.truncate(folder / "f", self.offset + self.nbytes // 2)
        return errno.ENODATA, self.offset


class TestFileAtAnOffset(TestFile):
    offset = 128


class TestDirectFile(TestFile):
    o_direct = True


class TestDirectFileAtAnOffset(TestFile):
    offset = 128
    o_direct = True


class TestStriped(StripedBackend, StorageContract):
    def damage(self, folder: Path, storage: Storage) -> tuple[int, int]:
        for i in range(3):
            os.truncate(folder / f"s{i}", 512 + self.nbytes // 2 // 3 // 512 * 512)
        return errno.ENODATA, 0


class TestStripedDirectFiles(TestStriped):
    o_direct = True


class TestConcatenated(ConcatenatedBackend, StorageContract):
    def damage(self, folder: Path, storage: Storage) -> tuple[int, int]:
        of_zero = 192 - self.ends(self.nbytes)[1]
        os.truncate(folder / "c2", self.nbytes // 2 + of_zero)
        return errno.ENODATA, of_zero


class TestConcatenatedDirectFiles(TestConcatenated):
    o_direct = True


class TestReplicated(ReplicatedBackend, StorageContract):
    def held(self, folder: Path) -> bytes:
        copies = {(folder / name).read_bytes() for name in "ab"}
        assert len(copies) == 1, "the replicas differ"
        return copies.pop()

    def damage(self, folder: Path, storage: Storage) -> tuple[int, int]:
        for name in "ab":
            os.truncate(folder / name, self.nbytes // 2)
        return errno.ENODATA, 0


class TestFaulty(FaultyBackend, StorageContract):
    def damage(self, folder: Path, storage: Storage) -> tuple[int, int]:
        assert isinstance(storage, Faulty)
        storage.inject(f"read eio bytes={self.nbytes // 2}-{self.nbytes}")
        return errno.EIO, 0


class TestFaultyWithHarmlessFaults(TestFaulty):
    plan = "any eintr p=0.2; any eagain p=0.2; read short p=0.2; write short p=0.2"


class TestRecording(RecordingBackend, StorageContract):
    def held(self, folder: Path) -> bytes:
        return bytes(self.memory)


class TestRecordingOfFaulty(RecordingBackend, StorageContract):
    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        self.memory = bytearray(content)
        self.faulty = Faulty(Memory(self.memory, writable))
        return Recording(self.faulty)

    def damage(self, folder: Path, storage: Storage) -> tuple[int, int]:
        self.faulty.inject(f"read enodata bytes={self.nbytes // 2}-{self.nbytes}")
        return errno.ENODATA, 0


# The software controller.


class Engines:
    """Chooses the I/O engine of the controllers that a contract makes."""

    engine: ClassVar[str] = "io_uring"

    def host(self, storage: Storage, **options: Any) -> Host:
        with pytest.MonkeyPatch.context() as environment:
            if self.engine == "threads":
                environment.setenv("FLASHWARP_IO_ENGINE", "threads")
            else:
                environment.delenv("FLASHWARP_IO_ENGINE", raising=False)
                available, reason = _native.io_uring_available()
                if not available:
                    pytest.skip(reason)
            host = Host(storage.native, **options)
        told = host.controller.describe()["engine"]
        assert told == "memory" or told.startswith(self.engine.removesuffix("s"))
        return host


class TestControllerOfMemory(MemoryBackend, ControllerContract):
    pass


class TestControllerOfFile(Engines, FileBackend, ControllerContract):
    pass


class TestControllerOfFileByThreads(TestControllerOfFile):
    offset = 128
    engine = "threads"


class TestControllerOfDirectFile(TestControllerOfFile):
    o_direct = True


class TestControllerOfDirectFileAtAnOffset(TestControllerOfFile):
    offset = 128
    o_direct = True


class TestControllerOfDirectFileByThreads(TestControllerOfDirectFile):
    engine = "threads"


class TestControllerOfStriped(Engines, StripedBackend, ControllerContract):
    pass


class TestControllerOfStripedDirectFiles(TestControllerOfStriped):
    o_direct = True


class TestControllerOfConcatenated(Engines, ConcatenatedBackend, ControllerContract):
    pass


class TestControllerOfConcatenatedDirectFiles(TestControllerOfConcatenated):
    o_direct = True


class TestControllerOfReplicated(Engines, ReplicatedBackend, ControllerContract):
    pass


class TestControllerOfFaulty(Engines, FaultyBackend, ControllerContract):
    pass


class TestControllerWithHarmlessFaults(TestControllerOfFaulty):
    """What a kernel may do to a transfer, none of which a host may see."""

    plan = (
        "seed=5; any delay=200us p=0.03; any eintr p=0.1; any eagain p=0.1; read short p=0.2; "
        "write short p=0.2"
    )


class TestControllerWithHarmlessFaultsPastThePageCache(TestControllerWithHarmlessFaults):
    o_direct = True
    offset = 128
    engine = "threads"


class TestControllerWithFaultsInCalls(TestControllerWithHarmlessFaults):
    """The same where every transfer is a blocking call."""

    blocking = True


class TestControllerOfRecording(RecordingBackend, ControllerContract):
    pass


# The contracts notice who breaks them. Not named Test..., so that pytest leaves them alone.


class Greedy(Memory):
    def write(self, offset: int, data: Any) -> None:
        extra = int(0 < offset + len(data) < self.nbytes)
        super().write(offset, bytes(data) + b"!" * extra)


class Lenient(Memory):
    def _check_range(self, offset: int, nbytes: int) -> None:
        pass


class Zeroing(Memory):
    """Gives zeros for what it has lost."""

    lost = False

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(nbytes) if self.lost else super().read(offset, nbytes)


class Reopening(Memory):
    def close(self) -> None:
        pass


class BrokenMemory(StorageContract):
    kind: type[Memory] = Memory

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        return self.kind(bytearray(content), writable)

    def damage(self, folder: Path, storage: Storage) -> tuple[int, int] | None:
        storage.lost = True
        return errno.ENODATA, 0


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Greedy, "test_writes_any_range_and_nothing_else"),
        (Lenient, "test_bytes_outside_are_refused"),
        (Zeroing, "test_failure_names_its_place"),
        (Reopening, "test_closes_twice_and_is_refused_afterwards"),
    ],
)
def test_storage_contract_notices(kind: type[Memory], test: str, tmp_path: Path) -> None:
    suite = BrokenMemory()
    suite.kind = kind
    with pytest.raises(AssertionError):
        getattr(suite, test)(tmp_path)


@pytest.mark.parametrize("plan", ["read flip n=7", "write torn n=5", "read eio n=9", "flush eio"])
@pytest.mark.parametrize("blocking", [False, True])
def test_controller_contract_notices(plan: str, blocking: bool, tmp_path: Path) -> None:
    class Failing(FaultyBackend, ControllerContract):
        pass

    suite = Failing()
    suite.plan, suite.blocking = plan, blocking
    with pytest.raises(AssertionError):
        suite.test_transfers_of_every_size_and_place(tmp_path)
