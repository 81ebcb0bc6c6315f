"""Sorting keys that exceed the memory of a GPU: sorted runs, then one merge, each a single pass."""

from flashwarp.apps.sorting.sorting import Merge, sort

__all__ = ["Merge", "sort"]
