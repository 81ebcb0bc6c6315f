"""How the limits of memory are divided among a cache, its tier, rings and pinned files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from flashwarp.cache.cache import Cache
from flashwarp.cache.sizes import LINE_BYTES_MIN, check_line
from flashwarp.config import cores
from flashwarp.device import Device
from flashwarp.errors import CacheError
from flashwarp.interop.torch.offloading.table import ModelTable, OpenedTable
from flashwarp.nvme.software import SoftwareController
from flashwarp.policy import Policy, resolve_policy

# Memory of an array on a GPU beside its lines: at most 8 MiB of missed lines, queues and counters.
_ARRAY_GPU_BYTES = 10 << 20
# Host memory of an array beside the buffers of its rings: records of errors, queues.
_ARRAY_HOST_BYTES = 1 << 20
# Of the cache itself, beside what grows with its lines.
_CACHE_BYTES = 1 << 20
# A tag and a word of the policy for each line, a word for each set.
_LINE_METADATA_BYTES = 8 + 4 + 4
_TIER_METADATA_BYTES = 8
# Its subsets are of whole lines.
_TIER_SPARE_LINES = 64

_QUEUE_PAIRS = 32
_DEPTH_MIN, _DEPTH_MAX = 16, 256
_LINE_BYTES_AUTO_MAX = 4096


@dataclass(frozen=True)
class Need:
    """What the tables need of a cache."""

    arrays: int
    line_bytes: int
    lines_per_row: int  # at most, of any table; scales take one more
    lines: int  # of all tables and their scales

    @classmethod
    def of(cls, tables: Sequence[ModelTable], line: int | str | None) -> Need:
        """Count; `line` is the bytes of a line, if they were given."""
        longest = max(table.row_bytes for table in tables)
        if line is None:
            room = 1 << (longest - 1).bit_length()
            line_bytes = min(max(room, LINE_BYTES_MIN), _LINE_BYTES_AUTO_MAX)
        else:
            line_bytes = check_line(line)
        lines = max(_lines_of_a_row(table.row_bytes, line_bytes) for table in tables)
        arrays = sum(table.array_count for table in tables)
        held = [tensor for table in tables for tensor in (*table.tensors, *table.scales)]
        whole = sum(tensor.nbytes // line_bytes + 1 for tensor in held)
        return cls(arrays, line_bytes, lines + (arrays > len(tables)), whole)


def _lines_of_a_row(row_bytes: int, line_bytes: int) -> int:
    """Return how many lines a row touches at most."""
    latest = line_bytes - math.gcd(row_bytes, line_bytes)  # where in a line a row may begin
    return (latest + row_bytes - 1) // line_bytes + 1


class Plan:
    """How the limits are divided."""

    def __init__(
        self,
        device: Device,
        need: Need,
        host_memory: int,
        gpu_memory: int,
        policy: str | Policy,
        immutable: bool,
    ) -> None:
        self.device, self.need = device, need
        self.host_memory, self.gpu_memory = host_memory, gpu_memory
        self.policy = resolve_policy(policy)
        self.immutable = immutable
        self.checks_lookups = True
        self.ways = 4
        self.on_gpu = device.kind == "cuda"
        self.fixed = _CACHE_BYTES + need.arrays * _ARRAY_GPU_BYTES if self.on_gpu else 0
        self.depth = self._depth() if self.on_gpu else 0
        self.rings = need.arrays * self._ring_bytes(self.depth) if self.on_gpu else 0
        self.capacity = self._capacity(0)
        self.least = self.ways * need.line_bytes  # bytes of lines that the cache must have
        if self.capacity < self.least:
            self._refuse_gpu(self.bytes_for(self.least), "one set of the cache")

    def _ring_bytes(self, depth: int) -> int:
        return _ARRAY_HOST_BYTES + _QUEUE_PAIRS * depth * self.need.line_bytes

    def _depth(self) -> int:
        """Return the entries of a ring: at most half of the host memory is for buffers."""
        depth = _DEPTH_MAX
        while (
            depth > _DEPTH_MIN
            and self.need.arrays * self._ring_bytes(depth) > self.host_memory // 2
        ):
            depth //= 2
        least = self.need.arrays * self._ring_bytes(depth)
        if least > self.host_memory:
            raise CacheError(
                f"host_memory={self.host_memory} bytes are less than the buffers of "
                f"{self.need.arrays} arrays need: give at least {least} bytes"
            )
        return depth

    def _capacity(self, tier_bytes: int) -> int:
        """Return the bytes of lines that leave room for all the rest, and hold all at most."""
        limit = self.gpu_memory if self.on_gpu else min(self.gpu_memory, self.host_memory)
        limit -= self.fixed + tier_bytes // self.need.line_bytes * _TIER_METADATA_BYTES
        line = self.need.line_bytes
        # The number of sets is rounded down to an odd one.
        whole = self.need.lines + 2 * self.ways
        return min(max(0, limit // (line + _LINE_METADATA_BYTES)), whole) * line

    def bytes_for(self, capacity: int) -> int:
        """Return the limit that leaves `capacity` bytes of lines."""
        lines = -(-capacity // self.need.line_bytes)
        return self.fixed + lines * (self.need.line_bytes + _LINE_METADATA_BYTES)

    def _refuse_gpu(self, needed: int, what: str) -> NoReturn:
        limit = f"gpu_memory={self.gpu_memory}"
        if not self.on_gpu:
            limit = (
                f"the least of host_memory={self.host_memory} and {limit}, for a cache on the CPU,"
            )
        raise CacheError(f"{limit} bytes are less than {what} needs: give at least {needed} bytes")

    def check_rows(self, rows: int) -> None:
        """Raise CacheError if the cache cannot hold so many rows at a time."""
        lines = min(rows * self.need.lines_per_row, self.need.lines)
        least = (lines + 2 * self.ways) * self.need.line_bytes
        if self.capacity < least:
            needed = self.bytes_for(least)
            self._refuse_gpu(
                needed,
                f"a step of {rows} rows, each in up to {self.need.lines_per_row} lines of "
                f"{self.need.line_bytes} bytes,",
            )
        self.least = max(self.least, least)

    def open(
        self, tables: Sequence[ModelTable], opened: contextlib.ExitStack
    ) -> tuple[Cache, list[OpenedTable]]:
        """Open a cache and all tables: all in place if they fit, else all by rings."""
        pinned = sum(table.pinned_bytes for table in tables)
        if self.on_gpu and pinned + self.rings <= self.host_memory:
            with contextlib.ExitStack() as attempt:
                found = self._open(tables, attempt, self.host_memory - self.rings - pinned, None)
                if any(each.rows.service.route == "in_place" for each in found[1]):
                    opened.enter_context(attempt.pop_all())
                    return found
        return self._open(tables, opened, self.host_memory - self.rings, "bounce")

    def _open(
        self, tables: Sequence[ModelTable], opened: contextlib.ExitStack, spare: int, route: Any
    ) -> tuple[Cache, list[OpenedTable]]:
        tier = self._tier(spare) if self.on_gpu else None
        self.capacity = self._capacity(tier or 0)
        cache = opened.enter_context(
            Cache(self.capacity, self.need.line_bytes, self.ways, self.policy, self.device, tier)
        )
        settings = {}
        if self.on_gpu:
            # They poll: more threads than cores, over all arrays, would wait for each other.
            threads = max(1, min(8, cores() // 2) // self.need.arrays)
            settings["controller"] = SoftwareController(
                _QUEUE_PAIRS, self.depth, threads, route=route
            )
        found = [
            table.open(opened, cache=cache, immutable=self.immutable, **settings)
            for table in tables
        ]
        return cache, found

    def _tier(self, spare: int) -> int | None:
        """Return the bytes of host memory below the cache; None if they are too few for one.

        It has no more lines than the tables, and its tags leave the cache what it must have.
        """
        line = self.need.line_bytes
        tier = min(spare, (self.need.lines + _TIER_SPARE_LINES) * line)
        while tier >= line and self._capacity(tier) < max(self.least, self._capacity(0) // 2):
            tier //= 2
        enough = tier >= self._capacity(tier) // self.ways + line
        return tier if enough else None
