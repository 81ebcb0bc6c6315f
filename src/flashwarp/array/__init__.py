"""Arrays in a storage: opening, indexing, calls, and what they leave behind."""

from typing import TYPE_CHECKING

from flashwarp import _names

if TYPE_CHECKING:
    from flashwarp.array.share_table import ShareTable
    from flashwarp.array.stats import Stats

__all__ = ["ShareTable", "Stats"]

__getattr__, __dir__ = _names.later(
    __name__,
    {
        "ShareTable": "array.share_table",
        "Stats": "array.stats",
    },
)
