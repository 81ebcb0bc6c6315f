"""One sample of a long list, the same in each run; `make test-all` takes all of each list.

The hash of an item's name draws it: what joins a list or leaves it changes little of the sample.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

EVERYTHING = bool(os.environ.get("FLASHWARP_ALL_TESTS"))

FUZZ_EXAMPLES = int(os.environ.get("FLASHWARP_FUZZ_EXAMPLES", "200"))
"""Pieces of damaged input for each parser. Sequences of calls take longer: a tenth as many."""


def sample(items: Sequence[T], parts: int) -> list[T]:
    """Return one in `parts` of the items, at least one, in their order; or all items."""
    if EVERYTHING:
        return list(items)
    by_hash = sorted(range(len(items)), key=lambda i: _hash(items[i]))
    return [items[i] for i in sorted(by_hash[: -(-len(items) // parts)])]


def _hash(item: object) -> bytes:
    return hashlib.sha256(str(getattr(item, "name", item)).encode()).digest()
