"""NVMe controllers: the contract that arrays and caches rely on."""

from flashwarp.nvme.controller import Controller, Destination, Queues, Service

__all__ = ["Controller", "Destination", "Queues", "Service"]
