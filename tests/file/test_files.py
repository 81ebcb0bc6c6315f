"""`fw.File`: the host and kernels read and write one file, of any kind, and its end is right."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    CopyError,
    DtypeError,
    ExistingFileError,
    FileFormatError,
    ForkError,
    LockedError,
    MissingFileError,
    PathError,
    ReadOnlyError,
    RouteError,
    StorageError,
)

CAPACITY = 200_000
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fixed": {"format": "gvdk"},
    "sparse": {"format": "gvdk", "preallocate": False},
}
SOURCE = """
#include "flashwarp/file.cuh"

// Appends the numbers below `count`, in any order.
FW_KERNEL log(fw::file f, uint64_t count, uint64_t* failed) {
  for (uint64_t i = fw::base::thread_index(); i < count; i += fw::base::thread_count()) {
    const uint32_t number = uint32_t(i);
    if (fw::append(f, &number, sizeof number) != sizeof number) failed[0] = 1;
  }
}
"""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    with fw.device.CpuDevice(2) if request.param == "cpu" else fw.device.CudaDevice(0) as made:
        yield made


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


@pytest.fixture
def options(device: Any) -> dict[str, Any]:
    return {"device": device, "cache": "64 KiB"}


def data_of(path: Path, device: Any) -> bytes:
    with fw.File.open(path, device=device) as f:
        return f.read(0, CAPACITY + 1)


def test_kernels_and_the_host_see_one_file(
    tmp_path: Path, kind: dict[str, Any], options: dict[str, Any], device: Any
) -> None:
    program = fw.compile(SOURCE, device)
    failed = device.allocate(8)
    device.upload(failed.address, bytes(8))
    path = tmp_path / "f"
    with fw.File.create(path, 0, capacity=CAPACITY, **kind, **options) as f:
        f.append(np.array([1000, 1001], np.uint32))
        program["log"](f, 500, failed, warps=8)
        assert f.size == 8 + 500 * 4
        f.append(np.array([1002], np.uint32))
        numbers = np.frombuffer(f.read(0, CAPACITY), np.uint32)
        assert numbers[[0, 1, -1]].tolist() == [1000, 1001, 1002]
        assert sorted(numbers[2:-1]) == list(range(500))
        f.flush()
        program["log"](f, 7, failed, warps=8)
    assert len(data_of(path, device)) == 12 + 507 * 4
    assert not np.frombuffer(device.download(failed.address, 8), np.uint64)[0]


@pytest.mark.parametrize("dtype", ["f4", "i8", "u1", "c16", "?"])
def test_tensors_of_any_dtype(tmp_path: Path, options: dict[str, Any], dtype: str) -> None:
    values = np.arange(60).reshape(3, 4, 5).astype(dtype)
    with fw.File.create(tmp_path / "f", 0, capacity=CAPACITY, **options) as f:
        f.write_from(values, 3)
        back = np.empty_like(values)
        assert f.read_into(back, 3) == values.nbytes
        np.testing.assert_array_equal(back, values)
        writes = [f.write_from_async(values, 5000 * i) for i in range(1, 5)]
        for write in writes:
            write.result()
        read = f.read_into_async(back[:2], 10_000)
        read.result()
        np.testing.assert_array_equal(back[:2], values[:2])
        assert f.size == 20_000 + values.nbytes


def test_tensors_of_torch(tmp_path: Path, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    place = "cpu" if options["device"].kind == "cpu" else "cuda"
    values = torch.arange(5000, dtype=torch.bfloat16, device=place).reshape(50, 100)
    with fw.File.create(tmp_path / "f", 0, capacity=CAPACITY, **options) as f:
        f.write_from(values, 1)
        back = torch.zeros_like(values)
        assert f.read_into(back, 1) == 10_000
        assert torch.equal(back, values)
        one = back.zero_()[7:8, 99::2]  # contiguous, with strides of others
        assert f.read_into(one, 1 + 2 * 799) == 2
        assert back[7, 99] == values[7, 99]
        with pytest.raises(ArgumentError, match="not contiguous"):
            f.read_into(back.t(), 0)


def test_a_file_grows(tmp_path: Path, options: dict[str, Any]) -> None:
    for name, kind in KINDS.items():
        path = tmp_path / name
        with fw.File.create(path, 10, **kind, **options) as f:
            f.write_from(b"0123456789", 0)
            with pytest.raises(BoundsError, match="extend it"):
                f.append(bytes(5000))
            if name == "sparse":
                with pytest.raises(ArgumentError, match="sparse image"):
                    f.extend(CAPACITY)
                continue
            f.extend(CAPACITY)
            f.append(b"x" * 5000)
            assert f.read(8, 4) == b"89xx"
        assert data_of(path, options["device"]) == b"0123456789" + b"x" * 5000


def test_files_are_opened_as_they_are(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "any.npy"
    np.save(path, np.arange(100))
    before = path.read_bytes()
    with fw.File.open(path, **options) as f:
        assert (f.size, f.capacity) == (len(before), len(before))
        assert f.read(0, 10_000) == before
        assert f.image is None
        with f.as_array("i8", offset=128) as x:
            assert x[:].tolist() == list(range(100))
        with pytest.raises(ReadOnlyError, match="opened for reading"):
            f.append(b"x")
        with pytest.raises(FileFormatError, match="ordinary file"):
            f.verify()
    with fw.File.open(path, "r+", capacity="1 MiB", **options) as f:
        f.append(b"tail")
    assert path.read_bytes() == before + b"tail"
    (tmp_path / "empty").touch()
    with fw.File.open(tmp_path / "empty", **options) as f:
        assert f.read(0, 5) == b""
        assert f.read_into(np.zeros(3), 0) == 0


def test_images_tell_what_they_are(tmp_path: Path, options: dict[str, Any]) -> None:
    key = b"k" * 32
    path = tmp_path / "f.gvdk"
    with fw.File.create(path, 0, capacity=CAPACITY, format="gvdk", key=key, **options) as f:
        f.append(np.arange(300, dtype="i4"))
        assert f.verify().clean
        f.export(tmp_path / "plain")
        with pytest.raises(ReadOnlyError, match="would not see"):
            f.as_array("i4")
    assert (tmp_path / "plain").read_bytes() == np.arange(300, dtype="i4").tobytes()
    with pytest.raises(FileFormatError, match="needs its key"):
        fw.File.open(path, **options)
    with fw.File.open(path, key=key, **options) as f:
        assert f.recovered is None
        with f.as_array("i4", offset=40) as x:
            assert x[:].tolist() == list(range(10, 300))
    fw.File.import_(tmp_path / "plain", tmp_path / "g.gvdk")
    assert fw.File.repair(tmp_path / "g.gvdk").clean
    with fw.File.open(tmp_path / "g.gvdk", **options) as f:
        assert np.frombuffer(f.read(0, 1200), "i4").tolist() == list(range(300))
        with pytest.raises(RouteError, match="not in one piece"):
            f.as_array("i4")


def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "f"
    with pytest.raises(MissingFileError):
        fw.File.open(path, **options)
    with pytest.raises(ArgumentError, match="made by"):
        fw.File(path)
    with pytest.raises(ArgumentError, match='format="gvdk"'):
        fw.File.create(path, 1, key=b"k" * 32, **options)
    with fw.File.create(path, 100, **options) as f:
        with pytest.raises(ExistingFileError):
            fw.File.create(path, 1, **options)
        with pytest.raises(LockedError):
            fw.File.open(path, "r+", **options)
        with pytest.raises(LockedError):
            fw.File.open(path, "r+", capacity=1000, **options)
        for tensor, error in [
            ([1, 2], DtypeError),
            (np.array([None, 1]), DtypeError),
            (np.zeros((4, 4))[:, ::2], ArgumentError),
        ]:
            with pytest.raises(error):
                f.write_from(tensor, 0)
        for offset in (-1, 1 << 65, 1.5):
            with pytest.raises(ArgumentError, match="offset"):
                f.read_into(np.zeros(1), offset)
        with pytest.raises(ArgumentError, match="size=101"):
            f.truncate(101)
        with pytest.raises(ArgumentError, match="capacity=50"):
            f.extend(50)
        with pytest.raises(BoundsError):
            f.read_into_async(np.zeros(13), 0)
        with pytest.raises(CopyError):
            pickle.dumps(f)
    assert path.stat().st_size == 100
    for act in (f.flush, lambda: f.read(0, 1), lambda: f.size, lambda: f.append(b"x")):
        with pytest.raises(ClosedError):
            act()
    f.close()
    with pytest.raises(ArgumentError, match="mode='r\\+'"):
        fw.File.open(path, capacity=1000, **options)
    with pytest.raises(ArgumentError, match="capacity"):
        fw.File.open(path, "r+", capacity=10, **options)
    with pytest.raises(PathError):
        fw.File.open(tmp_path, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_no_permission_is_said_by_name(
    kind: str, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    fw.File.create(path, 0, capacity="64 KiB", **KINDS[kind], **options).close()
    path.chmod(0o444)
    if os.geteuid() == 0:  # root may write everything: ask as somebody else would be answered
        monkeypatch.setattr(os, "access", lambda _, how: how != os.W_OK)
    with pytest.raises(PathError, match="not writable") as caught:
        fw.File.open(path, "r+", **options)
    assert caught.value.errno == errno.EACCES
    assert caught.value.filename == str(path)
    fw.File.open(path, **options).close()
    path.chmod(0)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PathError, match="not readable") as caught:
        fw.File.open(path, **options)
    assert caught.value.errno == errno.EACCES


def test_a_forked_child_leaves_it_to_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "f"
    f = fw.File.create(path, 0, capacity=CAPACITY, device="cpu")
    f.append(b"parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            f.append(b"child")
        except ForkError:
            code = 0
        f.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    f.close()
    assert path.read_bytes() == b"parent"


def test_a_file_that_is_lost_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    f = fw.File.create(path, 0, capacity=CAPACITY, device="cpu")
    f.append(b"kept")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del f
        gc.collect()
    assert any("was not closed" in str(each.message) for each in seen)
    assert path.read_bytes() == b"kept"


LEFT_OPEN = """
import sys
import flashwarp as fw
f = fw.File.create(sys.argv[1], 0, capacity=200_000, device="cpu", **eval(sys.argv[2]))
f.append(b"kept")
"""
KILLED = """
import os, signal, sys
import flashwarp as fw
f = fw.File.create(sys.argv[1], 0, capacity=200_000, device="cpu", **eval(sys.argv[2]))
f.append(b"synced")
f.flush()
f.append(b"not synced")
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(program: str, path: Path, kind: dict[str, Any]) -> int:
    arguments = [sys.executable, "-c", program, str(path), repr(kind)]
    return subprocess.run(arguments, check=False, timeout=100).returncode


def test_a_file_that_is_open_at_the_exit_keeps_all(tmp_path: Path, kind: dict[str, Any]) -> None:
    assert run(LEFT_OPEN, tmp_path / "f", kind) == 0
    assert data_of(tmp_path / "f", "cpu") == b"kept"


def test_a_kill_keeps_what_was_synced(tmp_path: Path, kind: dict[str, Any]) -> None:
    path = tmp_path / "f"
    assert run(KILLED, path, kind) == -signal.SIGKILL
    data = data_of(path, "cpu")
    assert data.startswith(b"synced")
    if kind:  # an image knows its end; an ordinary file is still as long as its capacity
        assert data == b"synced"
        with fw.File.open(path, "r+", device="cpu") as f:
            assert f.verify().clean
            f.append(b"!")
            assert f.read(0, 100) == b"synced!"
    else:
        assert len(data) == CAPACITY


def test_processes_share_a_cache_of_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(250)) * 400)
    name = f"files-{os.getpid()}"
    other = f"""
import sys
import flashwarp as fw
with fw.File.open({str(path)!r}, device="cpu", shared={name!r}) as f:
    sys.stdout.write(str(f.read(999, 3) == bytes([249, 0, 1])))
    sys.stdout.write(str(f.array.cache.owned))
"""
    with fw.File.open(path, device="cpu", shared=name, cache="1 MiB") as f:
        assert f.read(0, 100_000) == path.read_bytes()
        found = subprocess.run(
            [sys.executable, "-c", other], check=True, timeout=100, capture_output=True, text=True
        )
        assert found.stdout == "TrueFalse"


def test_a_full_disk_loses_nothing_of_a_sparse_image(small_disk: Path) -> None:
    filler, path = small_disk / "filler", small_disk / "f"
    filler.write_bytes(bytes(600 << 10))
    data = np.random.default_rng(1).integers(1, 256, 600_000, dtype=np.uint8)
    options: dict[str, Any] = {"device": "cpu", "cache": "1 MiB"}
    with fw.File.create(path, 0, capacity="4 MiB", **KINDS["sparse"], **options) as f:
        f.append(data[:100_000])
        f.flush()
        f.append(data[100_000:])
        with pytest.raises(StorageError) as raised:
            f.flush()
        assert raised.value.errno == errno.ENOSPC
        filler.unlink()
        f.flush()
        assert f.verify().clean
    with fw.File.open(path, device="cpu") as f:
        assert f.read(0, 1 << 20) == data.tobytes()


def test_a_full_disk_takes_no_new_file(small_disk: Path) -> None:
    for kind in (KINDS["plain"], KINDS["fixed"]):
        with pytest.raises(PathError) as raised:
            fw.File.create(small_disk / "f", "3 MiB", **kind, device="cpu")
        assert raised.value.errno == errno.ENOSPC
        assert not any(small_disk.iterdir())
