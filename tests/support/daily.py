"""Which part of a long list today's tests take, so that days add up to all of it.

``FLASHWARP_ALL_TESTS=1`` takes all of each list.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

T = TypeVar("T")

EVERYTHING = bool(os.environ.get("FLASHWARP_ALL_TESTS"))


def part_of_today(items: Sequence[T], parts: int) -> list[T]:
    """Return every `parts`-th item, from another one on each day; or all items."""
    if EVERYTHING:
        return list(items)
    return list(items[datetime.now(UTC).toordinal() % parts :: parts])
