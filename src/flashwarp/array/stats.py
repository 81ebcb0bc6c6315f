"""Counters of an array: hits, misses, and the transfers that they caused."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Stats:
    """A snapshot of an array's counters, which start at 0 when the array is opened.

    Hits and misses count line accesses of the built-in operations: a row in two lines counts two.
    A kernel that accesses the array by elements counts its misses but not its hits: a hit loads a
    tag twice, and a counter would double its cost. `kernel_misses` and `kernel_bytes_read` count
    these misses separately, and the ratios leave them out.
    """

    hits: int
    """Line accesses that found their line in the cache."""
    misses: int
    """Line accesses that fetched their line, or waited for a fetch in flight."""
    evictions: int
    """Lines that were evicted from their frame."""
    write_backs: int
    """Dirty lines written to the storage."""
    bytes_read: int
    """Bytes from the storage."""
    bytes_written: int
    """Bytes to the storage."""
    bytes_used: int
    """Bytes that callers requested."""
    commands: int
    """NVMe commands submitted."""
    doorbells: int
    """Submission doorbells rung; ``commands / doorbells`` says how many a ring has in the mean."""
    helps: int
    """How often a waiting warp drained completions."""
    errors: int
    """Commands that failed."""
    tier_hits: int = 0
    """Misses that the host-memory tier answered instead of the storage."""
    tier_lines: int = 0
    """Evicted lines that went to the host-memory tier."""
    kernel_misses: int = 0
    """Of `misses`, those of kernels that access the array element by element."""
    kernel_bytes_read: int = 0
    """Of `bytes_read`, the bytes for `kernel_misses`."""
    bypasses: int = 0
    """Of `misses`, those that left no line in the cache.

    On the CPU device, gathers of 256 lines and more copy most rows that miss out of the page cache
    straight to the caller, and gathers that are larger than the cache all. Such a row is a miss
    again the next time.
    """
    bytes_copied: int = 0
    """Of `bytes_read` and `bytes_used`, what copy engines moved past the cache: long ranges."""

    @property
    def hit_rate(self) -> float:
        """Hits among the line accesses of built-in operations; 0 before the first.

        Leaves out kernels that access the array by elements, because their hits are not counted.
        """
        accesses = self.hits + self.misses - self.kernel_misses
        return self.hits / accesses if accesses else 0.0

    @property
    def io_amplification(self) -> float:
        """Bytes read from the storage for each byte used; 0 before the first.

        Counts built-in operations only, as `hit_rate` does.
        """
        read = self.bytes_read - self.kernel_bytes_read
        return read / self.bytes_used if self.bytes_used else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return all counts and ratios, for JSON."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "io_amplification": self.io_amplification,
        }
