"""Queue pairs that kernels of a GPU would drive, in a drive, as far as it goes without a GPU.

CUDA's driver is the fake one, so the GPU's memory is the host's, and threads of the CPU device play
its kernels: with the device code, in the queue pairs that the GPU was given. The IOMMU, the drive
and its registers are QEMU's.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")

import flashwarp as fw
from flashwarp import _native
from flashwarp.device import CudaDevice
from flashwarp.errors import ArgumentError, DeviceError, RouteError, StorageError
from flashwarp.nvme import Destination
from flashwarp.nvme.drive_extents import DriveExtents, OnDrive
from flashwarp.nvme.drive_namespace import DriveNamespace
from flashwarp.nvme.queue_pair import NamespacePart
from flashwarp.nvme.vfio import VfioService
from flashwarp.storage import Namespace, Storage
from qemu.machine import COMPILED
from qemu.suites.commands import CommandsParams, load_kernel, words_of
from qemu.suites.drives import drive
from qemu.suites.machines import FAULTS, GOOD
from support import fake_cuda
from support.cuda_arrays import gpu
from support.fake_cuda import NOT_PERMITTED, failing, fake

MACHINE = FAULTS

BLOCK_BYTES = 4096
BLOCKS_LOG2 = 8
NBYTES = BLOCK_BYTES << BLOCKS_LOG2
WINDOW = 24


def read_and_write(service: VfioService, namespace: Storage | Rotated, commands: int) -> None:
    """Send commands as a kernel would, a third of them writes; every block is what it must be."""
    queues = service.queues
    ((buffers, _),) = queues.buffer_regions
    versions, counts = np.zeros(1 << BLOCKS_LOG2, np.uint32), np.zeros(3, np.uint64)
    tickets = np.zeros(WINDOW, np.uint32)
    namespace.write(0, words_of(versions, BLOCK_BYTES))
    params = CommandsParams(
        queues=queues.address,
        versions=versions.ctypes.data,
        tickets=tickets.ctypes.data,
        frames=buffers,
        counts=counts.ctypes.data,
        commands=commands,
        seed=7,
        queue_count=queues.count,
        blocks_log2=BLOCKS_LOG2,
        window=WINDOW,
        block_bytes=BLOCK_BYTES,
        writes=85,
        checks=1,
    )
    threads = fw.device.CpuDevice(1)

    threads.run_kernel(load_kernel(threads), [bytes(params)], warps=1)

    assert counts.tolist() == [0, 0, commands]
    held = np.frombuffer(namespace.read(0, versions.size * BLOCK_BYTES), np.uint64)
    np.testing.assert_array_equal(held.reshape(versions.size, -1), words_of(versions, BLOCK_BYTES))


@contextlib.contextmanager
def frames_beside_a_drive() -> Iterator[tuple[Destination, fw.nvme.VfioController, DriveNamespace]]:
    """Memory of the GPU, a drive and a namespace; nothing of the GPU is left in the end."""
    device = CudaDevice(0)
    before = fake().fake_live_allocations()
    frames = device.allocate(64 * BLOCK_BYTES)
    destination = Destination(device, BLOCK_BYTES, (frames.address, frames.nbytes))
    settings = {"queue_pairs": 2, "depth": 16, "allow_raw_writes": True}
    with drive(0, **settings) as controller, controller.namespace(GOOD) as namespace:
        yield destination, controller, namespace
    frames.close()
    assert fake().fake_live_allocations() == before


def queue_pairs_of_a_gpu_move_data_through_buffers() -> None:
    with frames_beside_a_drive() as (destination, controller, namespace):
        service = controller.attach(namespace, destination)

        assert fake().fake_registered_flags() == 2 | 4  # DEVICEMAP, IOMEMORY
        assert service.route == "bounce"
        assert "VFIO by type1 maps no memory of other devices" in service.reason
        read_and_write(service, namespace, 2000)
        with pytest.raises(ArgumentError, match="while arrays on cuda:0 use it: close them first"):
            controller.reset(function=True)
        controller.reset()
        assert "was reset" in str(service.failure())
        service.stop()
        service.stop()


class Rotated(Namespace, OnDrive):
    """The namespace as a file whose blocks lie elsewhere: the second half comes first."""

    def __init__(self, namespace: DriveNamespace) -> None:
        super().__init__(NBYTES)
        half = NBYTES // 2
        parts = (NamespacePart(half, half), NamespacePart(NBYTES, (-half) % (1 << 64)))
        self.drive_extents: DriveExtents = DriveExtents(namespace, parts, "rotated")
        self._on_drive = namespace

    def write(self, offset: int, data: Any) -> None:
        content = memoryview(data).cast("B")
        assert (offset, len(content)) == (0, NBYTES)
        self._on_drive.write(0, bytes(content[NBYTES // 2 :]) + bytes(content[: NBYTES // 2]))

    def read(self, offset: int, nbytes: int) -> bytes:
        assert (offset, nbytes) == (0, NBYTES)
        content = self._on_drive.read(0, NBYTES)
        return content[NBYTES // 2 :] + content[: NBYTES // 2]


def queue_pairs_of_a_gpu_look_extents_up() -> None:
    with frames_beside_a_drive() as (destination, controller, namespace):
        rotated = Rotated(namespace)
        service = controller.attach(rotated, destination)
        read_and_write(service, rotated, 2000)
        rotated.drive_extents.end(lambda: StorageError(errno.EREMCHG, "stale block map"))
        with pytest.raises(StorageError, match="stale block map"):
            service.wake()
        service.stop()
        assert namespace.read(0, 1), "the host's own queues go on"


def arrays_of_a_gpu_say_how_data_goes() -> None:
    device = gpu()
    with drive(0, queue_pairs=2) as controller, controller.namespace(GOOD) as namespace:
        with fw.open(
            namespace, "r", "u1", device=device, cache="64 KiB", controller=controller
        ) as x:
            assert x.explain().route == "bounce"
            assert "the drive does not reach cuda:0's memory" in x.explain().reason
        with pytest.raises(RouteError, match="strict='direct', but the data would go bounce"):
            fw.open(
                namespace, "r", "u1", device=device, cache="64 KiB", strict="direct",
                controller=controller,
            )  # fmt: skip


def refused_pieces_are_named_and_give_all_back() -> None:
    device = CudaDevice(0)
    frames = device.allocate(1 << 16)
    destination = Destination(device, BLOCK_BYTES, (frames.address, frames.nbytes))
    with drive(0, queue_pairs=2, route="direct") as controller:
        namespace = controller.namespace(GOOD)
        before = fake().fake_live_allocations()
        with pytest.raises(ArgumentError, match=r"route='direct', but the drive.*iommufd does"):
            controller.attach(namespace, destination)
        refusal = "ring the doorbells of 0000:.*PeerMappingOverride=1.*SoftwareController"
        with (
            failing("cuMemHostRegister", NOT_PERMITTED),
            pytest.raises(DeviceError, match=refusal),
        ):
            controller.attach(namespace, destination)
        assert fake().fake_live_allocations() == before
        # Nobody holds a number of a queue pair.
        taken = controller.native.identity()["queue_pairs_max"] - 1
        _native.QueueLease(controller.native, taken).release()


def check_all() -> None:
    """In one process: to import CUDA takes an emulated processor half a minute."""
    queue_pairs_of_a_gpu_move_data_through_buffers()
    queue_pairs_of_a_gpu_look_extents_up()
    refused_pieces_are_named_and_give_all_back()
    arrays_of_a_gpu_say_how_data_goes()  # leaves a compiler that compiles nothing


def test_fake_gpu() -> None:
    # Compiled by the host, before the guest ran.
    fake_cuda.run(check_all, {"FAKE_CUDA": str(COMPILED / "libcuda.so.1")})
