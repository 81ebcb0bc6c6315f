"""Files that are read in place under a lease, and writers that come meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import flashwarp as fw
from flashwarp.device import resolve
from flashwarp.errors import ArgumentError, RouteError, StorageError
from flashwarp.nvme.group import GroupService
from flashwarp.storage import File
from flashwarp.storage.file import Mapping
from flashwarp.storage.file_access import Access, _read_in_place
from flashwarp.storage.lease import Lease
from support.file_writer import ADDED, OPEN_S_MAX, ROWS, rewrite, rows, wait_until

needs_leases = pytest.mark.skipif(
    not hasattr(fcntl, "F_SETLEASE"), reason="the system has no leases"
)
pytestmark = [needs_leases, pytest.mark.timeout(120)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.npy"
    np.save(path, rows())
    try:
        Lease(str(path)).close()
    except OSError as error:
        pytest.skip(f"no lease on a file in {tmp_path}: {error}")
    return path


def open_mapped(path: Path, cache: str = "128 KiB", strict: str | None = None) -> fw.Array:
    plan = fw.nvme.SoftwareController(route="in_place")
    return fw.open(path, device="cpu", cache=cache, controller=plan, strict=strict)


def is_all(array: fw.Array, expected: npt.NDArray[np.int64]) -> bool:
    return bool((array[:] == expected).all())


def is_held(lease: Lease) -> bool:
    return bool(fcntl.fcntl(lease._fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK)


def lease_of(array: fw.Array) -> Lease:
    storage = array._attachment.storage
    assert isinstance(storage, File)
    assert storage.lease is not None
    return storage.lease


@pytest.mark.parametrize("how", ["write", "truncate", "direct"])
def test_rows_are_new_after_another_process_has_rewritten_the_file(path: Path, how: str) -> None:
    with open_mapped(path) as x:
        assert x.explain().route == "in_place"
        np.testing.assert_array_equal(x[:], rows())

        try:
            opened_s = rewrite(path, how)
        except AssertionError:
            if how == "direct":
                pytest.skip("no O_DIRECT here")
            raise
        wait_until(lambda: is_held(lease_of(x)), "the lease is taken again")
        x.drop_cache()

        np.testing.assert_array_equal(x[:], rows() + ADDED)
        assert opened_s < OPEN_S_MAX
        assert x.explain().route == "bounce"
        assert "opened the file for writing" in str(x.explain())


def test_cached_lines_are_dropped_when_the_writer_has_closed_the_file(path: Path) -> None:
    with open_mapped(path, cache="4 MiB") as x:
        np.testing.assert_array_equal(x[:], rows())

        for turn in (1, 2):
            rewrite(path)
            newest = rows() + turn * ADDED

            # Nobody calls drop_cache: the lease, taken again, proves that the writer has gone.
            wait_until(functools.partial(is_all, x, newest), "old rows for ever")


def test_a_signal_tells_of_a_writer_and_nobody_polls(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashwarp.storage.lease._SWEEP_S", 1000.0)
    with open_mapped(path) as x:
        np.testing.assert_array_equal(x[:], rows())
        wait_until(lambda: lease_of(x)._heard_by != 0, "the keeper never asks for a signal")

        for turn in (1, 2):
            assert rewrite(path) < OPEN_S_MAX
            wait_until(lambda: is_held(lease_of(x)), "the lease is taken again")
            x.drop_cache()
            np.testing.assert_array_equal(x[:], rows() + turn * ADDED)


def test_pages_of_the_file_are_left_before_a_writer_can_cut_it(path: Path) -> None:
    with open_mapped(path) as x:
        storage = x._attachment.storage
        assert isinstance(storage, File)
        assert storage.mapping._view.any()

        rewrite(path, "truncate")

        assert not storage.mapping._view.any()  # a thread that still reads there must not die of it


@pytest.mark.parametrize("how", ["write", "truncate"])
def test_gathers_that_run_while_the_file_is_rewritten_see_old_or_new_elements(
    path: Path, how: str
) -> None:
    stop = threading.Event()
    wrong: list[object] = []

    def read(x: fw.Array, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            index = rng.integers(0, ROWS, 500)
            try:
                got = x.gather(index)
            except StorageError as error:  # cut, and not written again yet
                if how != "truncate" or error.errno != errno.ENODATA:
                    wrong.append(error)
                continue
            old = rows()[index]
            good = (got == old) | (got == old + ADDED)
            if how == "truncate":
                good |= got == 0  # holes of a file that is being written
            if not good.all():
                wrong.append(got[~good])

    with open_mapped(path) as x, open_mapped(path, cache="16 KiB") as y:
        threads = [threading.Thread(target=read, args=(a, n)) for n, a in enumerate((x, y, x))]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        opened_s = rewrite(path, how)
        time.sleep(0.5)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)

        assert wrong == []
        assert opened_s < OPEN_S_MAX
        for array in (x, y):
            array.drop_cache()
            np.testing.assert_array_equal(array[:], rows() + ADDED)


def test_kernel_that_runs_while_the_pages_are_left_sees_old_or_new_elements(path: Path) -> None:
    program = fw.compile(Path(__file__).parents[1] / "support" / "lease_kernels.cu", "cpu")
    counts = np.zeros(2, np.uint64)
    elements = rows().size

    with open_mapped(path, cache="16 KiB") as x:
        kernel = threading.Thread(target=program["watch"], args=(x, ADDED, 1_500_000_000, counts))
        kernel.start()
        opened_s = rewrite(path)
        kernel.join(60)
        assert not kernel.is_alive()

        assert opened_s < OPEN_S_MAX
        assert counts[0] == 0
        assert counts[1] > 0  # it ran on
        wait_until(lambda: is_held(lease_of(x)), "the lease is taken again")
        counts[:] = 0
        program["watch"](x, ADDED, 0, counts)
        assert counts.tolist() == [0, elements]


def old_elements(array: fw.Array, refreshes: bool) -> int:
    """Count old elements by a kernel before which the host drops nothing, as in a replay."""
    program = fw.compile(Path(__file__).parents[1] / "support" / "lease_kernels.cu", "cpu")
    count = np.zeros(1, np.uint64)
    array._attachment.row_calls.changes = array.service.changes
    program["count_old"](array, int(refreshes), count, warps=3)
    return int(count[0])


def test_kernel_that_refreshes_serves_no_line_from_before_the_writer(path: Path) -> None:
    with open_mapped(path, cache="4 MiB") as x:
        np.testing.assert_array_equal(x[:], rows())

        for turn in (1, 2):
            rewrite(path)
            wait_until(lambda: is_held(lease_of(x)), "the lease is taken again")

            before = old_elements(x, refreshes=False)
            assert before == (rows().size if turn == 1 else 0), "no line was cached"
            assert old_elements(x, refreshes=True) == 0
            np.testing.assert_array_equal(x[:], rows() + turn * ADDED)


def test_built_in_kernels_refresh_without_a_call_of_the_array(path: Path) -> None:
    with open_mapped(path, cache="4 MiB") as x:
        np.testing.assert_array_equal(x[:], rows())
        rewrite(path)
        wait_until(lambda: is_held(lease_of(x)), "the lease is taken again")

        assert x.service.leased
        x._attachment.maintain("refresh_lines")

        assert old_elements(x, refreshes=False) == 0


def test_every_stripe_begins_an_epoch_of_all(tmp_path: Path) -> None:
    names = [tmp_path / "a", tmp_path / "b"]
    for name in names:
        np.arange(512 << 7, dtype=np.int64).tofile(name)
    plan = fw.nvme.SoftwareController(route="in_place")
    striped = fw.storage.Striped(names, 4096)
    with fw.open(
        striped, dtype="int64", device="cpu", controller=plan, cache="4 MiB", line=4096
    ) as x:
        x[:]
        with names[1].open("r+b") as file:
            file.write(np.full(512 << 7, -1).tobytes())

        assert isinstance(x.service, GroupService)
        second = x._attachment.storage.members[1].lease
        wait_until(lambda: is_held(second), "the lease is taken again")
        old_elements(x, refreshes=True)

        assert x.stats.misses == 2 * 2 * 128  # all lines, twice
        np.testing.assert_array_equal(x[:].reshape(-1, 2, 512)[:, 1], -1)


def test_prefetched_lines_of_left_pages_are_not_served(path: Path) -> None:
    with open_mapped(path) as x:
        # Their commands stay in the rings until the next call drains them.
        x.prefetch(np.arange(0, ROWS, 8))
        rewrite(path)
        wait_until(lambda: is_held(lease_of(x)), "the lease is taken again")

        np.testing.assert_array_equal(x[:], rows() + ADDED)


def test_stripes_in_place_leave_only_the_file_that_is_written(tmp_path: Path, path: Path) -> None:
    names = [tmp_path / "a", tmp_path / "b"]
    whole = np.arange(2 * (512 << 10) // 8, dtype=np.int64)
    stripes = whole.reshape(-1, 2, 4096 // 8)
    for n, name in enumerate(names):
        np.ascontiguousarray(stripes[:, n]).tofile(name)
    plan = fw.nvme.SoftwareController(route="in_place")

    with fw.open(
        fw.storage.Striped(names, 4096), dtype="int64", device="cpu", controller=plan
    ) as x:
        assert x.explain().route == "in_place"
        np.testing.assert_array_equal(x[:], whole)
        with names[0].open("r+b") as file:
            file.write((stripes[:, 0] + ADDED).tobytes())
        stripes[:, 0] += ADDED

        x.drop_cache()

        np.testing.assert_array_equal(x[:], whole)
        assert x.explain().route == "bounce"
        assert isinstance(x.service, GroupService)
        assert [c.route for c in x.service.services] == ["bounce", "in_place"]


def test_writer_in_this_process_waits_for_no_one_but_the_keeper(path: Path) -> None:
    with open_mapped(path) as x:
        begin = time.monotonic()
        with fw.open(path, "r+", device="cpu", lock=False) as writer:
            assert time.monotonic() - begin < OPEN_S_MAX
            writer[5] = 7
            writer.flush()

            x.drop_cache()

            assert (x[5] == 7).all()


def test_two_arrays_on_one_file_have_a_lease_each(path: Path) -> None:
    with open_mapped(path) as x, open_mapped(path) as y:
        x.close()
        assert is_held(lease_of(y))

        assert rewrite(path) < OPEN_S_MAX

        y.drop_cache()
        np.testing.assert_array_equal(y[:], rows() + ADDED)


def test_break_without_a_keeper_sends_no_signal(path: Path) -> None:
    program = textwrap.dedent("""
        import errno, fcntl, os, sys, time
        from flashwarp.storage.lease import Lease
        path = sys.argv[1]
        for turn in range(3):
            lease = Lease(path)
            child = os.posix_spawn(
                sys.executable,
                [sys.executable, "-c",
                 "import os, sys\\n"
                 "try: os.open(sys.argv[1], os.O_WRONLY | os.O_NONBLOCK)\\n"
                 "except BlockingIOError: sys.exit(11)", path],
                os.environ,
            )
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
            time.sleep(0.05)
            assert fcntl.fcntl(lease._fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK
            lease.close()
        print("alive")
    """)

    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_forked_child_neither_keeps_nor_ends_the_lease(path: Path) -> None:
    lease = Lease(str(path))
    lease.watch(lambda: True, lambda _error: None)

    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            lease.close()
            os.fstat(lease._fd)  # EBADF: closed already
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert is_held(lease)
    lease.close()
    with path.open("r+b"):  # nobody holds it
        pass


def on_cpu() -> Access:
    return Access(False, None, resolve("cpu"))


def test_lease_is_given_up_where_another_path_is_asked_for(path: Path) -> None:
    form = fw.storage.npy.read_layout(str(path))
    mapping = Mapping(path, path.stat().st_size)
    file = _read_in_place(str(path), form, mapping, on_cpu(), 0)
    assert isinstance(file, File)
    plan = fw.nvme.SoftwareController(route="direct")

    with fw.open(file, "r", "int64", form.shape, device="cpu", controller=plan) as x:
        assert rewrite(path) < OPEN_S_MAX
        np.testing.assert_array_equal(x[:], rows() + ADDED)

    mapping.close()


def test_file_open_for_writing_is_not_read_in_place(path: Path) -> None:
    with (
        path.open("r+b"),
        pytest.raises(ArgumentError, match="open for writing"),
    ):
        open_mapped(path)
    open_mapped(path).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_file_of_another_user_has_no_lease(path: Path) -> None:
    path.chmod(0o644)
    for folder in list(path.parents)[:3]:
        folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.setresuid(65534, 65534, 65534)
            try:
                Lease(str(path))
            except OSError as error:
                status = 0 if "only its owner" in Lease.refusal(error) else 2
        os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_path_that_names_another_file_meanwhile_is_not_read_in_place(
    tmp_path: Path, path: Path
) -> None:
    mapping = Mapping(path, path.stat().st_size)
    np.save(tmp_path / "other.npy", rows())
    (tmp_path / "other.npy").rename(path)

    found = _read_in_place(str(path), fw.storage.npy.read_layout(str(path)), mapping, on_cpu(), 0)

    assert found == "its path names another file than a moment ago"
    mapping.close()


def test_lease_that_the_system_has_ended_is_an_error_of_the_next_call(path: Path) -> None:
    with open_mapped(path) as x:
        x.gather(np.arange(10))
        # As it is after lease-break-time, for a process that was stopped by a debugger.
        fcntl.fcntl(lease_of(x)._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        wait_until(lambda: x.service.changes != 0, "the keeper sees it")

        with pytest.raises(StorageError, match="written while it was read in place") as caught:
            x.gather(np.arange(10))

        assert caught.value.errno == errno.ESTALE
        np.testing.assert_array_equal(x[:], rows())


def test_pages_that_cannot_be_left_fail_instead_of_serving_old_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "2")
    x = open_mapped(path)

    def fail(_stream: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(x.service.queues, "leave_in_place", fail)
    assert rewrite(path) < OPEN_S_MAX

    with pytest.raises(fw.errors.FlashwarpError):
        x.gather(np.arange(10))
    with pytest.raises(fw.errors.FlashwarpError):
        x.gather(np.arange(ROWS))
    with contextlib.suppress(fw.errors.FlashwarpError):
        x.close()


def test_strict_array_refuses_what_does_not_come_in_place_any_more(path: Path) -> None:
    with open_mapped(path, strict="in_place") as x:
        x.gather(np.arange(10))
        rewrite(path)

        for _ in range(2):
            with pytest.raises(RouteError, match="a writer has opened"):
                x.gather(np.arange(10))


def test_address_in_place_is_no_cpu_kernels(path: Path) -> None:
    with open_mapped(path) as x:
        assert x.in_place is None


def test_immutable_is_for_readers() -> None:
    with pytest.raises(ArgumentError, match="immutable"):
        fw.open("anything", "r+", immutable=True)


def test_break_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flashwarp.storage.lease")
    with open_mapped(path):
        rewrite(path)
        wait_until(lambda: bool(caplog.records), "a line in the log")

    assert f"{path} is opened for writing" in caplog.text


@pytest.fixture
def descriptors() -> Callable[[], set[str]]:
    def of_files() -> set[str]:
        gc.collect()
        links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return {os.readlink(link) for link in links if os.path.exists(link)}

    return of_files


def test_closed_array_leaves_neither_lease_nor_descriptor(
    path: Path, descriptors: Callable[[], set[str]]
) -> None:
    open_mapped(path).close()

    assert str(path) not in descriptors()
    begin = time.monotonic()
    with path.open("r+b"):
        assert time.monotonic() - begin < OPEN_S_MAX


def test_keeper_keeps_no_interpreter_from_ending(path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from flashwarp.storage.lease import Lease
        lease = Lease(sys.argv[1])
        lease.watch(lambda: True, lambda error: None)
    """)

    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_lease_that_excludes_readers_is_given_up_once(path: Path) -> None:
    lease = Lease(str(path), excludes_readers=True, once=True)
    left: list[bool] = []
    lease.watch(lambda: bool(left.append(lease.held)) or True, lambda _: None)
    with contextlib.closing(lease):
        assert lease.held

        assert subprocess.run(["cat", path], capture_output=True, timeout=30).returncode == 0

        assert left == [False], "the reader waited for it"
        time.sleep(0.3)  # longer than a lease is not asked for again
        assert not lease.held


def test_lease_that_excludes_readers_is_refused_beside_one(path: Path) -> None:
    with path.open("rb"), pytest.raises(BlockingIOError):
        Lease(str(path), excludes_readers=True)
