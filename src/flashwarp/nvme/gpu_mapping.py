"""What a GPU's kernels need to drive an NVMe controller themselves, piece by piece.

*Doorbells* are registers of the drive, so CUDA must take the mapping of its BAR as I/O memory.
Without that no kernel can send a command, and the software controller serves the namespace.

*Data* goes to the frames in GPU memory, "direct", if the GPU exports that memory as a dma-buf, the
kernel's iommufd maps it for the drive, and the GPU keeps the order of a device's writes. Then the
rings lie in GPU memory too: a completion takes the same way as the data before it. Else rings and
the slots' buffers lie in pinned host memory, "bounce", which is coherent with the drive's writes,
and the warp that drains a completion copies the data.

A GPU that does not keep that order shows a completion before its data, until the drive has read
from the GPU's memory once more. BaM (section 4.4) sends a second command for this; here such a GPU
takes the bounce path.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from flashwarp import _native
from flashwarp.device import CudaDevice, Registration
from flashwarp.errors import DeviceError

Doorbells = tuple[tuple[int, int], ...]

NO_EXPORT = "the GPU exports no memory as dma-buf, which takes NVIDIA's open kernel modules"


def map_doorbells(
    device: CudaDevice, lease: _native.QueueLease, bdf: str
) -> tuple[Registration, Doorbells]:
    """Register a drive's registers with CUDA; return the registration, and what kernels ring.

    The registers stay mapped until the lease is released, which must come after the registration's
    end: a kernel may store late.
    """
    begin, nbytes = lease.registers
    lease.hold()
    try:
        registers = device.register_io(begin, nbytes)
    except DeviceError as error:
        raise DeviceError(
            f"kernels of {device.name} cannot ring the doorbells of {bdf}: {error}. "
            f"{doorbell_advice()}; or take controller=flashwarp.nvme.SoftwareController(), whose "
            "threads read the namespace"
        ) from None
    moved = registers.address - begin
    return registers, tuple((sq + moved, cq + moved) for sq, cq in lease.doorbells)


def doorbell_advice() -> str:
    """Name what lets a user's kernels reach registers of devices."""
    return (
        "NVIDIA's driver takes I/O memory from root, or from anybody after "
        "echo 'options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\"' | sudo tee "
        "/etc/modprobe.d/flashwarp.conf and a restart"
    )


def direct_refusal(device: CudaDevice, iommu: str) -> str:
    """Say why a drive cannot move data to this GPU's memory; empty: nothing known is against it.

    `iommu` is how memory is mapped for the drive: "type1" or "iommufd".
    """
    if iommu != "iommufd":
        return f"VFIO by {iommu} maps no memory of other devices, only iommufd does"
    if not device.context.exports_dma_buf:
        return NO_EXPORT
    if not device.context.orders_dma_writes:
        return "the GPU does not keep the order of a device's writes to its memory"
    return ""


@contextlib.contextmanager
def dma_buf(device: CudaDevice, region: tuple[int, int]) -> Iterator[int]:
    """Export the pages of a region of device memory, for as long as it takes to map them."""
    file = device.export_dma_buf(*region)
    try:
        yield file
    finally:
        os.close(file)
