"""What goes wrong, on purpose: every mistake and every failure below is a typed error that says
what happened, and leaves the rest usable.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp._jit import cuda_api
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    CacheError,
    ClosedError,
    DeviceError,
    DeviceOutOfMemory,
    DtypeError,
    FileFormatError,
    FlashwarpError,
    MissingFileError,
    PathError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.storage import BlockDevice, File, Memory, Replicated, Storage, Striped


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 1000 rows of four int64, row i filled with i."""
    name = tmp_path / "rows.npy"
    np.save(name, np.repeat(np.arange(1000), 4).reshape(1000, 4))
    return name


@pytest.fixture
def x(path: Path) -> Iterator[fw.Array]:
    with fw.open(path, device="cpu", line=512, cache=2048) as array:
        yield array


# Memory that is not there.


def test_memory_for_a_storage_that_the_host_has_not() -> None:
    with pytest.raises(DeviceOutOfMemory, match=f"^{1 << 62} bytes"):
        Memory(1 << 62)


def test_copy_that_the_host_has_no_room_for() -> None:
    class Full:
        nbytes, writable = 8, False

        def read(self, offset: int, nbytes: int) -> bytes:
            raise MemoryError

    with pytest.raises(DeviceOutOfMemory, match="read: host memory has no room"):
        Storage(Full()).read(0, 8)


@pytest.mark.filterwarnings("ignore:.*the file is sparse")
def test_rows_that_the_host_has_no_room_for(tmp_path: Path) -> None:
    with fw.create(tmp_path / "sparse.npy", "i1", (1, 1 << 42), device="cpu", cache=1 << 16) as x:
        many = np.zeros(64, "i8")  # more than an address can say

        for refused in (
            lambda: x.gather(many),
            lambda: x.gather_async(many),
            lambda: x.scatter(many, 1),
            lambda: x.scatter_async(many, 1),
        ):
            with pytest.raises(DeviceOutOfMemory, match=f"^{1 << 48} bytes of host memory"):
                refused()


# Files that cannot be opened.


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError) as caught:
        fw.open(tmp_path / "absent.npy", device="cpu")
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.filename == str(tmp_path / "absent.npy")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="is a directory") as caught:
        fw.open(tmp_path, device="cpu")
    assert caught.value.errno == errno.EISDIR


def test_unreadable_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0)
    if os.geteuid() == 0:  # root may read everything: ask as somebody else would be answered
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PathError, match="not readable") as caught:
        fw.open(path, device="cpu")
    assert caught.value.errno == errno.EACCES


def test_file_that_may_not_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o444)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda _, how: how != os.W_OK)
    with pytest.raises(PathError, match='mode="r"'):
        fw.open(path, "r+", device="cpu")


def test_create_where_no_folder_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fw.create(tmp_path / "absent" / "x.npy", "f4", 4, device="cpu")


def test_file_is_no_block_device(path: Path) -> None:
    with pytest.raises(PathError, match="not a block device"):
        BlockDevice(path)


# Contents that do not fit what is said of them.


def test_truncated_npy(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FileFormatError, match=r"truncated.*needs 32128 bytes, the file has 32127"):
        fw.open(path, device="cpu")


def test_raw_file_with_a_rest(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(bytes(1001))
    with pytest.raises(FileFormatError, match=r"1001 bytes, no multiple of the 8"):
        fw.open(tmp_path / "raw", dtype="f8", device="cpu")
    with pytest.raises(FileFormatError, match=r"needs 1008 bytes.*has 1001"):
        fw.open(tmp_path / "raw", dtype="f8", shape=126, device="cpu")
    with pytest.raises(ArgumentError, match="give its dtype"):
        fw.open(tmp_path / "raw", device="cpu")
    (tmp_path / "rows.safetensors").touch()
    with pytest.raises(FileFormatError, match=r"rows\.safetensors is empty"):
        fw.open(tmp_path / "rows.safetensors", device="cpu")


def test_npy_that_contradicts_the_caller(path: Path) -> None:
    with pytest.raises(FileFormatError, match="holds int64, not float32"):
        fw.open(path, dtype="f4", device="cpu")
    with pytest.raises(FileFormatError, match="has shape"):
        fw.open(path, shape=(10, 4), device="cpu")


def test_python_objects(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}, []], dtype=object))
    with pytest.raises(DtypeError, match="Python objects"):
        fw.open(tmp_path / "x.npy", device="cpu")


def test_fortran_order(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.asfortranarray(np.ones((3, 4))))
    with pytest.raises(FileFormatError, match="Fortran"):
        fw.open(tmp_path / "x.npy", device="cpu")


def test_storage_smaller_than_the_array() -> None:
    with pytest.raises(ArgumentError, match="needs 800 bytes, the storage has 512"):
        fw.open(Memory(512), "r+", "f8", 100, device="cpu")


# Indices and values.


@pytest.mark.parametrize("index", [1000, -1001, 10**15, -(10**15)])
def test_index_out_of_bounds_is_named(x: fw.Array, index: int) -> None:
    for use in (lambda: x.gather([3, index, 5]), lambda: x[index], lambda: x.prefetch([index])):
        with pytest.raises(BoundsError, match=rf"index {index} is out of bounds.*1000"):
            use()
    assert x[999].tolist() == [999] * 4


def test_out_that_does_not_fit(x: fw.Array) -> None:
    for out in (np.empty((3, 4), np.int64), np.empty((2, 4, 1), np.int64)):
        with pytest.raises(ArgumentError, match="out has shape"):
            x.gather([1, 2], out=out)
    with pytest.raises(DtypeError, match="out has dtype"):
        x.gather([1, 2], out=np.empty((2, 4), np.float32))
    with pytest.raises(ArgumentError, match="contiguous"):
        x.gather([1, 2], out=np.empty((2, 8), np.int64)[:, ::2])
    read_only = np.empty((2, 4), np.int64)
    read_only.flags.writeable = False
    with pytest.raises(ArgumentError, match="writable"):
        x.gather([1, 2], out=read_only)


def test_store_to_a_read_only_array(x: fw.Array) -> None:
    with pytest.raises(ReadOnlyError, match=re.escape('mode="r+"')):
        x.scatter([0], 1)
    with pytest.raises(ReadOnlyError, match=re.escape('mode="r+"')):
        x[0] = 1
    x.flush()


# Arguments.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mode": "w"}, ArgumentError),
        ({"strict": "fast"}, ArgumentError),
        ({"line": 0}, CacheError),
        ({"line": 256}, CacheError),
        ({"line": 1000}, CacheError),
        ({"line": "4 MiB"}, CacheError),
        ({"line": "4 parsecs"}, ArgumentError),
        ({"cache": -1}, ArgumentError),
        ({"cache": "much"}, ArgumentError),
        ({"cache": 4 * 4096 - 1}, CacheError),
        ({"cache": 0}, CacheError),
        ({"device": "tpu"}, FlashwarpError),
        ({"shape": (2, 2)}, FileFormatError),
    ],
    ids=repr,
)
def test_arguments_that_cannot_work(
    path: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        fw.open(path, **{"device": "cpu", **options})


def test_cache_smaller_than_a_set_says_what_it_needs() -> None:
    with pytest.raises(CacheError, match="at least 65536 bytes"):
        fw.Cache(65535, 4096, 16, device="cpu")
    with pytest.raises(CacheError, match="ways=5"):
        fw.Cache("1 MiB", ways=5, device="cpu")


def test_cache_of_more_frames_than_kernels_number_is_refused() -> None:
    with pytest.raises(CacheError, match="longer lines"):
        fw.Cache("3 TiB", 512, device="cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"queue_pairs": 0},
        {"queue_pairs": 5000},
        {"depth": 1},
        {"depth": 3},
        {"depth": 1 << 16},
        {"threads": 0},
        {"route": "teleport"},
    ],
    ids=repr,
)
def test_controllers_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        fw.nvme.SoftwareController(**options)


def test_mapped_path_of_a_file_on_the_cpu_without_a_lease(path: Path) -> None:
    with path.open("r+b"), pytest.raises(ArgumentError, match="a lease: there is no lease on it"):
        fw.open(path, device="cpu", controller=fw.nvme.SoftwareController(route="in_place"))


def test_controller_has_settings_and_no_storage(path: Path) -> None:
    for storage in (Memory(4096), File(path), Striped([path])):
        with pytest.raises(ArgumentError, match=r"give .* to flashwarp\.open"):
            fw.nvme.SoftwareController(storage)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="storage"):
        fw.nvme.SoftwareController(storage=Memory(4096))  # type: ignore[call-arg]


def test_members_that_do_not_fit(path: Path) -> None:
    with pytest.raises(ArgumentError):
        Striped([])
    with pytest.raises(ArgumentError):
        Striped([Memory(8192)], stripe=1000)
    with pytest.raises(ArgumentError):
        Replicated([Memory(512), Memory(1024)])
    one = Memory(8192)
    for kind in (Striped, Replicated):
        for twice in ([one, one], [Striped([one], 4096), one]):
            with pytest.raises(ArgumentError, match="named twice"):
                kind(twice)
    with pytest.raises(ArgumentError, match="bytes"):
        File(path, offset=10**9)
    with pytest.raises(ReadOnlyError):
        Memory(b"constant", writable=True)


def test_no_gpu(path: Path) -> None:
    try:
        if cuda_api.device_count() > 0:
            pytest.skip("a GPU is here")
    except DeviceError:
        pass
    with pytest.raises(DeviceError):
        fw.open(path, device="cuda:0")


# Objects after their end.


def test_closed_array(path: Path) -> None:
    x = fw.open(path, "r+", device="cpu")
    x.close()
    x.close()
    assert x.closed
    assert "closed" in repr(x)
    for use in (
        lambda: x[0],
        lambda: x.gather([0]),
        lambda: x.scatter([0], 1),
        lambda: x.__setitem__(0, 1),
        lambda: x.prefetch([0]),
        lambda: x.flush(),
        lambda: x.explain(),
        lambda: x.stats,
        lambda: x.kernel_handle,
    ):
        with pytest.raises(ClosedError):
            use()


def test_closed_cache(path: Path) -> None:
    with fw.Cache("1 MiB", device="cpu") as shared:
        pass
    with pytest.raises(ClosedError):
        fw.open(path, cache=shared)


def test_array_left_open_warns(path: Path) -> None:
    x = fw.open(path, "r+", device="cpu")
    x[3] = 8
    with pytest.warns(ResourceWarning, match="was not closed"):
        del x
    assert np.load(path)[3].tolist() == [8] * 4


def test_array_lost_in_a_cycle_is_closed_while_its_memory_is_there(path: Path) -> None:
    """The garbage collector freed the frames first, and closing the array touched them."""
    for turn in range(3):
        x = fw.open(path, "r+", device="cpu")
        x[3] = turn
        cycle: list[Any] = [x]
        cycle.append(cycle)
        del x, cycle
        with pytest.warns(ResourceWarning, match="was not closed"):
            gc.collect()
        assert np.load(path)[3].tolist() == [turn] * 4


def _read_until_closed(x: fw.Array, endings: list[BaseException]) -> None:
    try:
        while True:
            assert x.gather(np.arange(0, 1000, 17))[2, 0] == 34
    except BaseException as error:  # judged by the test
        endings.append(error)


def test_close_while_others_read(path: Path) -> None:
    for _ in range(3):
        x = fw.open(path, "r+", device="cpu", line=512, cache=2048)
        endings: list[BaseException] = []
        threads = [threading.Thread(target=_read_until_closed, args=(x, endings)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        x.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert [type(error) for error in endings] == [ClosedError] * 2


# Storage that fails while in use.


@pytest.mark.parametrize("o_direct", [False, True])
@pytest.mark.parametrize("route", ["direct", "bounce"])
def test_file_truncated_while_in_use(path: Path, o_direct: bool, route: str) -> None:
    whole = path.read_bytes()
    controller = fw.nvme.SoftwareController(route=route)
    with fw.open(
        path, device="cpu", line=512, cache=2048, o_direct=o_direct, controller=controller
    ) as x:
        assert x[999].tolist() == [999] * 4
        x.drop_cache()
        os.truncate(path, 128 + 16000)
        with pytest.raises(StorageError, match="truncated") as caught:
            x.gather([0, 900])
        assert caught.value.errno == errno.ENODATA
        assert caught.value.filename == str(path)
        assert caught.value.offset is not None
        assert 128 + 16000 - 512 <= caught.value.offset <= 128 + 900 * 32
        # What is still there can be read, and all of it once it is back.
        assert x.gather([1, 400])[:, 0].tolist() == [1, 400]
        path.write_bytes(whole)
        assert x.gather([0, 900])[:, 0].tolist() == [0, 900]
        assert x.stats.errors > 0


def test_file_size_limit_while_in_use(tmp_path: Path) -> None:
    # The limit holds for the whole process, so that it needs one of its own.
    program = """
        import errno, resource, signal, sys
        import numpy as np
        import flashwarp as fw
        from flashwarp.errors import StorageError

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        x = fw.create(sys.argv[1], "u4", (100, 1024), device="cpu", line=4096, cache="1 MiB",
                      o_direct=False)
        x[3] = 7
        x.flush()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 50 * 4096, hard))
        x[80] = 9
        try:
            x.flush()
        except StorageError as error:
            assert error.errno == errno.EFBIG, error
            assert error.filename == sys.argv[1], error
            assert error.offset == 4096 + 80 * 4096, error
        else:
            raise SystemExit("no error")
        assert x[3, 0] == 7 and x[80, 0] == 9
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        x.close()
        y = np.load(sys.argv[1])
        assert y[80, 0] == 9 and y[3, 0] == 7 and y.sum() == 16 * 1024
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "x.npy")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_neighbour_that_cannot_be_written_back_fails_the_read_that_needs_its_frame(
    tmp_path: Path,
) -> None:
    # A gather returned without its rows: only the neighbour was told that its line was in the way.
    program = """
        import resource, signal, sys
        import numpy as np
        import flashwarp as fw
        from flashwarp.errors import StorageError
        from flashwarp.storage import Memory

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        values = np.arange(8 * 512).reshape(8, 512)
        with fw.Cache(4 * 4096, ways=4, device="cpu") as cache:
            whole = fw.open(Memory(values.copy()), "r+", "i8", values.shape, cache=cache)
            ill = fw.create(sys.argv[1], "i8", (8, 512), cache=cache, o_direct=False)
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
            ill[:4] = 1
            try:
                whole.gather([3, 5])
            except StorageError:
                pass
            else:
                raise SystemExit("no error")
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert (whole.gather([3, 5]) == values[[3, 5]]).all()
            whole.close()
            try:
                ill.close()
            except StorageError:
                pass
            else:
                raise SystemExit("the neighbour was not told")
        assert (np.load(sys.argv[1])[:4] == 1).all()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "x.npy")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:.*the file is sparse")
def test_disk_full_while_in_use(small_disk: Path) -> None:
    x = fw.create(
        small_disk / "x.npy", "u4", (1024, 1024), device="cpu", cache="8 MiB", o_direct=False
    )
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(512 << 10))
    x[:200] = 5
    with pytest.raises(StorageError) as caught:
        x.flush()
    assert caught.value.errno == errno.ENOSPC
    assert (x[:200] == 5).all(), "what could not be written is kept"
    ballast.unlink()
    x.flush()
    x.close()
    assert (np.load(small_disk / "x.npy", mmap_mode="r")[:200] == 5).all()


@pytest.mark.filterwarnings("ignore:.*the file is sparse")
def test_error_at_close_is_raised_and_all_is_released(small_disk: Path) -> None:
    x = fw.create(
        small_disk / "x.npy", "u4", (1024, 1024), device="cpu", cache="8 MiB", o_direct=False
    )
    x[:] = 5
    with pytest.raises(StorageError) as caught:
        x.close()
    assert caught.value.errno == errno.ENOSPC
    assert x.closed
    x.close()


@pytest.mark.parametrize("data", [np.zeros(4, "M8[ns]"), np.zeros(4, "m8[s]"), 3.5], ids=repr)
def test_data_that_is_no_buffer_is_refused(data: object) -> None:
    with pytest.raises(ArgumentError, match="has its bytes as"):
        Memory(4096).write(0, data)
    with (
        fw.device.CpuDevice(1) as device,
        device.allocate(64) as memory,
        pytest.raises(ArgumentError, match="has its bytes as"),
    ):
        device.upload(memory.address, data)  # type: ignore[arg-type]
