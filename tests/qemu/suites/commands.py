"""Commands of raw queue pairs to a drive: by the device code, by a plain loop, and by fio."""

from __future__ import annotations

import ctypes
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import flashwarp as fw
from flashwarp._jit.compiler import Source
from flashwarp._jit.program import LoadedKernel
from flashwarp.nvme import Destination
from flashwarp.nvme.drive_namespace import DriveNamespace
from flashwarp.testing.rings import AlignedMemory
from qemu.machine import COMPILED
from qemu.suites.drive_rings import DriveHost, DriveRing

KERNEL = Path(__file__).with_suffix(".cu")
LOOP = Path(__file__).with_name("plain_loop.cpp")
# Made of it by the host, before the guest runs.
LIBRARY = COMPILED / "plain_loop.so"


class CommandsParams(ctypes.Structure):
    """Mirror of `commands::params`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("queues", "versions", "tickets", "frames")),
        *((name, ctypes.c_uint64) for name in ("counts", "commands", "seed")),
        *((name, ctypes.c_uint32) for name in ("queue_count", "blocks_log2", "window")),
        *((name, ctypes.c_uint32) for name in ("block_bytes", "writes", "checks")),
    )


@dataclass(frozen=True)
class Shape:
    """Queue pairs and their entries, the threads that use them, and what each has outstanding."""

    queue_pairs: int
    depth: int
    threads: int = 1
    outstanding: int = 0
    """0: together, all that the rings take."""

    @property
    def window(self) -> int:
        """Commands that each thread keeps outstanding."""
        return self.outstanding or max(1, self.queue_pairs * (self.depth - 1) // self.threads)


@dataclass(frozen=True)
class Outcome:
    """What a launch did: blocks that were wrong, commands that failed and that ended, and time."""

    wrong: int
    failed: int
    commands: int
    seconds: float


def load_kernel(device: fw.device.CpuDevice) -> LoadedKernel:
    """Compile the kernel, or find it compiled."""
    return device.load_program(Source.read(KERNEL)).by_name()["drive_commands"]


def words_of(versions: npt.NDArray[np.uint32], block_bytes: int) -> npt.NDArray[np.uint64]:
    """Return what blocks of these versions hold: `commands::word_of`, for each block and word."""
    blocks = np.arange(versions.size, dtype=np.uint64)[:, None]
    k = np.arange(block_bytes // 8, dtype=np.uint64)[None, :]
    x = (blocks << np.uint64(32) | versions[:, None]) * np.uint64(0x9E3779B97F4A7C15) + k
    x = (x ^ x >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(x ^ x >> np.uint64(32))


class Commands:
    """Queue pairs of one shape in a drive, whose namespace holds version 0 of all blocks."""

    def __init__(
        self,
        drive: fw.nvme.VfioController,
        namespace: DriveNamespace,
        shape: Shape,
        block_bytes: int,
    ) -> None:
        self.namespace, self.shape, self.block_bytes = namespace, shape, block_bytes
        self.device = fw.device.CpuDevice(shape.threads)
        self._kernel = load_kernel(self.device)
        slots = shape.window * shape.threads
        self._frames = AlignedMemory(max(slots * block_bytes, 4096), 2 << 20)
        self._tickets = np.zeros(slots, np.uint32)
        self._counts = np.zeros(3, np.uint64)
        part = namespace.nbytes // block_bytes // shape.threads
        self._blocks_log2 = part.bit_length() - 1
        assert shape.window < 1 << self._blocks_log2, "a block would be in a window twice"
        self.versions = np.zeros(shape.threads << self._blocks_log2, np.uint32)
        frames = (self._frames.address, self._frames.nbytes)
        self.service = drive.attach(namespace, Destination(self.device, block_bytes, frames))
        self._seed = 0

    def run(self, commands: int, writes: int = 0, checks: bool = True) -> Outcome:
        """Send so many commands, of which `writes` of 256 are writes; return what came of them."""
        shape, queues = self.shape, self.service.queues
        self._counts[:] = 0
        self._seed += 0x51ED270B
        params = CommandsParams(
            queues=queues.address,
            versions=self.versions.ctypes.data,
            tickets=self._tickets.ctypes.data,
            frames=self._frames.address,
            counts=self._counts.ctypes.data,
            commands=-(-commands // shape.threads),
            seed=self._seed,
            queue_count=queues.count,
            blocks_log2=self._blocks_log2,
            window=shape.window,
            block_bytes=self.block_bytes,
            writes=writes,
            checks=checks,
        )
        start = time.perf_counter()
        self.device.run_kernel(
            self._kernel, [bytes(params)], warps=shape.threads, uses=self.service.natives
        )
        seconds = time.perf_counter() - start
        wrong, failed, ended = map(int, self._counts)
        return Outcome(wrong, failed, ended, seconds)

    def wrong_on_drive(self) -> int:
        """Blocks that do not hold what was stored last, as the host's own commands read them."""
        nbytes = self.versions.size * self.block_bytes
        held = np.frombuffer(self.namespace.read(0, nbytes), np.uint64)
        expected = words_of(self.versions, self.block_bytes)
        return int((held.reshape(expected.shape) != expected).any(axis=1).sum())

    def close(self) -> None:
        self.service.stop()


@contextmanager
def commands(
    drive: fw.nvme.VfioController, shape: Shape, block_bytes: int, fill: bool = True
) -> Iterator[Commands]:
    """Queue pairs of a shape, and blocks of version 0 on the drive if `fill`."""
    with drive.namespace(1) as namespace:
        if fill:
            blocks = namespace.nbytes // block_bytes
            namespace.write(0, words_of(np.zeros(blocks, np.uint32), block_bytes))
        found = Commands(drive, namespace, shape, block_bytes)
        try:
            yield found
        finally:
            found.close()


# The same by others, without a look at the data.


def by_plain_loop(
    drive: fw.nvme.VfioController, window: int, block_bytes: int, count: int
) -> Outcome:
    """Random reads by `plain_loop.cpp`, compiled before."""
    read_blocks = ctypes.CDLL(str(LIBRARY)).read_blocks
    read_blocks.restype = ctypes.c_uint64
    with (
        drive.namespace(1) as namespace,
        DriveHost(namespace, depth=2 * window, buffer_nbytes=window * block_bytes) as host,
    ):
        (ring,) = host.rings
        assert isinstance(ring, DriveRing)
        pointers = [ring.sq.ctypes.data, ring.cq.ctypes.data]
        pointers += [ctypes.addressof(bell) for bell in (ring.sq_bell, ring.cq_bell)]
        start = time.perf_counter()
        failed = read_blocks(
            *map(ctypes.c_void_p, pointers),
            ctypes.c_uint32(ring.depth),
            ctypes.c_uint32(window),
            ctypes.c_uint64(count),
            ctypes.c_uint64(host.buffer.address),
            ctypes.c_uint32(namespace.nsid),
            ctypes.c_uint64(namespace.nbytes // block_bytes),
            ctypes.c_uint32(block_bytes),
        )
        return Outcome(0, failed, count, time.perf_counter() - start)


def by_fio(path: Path, window: int, block_bytes: int, seconds: float) -> Outcome:
    """Random reads by fio: io_uring commands of a character device, io_uring of a block device."""
    command = ["fio", "--name=reads", f"--filename={path}", "--rw=randread", "--time_based"]
    command += [f"--bs={block_bytes}", f"--iodepth={window}", f"--runtime={seconds:g}"]
    command += ["--output-format=json"]
    if path.is_char_device():
        command += ["--ioengine=io_uring_cmd", "--cmd_type=nvme"]
    else:
        command += ["--ioengine=io_uring", "--direct=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 4 * seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    read: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    return Outcome(0, 0, read["total_ios"], read["runtime"] / 1000)
