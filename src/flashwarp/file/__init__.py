"""Files: what kernels hold of one that is open, and files by the blocks of their device."""

from typing import TYPE_CHECKING

from flashwarp import _names

if TYPE_CHECKING:
    from flashwarp.file.block_map import BlockMap
    from flashwarp.file.mapped_file import MappedFile

__all__ = ["BlockMap", "MappedFile"]

__getattr__, __dir__ = _names.later(
    __name__,
    {
        "BlockMap": "file.block_map",
        "MappedFile": "file.mapped_file",
    },
)
