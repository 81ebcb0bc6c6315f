"""Drives of the guest that this process drives through VFIO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flashwarp as fw
from flashwarp.nvme import binding
from qemu import guest


def bound(index: int = 0) -> str:
    """Give controller `index` of the machine to vfio-pci; return its PCI address."""
    guest.load("vfio-pci")
    return binding.bind(guest.controllers()[index]).bdf


@contextmanager
def drive(index: int = 0, **settings: Any) -> Iterator[fw.nvme.VfioController]:
    """Open controller `index`; it is closed however the test ends."""
    controller = fw.nvme.VfioController(bound(index), **settings)
    try:
        yield controller
    finally:
        controller.close()
