"""What holds the bytes of an array: host memory, a file, a block device, or several of these."""

from flashwarp.storage.base import Namespace, Storage
from flashwarp.storage.composite import Concatenated, Replicated, Striped
from flashwarp.storage.file import BlockDevice, File
from flashwarp.storage.memory import Memory
from flashwarp.storage.passthrough import Passthrough

__all__ = [
    "BlockDevice",
    "Concatenated",
    "File",
    "Memory",
    "Namespace",
    "Passthrough",
    "Replicated",
    "Storage",
    "Striped",
]
