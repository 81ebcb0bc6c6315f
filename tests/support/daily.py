"""Which part of a long list today's tests take, so that days add up to all of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

T = TypeVar("T")


def part_of_today(items: Sequence[T], parts: int) -> list[T]:
    """Return every `parts`-th item, from another one on each day."""
    return list(items[datetime.now(UTC).toordinal() % parts :: parts])
