"""NVMe controllers: the contract that arrays and caches rely on."""

from flashwarp.nvme.controller import Controller, Queues, Service

__all__ = ["Controller", "Queues", "Service"]
