"""A cache between processes: names, messages, and the owner's and the client's end.

Arrays are above caches, and serve those that are shared. So whoever imports the package says here
what serves them: it is imported when a cache is first owned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["serve_with", "sessions_of"]

_make: Callable[[Any], Any] | None = None


def serve_with(make: Callable[[Any], Any]) -> None:
    """Say what makes the sessions of an owned cache, a `cache.shared.Sessions`."""
    global _make
    _make = make


def sessions_of(cache: Any) -> Any:
    """Make the sessions of an owned cache."""
    assert _make is not None, "flashwarp/__init__.py has said what serves shared caches"
    return _make(cache)
