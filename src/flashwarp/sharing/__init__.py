"""A cache between processes: names, messages, and the owner's and the client's end.

Arrays are above caches, and serve those that are shared. So what serves a cache is imported by its
name when a cache is first owned.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["sessions_of"]


def sessions_of(cache: Any) -> Any:
    """Make the sessions of an owned cache, a `cache.shared.Sessions`."""
    return import_module("flashwarp.array.serving").Serving(cache)
