"""NVMe controllers: the contract that arrays and caches rely on; drives, and models of them."""

from typing import TYPE_CHECKING

from flashwarp import _names
from flashwarp.nvme.controller import Controller, Destination, Queues, Service

if TYPE_CHECKING:
    from flashwarp.nvme.drive_model import SSDModel
    from flashwarp.nvme.software import SoftwareController
    from flashwarp.nvme.vfio import VfioController

__all__ = [
    "Controller",
    "Destination",
    "Queues",
    "SSDModel",
    "Service",
    "SoftwareController",
    "VfioController",
]

__getattr__, __dir__ = _names.later(
    __name__,
    {
        "SSDModel": "nvme.drive_model",
        "SoftwareController": "nvme.software",
        "VfioController": "nvme.vfio",
    },
)
