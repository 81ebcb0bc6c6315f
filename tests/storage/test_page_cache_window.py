"""Page-cached files read without system calls: same bytes, and no SIGBUS when the file shrinks."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import _native
from flashwarp.errors import StorageError
from flashwarp.testing.rings import FLUSH, LBA, SUCCESS, UNRECOVERED_READ, WRITE, Host

MIB = 1 << 20


def make_file(path: Path, nbytes: int, low: int = 1) -> np.ndarray:
    """Write random bytes; none is zero unless `low` is."""
    content = np.random.default_rng(nbytes).integers(low, 256, nbytes, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    return content


def open_window(path: Path, **options: Any) -> Any:
    storage = _native.FileStorage(str(path), **options)
    if storage.describe()["cached reads"] != "copied in place":
        pytest.skip(f"no window here: {storage.describe()['cached reads']}")
    return storage


def read_calls() -> int:
    """Count the read system calls of this process so far."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["syscr"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "f"


@pytest.mark.parametrize("offset", [0, 128, 3 * MIB + 5])
def test_reads_bring_the_bytes_without_read_calls(path: Path, offset: int) -> None:
    content = make_file(path, 6 * MIB + 777, low=0)
    with Host(open_window(path, offset=offset), buffer_nbytes=2 * MIB) as host:
        blocks = (len(content) - offset) // LBA
        calls = read_calls()

        for lba in np.random.default_rng(1).integers(0, blocks - 4096, 200):
            count = 1 << (int(lba) % 13)
            host.data[:] = 0
            assert host.read(int(lba), count) == SUCCESS
            begin = offset + int(lba) * LBA
            assert (host.data[: count * LBA] == content[begin : begin + count * LBA]).all()

        # Reading the counter is a read call, too.
        assert read_calls() - calls < 10


def test_configuration_turns_the_window_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_file(path, MIB)
    monkeypatch.setenv("FLASHWARP_COPY_CACHED", "0")

    storage = fw.storage.File(path)

    assert storage.describe()["cached reads"] == "by system calls: as configured"


def test_written_bytes_are_read_back(path: Path) -> None:
    make_file(path, MIB)
    with Host(open_window(path, writable=True)) as host:
        assert host.read(100, 8) == SUCCESS
        host.data[: 8 * LBA] = 77

        assert host.do(WRITE, lba=100, blocks=8) == SUCCESS
        assert host.do(FLUSH) == SUCCESS

        host.data[:] = 0
        assert host.read(100, 8) == SUCCESS
        assert (host.data[: 8 * LBA] == 77).all()


def test_pages_that_are_gone_fail_the_read_and_not_the_process(path: Path) -> None:
    content = make_file(path, MIB)
    with Host(open_window(path)) as host:
        # Just seen in the page cache: the next reads touch the mapping without another look.
        assert host.read(0, 8) == SUCCESS
        os.truncate(path, MIB // 2)

        assert host.read(MIB // LBA - 8, 8) == UNRECOVERED_READ
        assert host.read(0, 8) == SUCCESS
        assert (host.data[: 8 * LBA] == content[: 8 * LBA]).all()

        (error,) = host.controller.take_errors()
        assert error["errno"] == errno.ENODATA
        assert "truncated" in error["reason"]
        assert error["path"] == str(path)


@pytest.mark.parametrize("keep", [1, 511, 2048, 4095])
def test_end_of_the_last_page_is_an_error_and_not_zeros(path: Path, keep: int) -> None:
    make_file(path, MIB)
    with Host(open_window(path)) as host:
        assert host.read(0, 8) == SUCCESS
        os.truncate(path, 8192 + keep)

        assert host.read(8192 // LBA, 8) == UNRECOVERED_READ
        assert host.read(8, 8) == SUCCESS


def test_data_that_ends_with_zeros_is_data(path: Path) -> None:
    content = make_file(path, MIB)
    content[4096:8192] = 0
    path.write_bytes(content.tobytes())
    with Host(open_window(path)) as host:
        calls = read_calls()
        host.data[:] = 1

        assert host.read(8, 8) == SUCCESS

        assert not host.data[:4096].any()
        assert read_calls() - calls < 5


def test_array_raises_when_its_file_shrinks_under_it(path: Path) -> None:
    rows = np.arange(1, 4 * MIB // 4 + 1, dtype="<u4").reshape(-1, 1024)
    rows.tofile(path)
    with fw.open(path, dtype="<u4", shape=rows.shape, device="cpu", cache=64 << 10) as x:
        index = np.random.default_rng(2).permutation(len(rows))
        assert (x.gather(index) == rows[index]).all()
        cutter = threading.Timer(0.02, os.truncate, (path, rows.nbytes // 3))
        cutter.start()

        def read_for_long() -> None:
            for _ in range(100_000):
                assert (x.gather(index) == rows[index]).all()

        with pytest.raises(StorageError, match="truncated") as caught:
            read_for_long()
        cutter.join()

        assert caught.value.errno == errno.ENODATA
        keep = np.arange(rows.nbytes // 3 // 4096)
        assert (x.gather(keep) == rows[keep]).all()


# What happens to signals is tried in processes of their own.

PRELUDE = """
import ctypes, faulthandler, mmap, os, pathlib, signal, sys, time
from flashwarp import _native
from flashwarp.errors import StorageError
from flashwarp.testing.rings import Host, LBA, SUCCESS, UNRECOVERED_READ
path = pathlib.Path(sys.argv[1])
path.write_bytes(b"x" * (1 << 20))
resource_limit = __import__("resource")
resource_limit.setrlimit(resource_limit.RLIMIT_CORE, (0, 0))
"""

SHRINK = """
assert host.read(0, 8) == SUCCESS
os.truncate(path, 1 << 16)
assert host.read(1024, 8) == UNRECOVERED_READ
assert host.read(0, 8) == SUCCESS
host.controller.stop()
print("alive")
"""


def run_script(path: Path, script: str) -> subprocess.CompletedProcess[str]:
    open_window_path = path.with_suffix(".probe")
    make_file(open_window_path, 8192)
    open_window(open_window_path)
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_handler_that_a_program_installs_later_is_respected(path: Path) -> None:
    done = run_script(
        path,
        """
host = Host(_native.FileStorage(str(path)))
assert host.read(0, 8) == SUCCESS
signal.signal(signal.SIGBUS, lambda *_: sys.exit("our reads raise no signal"))
time.sleep(0.05)
"""
        + SHRINK,
    )

    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_thread_that_blocks_the_signal_reads_by_system_calls(path: Path) -> None:
    done = run_script(
        path,
        """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])
host = Host(_native.FileStorage(str(path)))
"""
        + SHRINK,
    )

    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


BLOCKED_LATER = """
import threading
import numpy as np
import flashwarp as fw

for on_main_thread in (True, False):
    path.write_bytes(b"x" * (1 << 20))
    with fw.open(path, dtype="u1", shape=(256, 4096), device="cpu", cache=16384) as x:
        def reads_and_blocks_and_reads():
            x.gather(np.arange(256))
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])
            # The signal is blocked in this thread, and was not when it copied first.
            for _ in range(20):
                x.gather(np.arange(256))
            os.truncate(path, 1 << 16)
            try:
                x.gather(np.arange(255, -1, -1))
            except StorageError as error:
                assert "truncated" in str(error), error
            else:
                sys.exit("rows that are gone were read")
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGBUS])
            assert (x.gather(np.arange(16)) == ord("x")).all()

        if on_main_thread:
            reads_and_blocks_and_reads()
        else:
            thread = threading.Thread(target=reads_and_blocks_and_reads)
            thread.start()
            thread.join()
print("alive")
"""


def test_signal_that_is_blocked_after_the_first_read(path: Path) -> None:
    """The mask was asked for once a thread, and the process was killed."""
    done = run_script(path, BLOCKED_LATER)

    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_signal_that_is_blocked_after_the_first_visit(path: Path) -> None:
    done = run_script(
        path,
        """
host = Host(_native.FileStorage(str(path)))
assert host.read(0, 8) == SUCCESS
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])
"""
        + SHRINK,
    )

    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


FOREIGN_FAULT = """
host = Host(_native.FileStorage(str(path)))
assert host.read(0, 8) == SUCCESS
with path.open("rb") as file:
    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
import numpy as np
array = np.frombuffer(view, np.uint8)
os.truncate(path, 0)
print(array[4096])
"""


@pytest.mark.parametrize("reporter", [False, True])
def test_faults_of_others_end_the_process_as_before(path: Path, reporter: bool) -> None:
    done = run_script(path, ("faulthandler.enable()\n" if reporter else "") + FOREIGN_FAULT)

    assert done.returncode == -signal.SIGBUS
    assert ("Bus error" in done.stderr) == reporter


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        ("", -signal.SIGBUS),
        ("signal.signal(signal.SIGBUS, signal.SIG_IGN)\n", 0),
        ("signal.signal(signal.SIGBUS, lambda *_: os._exit(7))\n", 7),
    ],
)
def test_signals_that_were_sent_go_where_they_went_before(
    path: Path, setup: str, code: int
) -> None:
    done = run_script(
        path,
        setup
        + """
host = Host(_native.FileStorage(str(path)))
assert host.read(0, 8) == SUCCESS
os.kill(os.getpid(), signal.SIGBUS)
time.sleep(0.01)
host.controller.stop()
""",
    )

    assert done.returncode == code, done.stderr
