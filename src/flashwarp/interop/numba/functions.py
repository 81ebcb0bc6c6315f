"""Functions for kernels. Outside of kernels each raises, and says where it works."""

# Numba looks at the parameters, and nothing else does.
# ruff: noqa: ARG001
from __future__ import annotations

from typing import Any

from flashwarp.errors import ArgumentError


def prefetch(data: Any, i: Any, n: Any = None) -> Any:
    """Start bringing in element `i`, or the elements i .. i + n - 1; in kernels only.

    With `n` returns a token. Its `wait` returns when each of the `n` elements was in the cache.
    """
    raise _outside("prefetch")


def read_async(data: Any, i: Any, n: Any, dst: Any) -> Any:
    """Start copying the elements i .. i + n - 1 to the array `dst`; in kernels only.

    `data` has one axis, or `i` counts elements as its flat view has them. `dst` is contiguous, has
    the same dtype, and is the thread's own until the token's `wait` or `done` says that the copy is
    over.

    Returns
    -------
    token
        With `wait()` and `status()`, an NVMe status, 0 for success, and `done()`.
    """
    raise _outside("read_async")


def write_async(data: Any, i: Any, n: Any, src: Any) -> Any:
    """Start storing the array `src` to the elements i .. i + n - 1; as `read_async`."""
    raise _outside("write_async")


def atomic_add(data: Any, i: Any, value: Any) -> Any:
    """Add to element `i` in one step, and return what was there; in kernels only.

    For 32-bit and 64-bit integers and floats.
    """
    raise _outside("atomic_add")


def _outside(name: str) -> Exception:
    return ArgumentError(f"{name} works in kernels: functions under flashwarp.interop.numba.jit")
