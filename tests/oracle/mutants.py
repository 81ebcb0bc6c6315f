"""Mends that programs must miss: each is taken out, and a seed is told whose program finds it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """Take a mend out; the empty name takes none."""
    if name:
        raise SystemExit(f"no mutant {name!r}")
    yield
