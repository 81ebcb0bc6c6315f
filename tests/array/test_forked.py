"""Arrays in other processes: what a pickle and a forked child open by themselves, and refuse."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ClosedError, CopyError, MissingFileError
from flashwarp.storage import File, Memory, Striped

# Of a fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

ROWS = np.arange(4000, dtype="i8").reshape(1000, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", ROWS)
    return tmp_path / "x.npy"


def in_child(act: Callable[[], object]) -> str:
    """Return what a function says in a forked child: its result, or its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.alarm(30)
        try:
            said = str(act())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


def test_child_opens_what_it_reads(path: Path) -> None:
    with fw.open(path, device="cpu", line=512, cache=4096) as x:
        np.testing.assert_array_equal(x[...], ROWS)
        reads = x.stats.bytes_read

        def use() -> object:
            assert repr(x).startswith("<unopened")
            assert not x.closed
            np.testing.assert_array_equal(x.gather(np.arange(999, -1, -1)), ROWS[::-1])
            assert x.gather_async(slice(3, 5)).result().tolist() == ROWS[3:5].tolist()
            assert (x.cache.line_bytes, x.cache.capacity) == (512, 4096)
            assert 0 < x.stats.bytes_read < 2 * reads, "counters of its own"
            x.close()
            with pytest.raises(ClosedError):
                x[0]
            return "fine"

        assert in_child(use) == "fine"
        assert x[5].tolist() == ROWS[5].tolist(), "the parent goes on"


@pytest.mark.parametrize("options", [{"o_direct": True}, {"strict": "bounce"}, {"lock": False}])
def test_child_opens_with_the_same_settings(path: Path, options: dict[str, object]) -> None:
    bounces = fw.nvme.SoftwareController(route="bounce") if "strict" in options else None
    with fw.open(path, device="cpu", controller=bounces, **options) as x:
        assert in_child(lambda: (x[7].tolist(), x.strict)) == str((ROWS[7].tolist(), x.strict))


def test_arrays_that_share_a_cache_have_one_each_in_the_child(path: Path) -> None:
    with (
        fw.Cache("64 KiB", line=512, device="cpu") as cache,
        fw.open(path, cache=cache) as x,
        fw.open(path, cache=cache) as y,
    ):
        said = in_child(lambda: (x[1, 1], y[2, 1], x.cache is y.cache, x.cache.capacity))

        assert said == str((ROWS[1, 1], ROWS[2, 1], False, cache.capacity))


def test_grandchild_opens_it_again(path: Path) -> None:
    with fw.open(path, device="cpu") as x:
        assert in_child(lambda: [int(x[1, 0]), in_child(lambda: x[2, 0])]) == "[4, '8']"


def test_striped_paths_are_opened_again(tmp_path: Path) -> None:
    stripes = [tmp_path / "0", tmp_path / "1"]
    for number, stripe in enumerate(stripes):
        stripe.write_bytes(bytes([number]) * 8192)
    with fw.open(Striped(stripes, 4096), dtype="u1", device="cpu") as x:
        assert in_child(lambda: x[[0, 4096, 8192]].tolist()) == "[0, 1, 0]"


def test_thread_that_holds_the_parents_lock_does_not_stop_the_child(path: Path) -> None:
    with fw.open(path, device="cpu") as x:
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with x.cache.turn:
                held.set()
                done.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        try:
            assert in_child(lambda: x[6, 0]) == "24"
        finally:
            done.set()
            holder.join()


def test_child_of_a_thread_opens_it_too(path: Path) -> None:
    said = []
    with fw.open(path, device="cpu") as x:
        x[0]
        thread = threading.Thread(target=lambda: said.append(in_child(lambda: x[6, 0])))
        thread.start()
        thread.join()

    assert said == ["24"]


def test_array_that_may_be_stored_to_stays_the_parents(path: Path) -> None:
    with fw.open(path, "r+", device="cpu") as x:
        x[0] = 7
        for act in (lambda: x[0], lambda: x.gather_async([0]), x.flush, lambda: x.stats):
            said = in_child(act)
            assert said.startswith("ForkError")
            assert "open it there with mode='r'" in said
        assert in_child(x.close) == "None", "and closing it there does nothing"
        assert x[0].tolist() == [7] * 4


@pytest.mark.parametrize("storage", [File, lambda path: Memory(path.read_bytes())])
def test_array_of_a_storage_stays_the_parents(
    path: Path, storage: Callable[[Path], fw.Storage]
) -> None:
    with storage(path) as made, fw.open(made, dtype="i8", device="cpu") as x:
        said = in_child(lambda: x[0])

        assert said.startswith("ForkError")
        assert "from a path" in said


def test_closed_array_stays_closed(path: Path) -> None:
    with fw.open(path, device="cpu") as x:
        pass

    assert in_child(lambda: x[0]).startswith("ClosedError")


def test_file_that_is_gone_is_an_error_in_the_child(path: Path) -> None:
    with fw.open(path, device="cpu") as x:
        path.unlink()

        assert in_child(lambda: x[0]).startswith(MissingFileError.__name__)
        assert x[0].tolist() == ROWS[0].tolist()


def test_other_file_of_that_name_is_an_error_in_the_child(path: Path) -> None:
    with fw.open(path, device="cpu") as x:
        path.unlink()
        np.save(path, np.zeros((3, 3)))

        assert in_child(lambda: x[0]).startswith("FileFormatError")


def test_what_cannot_be_pickled_is_refused(path: Path) -> None:
    with fw.open(path, "r+", device="cpu") as x, pytest.raises(CopyError):
        pickle.dumps(x)
    with (
        Memory(4096) as made,
        fw.open(made, dtype="i8", device="cpu") as x,
        pytest.raises(CopyError),
    ):
        pickle.dumps(x)


def row(x: fw.Array, number: int) -> list[int]:
    return list(map(int, x[number]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pool_reads_rows(path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    with fw.open(path, device="cpu") as x, context.Pool(2) as pool:
        found = pool.starmap(row, [(x, number) for number in range(0, 1000, 100)], chunksize=3)

    assert found == ROWS[::100].tolist()


def test_kernel_stays_the_parents(path: Path) -> None:
    program = fw.compile(
        """
        #include "flashwarp/array.cuh"
        FW_KERNEL first(fw::array<const long> x, long* to) { *to = x[0]; }
        """,
        "cpu",
    )
    with fw.open(path, device="cpu") as x:
        said = in_child(lambda: program["first"](x, np.zeros(1, "i8")))

    assert said.startswith("ForkError")
