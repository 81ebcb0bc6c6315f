"""Ranges for NVIDIA's profilers, by `nvtx`, which is an extra; off unless FLASHWARP_NVTX=1.

The choice is made when a module is imported. If it is off, calls are the functions themselves.
"""

from __future__ import annotations

from typing import Any, TypeVar

from flashwarp import config
from flashwarp.errors import MissingFileError

_DOMAIN = "flashwarp"
_METHODS = {
    "Array": (
        *("__getitem__", "__setitem__", "gather", "scatter", "gather_async", "scatter_async"),
        *("prefetch", "flush", "wait", "close"),
    ),
    "Pipeline": ("prefetch", "take", "write_back", "reclaim", "flush", "close"),
    "Checkpointer": ("checkpoint", "restart", "restart_latest", "wait", "close"),
}

T = TypeVar("T")


def marked(kind: type[T]) -> type[T]:
    """Mark calls of a class as ranges, such as "Array.gather"; a decorator."""
    if config.current("nvtx").nvtx:
        for name in _METHODS[kind.__name__]:
            setattr(kind, name, _annotated(f"{kind.__name__}.{name}", vars(kind)[name]))
    return kind


def _annotated(name: str, function: Any) -> Any:
    try:
        import nvtx
    except ImportError as error:
        why = "FLASHWARP_NVTX=1 needs nvtx: pip install 'flashwarp[nvtx]'"
        raise MissingFileError(why) from error
    return nvtx.annotate(name, domain=_DOMAIN)(function)
