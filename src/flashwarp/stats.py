"""Counters of an array: what its accesses met and what they cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """A snapshot, taken when `Array.stats` is read. All counts are since the array was opened.

    Hits and misses count line accesses of the built-in operations: a row that touches two lines
    counts two. A kernel that uses the array by elements counts what it brings in, and no hit: a
    load that hits costs two looks at a tag, and a counter would double that. So `kernel_misses` and
    `kernel_bytes_read` tell those apart, and the ratios leave them out.
    """

    hits: int
    """Line accesses that found their line in the cache."""
    misses: int
    """Line accesses that brought their line in, or waited on one that came."""
    evictions: int
    """Lines that made room for others."""
    write_backs: int
    """Dirty lines written to the storage."""
    bytes_read: int
    """Bytes from the storage."""
    bytes_written: int
    """Bytes to the storage."""
    bytes_used: int
    """Bytes that callers asked for."""
    commands: int
    """NVMe commands submitted."""
    doorbells: int
    """Submission doorbells rung: commands / doorbells is the batch."""
    helps: int
    """Times a waiting warp drained completions."""
    errors: int
    """Commands that failed."""
    tier_hits: int = 0
    """Misses that the host-memory tier answered in place of the storage."""
    tier_lines: int = 0
    """Lines that made room and went to the host-memory tier."""
    kernel_misses: int = 0
    """Of `misses`, those that kernels met through the array, element by element."""
    kernel_bytes_read: int = 0
    """Of `bytes_read`, those for them."""

    @property
    def hit_rate(self) -> float:
        """Hits among the line accesses of built-in operations; 0 before the first.

        Kernels that use the array by elements are left out: their hits are not counted.
        """
        accesses = self.hits + self.misses - self.kernel_misses
        return self.hits / accesses if accesses else 0.0

    @property
    def io_amplification(self) -> float:
        """Bytes read from the storage for each byte used; 0 before the first.

        Of built-in operations, as `hit_rate`.
        """
        read = self.bytes_read - self.kernel_bytes_read
        return read / self.bytes_used if self.bytes_used else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return counts and ratios, for JSON."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "io_amplification": self.io_amplification,
        }
