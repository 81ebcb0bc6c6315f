"""Files that a GPU reads in place under a lease, and processes that rewrite them meanwhile.

What does not depend on the device is in `tests/storage/test_leases.py`.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.device import resolve
from flashwarp.errors import StorageError
from flashwarp.storage.lease import Lease
from support.file_writer import (
    ADDED,
    OPEN_S_MAX,
    ROWS,
    end_writer,
    rewrite,
    rows,
    start_writer,
    wait_until,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.npy"
    np.save(path, rows())
    try:
        Lease(str(path)).close()
    except OSError as error:
        pytest.skip(f"no lease on a file in {tmp_path}: {error}")
    return path


def has_new_rows(x: fw.Array) -> bool:
    return bool((x[:] == rows() + ADDED).all())


@pytest.mark.parametrize("how", ["write", "truncate", "direct"])
def test_rows_are_new_after_another_process_has_rewritten_the_file(path: Path, how: str) -> None:
    # Larger than the file: what was read before would stay.
    with fw.open(path, device="cuda:0", cache="8 MiB") as x:
        assert x.explain().route == "in_place"
        assert "a lease holds writers off" in str(x.explain())
        np.testing.assert_array_equal(x[:], rows())

        assert rewrite(path, how) < OPEN_S_MAX

        # Nobody calls drop_cache: the lease, taken again, proves that the writer has gone.
        wait_until(lambda: has_new_rows(x), "old rows for ever")
        assert x.explain().route == "bounce"


@pytest.mark.parametrize("how", ["truncate", "direct"])
def test_lines_that_were_not_cached_are_not_read_from_the_orphaned_pages(
    path: Path, how: str
) -> None:
    with fw.open(path, device="cuda:0", cache="64 KiB") as x:
        x.prefetch(np.arange(0, ROWS, 8))  # in the rings until the next call drains them
        rewrite(path, how)

        x.drop_cache()

        np.testing.assert_array_equal(x[:], rows() + ADDED)


@pytest.mark.parametrize("how", ["write", "direct"])
def test_gathers_that_run_while_the_file_is_rewritten_see_old_or_new_elements(
    path: Path, how: str
) -> None:
    rng = np.random.default_rng(3)
    with fw.open(path, device="cuda:0", cache="64 KiB") as x:
        writer = start_writer(path, how)
        while writer.poll() is None:
            index = rng.integers(0, ROWS, 4096)
            got, old = x.gather(index), rows()[index]
            assert ((got == old) | (got == old + ADDED)).all()

        assert end_writer(writer) < OPEN_S_MAX
        wait_until(lambda: has_new_rows(x), "old rows for ever")


def test_kernel_that_runs_while_the_pages_are_left_sees_old_or_new_elements(path: Path) -> None:
    device = resolve("cuda:0")
    program = fw.compile(Path(__file__).parents[1] / "support" / "lease_kernels.cu", device)
    counts = device.allocate(16)
    device.fill(counts.address, 0, 16)

    with fw.open(path, device=device, cache="64 KiB") as x:
        program["watch"](x, ADDED, 3_000_000_000, counts)
        opened_s = rewrite(path, "direct")
        x.wait()

        wrong, fresh = np.frombuffer(device.download(counts.address, 16), np.uint64)
        assert wrong == 0
        assert opened_s < OPEN_S_MAX
        assert fresh > 0, "the kernel had ended before the file was rewritten"
    counts.close()


@pytest.mark.parametrize("how", ["write", "direct"])
def test_kernels_without_a_call_of_the_array_serve_no_line_from_before_the_writer(
    path: Path, how: str
) -> None:
    device = resolve("cuda:0")
    program = fw.compile(Path(__file__).parents[1] / "support" / "lease_kernels.cu", device)
    count = device.allocate(8)

    def old_elements(refreshes: bool) -> int:
        device.fill(count.address, 0, 8)
        x._attachment.row_calls.changes = (
            x.service.changes
        )  # as in a replayed graph: the host drops nothing
        program["count_old"](x, int(refreshes), count)
        x.wait()
        return int.from_bytes(device.download(count.address, 8), "little")

    with fw.open(path, device=device, cache="8 MiB") as x:
        for refreshed_by in ("the kernel", "refresh_lines", "gather"):
            expected = x[:]
            opened_s = rewrite(path, how)
            assert opened_s < OPEN_S_MAX
            lease = x._attachment.storage.lease
            wait_until(lambda: bool(lease._held), "the lease is taken again")  # noqa: B023
            x._attachment.row_calls.changes = x.service.changes
            if refreshed_by == "refresh_lines":
                x._attachment.maintain("refresh_lines")
            if refreshed_by == "gather":
                np.testing.assert_array_equal(x.gather(np.arange(ROWS)), expected + ADDED)
            elif (expected == rows()).all():
                assert old_elements(refreshes=False) == rows().size, "no line was cached"
                assert old_elements(refreshes=True) == 0
            np.testing.assert_array_equal(x[:], expected + ADDED)
    count.close()


def test_writer_does_not_wait_for_a_kernel(path: Path) -> None:
    device = resolve("cuda:0")
    program = fw.compile(Path(__file__).parents[1] / "support" / "lease_kernels.cu", device)
    counts = device.allocate(16)
    with fw.open(path, device=device, cache="64 KiB") as x:
        done = device.event()
        program["watch"](x, 0, 3_000_000_000, counts)
        done.record()

        begin = time.monotonic()
        with path.open("r+b"):
            opened_s = time.monotonic() - begin
        ran_on = not done.done()
        x.wait()

        assert ran_on, "the kernel had ended before the file was opened"
        assert opened_s < 1.0
        done.close()
    counts.close()


def test_address_in_place_is_given_while_the_lease_holds(path: Path) -> None:
    with fw.open(path, device="cuda:0") as x:
        assert x.in_place is not None
        rewrite(path)
        assert x.in_place is None


def test_file_that_was_cut_is_an_error_of_its_rows_alone(path: Path) -> None:
    with fw.open(path, device="cuda:0", cache="64 KiB") as x:
        with path.open("r+b") as file:
            file.truncate(128 + 4096 * 64)

        np.testing.assert_array_equal(x.gather(np.arange(64)), rows()[:64])
        with pytest.raises(StorageError, match="truncated"):
            x.gather(np.arange(ROWS - 64, ROWS))
