"""Limits of the process and of the disk: calls work, or raise a typed error and leave nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from edges import nursery

PRELUDE = """
import errno, gc, os, resource
from contextlib import contextmanager

np.random.default_rng(1)  # imported before somebody else may not read it
rows = np.arange(64 * 256, dtype="i4").reshape(256, 64)
np.save("rows.npy", rows)
os.chmod(".", 0o777)
os.chmod("rows.npy", 0o666)

@contextmanager
def limit(which, soft):
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)

def works(mode="r+"):
    with fw.open("rows.npy", mode, device="cpu", cache="16 KiB", line=512) as x:
        index = np.random.default_rng(1).integers(0, 256, 300)
        assert (x.gather(index) == rows[index]).all()
        if mode == "r+":
            x[:4] = rows[:4]
            x.flush()
            assert (x.gather_async(index).result() == rows[index]).all()

def works_or_says(*kinds):
    try:
        works()
        return "works"
    except (fw.errors.FlashwarpError, *kinds) as error:
        assert not isinstance(error, (fw.errors.DeviceTimeout, fw.errors.ControllerTimeout)), error
        return "says"

def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
"""

PROGRAMS = {
    "descriptors": """
works()
# The limit stays as low as it is here.
fw.storage.files._raise_descriptor_limit = lambda: None
before = descriptors()
first_free = os.dup(0)
os.close(first_free)
seen = set()
for room in range(14):
    with limit(resource.RLIMIT_NOFILE, first_free + room):
        seen.add(works_or_says())
        try:
            fw.create(f"new{room}.npy", "i4", 64, device="cpu", cache="16 KiB").close()
        except fw.errors.FlashwarpError:
            assert not os.path.exists(f"new{room}.npy"), room
    assert descriptors() == before, room
assert seen == {"works", "says"}, seen
works()
""",
    "address space": """
works()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
seen = set()
for room in (1 << 12, 1 << 20, 1 << 24, 1 << 26, 1 << 30):
    with limit(resource.RLIMIT_AS, used + room):
        # Python itself may find no room for an object.
        seen.add(works_or_says(MemoryError))
        for cache in ("1 GiB", "1 TiB"):
            try:
                fw.Cache(cache, device="cpu").close()
                assert cache == "1 GiB"
            except MemoryError as error:
                assert room < 1 << 20 or isinstance(error, fw.errors.FlashwarpError), repr(error)
works()
""",
    "locked memory": """
with limit(resource.RLIMIT_MEMLOCK, 0):
    works()
with limit(resource.RLIMIT_MEMLOCK, 1 << 16):
    works()
""",
    "file size": """
with limit(resource.RLIMIT_FSIZE, 8192):
    works("r")
    x = fw.open("rows.npy", "r+", device="cpu", cache="64 KiB", line=512)
    x[:8] = -1
    x.flush()
    x[200:] = -2
    try:
        x.flush()
        raise SystemExit("the flush worked")
    except fw.errors.StorageError as error:
        assert error.errno == errno.EFBIG, error
    assert (x.gather([255]) == -2).all()
    before = set(os.listdir())
    try:
        fw.create("large.npy", "i4", (256, 64), device="cpu", cache="16 KiB").close()
        raise SystemExit("the create worked")
    except fw.errors.FlashwarpError as error:
        assert isinstance(error, OSError), repr(error)
    assert set(os.listdir()) == before, os.listdir()
x.flush()
x.close()
rows[:8], rows[200:] = -1, -2
assert (np.load("rows.npy") == rows).all()
""",
}

# As root no limit of processes holds, so these become somebody else first.
THREADS = """
os.environ["FLASHWARP_IO_ENGINE"] = {engine!r}
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65533, 65533, 65533)
    os.setresuid({user}, {user}, {user})
device = fw.device.CpuDevice(4)
x = None
{before}
with limit(resource.RLIMIT_NPROC, 0):
    try:
        if x is None:
            x = fw.open("rows.npy", "r+", device=device, cache="16 KiB", line=512)
        assert (x.gather([1, 200]) == rows[[1, 200]]).all()
        assert (x.gather_async([1, 200]).result() == rows[[1, 200]]).all()
    except fw.errors.FlashwarpError as error:
        assert "thread" in str(error) or "Resource" in str(error), repr(error)
if x is not None:
    assert (x.gather([1, 200]) == rows[[1, 200]]).all()
    x.close()
works()
"""

PROGRAMS |= {
    "threads, at open": THREADS.format(engine="", user=64001, before=""),
    "threads, at open, of a pool": THREADS.format(engine="threads", user=64002, before=""),
    "threads, at the first gather": THREADS.format(
        engine="",
        user=64003,
        before='x = fw.open("rows.npy", "r+", device=device, cache="16 KiB", line=512)',
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_limit_of(run_program: nursery.Run, name: str) -> None:
    outcome = run_program(nursery.Program(name, PRELUDE + PROGRAMS[name], 40))

    assert (outcome.status, outcome.err, outcome.hung) == (0, "", False), outcome


def test_full_disk_loses_nothing_that_fits_later(small_disk: Path) -> None:
    rows = np.arange(128 * 1024, dtype="i4").reshape(512, 256)  # half of the disk
    with fw.create(small_disk / "rows.npy", "i4", rows.shape, device="cpu", cache="1 MiB") as x:
        x[...] = rows
        (small_disk / "other").write_bytes(bytes(700 << 10))

        with pytest.raises(fw.errors.StorageError) as caught:
            x.flush()
        assert caught.value.errno == 28
        np.testing.assert_array_equal(x[...], rows)

        (small_disk / "other").unlink()
        x.flush()
        x.drop_cache()
        np.testing.assert_array_equal(x[...], rows)
    np.testing.assert_array_equal(np.load(small_disk / "rows.npy"), rows)


def test_create_on_a_full_disk_leaves_nothing(small_disk: Path) -> None:
    with open(small_disk / "other", "wb") as other:
        os.posix_fallocate(other.fileno(), 0, shutil.disk_usage(small_disk).free)

    with pytest.raises(fw.errors.FlashwarpError) as caught:
        fw.create(small_disk / "rows.npy", "i4", 4096, device="cpu")

    assert isinstance(caught.value, OSError)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_close_on_a_full_disk_says_what_is_lost(small_disk: Path) -> None:
    x = fw.create(small_disk / "rows.npy", "i4", (512, 256), device="cpu", cache="1 MiB")
    x[...] = 7
    (small_disk / "other").write_bytes(bytes(700 << 10))

    with pytest.raises(fw.errors.StorageError) as caught:
        x.close()

    assert caught.value.errno == 28
    assert x.closed
    x.close()
