"""Counters of the tables of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableStats:
    """Counts of one table since it was offloaded."""

    name: str
    rows: int
    row_bytes: int
    route: str
    """How its data moves: ``"in_place"``, ``"bounce"`` or ``"direct"``."""
    hits: int
    """Lines that lookups found in the cache."""
    misses: int
    bytes_looked_up: int
    """What lookups returned, in the dtype of the storage."""
    bytes_from_storage: int
    """Read from the files, through the page cache or past it."""
    bytes_from_host: int
    """Read from the tier in pinned host memory."""
    seconds_per_lookup: float | None
    """Mean of eager lookups, of one of 16 on a GPU; None if all were compiled or in graphs."""

    @property
    def hit_rate(self) -> float:
        """Share of lines that were in the cache; 0 before the first lookup."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


@dataclass(frozen=True)
class OffloadStats:
    """What the tables of a model did and hold."""

    tables: tuple[TableStats, ...]
    gpu_bytes: int
    """Of `gpu_memory`, at most what the cache and its arrays take; on the CPU device 0."""
    host_bytes: int
    """Of `host_memory`, at most what is pinned: pages of files, buffers and host tier; and the
    cache, on the CPU device."""

    @property
    def hit_rate(self) -> float:
        """Share of lines that were in the cache, over all tables."""
        hits = sum(table.hits for table in self.tables)
        accesses = hits + sum(table.misses for table in self.tables)
        return hits / accesses if accesses else 0.0

    @property
    def seconds_per_step(self) -> float | None:
        """Sum over the tables of the mean time of an eager lookup; None if there was none."""
        found = [t.seconds_per_lookup for t in self.tables if t.seconds_per_lookup is not None]
        return sum(found) if found else None

    def __str__(self) -> str:
        lines = [
            f"{len(self.tables)} tables, hit rate {self.hit_rate:.1%}, "
            f"{self.gpu_bytes} bytes of GPU memory, {self.host_bytes} of host memory"
        ]
        step = self.seconds_per_step
        if step is not None:
            lines[0] += f", {step * 1e6:.1f} us a step"
        lines += [
            f"  {t.name}: {t.rows} rows of {t.row_bytes} bytes, {t.route}, hit rate "
            f"{t.hit_rate:.1%}, {t.bytes_looked_up} bytes looked up, {t.bytes_from_storage} from "
            f"storage, {t.bytes_from_host} from the host tier"
            for t in self.tables
        ]
        return "\n".join(lines)
