"""Every tunable with its unit and default, and sizes as people write them.

Each field of `Config` can be set by an environment variable of the same name in capitals with the
prefix ``FLASHWARP_``; arguments of calls win over both.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from flashwarp.errors import ArgumentError

__all__ = ["Config", "current", "parse_bytes"]

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE_MAX = (1 << 63) - 1


def parse_bytes(size: int | str) -> int:
    """Return a size in bytes from an int or a text such as ``"4 MiB"``.

    Raises
    ------
    ArgumentError
        When the text has no number, an unknown unit, or the size is negative or beyond 2^63.

    Examples
    --------
    >>> parse_bytes("4 KiB")
    4096
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ArgumentError(f"a size of {size} bytes is negative")
        return _bounded(size)
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].lower() not in _UNITS:
        raise ArgumentError(f"{size!r} is not a size: write bytes as an int, or e.g. '4 KiB'")
    # Exact, as a float would not be from 2^53 on.
    return _bounded(int(Fraction(match[1]) * _UNITS[match[2].lower()]))


def _bounded(size: int) -> int:
    if size > _SIZE_MAX:
        raise ArgumentError(f"a size of {size} bytes is more than {_SIZE_MAX}")
    return size


# What each setting may be; the sizes of rings are those of the specification's queues.
_RANGES: dict[str, tuple[float, float]] = {
    "timeout_s": (1e-3, 1e6),
    "queue_pairs": (1, 1024),
    "depth": (2, 32768),
    "bounce_depth": (2, 32768),
    "bounce_bytes": (0, _SIZE_MAX),
    "controller_threads": (0, 256),
    "mapped_budget": (0, 1),
    "mapped_residency": (0, 1e9),
    "cache_share": (0, 1),
    "look_ahead": (0, 1 << 20),
    "async_calls": (1, 4096),
    "async_streams": (1, 128),
}


@dataclass(frozen=True)
class Config:
    """Defaults of the library."""

    timeout_s: float = 30.0
    """Bound of every wait for a command. A drive that takes longer is broken: the kernel's own NVMe
    driver gives up after 30 s too."""

    queue_pairs: int = 32
    """Queue pairs of a controller that serves a GPU; a CPU device gets two a thread."""

    depth: int = 1024
    """Entries of a ring on the mapped path: 32 pairs hold the 94 M commands/s of one thread."""

    bounce_depth: int = 256
    """Entries of a ring whose slots own buffers: 32 x 256 x 4 KiB pin 32 MiB. Files
    that are read in place under a lease have such rings too, for when it is broken."""

    bounce_bytes: int = 256 << 20
    """Most pinned memory for the buffers of one controller; the depth shrinks to fit."""

    controller_threads: int = 0
    """Threads of a controller. 0: one where it moves no data, else half the cores, at most 8, dealt
    to the controllers of an array."""

    mapped_budget: float = 0.5
    """Share of the host's available memory that one file may pin when it is mapped in place."""

    mapped_residency: float = 0.9
    """Least share of a file in the page cache for which mapping it beats reading it."""

    copy_cached: int = 1
    """1: bytes of a file that are in the page cache are copied from a mapping, which takes half the
    time of a system call and a SIGBUS handler for the process. 0: by system calls."""

    cache_share: float = 0.25
    """Share of the free device memory that ``cache="auto"`` may take."""

    look_ahead: int = 64
    """Rows that a CPU thread has in flight ahead of the one it copies, for storage that waits."""

    async_calls: int = 64
    """Most asynchronous calls of one array in flight; one more waits until one has ended."""

    async_streams: int = 8
    """Streams of a GPU that an array's asynchronous calls take turns on."""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # a NaN is in no range
                raise ArgumentError(f"{name}={value!r} is not between {low} and {high}")
        for name in ("depth", "bounce_depth"):
            value = getattr(self, name)
            if value & (value - 1):
                raise ArgumentError(f"{name}={value!r} is not a power of two")


def current() -> Config:
    """Return the defaults, with what the environment overrides.

    Raises
    ------
    ArgumentError
        When a variable does not parse, or its value cannot work.
    """
    changes: dict[str, Any] = {}
    for field in fields(Config):
        variable = f"FLASHWARP_{field.name.upper()}"
        text = os.environ.get(variable)
        if text is None:
            continue
        kind: type[Any] = type(field.default)
        try:
            changes[field.name] = kind(text)
            replace(Config(), **{field.name: changes[field.name]})
        except ArgumentError as error:
            raise ArgumentError(f"{variable}={text!r}: {error}") from None
        except ValueError:
            raise ArgumentError(f"{variable}={text!r} is not {kind.__name__}") from None
    return replace(Config(), **changes)
