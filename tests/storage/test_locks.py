"""One writer a file: who is refused, who is named, and what a reader beside a writer sees."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ClosedError, LockedError, PathError, StorageError
from flashwarp.storage import BlockDevice, File, Memory, Replicated, Storage, Striped

ROWS = np.arange(8192, dtype="i8").reshape(-1, 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.npy"
    np.save(path, ROWS)
    return path


def open_array(path: Path | Storage, mode: Any = "r", **options: Any) -> fw.Array:
    return fw.open(path, mode, device="cpu", **{"cache": 65536, **options})


@contextlib.contextmanager
def process(path: Path, script: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script that has the array `x` of the path open, and prints when it is ready."""
    begin = """
import os, sys, time
import numpy as np
import flashwarp as fw
x = fw.open(sys.argv[1], sys.argv[2], device="cpu", cache=65536)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", begin + script, str(path), "r+"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    try:
        yield child
    finally:
        child.kill()
        child.wait(60)
        child.stdout.close()
        child.stdin.close()


def tell(child: subprocess.Popen[str]) -> str:
    """Let it go on, and return the next line that it prints."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return child.stdout.readline()


HOLD = 'print("ready", flush=True)\ninput()\nx.close()\nprint("closed", flush=True)\ninput()\n'


# Within one process.


def other_names(path: Path) -> dict[str, Path]:
    link, hard = path.with_name("link"), path.with_name("hard")
    link.symlink_to(path)
    os.link(path, hard)
    return {"same": path, "symlink": link, "hard link": hard}


@pytest.mark.parametrize("name", ["same", "symlink", "hard link"])
@pytest.mark.parametrize(("first", "second"), [("r+", "r+"), ("r+", "r"), ("r", "r+")])
def test_writer_excludes_every_other_array_of_its_process(
    path: Path, first: str, second: str, name: str
) -> None:
    other = other_names(path)[name]
    with open_array(path, first) as x:
        with pytest.raises(LockedError, match="in this process") as caught:
            open_array(other, second)
        assert (x[3] == ROWS[3]).all()
    assert isinstance(caught.value, PathError)
    assert caught.value.errno == errno.EWOULDBLOCK
    assert caught.value.holder == os.getpid()
    assert caught.value.filename == str(other)
    assert "lock=False" in str(caught.value)

    open_array(other, second).close()


def test_any_number_of_readers(path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(open_array(path))


def test_way_out(path: Path) -> None:
    with open_array(path, "r+") as x, open_array(path, "r+", lock=False) as y:
        x[0] = 1
        x.flush()
        assert (y[0] == 1).all()
        assert x.explain().facts["storage"]["lock"] == "held"
        assert y.explain().facts["storage"]["lock"] == "none, as asked for"


def test_open_that_fails_leaves_no_lock(path: Path) -> None:
    for _ in range(3):
        with pytest.raises(fw.errors.FlashwarpError):
            open_array(path, "r+", cache=1)
        with pytest.raises(fw.errors.RouteError):
            open_array(path, "r+", strict="bounce")
    open_array(path, "r+").close()


def test_storages_are_locked_too(path: Path) -> None:
    with File(path, writable=True):
        with pytest.raises(LockedError):
            File(path, writable=True)
        with pytest.raises(LockedError):
            File(path)
        with pytest.raises(LockedError):
            open_array(path)
        File(path, writable=True, lock=False).close()
    open_array(path, "r+").close()


def test_storage_keeps_its_lock_as_long_as_an_array_uses_it(path: Path) -> None:
    storage = File(path, 128, writable=True)
    with fw.open(storage, "r+", "i8", device="cpu", cache=65536) as x:
        storage.close()
        with pytest.raises(LockedError):
            open_array(path, "r+")
        x[0] = 9
    open_array(path, "r+").close()


def on_storage(storage: Storage) -> fw.Array:
    mode: Any = "r+" if storage.writable else "r"
    return fw.open(storage, mode, "i8", device="cpu", cache=65536)


def test_storage_that_takes_writes_serves_one_array(path: Path) -> None:
    for storage in (Memory(8192), File(path, 128, writable=True)):
        with on_storage(storage) as x:
            for other in (
                storage,
                Striped([storage], 4096),
                Replicated([Memory(storage.nbytes), storage]),
            ):
                with pytest.raises(LockedError, match="another array") as caught:
                    on_storage(other)
                assert caught.value.holder == os.getpid()
            with pytest.raises(LockedError):
                on_storage(Striped([storage], 4096))
            x[0] = 1

        on_storage(storage).close()
        with on_storage(Replicated([Memory(storage.nbytes), storage])):
            with pytest.raises(LockedError):
                on_storage(storage)
            with pytest.raises(LockedError):
                on_storage(Striped([storage], 4096))


def test_storage_of_readers_and_storage_without_lock_serve_any_number(path: Path) -> None:
    for storage in (
        Memory(np.zeros(1024), writable=False),
        File(path, 128),
        File(path, 128, writable=True, lock=False),
    ):
        with on_storage(storage), on_storage(storage) as x:
            assert x.writable == storage.writable


def test_array_that_could_not_be_opened_leaves_its_storage_free() -> None:
    storage = Memory(8192)
    with fw.Cache("64 KiB", device="cpu") as closed:
        pass
    with pytest.raises(ClosedError):
        fw.open(storage, "r+", "i8", cache=closed)

    on_storage(storage).close()


def test_array_goes_on_after_its_storage_was_closed(path: Path) -> None:
    memory = Memory(np.arange(4096), writable=False)
    striped = Striped([File(path, 128, lock=False)], 4096)
    for storage in (memory, File(path, 128, writable=True), striped):
        with on_storage(storage) as x:
            before = x.in_place
            for each in (storage, *getattr(storage, "members", ())):
                each.close()

            assert str(x.explain())
            assert x.in_place == before
            x.refresh()
            assert (x[:8] == np.arange(8)).all()
            with pytest.raises(ClosedError):
                storage.read(0, 1)
            with pytest.raises(ClosedError):
                on_storage(storage)
    with File(path, writable=True):
        pass


@pytest.mark.parametrize("kind", [Striped, Replicated])
def test_each_of_several_files_is_locked(
    tmp_path: Path, kind: type[Striped] | type[Replicated]
) -> None:
    names = [tmp_path / f"{n}.raw" for n in range(3)]
    for name in names:
        name.write_bytes(bytes(1 << 18))
    options = {"dtype": "i8"}
    with open_array(kind(names), "r+", **options) as x:
        for name in names:
            with pytest.raises(LockedError):
                File(name)
        assert [m["lock"] for m in x.explain().facts["storage"]["members"]] == ["held"] * 3
    with open_array(kind(names), "r+", **options):
        pass
    with pytest.raises(LockedError):
        open_array(kind([names[0], names[1], names[0]]), "r+", **options)
    open_array(kind([names[0], names[1], names[0]]), "r", **options).close()
    for wrong in ({"cache": 1}, {"strict": "bounce"}, {"line": 3}):
        with pytest.raises(fw.errors.FlashwarpError):
            open_array(kind(names), "r+", **options, **wrong)
    with Striped([File(name, writable=True) for name in names]), pytest.raises(LockedError):
        Replicated([File(name) for name in names])


def test_closed_array_holds_neither_lock_nor_descriptor(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arrays = []
    for mode in ["r", "r+"] * 5:
        arrays.append(open_array(path, mode))
        arrays[-1].close()
    # Descriptors that tests before this one have lost may be closed meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before
    for array in arrays:
        with pytest.raises(ClosedError):
            array.refresh()


def test_threads_that_race_for_a_file(path: Path) -> None:
    """Exactly one of them gets it, whatever the order."""
    for _ in range(10):
        start, end = threading.Barrier(8), threading.Barrier(8)
        got: list[str] = []

        def take(start: Any = start, end: Any = end, got: Any = got) -> None:
            start.wait(30)
            try:
                storage = File(path, writable=True)
            except LockedError:
                got.append("refused")
                end.wait(30)
            else:
                got.append("held")
                end.wait(30)
                storage.close()

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(got) == ["held"] + ["refused"] * 7


# Between processes.


def test_second_writer_is_told_who_the_first_is(path: Path) -> None:
    with process(path, HOLD) as child:
        with pytest.raises(LockedError, match=f"process {child.pid}") as caught:
            open_array(path, "r+")
        assert caught.value.holder == child.pid
        with pytest.raises(LockedError):
            File(path, writable=True)
        with pytest.raises(LockedError, match=f"process {child.pid}"):
            fw.create(path, "f8", 3, device="cpu", overwrite=True)
        open_array(path, "r+", lock=False).close()

        assert tell(child) == "closed\n"
        open_array(path, "r+").close()


def test_killed_writer_leaves_no_lock(path: Path) -> None:
    with process(path, HOLD) as child:
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        open_array(path, "r+").close()


def test_reader_beside_a_writer_sees_what_was_flushed_after_refresh(path: Path) -> None:
    script = """
print("ready", flush=True)
input()
x[5] = 55
x.flush()
print("flushed", flush=True)
input()
x.close()
"""
    with process(path, script) as child, open_array(path) as x:
        assert (x[5] == ROWS[5]).all()
        assert tell(child) == "flushed\n"
        assert (x[5] == ROWS[5]).all(), "a cached line is what it was"

        x.refresh()

        assert (x[5] == 55).all()
        np.testing.assert_array_equal(x[6:], ROWS[6:])


@pytest.mark.parametrize("o_direct", [False, True])
def test_refresh_waits_for_asynchronous_calls_and_keeps_stores(path: Path, o_direct: bool) -> None:
    with open_array(path, "r+", o_direct=o_direct) as x:
        written = x.scatter_async(slice(0, 100), 7)
        x.refresh()
        assert written.done()
        assert (x[:100] == 7).all()


def test_refresh_reports_a_file_that_was_cut(path: Path) -> None:
    with open_array(path) as x:
        assert (x[-1] == ROWS[-1]).all()
        os.truncate(path, path.stat().st_size - 1)

        with pytest.raises(StorageError, match="truncated") as caught:
            x.refresh()

        assert caught.value.errno == errno.ENODATA
        assert (x[0] == ROWS[0]).all()


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_refresh_reports_a_file_that_is_another(
    path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    with open_array(Path(path.name)) as x:
        monkeypatch.chdir("/")
        x.refresh()
        if how == "replaced":
            np.save(path.with_name("new.npy"), -ROWS)
            path.with_name("new.npy").replace(path)
        else:
            path.unlink()

        with pytest.raises(StorageError, match=how) as caught:
            x.refresh()

        assert caught.value.errno == errno.ESTALE
        np.testing.assert_array_equal(x[...], ROWS)


def test_refresh_looks_at_every_file(tmp_path: Path) -> None:
    names = [tmp_path / f"{n}.raw" for n in range(3)]
    for name in names:
        name.write_bytes(bytes(1 << 18))
    with open_array(Striped(names), dtype="i8") as x:
        x.refresh()
        names[1].unlink()
        with pytest.raises(StorageError, match="removed"):
            x.refresh()


def test_child_of_fork_neither_keeps_nor_releases_the_lock(path: Path) -> None:
    script = """
if (child := os.fork()) == 0:
    # What it has inherited must not matter: not when it is closed, and not while it stays open.
    y = x
    y.close()
    try:
        fw.open(sys.argv[1], "r+", device="cpu", cache=65536)
    except fw.errors.LockedError as error:
        print("ready" if error.holder == os.getppid() else error, flush=True)
    time.sleep(100)
    os._exit(0)
input()
x.close()
print("closed", flush=True)
input()
os.kill(child, 9)
"""
    with process(path, script) as child:
        try:
            with pytest.raises(LockedError) as caught:
                open_array(path, "r+")
            assert caught.value.holder == child.pid
            assert tell(child) == "closed\n"

            open_array(path, "r+").close()
        finally:
            tell(child)


def test_descriptor_that_a_child_inherited_is_explained(path: Path) -> None:
    script = """
if (child := os.fork()) == 0:
    time.sleep(100)
    os._exit(0)
print("ready", flush=True)
print(child, flush=True)
input()
"""
    with process(path, script) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait(60)
        try:
            with pytest.raises(LockedError, match="has ended, or more likely one that it forked"):
                open_array(path, "r+")
        finally:
            os.kill(child, signal.SIGKILL)


NO_FLOCK = """
#include <errno.h>
int flock(int fd, int how) { (void)fd; (void)how; errno = ENOLCK; return -1; }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_file_system_without_locks_goes_on_and_says_so(path: Path, tmp_path: Path) -> None:
    (tmp_path / "no.c").write_text(NO_FLOCK)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", tmp_path / "no.so", tmp_path / "no.c"], check=True
    )
    script = """
import sys, flashwarp as fw
with fw.open(sys.argv[1], "r+", device="cpu") as x:
    x[0] = 3
    print(x.explain().facts["storage"]["lock"])
with fw.create(sys.argv[1], "f8", 3, device="cpu", overwrite=True):
    pass
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env={**os.environ, "LD_PRELOAD": str(tmp_path / "no.so")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "none, the file system refuses: No locks available\n"


def test_block_device_takes_the_option(path: Path) -> None:
    with pytest.raises(PathError, match="not a block device"):
        BlockDevice(path, lock=False)
