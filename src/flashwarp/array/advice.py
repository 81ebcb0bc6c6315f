"""Advice from an array's counters. Each sentence has the figure and the way out.

There is none before enough data was read to judge, and none if nothing is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashwarp.array.stats import Stats
from flashwarp.cache.sizes import LINE_BYTES_MIN

# Longer lines were no faster on the drives that were measured.
_LINE_BYTES_WORTH = 64 << 10

# Below these, counters say more about how the array began than about its use.
_BYTES_ENOUGH = 1 << 20
_CALLS_ENOUGH = 1000
_MISSES_ENOUGH = 10_000

# Bytes from the storage for each requested byte, from which on shorter lines are advised.
_AMPLIFICATION = 2.0

# How often the whole array must have been moved, before a larger cache is advised.
_AGAIN = 2.0

# With fewer rows in a call, the launch costs more than the rows.
_ROWS_OF_A_CALL = 8

_TIER_HITS_MIN = 0.01


@dataclass(frozen=True)
class Usage:
    """An array, its storage and memory, and how it was used."""

    nbytes: int
    """Bytes of the array."""
    row_bytes: int
    line_bytes: int
    capacity: int
    """Bytes of the cache's frames."""
    host_memory: int
    """Bytes of the cache's host tier that the array's lines may enter."""
    on_cpu: bool
    """Whether frames are host memory."""
    in_place: bool
    """Whether the device reads the storage itself."""
    o_direct: bool
    """Whether a file uses O_DIRECT, and this choice is not reviewed."""
    alignment: int
    """Least bytes that the storage moves."""
    device_free_bytes: int
    host_free_bytes: int
    page_room: int
    """Bytes that the file may take in the page cache."""
    calls: int
    """Calls that moved rows."""
    rows: int
    """Rows that they moved."""
    stats: Stats


def advise(usage: Usage) -> tuple[str, ...]:
    """Return a sentence for each cost that is high and can be reduced."""
    found = (
        _short_rows(usage),
        _long_rows(usage),
        _past_the_page_cache(usage),
        _small_cache(usage),
        _idle_tier(usage),
        _small_calls(usage),
    )
    return tuple(sentence for sentence in found if sentence)


def _short_rows(usage: Usage) -> str:
    row, line = usage.row_bytes, usage.line_bytes
    measured = usage.stats.io_amplification
    if not row or usage.stats.bytes_read < _BYTES_ENOUGH or measured < _AMPLIFICATION:
        return ""
    # A single row costs at most the lines that it touches. More was read by the user's own kernels,
    # whose loads are not counted, or by prefetches.
    if measured > line / row + 1:
        return ""
    fit = max(LINE_BYTES_MIN, usage.alignment, _power_of_two_from(row))
    if 2 * fit > line:
        return ""
    return (
        f"{measured:.1f} bytes were read for each byte used: rows of {row} bytes lie in lines of "
        f"{line}; line={fit} reads about {fit / row:.1f}, and the cache holds {line // fit} times "
        "as many rows."
    )


def _long_rows(usage: Usage) -> str:
    row, line, stats = usage.row_bytes, usage.line_bytes, usage.stats
    if usage.in_place or stats.bytes_read < _BYTES_ENOUGH or stats.commands < _CALLS_ENOUGH:
        return ""
    fit = min(_LINE_BYTES_WORTH, row & -row)
    # A cache of few lines would evict rows that are in use.
    if fit <= line or usage.capacity < 256 * fit:
        return ""
    return (
        f"{stats.commands} commands were submitted, {-(-row // line)} for each row of {row} bytes "
        f"in lines of {line}; line={fit} needs {-(-row // fit)}."
    )


def _past_the_page_cache(usage: Usage) -> str:
    moved = usage.stats.bytes_read + usage.stats.bytes_written
    if not usage.o_direct or usage.nbytes > usage.page_room:
        return ""
    if moved < max(_BYTES_ENOUGH, _AGAIN * usage.nbytes):
        return ""
    return (
        f"{moved} bytes went past the page cache (O_DIRECT), {moved / usage.nbytes:.1f} times the "
        f"array's {usage.nbytes}, which fit the {usage.page_room} that it may take; o_direct=False "
        "keeps them in memory."
    )


def _small_cache(usage: Usage) -> str:
    stats, held = usage.stats, usage.capacity + usage.host_memory
    if usage.in_place or stats.bytes_read < max(_BYTES_ENOUGH, _AGAIN * usage.nbytes):
        return ""
    if held >= usage.nbytes or not stats.evictions:
        return ""
    remedy = _larger(usage)
    if not remedy:
        return ""
    return (
        f"Each byte was read {stats.bytes_read / usage.nbytes:.1f} times on average, and "
        f"{stats.evictions} lines were evicted: the cache holds {held / usage.nbytes:.0%} of the "
        f"array; {remedy}."
    )


def _larger(usage: Usage) -> str:
    """Name memory that would hold the evicted lines; empty if there is none."""
    # More than the array, because sets do not fill evenly, and their number is rounded down.
    whole = _whole_mib(usage.nbytes + usage.nbytes // 16)
    if whole <= usage.capacity + usage.device_free_bytes // 2:
        return f'cache="{whole >> 20} MiB" holds all of it'
    if usage.on_cpu:
        return ""
    rest = whole - usage.capacity
    if rest <= usage.host_free_bytes // 2:
        return f'fw.Cache(.., host_memory="{rest >> 20} MiB") keeps the rest in pinned host memory'
    return ""


def _idle_tier(usage: Usage) -> str:
    stats = usage.stats
    if not usage.host_memory or stats.misses < _MISSES_ENOUGH:
        return ""
    if usage.on_cpu and stats.tier_hits:
        whole = _whole_mib(usage.capacity + usage.host_memory)
        return (
            f"{stats.tier_hits} misses were answered by a host tier, which is the same memory as "
            f'the frames on this device; cache="{whole >> 20} MiB" without host_memory saves the '
            "copies."
        )
    share = stats.tier_hits / stats.misses
    if share >= _TIER_HITS_MIN or stats.tier_lines * usage.line_bytes < usage.host_memory:
        return ""
    return (
        f"The host tier answered {share:.1%} of {stats.misses} misses: its {usage.host_memory} "
        "bytes hold too little of what is read again; leave host_memory out, or make it larger."
    )


def _small_calls(usage: Usage) -> str:
    if usage.calls < _CALLS_ENOUGH or usage.rows >= _ROWS_OF_A_CALL * usage.calls:
        return ""
    return (
        f"{usage.calls} calls moved {usage.rows / usage.calls:.1f} rows each, and every call is a "
        "launch: give gather and scatter many indices at a time."
    )


def _power_of_two_from(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _whole_mib(nbytes: int) -> int:
    return -(-nbytes >> 20) << 20
