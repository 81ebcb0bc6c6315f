"""Faults on demand: each kind does what it says, where it says, the same way for the same seed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, ControllerTimeout, StorageError
from flashwarp.storage import File, Memory, Replicated
from flashwarp.testing import Fault, FaultPlan, Faulty

ROWS = 512  # of 8 bytes; 64 to a line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """ROWS int64 that count from 0."""
    np.arange(ROWS).tofile(tmp_path / "f")
    return tmp_path / "f"


@pytest.fixture(params=["engine", "calls"])
def blocking(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "calls")


def open_array(storage: Faulty | Replicated, **options: Any) -> fw.Array:
    mode: Literal["r", "r+"] = "r+" if storage.writable else "r"
    return fw.open(storage, mode, "i8", device="cpu", line=512, cache=2048, **options)


# Plans.


@pytest.mark.parametrize(
    "text",
    [
        "seed=0",
        "seed=7; read eio p=0.01; write enospc n=3,5; any delay=200us p=0.1",
        "seed=1; read flip bytes=0-4096; write torn; flush eio n=1; discard erofs",
        "seed=9; any hang p=1e-09 n=1 bytes=5-6",
    ],
)
def test_plan_is_its_text(text: str) -> None:
    assert str(FaultPlan.parse(text)) == text
    assert FaultPlan.parse(str(FaultPlan.parse(text))) == FaultPlan.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "read",
        "eio",
        "read broken",
        "read torn",
        "write flip",
        "flush short",
        "read eio flip",
        "read eio p=2",
        "read eio p=nan",
        "read eio p=.",
        "read eio p=0.1 p=0.2",
        "read eio n=0",
        "read eio n=",
        "read eio bytes=5-5",
        "read eio bytes=5",
        "read delay=0us",
        "read delay=99999999us",
        "read eio color=red",
        "seed=99999999999999999999",
        "seed=9223372036854775808",
        "read eio; seed=1",
        "x" * 20_000,
    ],
)
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(ArgumentError):
        FaultPlan.parse(text)


def test_fault_that_cannot_be() -> None:
    with pytest.raises(ArgumentError, match="delay"):
        Fault("read", "delay")
    with pytest.raises(ArgumentError, match="delay"):
        Fault("read", "eio", delay_us=5)


# What they do.


def test_numbered_operation_fails_once(file: Path, blocking: bool) -> None:
    storage = Faulty(File(file), "read eio n=2", blocking=blocking)
    with open_array(storage) as x:
        assert x[0] == 0
        with pytest.raises(StorageError) as caught:
            x[70]
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(file)
        assert caught.value.offset == 512
        assert x[70] == 70
    assert storage.hits() == (1,)
    assert storage.operations()["read"] == 3


def test_span_fails_until_healed(file: Path, blocking: bool) -> None:
    storage = Faulty(File(file, 512), "read enodata bytes=1024-1025", blocking=blocking)
    with open_array(storage) as x:
        assert x[127] == 64 + 127
        for _ in range(2):
            with pytest.raises(StorageError, match="truncated") as caught:
                x[128]
            assert caught.value.offset == 512 + 1024
        storage.heal()
        assert x[128] == 64 + 128


def test_flush_after_a_failed_one_does_not_succeed(file: Path, blocking: bool) -> None:
    """The kernel reports lost writes once: the second flush used to succeed without them."""
    storage = Faulty(File(file, writable=True), "flush enospc n=1", blocking=blocking)
    x = open_array(storage)
    x[0] = 5
    with pytest.raises(StorageError) as caught:
        x.flush()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(file)
    x[1] = 6
    for end in (x.flush, x.close):
        with pytest.raises(StorageError, match="earlier flush failed") as caught:
            end()
        assert caught.value.errno == errno.ENOSPC
    assert x.closed
    assert np.fromfile(file, np.int64)[:2].tolist() == [5, 6], "what can be written is"


def test_dropping_dirty_lines_gives_up_only_what_cannot_be_written() -> None:
    data = np.zeros((64, 128), np.int32)  # a line each
    storage = Faulty(Memory(data), "write eio bytes=512-1023")
    with fw.open(storage, "r+", "i4", data.shape, device="cpu", line=512, cache=1 << 18) as x:
        x[:] = 1
        with pytest.raises(StorageError):
            x.drop_cache()
        x.drop_cache(drop_dirty=True)

        storage.heal()
        want = np.ones_like(data)
        want[1] = 0
        np.testing.assert_array_equal(x[:], want)
        x[1] = 2
        x.drop_cache(drop_dirty=True)
        assert (x[1] == 2).all()
    assert (data[1] == 2).all()


def test_torn_write_lands_in_part_and_is_written_again(file: Path, blocking: bool) -> None:
    storage = Faulty(File(file, writable=True), "seed=3; write torn n=1", blocking=blocking)
    with fw.open(storage, "r+", "i8", device="cpu", line=4096, cache=16384) as x:
        x[...] = -1
        with pytest.raises(StorageError):
            x.flush()
        on_disk = np.fromfile(file, np.int64)
        landed = int((on_disk == -1).sum())
        # Sectors at the front, not all of them; the rest is as it was.
        assert landed % 64 == 0
        assert landed < ROWS
        assert (on_disk[landed:] == np.arange(landed, ROWS)).all()
        assert (x[...] == -1).all()
        x.flush()
    assert (np.fromfile(file, np.int64) == -1).all()


def test_flipped_bit_is_one_bit(file: Path, blocking: bool) -> None:
    storage = Faulty(File(file), "read flip n=1", blocking=blocking)
    with fw.open(storage, "r", "i8", device="cpu", line=4096, cache=16384) as x:
        wrong = x[...] ^ np.arange(ROWS)
    assert np.unpackbits(wrong.view(np.uint8)).sum() == 1


@pytest.mark.parametrize("o_direct", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        "any eintr p=0.3; any eagain p=0.3",
        "read short p=0.5; write short p=0.5",
        "any delay=300us p=0.2",
        "any delay=100us p=0.1; any eintr p=0.1; read short p=0.2; write short p=0.2",
    ],
)
def test_what_the_kernel_may_do_changes_nothing(
    file: Path, blocking: bool, o_direct: bool, plan: str
) -> None:
    storage = Faulty(File(file, writable=True, o_direct=o_direct), plan, blocking=blocking)
    with open_array(storage) as x:
        for turn in range(3):
            order = np.random.default_rng(turn).permutation(ROWS)
            x.scatter(order, order * 10 + turn)
            assert (x.gather(order[::-1]) == order[::-1] * 10 + turn).all()
        x.flush()
        assert sum(storage.hits()) > 10
    assert (np.fromfile(file, np.int64) == np.arange(ROWS) * 10 + 2).all()


def test_late_completions_come_in_another_order(file: Path) -> None:
    storage = Faulty(File(file), "read delay=2000us n=1")
    with fw.open(storage, "r", "i8", device="cpu", line=512, cache=8192) as x:
        x.prefetch([0])
        x.prefetch([64])
        assert x[64] == 64
        assert x[0] == 0


def test_same_seed_fails_the_same_way(tmp_path: Path) -> None:
    def failures(seed: int) -> list[int]:
        storage = Faulty(Memory(512 * 100), f"seed={seed}; read eio p=0.2")
        found = []
        for i in range(100):
            try:
                storage.read(512 * i, 512)
            except StorageError:
                found.append(i)
        return found

    assert failures(1) == failures(1)
    assert 5 < len(failures(1)) < 40
    assert failures(1) != failures(2)


class ForAll(fw.nvme.SoftwareController):
    """Serves replicas as a whole: the host, not device code, tries the next."""

    serves_members = False


@pytest.mark.parametrize("controller", [None, ForAll()], ids=["each", "for all"])
def test_replica_answers_for_a_faulty_one(
    file: Path, tmp_path: Path, controller: ForAll | None
) -> None:
    (tmp_path / "g").write_bytes(file.read_bytes())
    bad = Faulty(File(file), "read eio")
    replicas = Replicated([bad, File(tmp_path / "g")])
    with open_array(replicas, controller=controller) as x:
        assert (x[...] == np.arange(ROWS)).all()
        assert x.stats.errors == 0
    assert bad.hits()[0] > 0


def test_faults_in_calls_of_the_storage_itself() -> None:
    storage = Faulty(Memory(4096), "read hang n=1; discard eio n=1; write_zeroes enospc; write eio")
    for use, number in [
        (lambda: storage.read(0, 1), errno.ETIMEDOUT),
        (lambda: storage.discard(0, 512), errno.EIO),
        (lambda: storage.write_zeroes(0, 512), errno.ENOSPC),
        (lambda: storage.write(0, b"a"), errno.EIO),
    ]:
        with pytest.raises(StorageError) as caught:
            use()
        assert caught.value.errno == number
        assert caught.value.offset == 0
    assert storage.read(0, 4096) == bytes(4096)


def test_a_drive_that_never_answers_is_a_timeout(file: Path) -> None:
    # The time limit is read when the array opens, from the environment of the process; that of a
    # command is a quarter of it.
    program = """
import sys, time
import flashwarp as fw
from flashwarp.testing import Faulty
x = fw.open(Faulty(fw.storage.File(sys.argv[1]), "read hang n=1"), "r", "i8", device="cpu")
start = time.monotonic()
try:
    x[3]
except fw.errors.ControllerTimeout:
    print(time.monotonic() - start)
try:
    x.close()
except fw.errors.ControllerTimeout:
    print("close")
assert x.closed
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)],
        env={**os.environ, "FLASHWARP_TIMEOUT_S": "4"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) >= 1
    assert issubclass(ControllerTimeout, TimeoutError)


# A read of 4 s, for 3 of which the process is stopped, and a limit of 2 s for a command.
SLOW_READ = """
import sys
import flashwarp as fw
from flashwarp.testing import Faulty
storage = Faulty(fw.storage.File(sys.argv[1]), "read delay=4000000us n=1", blocking=%s)
with fw.open(storage, "r", "i8", device="cpu", line=512, cache=2048) as x:
    print("waits", flush=True)
    assert x[3] == 3
print("done")
"""


def test_stopped_process_has_not_waited(file: Path) -> None:
    """Ctrl-Z for longer than the time limit used to end every wait, and the queue pairs with it."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW_READ % blocking, str(file)],
            env={**os.environ, "FLASHWARP_TIMEOUT_S": "8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for blocking in (False, True)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "waits\n"
    time.sleep(0.4)
    for number, wait_s in ((signal.SIGSTOP, 3), (signal.SIGCONT, 0)):
        for child in children:
            child.send_signal(number)
        time.sleep(wait_s)

    ended = [child.communicate(timeout=60) for child in children]

    assert ended == [("done\n", "")] * 2


def test_store_that_found_no_frame_because_of_a_neighbour_is_raised(blocking: bool) -> None:
    """The neighbour's write-back failed, and only the neighbour was told: the store was lost."""
    bad = Faulty(Memory(4096), "write eio", blocking=blocking)
    with fw.Cache(2048, 512, device="cpu") as cache:
        neighbour = fw.open(bad, "r+", "i8", cache=cache)
        neighbour[:256] = 7  # every frame is dirty with what cannot be written
        with fw.open(Memory(4096), "r+", "i8", cache=cache) as x:
            for use in (lambda: x.scatter([3], [9]), lambda: x[3], lambda: x.gather([70])):
                with pytest.raises(StorageError, match="a line in its way"):
                    use()
            bad.heal()
            x[3] = 9
            assert x[3] == 9
        # What it was told then, it raises with its next call.
        with pytest.raises(StorageError, match="Input/output error"):
            neighbour.flush()
        assert (neighbour[:256] == 7).all()
        neighbour.close()
    assert np.frombuffer(bad.inner.read(0, 2048), np.int64).tolist() == [7] * 256


def test_frames_of_commands_without_an_answer_come_back_when_the_array_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay taken while the drive may still write them; a neighbour gets them afterwards."""
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "1.2")
    rows = np.arange(64 * 128, dtype=np.uint32).reshape(64, 128)
    for name in ("stuck", "well"):
        np.save(tmp_path / f"{name}.npy", rows)
    stuck = Faulty(File(tmp_path / "stuck.npy", 128), "read hang")
    with (
        fw.device.CpuDevice(2) as device,
        fw.Cache(4 * 512, line=512, ways=4, device=device) as cache,
        fw.open(tmp_path / "well.npy", cache=cache) as well,
    ):
        array = fw.open(stuck, "r", "uint32", (64, 128), cache=cache)
        with pytest.raises(ControllerTimeout):
            array.gather(np.arange(4))

        with pytest.raises(ControllerTimeout):
            array.close()

        for _ in range(3):
            assert (well.gather(np.arange(64)) == rows).all()


def test_thread_that_waits_for_long_sleeps(file: Path) -> None:
    """It yielded without end; a few such threads held up the kernel's, and so their own I/O."""
    storage = Faulty(File(file), "read delay=500000us n=1")
    with open_array(storage) as x:
        before = os.times()
        assert x[0] == 0
        after = os.times()
    assert after.elapsed - before.elapsed > 0.4
    assert after.user + after.system - before.user - before.system < 0.3
