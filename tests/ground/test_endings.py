"""How things end: whoever closes what first, whatever is copied, pickled or forked.

What happens to arrays at the end of a process, and whatever is interrupted, is in `edges/`.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import _native, endings
from flashwarp.device import CpuDevice
from flashwarp.errors import (
    CacheError,
    ClosedError,
    CopyError,
    DeviceError,
    FileFormatError,
    ForkError,
    StorageError,
)
from flashwarp.storage import File
from flashwarp.testing import Faulty


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 1000 rows of four int64, row i filled with i."""
    name = tmp_path / "rows.npy"
    np.save(name, np.repeat(np.arange(1000), 4).reshape(1000, 4))
    return name


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with CpuDevice(threads=2) as opened:
        yield opened


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # Python's own warning, of version 3.12 and later, wherever a program forks.
        [
            sys.executable,
            "-Wignore:This process:DeprecationWarning",
            "-c",
            textwrap.dedent(script),
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# Copies.


def test_what_owns_something_is_not_copied(path: Path, device: CpuDevice) -> None:
    with fw.open(path, "r+", device=device) as x, fw.Cache("64 KiB", device=device) as cache:
        future = x.gather_async([1])
        owners = (
            x,
            cache,
            device,
            x._attachment.storage,
            future,
            device.allocate(1),
            x.service.queues,
        )
        for owner in owners:
            for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(CopyError):
                    duplicate(owner)
        with pytest.raises(CopyError):
            copy.copy(x.service)
        gc.collect()

        assert future.result().tolist() == [[1] * 4]


def test_read_only_array_is_pickled_as_how_to_open_it(path: Path, device: CpuDevice) -> None:
    with fw.open(path, device=device, cache="16 KiB", line=512) as x:
        sent = pickle.dumps(x)

    y = pickle.loads(sent)
    assert (y.shape, y.dtype, y.closed) == (x.shape, x.dtype, False)
    again = pickle.loads(pickle.dumps(y))  # sent on before it was used

    assert y[7].tolist() == [7] * 4
    assert y.cache.line_bytes == 512
    y.close()
    assert again.gather([3]).tolist() == [[3] * 4]
    again.close()


def test_deep_copy_of_a_read_only_array_opens_its_path_again(path: Path) -> None:
    with fw.open(path, device="cpu") as x:
        copied = copy.deepcopy({"table": x})["table"]
        with pytest.raises(CopyError):
            copy.copy(x)
    assert repr(copied).startswith("<unopened")
    with copied:
        assert copied[1].tolist() == [1] * 4


def test_pickled_array_has_its_path_and_a_cache_of_its_own(
    path: Path, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    plan = fw.nvme.SoftwareController(queue_pairs=2, depth=8)
    with (
        fw.Cache("64 KiB", line="2 KiB", policy="lru", device=device) as cache,
        fw.open(path.name, cache=cache, controller=plan) as x,
    ):
        sent = pickle.dumps(x)
        monkeypatch.chdir("/")

        with pickle.loads(sent) as y:
            assert y[-1].tolist() == [999] * 4
            assert y.cache is not cache
            assert (y.cache.capacity, y.cache.line_bytes) == (cache.capacity, 2048)
            assert y.cache.policy == cache.policy
            assert y.service.queues.depth == 8


def test_pickled_array_that_nobody_uses_opens_nothing(path: Path) -> None:
    with fw.open(path, device="cpu") as x:
        sent = pickle.dumps(x)

    y = pickle.loads(sent)
    assert "unopened" in repr(y)
    y.close()

    assert y.closed
    with pytest.raises(ClosedError):
        y.gather([0])


def test_pickled_array_whose_file_has_changed_is_refused(path: Path) -> None:
    with fw.open(path, device="cpu") as x:
        sent = pickle.dumps(x)
    np.save(path, np.zeros((3, 4)))

    with pytest.raises(FileFormatError):
        pickle.loads(sent)[0]


def test_array_that_stores_names_the_way_out_when_pickled(path: Path) -> None:
    with fw.open(path, "r+", device="cpu") as x, pytest.raises(CopyError, match="mode='r'"):
        pickle.dumps(x)
    memory = fw.storage.Memory(64)
    with fw.open(memory, "r+", "i8", device="cpu") as x, pytest.raises(CopyError, match="path"):
        pickle.dumps(x)


# Any order.


def test_device_closes_what_is_on_it(path: Path) -> None:
    device = CpuDevice(threads=2)
    cache = fw.Cache("64 KiB", device=device)
    x = fw.open(path, "r+", cache=cache)
    y = fw.open(_copy(path), device="cpu")
    x[5] = -1

    device.close()

    assert x.closed
    assert cache.closed
    assert np.load(path)[5].tolist() == [-1] * 4
    with pytest.raises(ClosedError):
        x.gather([1])
    assert y[3].tolist() == [3] * 4  # on another device
    y.close()
    x.close()
    cache.close()
    device.close()


def test_device_raises_what_its_arrays_could_not_flush(tmp_path: Path) -> None:
    np.arange(512).tofile(tmp_path / "f")
    storage = Faulty(File(tmp_path / "f", writable=True))
    device = CpuDevice(threads=1)
    x = fw.open(storage, "r+", "i8", device=device)
    x[0] = 1
    storage.inject("write eio")

    with pytest.raises(StorageError, match="write"):
        device.close()

    assert x.closed


def test_settings_outlive_their_arrays_and_serve_several_at_once(path: Path) -> None:
    controller = fw.nvme.SoftwareController(threads=1)
    with fw.open(path, device="cpu", controller=controller) as x:
        with fw.open(path, device="cpu", controller=controller) as y:
            assert x.service is not y.service
            assert y[3].tolist() == [3] * 4
        with pytest.raises(ClosedError):
            _ = y.service.queues
        # The end of one leaves the other's threads alone.
        assert x[1].tolist() == [1] * 4

    with fw.open(path, device="cpu", controller=controller) as x:
        assert x[2].tolist() == [2] * 4


def descriptors_of(path: Path) -> list[str]:
    return [each for each in os.listdir("/proc/self/fd") if names(each, path)]


def names(descriptor: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except FileNotFoundError:  # that of the listing itself
        return False


def test_attachment_that_fails_half_way_leaves_nothing(
    path: Path, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise DeviceError("no stream")

    with fw.Cache("64 KiB", device=device) as cache, fw.open(path, cache=cache) as neighbour:
        threads, files = os.listdir("/proc/self/task"), descriptors_of(path)
        with monkeypatch.context() as patch:
            patch.setattr(device, "create_stream", refuse)
            with pytest.raises(DeviceError, match="no stream"):
                fw.open(path, cache=cache)

        assert len(cache._volumes) == 1
        assert set(os.listdir("/proc/self/task")) <= set(threads)
        assert descriptors_of(path) == files
        assert neighbour.gather([5]).tolist() == [[5] * 4]
        with fw.open(path, "r+", cache=cache, lock=False) as x:
            assert x[3].tolist() == [3] * 4


def test_error_of_a_close_shows_the_exception_that_ended_the_block(path: Path) -> None:
    def fail() -> None:
        with fw.Cache("64 KiB") as cache:
            opened.append(fw.open(path, device="cpu", cache=cache))
            raise KeyError("of the block")

    opened: list[fw.Array] = []
    with pytest.raises(CacheError) as failed:
        fail()
    opened[0].close()

    assert isinstance(failed.value.__context__, KeyError)


def test_cache_is_not_closed_under_its_arrays(path: Path, device: CpuDevice) -> None:
    cache = fw.Cache("64 KiB", device=device)
    with fw.open(path, cache=cache) as x:
        with pytest.raises(CacheError, match="1 arrays use the cache"):
            cache.close()
        assert x[1].tolist() == [1] * 4
    cache.close()


@pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning")
@pytest.mark.parametrize("lost", [False, True])
def test_an_array_leaves_its_cache_to_those_that_use_it(path: Path, lost: bool) -> None:
    """It once raised, and kept its file open and locked until the process ended."""
    other = path.with_name("other.npy")
    np.save(other, np.full((4, 4), 7.0))
    x = fw.open(path, "r+", device="cpu")
    x[0] = 5
    y = fw.open(other, cache=x.cache)
    assert y[1].tolist() == [7] * 4

    if not lost:
        x.close()
    del x
    gc.collect()

    assert not descriptors_of(path)
    assert y[2].tolist() == [7] * 4
    y.close()
    with fw.open(path, "r+", device="cpu") as again:
        assert (again[0] == 5).all()


def test_closed_array_holds_no_file(path: Path) -> None:
    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    x = fw.open(path, "r+", device="cpu", o_direct=False)
    x[0] = x[1]
    assert descriptors_of(path)

    x.close()

    assert not descriptors_of(path)
    assert not mapped()


def test_memory_that_somebody_looks_at_outlives_its_device() -> None:
    device = CpuDevice(threads=1)
    view = device.allocate(1 << 20).as_numpy()

    device.close()
    view[:] = 3

    assert int(view.sum()) == 3 << 20


def test_array_lost_in_the_turn_of_another_is_closed_afterwards(
    path: Path, device: CpuDevice
) -> None:
    cache = fw.Cache("64 KiB", device=device)
    x = fw.open(path, cache=cache)
    other = path.with_name("other.npy")
    np.save(other, np.zeros((8, 4)))
    y = fw.open(other, "r+", cache=cache)
    y[2] = 5

    def lose() -> None:
        nonlocal y
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            del y
        assert x[4].tolist() == [4] * 4

    endings.holding([cache.turn], lose)
    for thread in threading.enumerate():
        if thread.name == "flashwarp closing":
            thread.join(30)

    assert np.load(other)[2].tolist() == [5] * 4
    x.close()
    cache.close()


# The end of the process.


def test_flush_that_fails_at_exit_is_told(tmp_path: Path) -> None:
    np.arange(512).tofile(tmp_path / "f")
    done = run(
        """
        import sys, flashwarp as fw
        from flashwarp.testing import Faulty
        storage = Faulty(fw.storage.File(sys.argv[1], writable=True))
        x = fw.open(storage, "r+", "i8", device="cpu")
        x[3] = 77
        storage.inject("write eio")
        """,
        tmp_path / "f",
    )

    assert "StorageError" in done.stderr


def test_daemon_threads_may_gather_when_the_interpreter_ends(path: Path) -> None:
    done = run(
        """
        import sys, threading, time, numpy as np, flashwarp as fw
        x = fw.open(sys.argv[1], device="cpu", cache="4 KiB", line=512)
        memory = fw.storage.Memory(1 << 20)
        def gather():
            while True:
                try:
                    x.gather(np.random.randint(0, 1000, 300))
                except fw.errors.ClosedError:
                    pass
        def read():
            while True:
                memory.read(0, 1 << 20)
        for work in (gather, gather, read, read):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.2)
        """,
        path,
    )

    assert (done.returncode, done.stderr) == (0, "")


# Forks.


def test_forked_child_ends_opens_anew_and_closes_nothing(path: Path) -> None:
    done = run(
        """
        import os, sys, gc, flashwarp as fw
        x = fw.open(sys.argv[1], "r+", device="cpu")
        x[3] = 77
        x.gather([1, 2])
        y = fw.open(sys.argv[2], device="cpu")
        y.gather([1, 2])
        y.close()
        child = os.fork()
        if child == 0:
            try:
                x[1]
            except fw.errors.ForkError:
                print("refused", flush=True)
            x.close()
            with fw.open(sys.argv[2], device="cpu") as own:
                print(own[5].tolist(), flush=True)
            del x, y
            gc.collect()
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(x[3].tolist())
        """,
        path,
        _copy(path),
    )

    assert done.stderr == ""
    assert done.stdout.split("\n") == ["refused", "[5, 5, 5, 5]", "3", "[77, 77, 77, 77]", ""]
    assert np.load(path)[3].tolist() == [77] * 4


def _copy(path: Path) -> Path:
    other = path.with_name("copy.npy")
    other.write_bytes(path.read_bytes())
    return other


def test_counters_of_an_inherited_array_are_refused_even_in_a_turn(path: Path) -> None:
    with fw.open(path, mode="r+", device="cpu") as x:
        held, leave = threading.Event(), threading.Event()
        holder = threading.Thread(
            target=endings.holding, args=([x.cache.turn], lambda: held.set() or leave.wait())
        )
        holder.start()
        held.wait()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _ = x.stats
            except ForkError:
                code = 0
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        leave.set()
        holder.join()
        assert os.waitstatus_to_exitcode(status) == 0


def test_lock_comes_free_when_what_held_it_raises() -> None:
    lock = threading.Lock()

    with pytest.raises(KeyError):
        _native.holding(lock, lambda: {}[1])

    assert lock.acquire(blocking=False)
