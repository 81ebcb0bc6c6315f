"""The ways from arrays to a drive: the kernel's block device, passthrough, and VFIO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.storage import BlockDevice, Passthrough
from qemu import guest

KERNEL, PASSTHROUGH, VFIO = "kernel", "passthrough", "vfio"
each_way = pytest.mark.parametrize("way", [KERNEL, PASSTHROUGH, VFIO])


def bound(way: str, drive: int) -> str:
    """Give a drive of one controller to the driver that this way needs; return its PCI address."""
    bdf = guest.address_of(drive)
    guest.bind(bdf, "vfio-pci" if way == VFIO else "nvme")
    return bdf


@contextmanager
def array(
    way: str,
    drive: int = 0,
    nsid: int = 1,
    *,
    nbytes: int = 1 << 20,
    dtype: str = "u1",
    queue_pairs: int = 2,
    depth: int = 64,
    **options: Any,
) -> Iterator[fw.Array]:
    """Open the first `nbytes` bytes of a namespace of a drive for reading and writing."""
    bdf = bound(way, drive)
    options = {"device": "cpu", "cache": "128 KiB", **options}
    length = nbytes // np.dtype(dtype).itemsize
    if way == VFIO:
        with (
            fw.nvme.VfioController(bdf, queue_pairs, depth, allow_raw_writes=True) as controller,
            controller.namespace(nsid) as namespace,
            fw.open(namespace, "r+", dtype, length, controller=controller, **options) as x,
        ):
            yield x
        return
    software = fw.nvme.SoftwareController(queue_pairs, depth, threads=1, commands=True)
    make = BlockDevice if way == KERNEL else Passthrough
    path = guest.block_device(drive, nsid) if way == KERNEL else guest.character_device(drive, nsid)
    extra = {} if way == KERNEL else {"allow_raw_writes": True}
    with (
        make(path, nbytes=nbytes, writable=True, **extra) as storage,
        fw.open(storage, "r+", dtype, length, controller=software, **options) as x,
    ):
        yield x
