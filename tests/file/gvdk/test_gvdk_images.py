"""Images hold what was written, refuse what they cannot do, and say so."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import flashwarp as fw
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    ExistingFileError,
    FileFormatError,
    LockedError,
    MissingFileError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.file.gvdk import DamagedImageError, Gvdk, is_gvdk
from flashwarp.file.gvdk.tables import Disk
from flashwarp.storage import Storage, Striped

CAPACITY = 96 << 10
KEY = b"0123456789abcdef"


@pytest.fixture(params=[True, False, "zeros"], ids=["fixed", "sparse", "zeros"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "image.gvdk"
    Gvdk.create(path, 10_000, capacity=CAPACITY, preallocate=request.param).close()
    return path


class Images(RuleBasedStateMachine):
    """An image beside the bytes that it must hold."""

    folder: Path
    number = 0

    @initialize(
        preallocate=st.sampled_from([True, False]),
        block=st.sampled_from([4096, 8192, 65536]),
        key=st.sampled_from([None, KEY]),
    )
    def make(self, preallocate: bool, block: int, key: bytes | None) -> None:
        Images.number += 1
        self.path = self.folder / f"{Images.number}.gvdk"
        self.key = key
        self.image = Gvdk.create(
            self.path, 1000, block=block, capacity=CAPACITY, preallocate=preallocate, key=key
        )
        self.size = 1000
        self.model = bytearray(self.image.capacity)

    @rule(begin=st.integers(0, CAPACITY - 1), data=st.binary(min_size=1, max_size=20_000))
    def write(self, begin: int, data: bytes) -> None:
        data = data[: CAPACITY - begin]
        self.image.write(begin, data)
        self.model[begin : begin + len(data)] = data

    @rule(begin=st.integers(0, CAPACITY - 1), nbytes=st.integers(1, CAPACITY))
    def discard(self, begin: int, nbytes: int) -> None:
        nbytes = min(nbytes, CAPACITY - begin)
        self.image.discard(begin, nbytes)
        self.model[begin : begin + nbytes] = bytes(nbytes)

    @rule(size=st.integers(0, CAPACITY))
    def resize(self, size: int) -> None:
        self.image.resize(size)
        if size < self.size:
            self.model[size : self.size] = bytes(self.size - size)
        self.size = size

    @rule()
    def flush(self) -> None:
        self.image.flush()

    @rule(writable=st.booleans())
    def reopen(self, writable: bool) -> None:
        self.image.close()
        if not writable:
            with Gvdk(self.path, key=self.key) as image:
                assert image.read(0, image.capacity) == self.model
                assert image.verify().clean
        self.image = Gvdk(self.path, writable=True, key=self.key)
        assert self.image.recovered is None
        assert self.image.size == self.size

    @precondition(lambda self: self.image.type == "sparse")
    @invariant()
    def its_map_is_sound(self) -> None:
        assert self.image.verify().clean

    @invariant()
    def it_holds_what_was_written(self) -> None:
        assert self.image.read(0, self.image.capacity) == self.model

    def teardown(self) -> None:
        if hasattr(self, "image"):
            self.image.close()
            self.path.unlink()


def test_images_hold_what_was_written(tmp_path: Path) -> None:
    Images.folder = tmp_path
    case = Images.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
    case("runTest").runTest()


def test_a_full_sparse_image_whose_blocks_were_discarded_is_written_again(tmp_path: Path) -> None:
    with Gvdk.create(tmp_path / "image.gvdk", CAPACITY, preallocate=False) as image:
        for turn in range(4):
            data = bytes([turn + 1]) * CAPACITY
            image.write(0, data)
            assert image.read(0, CAPACITY) == data
            assert image.verify().clean
            image.discard(0, CAPACITY)


def test_its_data_is_where_it_says(tmp_path: Path) -> None:
    path = tmp_path / "image.gvdk"
    with Gvdk.create(path, 5000) as image:
        image.write(100, b"data")
        offset = image.data_offset
        assert image.type == "fixed"
    assert offset is not None
    assert path.read_bytes()[offset + 100 : offset + 104] == b"data"
    assert is_gvdk(path)
    with Gvdk.create(tmp_path / "sparse.gvdk", 5000, preallocate=False) as image:
        assert image.data_offset is None


def test_sixteen_terabytes_cost_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "large.gvdk"
    with Gvdk.create(path, "16 TiB", preallocate=False) as image:
        image.write((16 << 40) - 7, b"the end")
        image.write(5 << 40, b"x" * 5000)
    assert path.stat().st_blocks * 512 < 1 << 20
    with Gvdk(path) as image:
        assert image.read((16 << 40) - 7, 7) == b"the end"
        assert image.read((5 << 40) + 4999, 2) == b"x\0"
        assert image.verify().clean


def test_an_empty_image(tmp_path: Path) -> None:
    for preallocate in (True, False):
        path = tmp_path / f"{preallocate}.gvdk"
        with Gvdk.create(path, 0, preallocate=preallocate) as image:
            assert (image.size, image.capacity) == (0, 4096)
        with Gvdk(path) as image:
            image.export(tmp_path / f"{preallocate}.raw")
        assert (tmp_path / f"{preallocate}.raw").read_bytes() == b""


def test_arrays_on_it_are_durable_after_their_flush(made: Path) -> None:
    with Gvdk(made, writable=True) as image:
        with fw.open(image, "r+", dtype="i4", device="cpu") as x:
            x[:] = np.arange(len(x), dtype="i4")
            x.flush()
            generation = image.describe()["generation"]
            x[5] = -1
        assert generation > 0
    with Gvdk(made) as image, fw.open(image, dtype="i4", device="cpu") as x:
        assert x[4] == 4
        assert x[5] == -1
        assert x[:].sum() == np.arange(CAPACITY // 4).sum() - 6


def test_many_threads_write_it(made: Path) -> None:
    with Gvdk(made, writable=True) as image:

        def write(number: int) -> None:
            for place in range(number * 100, CAPACITY - 100, 800):
                image.write(place, bytes([number]) * 100)
                if place % 5600 == 0:
                    image.flush()

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert image.verify().clean
    with Gvdk(made) as image:
        found = np.frombuffer(image.read(0, CAPACITY // 800 * 800), np.uint8).reshape(-1, 8, 100)
        assert (found[:-1] == np.arange(8)[None, :, None]).all()


def test_what_one_exports_another_imports(made: Path, tmp_path: Path) -> None:
    data = np.random.default_rng(3).bytes(9000) + bytes(30_000) + b"end"
    with Gvdk(made, writable=True) as image:
        image.write(0, data)
        image.resize(len(data))
        image.export(tmp_path / "plain")
        with pytest.raises(ExistingFileError):
            image.export(tmp_path / "plain")
    assert (tmp_path / "plain").read_bytes() == data
    copy = tmp_path / "copy.gvdk"
    Gvdk.import_(tmp_path / "plain", copy, read_only=True, key=KEY)
    with Gvdk(copy, key=KEY) as image:
        assert image.size == len(data)
        assert image.read(0, len(data)) == data
    with pytest.raises(ReadOnlyError, match="the image is read-only"):
        Gvdk(copy, writable=True, key=KEY)
    with pytest.raises(ReadOnlyError):
        Gvdk.repair(copy, key=KEY)


def test_a_fixed_image_is_extended(tmp_path: Path) -> None:
    path = tmp_path / "image.gvdk"
    with Gvdk.create(path, 4096) as image:
        image.write(0, b"a" * 4096)
        with pytest.raises(ArgumentError, match="size=4097"):
            image.resize(4097)
    Gvdk.extend(path, "1 MiB")
    with Gvdk(path, writable=True) as image:
        image.resize(1 << 20)
        image.write((1 << 20) - 1, b"b")
        assert image.read(0, 1 << 20) == b"a" * 4096 + bytes((1 << 20) - 4097) + b"b"
    with pytest.raises(ArgumentError, match="capacity=4096"):
        Gvdk.extend(path, 4096)
    with Gvdk.create(tmp_path / "sparse", 4096, preallocate=False):
        pass
    with pytest.raises(ArgumentError, match="sparse"):
        Gvdk.extend(tmp_path / "sparse", "1 MiB")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"size": -1}, ArgumentError),
        ({"size": (16 << 40) + 1, "preallocate": False}, ArgumentError),
        ({"size": 1, "block": 5000}, ArgumentError),
        ({"size": 1, "block": 2048}, ArgumentError),
        ({"size": 1, "block": "4 MiB"}, ArgumentError),
        ({"size": 10_000, "capacity": 5000}, ArgumentError),
        ({"size": 1, "preallocate": "often"}, ArgumentError),
        ({"size": 1, "key": b"short"}, ArgumentError),
        ({"size": 1, "key": "0123456789abcdef"}, ArgumentError),
        ({"size": 1, "path": "/nowhere/at/all"}, MissingFileError),
    ],
)
def test_what_cannot_be_made_is_refused(
    options: dict, error: type[Exception], tmp_path: Path
) -> None:
    path = options.pop("path", tmp_path / "image.gvdk")
    with pytest.raises(error):
        Gvdk.create(path, **options)
    assert not any(tmp_path.iterdir())


def test_an_existing_file_is_not_replaced_unasked(made: Path) -> None:
    with pytest.raises(ExistingFileError):
        Gvdk.create(made, 1)
    Gvdk.create(made, 1, overwrite=True).close()
    with Gvdk(made) as image:
        assert image.size == 1


def test_use_that_cannot_be_is_refused(made: Path) -> None:
    with Gvdk(made) as image:
        with pytest.raises(ReadOnlyError):
            image.write(0, b"x")
        with pytest.raises(ReadOnlyError):
            image.resize(1)
        with pytest.raises(BoundsError):
            image.read(CAPACITY, 1)
    with pytest.raises(ClosedError):
        image.flush()
    with Gvdk(made, writable=True) as image:
        with pytest.raises(LockedError):
            Gvdk(made, writable=True)
        assert not image.closed
    with pytest.raises(FileFormatError, match="has no key"):
        Gvdk(made, key=KEY)


def test_a_key_is_needed_and_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "image.gvdk"
    Gvdk.create(path, 1, key=KEY).close()
    with pytest.raises(FileFormatError, match="needs its key"):
        Gvdk(path)
    with pytest.raises(DamagedImageError, match="the key is another one"):
        Gvdk(path, key=KEY + b"!")


def test_a_forked_child_cannot_use_it(made: Path) -> None:
    image = Gvdk(made, writable=True)
    image.write(0, b"parent")
    child = os.fork()
    if child == 0:
        seen = []
        for act in (image.flush, lambda: image.write(0, b"child"), lambda: image.read(0, 1)):
            try:
                act()
                seen.append("")
            except fw.errors.ForkError:
                seen.append("refused")
            except BaseException as error:
                seen.append(repr(error))
        image.close()
        os._exit(0 if seen[:2] == ["refused", "refused"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    image.close()
    with Gvdk(made) as image:
        assert image.read(0, 6) == b"parent"


def fails_once(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, when: Callable[[int], bool]
) -> None:
    """Let a call of `Disk` fail once, when it is the right one."""
    real = getattr(Disk, name)
    calls = 0

    def call(disk: Disk, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        if when(calls):
            raise OSError(number, os.strerror(number))
        return real(disk, *arguments)

    monkeypatch.setattr(Disk, name, call)


@pytest.mark.parametrize("place", range(1, 5))
def test_a_full_disk_loses_nothing(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "image.gvdk"
    with Gvdk.create(path, CAPACITY, preallocate=False) as image:
        image.write(0, b"a" * 9000)
        image.flush()
        image.write(20_000, b"b" * 9000)
        image.discard(0, 4096)
        with monkeypatch.context() as patch:
            fails_once(patch, "write", errno.ENOSPC, lambda call: call == place)
            with pytest.raises(StorageError) as raised:
                image.flush()
            assert raised.value.errno == errno.ENOSPC
        image.write(0, b"c" * 4096)
        image.flush()
        assert image.verify().clean
    with Gvdk(path) as image:
        assert image.read(0, 9000) == b"c" * 4096 + b"a" * (9000 - 4096)
        assert image.read(20_000, 9000) == b"b" * 9000


def test_marks_that_cannot_be_written_refuse_the_write(made: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Gvdk(made, writable=True) as image:
        # Of this process's files, whatever it writes meanwhile. The marks follow two headers.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 4096, before[1]))
        try:
            with pytest.raises(StorageError) as raised:
                image.write(0, b"x")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert raised.value.errno == errno.EFBIG
        assert image.read(0, 1) == b"\0"
        image.write(0, b"y")
    with Gvdk(made) as image:
        assert image.read(0, 1) == b"y"


def test_a_flush_of_an_array_on_several_images_syncs_each(tmp_path: Path) -> None:
    names = ["first.gvdk", "second.gvdk"]
    for name in names:
        Gvdk.create(tmp_path / name, 64 << 10, preallocate=False).close()
    images = [Gvdk(tmp_path / name, writable=True) for name in names]
    with Striped(images, "4 KiB") as both, fw.open(both, "r+", dtype="u1", device="cpu") as x:
        x[:] = 7
        x.flush()
        for name in names:
            shutil.copy(tmp_path / name, tmp_path / f"{name}.copy")
    for image in images:
        image.close()

    for name in names:
        with Gvdk(tmp_path / f"{name}.copy") as image:
            assert image.recovered is None
            assert image.read(0, 64 << 10) == b"\7" * (64 << 10)


def test_after_a_failed_sync_the_image_stays_at_the_last_one(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Gvdk(made, writable=True)
    image.write(0, b"old")
    image.flush()
    image.write(0, b"new")
    with monkeypatch.context() as patch:
        fails_once(patch, "flush", errno.EIO, lambda call: call == 1)
        with pytest.raises(StorageError):
            image.flush()
    for act in (image.flush, lambda: image.write(50_000, b"more")):
        with pytest.raises(StorageError):
            act()
    image.close()
    with Gvdk(made) as image:
        assert image.recovered is not None
        assert any(begin == 0 for begin, _ in image.recovered.ranges)


def test_storages_are_what_arrays_take(made: Path) -> None:
    with Gvdk(made) as image:
        assert isinstance(image, Storage)
        facts = image.describe()
    assert facts["kind"] == "GVDK image"
    assert facts["size"] == 10_000
