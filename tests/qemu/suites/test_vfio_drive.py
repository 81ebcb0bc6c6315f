"""A drive that this process drives: data, refusals, losses and recovery."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import _native
from flashwarp.errors import (
    ArgumentError,
    ControllerLost,
    FlashwarpError,
    LockedError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.nvme import binding
from flashwarp.nvme.group import ControllerGroup
from flashwarp.storage import Striped
from qemu import guest
from qemu.machine import Drive, Machine, Namespace
from qemu.suites.drives import bound, drive

MIB = 1 << 20
# Two plain drives, of which the second has namespaces of other kinds; one with few queues and a
# small limit of transfers, throttled; one that a test pulls.
MACHINE = Machine(
    (
        Drive((Namespace(32 * MIB),)),
        Drive(
            (
                Namespace(4 * MIB),
                Namespace(4 * MIB, unreadable=(4096,)),
                Namespace(4 * MIB, lba_bytes=2048),
                Namespace(4 * MIB, metadata_bytes=8),
            )
        ),
        Drive((Namespace(4 * MIB, iops_max=400),), mdts=1, queue_pairs_max=3),
        Drive((Namespace(4 * MIB),)),
    )
)
PLAIN, SECOND, SMALL, PULLED = range(4)

# How many commands the integrity test makes of each shape.
COMMANDS = int(os.environ.get("FLASHWARP_QEMU_COMMANDS", "1500"))


def pattern(nbytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def opened() -> Iterator[fw.nvme.VfioController]:
    with drive(PLAIN, allow_raw_writes=True) as controller:
        yield controller


def open_rows(controller: fw.nvme.VfioController, **options: Any) -> fw.Array:
    namespace = controller.namespace(1)
    return fw.open(namespace, "r+", "u1", device="cpu", controller=controller, **options)


# Data.


@pytest.mark.parametrize(
    ("queue_pairs", "depth"), [(1, 2), (1, 128), (2, 16), (4, 1024), (16, 2), (16, 64)]
)
def test_data_is_whole_at_every_shape(queue_pairs: int, depth: int) -> None:
    """Rows of words that name their own place, read in any order and stored anew."""
    with (
        drive(PLAIN, queue_pairs=queue_pairs, depth=depth, allow_raw_writes=True) as controller,
        controller.namespace(1) as namespace,
    ):
        words = np.arange(namespace.nbytes // 8, dtype="<u8")
        namespace.write(0, words)
        chooser = np.random.default_rng(depth)
        with fw.open(
            namespace, "r+", "<u8", device="cpu", line=512, cache="256 KiB",
            controller=controller,
        ) as x:  # fmt: skip
            while x.stats.commands < COMMANDS:
                index = chooser.integers(0, words.size, 1000)
                np.testing.assert_array_equal(x.gather(index), words[index])
                stored = np.unique(chooser.integers(0, words.size, 50))
                words[stored] = chooser.integers(0, 1 << 60, stored.size)
                x.scatter(stored, words[stored])
            x.flush()
        held = np.frombuffer(namespace.read(0, namespace.nbytes), "<u8")
        assert not (held != words).sum()


@pytest.mark.parametrize("line", [512, 4096, 8192, 16384, 512 << 10])
@pytest.mark.parametrize("path", ["direct", "bounce"])
def test_lines_of_every_size_are_moved(path: Literal["direct", "bounce"], line: int) -> None:
    """One page, two by PRP entries, more by a list."""
    content = pattern(4 * MIB, line)
    settings = {"depth": 16, "route": path, "allow_raw_writes": True}
    with drive(PLAIN, **settings) as opened, opened.namespace(1) as namespace:
        namespace.write(0, content)
        with fw.open(
            namespace, "r+", "u1", device="cpu", line=line, cache=8 * line, controller=opened
        ) as x:
            assert x.explain().route == path
            np.testing.assert_array_equal(x[: content.size], content)
            content[100_000:300_000] = 5
            x[100_000:300_000] = 5
        assert namespace.read(0, content.size) == content.tobytes()


def test_host_commands_split_and_keep_neighbours(opened: fw.nvme.VfioController) -> None:
    """Transfers at any byte, longer than one command takes."""
    with opened.namespace(1) as namespace:
        expected = bytearray(pattern(3 * MIB).tobytes())
        namespace.write(0, expected)
        for offset, nbytes in ((0, 1), (511, 2), (1000, 5000), (4097, 2 * MIB), (511, 513)):
            part = pattern(nbytes, nbytes).tobytes()
            namespace.write(offset, part)
            expected[offset : offset + nbytes] = part
        namespace.write_zeroes(777, MIB)
        expected[777 : 777 + MIB] = bytes(MIB)
        namespace.flush()
        assert namespace.read(0, len(expected)) == expected
        namespace.discard(2 * MIB + 100, 5000)
        assert namespace.read(0, 2 * MIB + 100) == expected[: 2 * MIB + 100]


def test_stripes_over_two_drives() -> None:
    """A controller for each; device code chooses between them."""
    with drive(PLAIN, allow_raw_writes=True) as a, drive(SECOND, allow_raw_writes=True) as b:
        content = pattern(4 * MIB)
        with Striped([a.namespace(1), b.namespace(1)], "64 KiB", content.size) as both:
            both.write(0, content)
            group = ControllerGroup([a, b])
            with fw.open(both, "r+", "u1", device="cpu", cache="256 KiB", controller=group) as x:
                assert "2 controllers" in x.explain().facts["engine"]
                np.testing.assert_array_equal(x[:], content)
                x[500_000:900_000] = 9
                content[500_000:900_000] = 9
            assert both.read(0, content.size) == content.tobytes()


def test_software_controller_serves_a_namespace(opened: fw.nvme.VfioController) -> None:
    """The way for devices whose memory the drive does not reach."""
    content = pattern(MIB)
    with opened.namespace(1) as namespace:
        namespace.write(0, content)
        settings = fw.nvme.SoftwareController(route="bounce")
        with fw.open(namespace, "r", "u1", device="cpu", controller=settings) as x:
            np.testing.assert_array_equal(x[: content.size], content)


# Refusals.


def test_bad_addresses_are_refused() -> None:
    with pytest.raises(ArgumentError, match="no PCI address such as"):
        fw.nvme.VfioController("nvme0")
    with pytest.raises(ArgumentError, match=r"no PCI device 0000:7f:00\.0; the NVMe controllers"):
        fw.nvme.VfioController("7f:00.0")
    with pytest.raises(ArgumentError, match="is no NVMe controller: its class is"):
        fw.nvme.VfioController("00:00.0")


def test_drive_of_the_kernel_is_refused_and_one_in_use_not_taken(tmp_path: Path) -> None:
    """It says who uses it; when nobody does any more, it is bound."""
    bdf = guest.controllers()[PULLED]
    guest.bind(bdf, "nvme")
    disk = guest.block_device(PULLED)
    with pytest.raises(LockedError, match=f"has the driver nvme.*binding bind {bdf}"):
        fw.nvme.VfioController(bdf)

    with (
        disk.open("rb"),
        pytest.raises(LockedError, match=f"process {os.getpid()} has {disk} open"),
    ):
        binding.bind(bdf)
    guest.load("ext4")
    subprocess.run(["mkfs.ext4", "-q", "-F", str(disk)], check=True)
    subprocess.run(["mount", str(disk), str(tmp_path)], check=True)
    try:
        with pytest.raises(LockedError, match=f"{disk} is mounted on {tmp_path}"):
            binding.bind(bdf)
        with pytest.raises(LockedError, match="is mounted on"):
            fw.nvme.VfioController(bdf)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    # In a mount namespace of its own, as containers have one.
    mounts = f"mount {disk} {tmp_path} && echo ready && exec sleep 60"
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", mounts], stdout=subprocess.PIPE, text=True
    ) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "ready\n"
        with pytest.raises(LockedError, match=f"the kernel has claimed {disk}"):
            binding.bind(bdf)
        container.kill()
    assert guest.driver_of(bdf) == "nvme"

    with drive(PULLED) as controller, controller.namespace(1) as namespace:
        assert namespace.carries == ["ext2, ext3 or ext4"]
        with pytest.raises(ReadOnlyError, match=r"carries ext2.*allow_raw_writes=True"):
            namespace.write(0, b"x")
        with pytest.raises(ReadOnlyError, match="allow_raw_writes=True"):
            open_rows(controller)
    with drive(PULLED, allow_raw_writes=True) as controller, controller.namespace(1) as namespace:
        namespace.write_zeroes(0, namespace.nbytes)


def test_second_process_is_refused(opened: fw.nvme.VfioController) -> None:
    with pytest.raises(LockedError, match=r"open in another process.*fuser -v /dev/vfio"):
        fw.nvme.VfioController(opened.bdf)
    with pytest.raises(LockedError, match=f"process {os.getpid()} drives {opened.bdf}"):
        binding.unbind(opened.bdf)


def test_limits_of_the_drive_are_told() -> None:
    with (
        drive(SMALL, queue_pairs=3, allow_raw_writes=True) as controller,
        pytest.raises(ArgumentError, match="has 3 I/O queue pairs, of which 2 are free"),
    ):
        open_rows(controller)
    with drive(SMALL, queue_pairs=1, allow_raw_writes=True) as controller:
        with pytest.raises(ArgumentError, match=r"at most 8192 bytes in a command \(MDTS\)"):
            open_rows(controller, line=16384)
        with pytest.raises(ArgumentError, match="has no namespace 2; it has 1"):
            controller.namespace(2)
        with open_rows(controller), pytest.raises(ArgumentError, match="is open with"):
            controller.namespace(1, writable=False)
    with pytest.raises(ArgumentError, match="depth=4096 is more than the 2048 entries"):
        fw.nvme.VfioController(bound(SMALL), depth=4096)


@pytest.mark.parametrize(
    ("nsid", "format_"), [(3, "2048 bytes with 0 bytes"), (4, "512 bytes with 8 bytes")]
)
def test_other_formats_of_blocks_are_refused(nsid: int, format_: str) -> None:
    refusal = (
        f"namespace {nsid} .* has blocks of {format_} of metadata.*nvme format /dev/nvmeXn{nsid}"
    )
    with drive(SECOND) as controller, pytest.raises(ArgumentError, match=refusal):
        controller.namespace(nsid)


def test_a_user_needs_the_group_alone() -> None:
    """With the file of the group, and enough memory to lock, no root is needed."""
    bdf = bound(PLAIN)
    program = f"import flashwarp as fw; fw.nvme.VfioController({bdf!r}).close()"
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    run = [*user, sys.executable, "-c", program]
    group = Path("/dev/vfio", binding.find(bdf).group)

    os.chmod("/dev/vfio/vfio", 0o666)
    os.chown(group, 0, 0)
    refused = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "PathError" in refused.stderr
    assert f"sudo chown $USER {group}" in refused.stderr

    os.chown(group, 65534, 65534)
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    os.chown(group, 0, 0)


# Failures of commands.


def test_out_of_range_and_unreadable_blocks() -> None:
    with drive(SECOND, allow_raw_writes=True) as controller:
        with controller.namespace(2) as namespace:
            with pytest.raises(StorageError) as caught:
                namespace.read(2 * MIB, 4096)
            assert caught.value.offset == 2 * MIB
            with fw.open(namespace, "r", "u1", device="cpu", controller=controller) as x:
                with pytest.raises(StorageError) as failed:
                    x[2 * MIB - 100 : 2 * MIB + 100]
                assert failed.value.status == 0x281
                assert x[:5].tolist() == [0] * 5
        native = controller.native
        with pytest.raises(_native.DriveFailure, match="Identify Namespace failed"):
            native.identify_namespace(0xFFFFFF00)
        assert not native.abort(0, 77)
        assert isinstance(controller.error_log(), list)


# Losses.


def in_flight(controller: fw.nvme.VfioController, lose: Callable[[], object]) -> BaseException:
    """Lose the drive while a thread reads from it; return what the thread met."""
    met: list[BaseException] = []
    running = threading.Event()
    x = open_rows(controller, line=512, cache="64 KiB")

    def work() -> None:
        chooser = np.random.default_rng(1)
        try:
            while True:
                x.gather(chooser.integers(0, x.shape[0], 5000))
                running.set()
        except BaseException as error:
            met.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert running.wait(60)
    lose()
    thread.join(60)
    assert not thread.is_alive(), "a call hangs"
    with pytest.raises(ControllerLost):
        x.gather(np.arange(5))
    with pytest.raises(ControllerLost):  # nobody knows what a writer has stored
        x.close()
    x.close()
    return met[0]


# A reset of the slot is not tested: the links of QEMU 7.2's root ports do not come up after one.


@pytest.mark.parametrize("function", [False, True])
def test_reset_while_busy(opened: fw.nvme.VfioController, function: bool) -> None:
    """What is in flight ends with the error; arrays that are opened afterwards work."""
    content = pattern(MIB)
    with opened.namespace(1) as namespace:
        namespace.write(0, content)
        met = in_flight(opened, lambda: opened.reset(function=function))
        assert isinstance(met, ControllerLost), repr(met)
        assert "was reset" in str(met)
        assert opened.lost == ""
        with open_rows(opened) as x:
            np.testing.assert_array_equal(x[: content.size], content)


def test_close_in_every_state(opened: fw.nvme.VfioController) -> None:
    namespace = opened.namespace(1)
    x = open_rows(opened)
    opened.close()
    x[5] = 77
    x.close()  # the last array gives the drive back
    opened.close()
    assert namespace.closed
    with pytest.raises(FlashwarpError, match="is closed"):
        opened.namespace(1)
    with pytest.raises(FlashwarpError):
        opened.reset()
    with drive(PLAIN, allow_raw_writes=True) as again, again.namespace(1) as held:
        assert held.read(5, 1) == b"M"


def test_stranger_disables_the_controller(opened: fw.nvme.VfioController) -> None:
    """As after a reset by someone else, or a loss of power: CSTS.RDY is 0."""
    lease = _native.QueueLease(opened.native, 1)
    doorbell = lease.doorbells[0][0]
    registers = doorbell - 0x1000 - 2 * lease.ids[0] * opened.describe()["doorbell_stride"]

    def disable() -> None:
        ctypes.c_uint32.from_address(registers + 0x14).value = 0  # CC

    met = in_flight(opened, disable)
    assert isinstance(met, ControllerLost), repr(met)
    assert "reset by someone else" in opened.lost
    with pytest.raises(ControllerLost):
        opened.namespaces()
    opened.reset()
    assert opened.namespaces() == (1,)
    lease.release()


def test_killed_process_leaves_a_drive_that_opens(tmp_path: Path) -> None:
    """The kernel resets what a process leaves behind."""
    bdf = bound(PLAIN)
    program = f"""
import flashwarp as fw, numpy as np
d = fw.nvme.VfioController({bdf!r}, allow_raw_writes=True)
x = fw.open(d.namespace(1), "r+", "u1", device="cpu", line=512, cache="64 KiB", controller=d)
x[:100] = 3
x.flush()
print("ready", flush=True)
while True:
    x.gather(np.random.default_rng(1).integers(0, x.shape[0], 5000))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGKILL)
    with (
        drive(PLAIN, allow_raw_writes=True) as controller,
        controller.namespace(1) as namespace,
    ):
        assert namespace.read(0, 100) == b"\3" * 100


def test_forked_child_touches_nothing(opened: fw.nvme.VfioController) -> None:
    with opened.namespace(1) as namespace, open_rows(opened) as x:
        assert x[:3].size == 3
        child = os.fork()
        if child == 0:
            refused = 0
            for act in (opened.namespaces, namespace.flush, lambda: namespace.read(0, 1)):
                try:
                    act()
                except FlashwarpError:
                    refused += 1
            opened.close()
            os._exit(refused)
        assert os.waitpid(child, 0)[1] >> 8 == 3
        assert x[:3].size == 3
        namespace.flush()


def test_drive_is_pulled_while_busy() -> None:
    """The last test: what is in flight ends, and the kernel gets the device back."""
    with drive(PULLED, allow_raw_writes=True) as controller:
        met = in_flight(controller, lambda: guest.remove_controller(PULLED))
        assert isinstance(met, ControllerLost), repr(met)
        assert "remove" in controller.lost
        controller.close()
