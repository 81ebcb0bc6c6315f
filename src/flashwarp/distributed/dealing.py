"""Which rank has a row: by arithmetic that every rank does alike, without a table.

A row has a *place*, and rank r has the places from ``starts[r]`` to ``starts[r + 1]``, in their
order. Dealt by range, a row's place is its number. Dealt by hash, it is the number times a fixed
factor, modulo the number of rows. So another number of ranks moves whole ranges of places, however
the rows are dealt.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from flashwarp.config import choice
from flashwarp.errors import ArgumentError

Deal = Literal["range", "hash"]
DEALS = ("range", "hash")

HASHED_ROWS_MAX = 1 << 48

# 2^64 divided by the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Dealing:
    """How rows are dealt over ranks.

    By hash, the factor is the number of rows divided by the golden ratio, or the next integer that
    has no divisor in common with it (Fibonacci hashing: Knuth, volume 3, section 6.4). It spreads
    neighbours, and rows at most steps, evenly over the ranks. It is a permutation of the rows, so
    shards differ by one row at most, and its inverse is another factor.
    """

    deal: Deal
    rows: int
    ranks: int

    def __post_init__(self) -> None:
        choice("deal", self.deal, DEALS)
        if self.deal == "hash" and self.rows > HASHED_ROWS_MAX:
            raise ArgumentError(
                f'{self.rows} rows: by hash at most {HASHED_ROWS_MAX} are dealt, use deal="range"'
            )

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first place of each rank, and the number of rows."""
        return [self.rows * rank // self.ranks for rank in range(self.ranks + 1)]

    @functools.cached_property
    def _placed(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def starts_on(self, place: torch.device) -> torch.Tensor:
        """Return `starts` where ids are; the first call copies it there."""
        if place not in self._placed:
            self._placed[place] = torch.tensor(self.starts, device=place)
        return self._placed[place]

    @functools.cached_property
    def _factor(self) -> int:
        factor = max(1, self.rows * _GOLDEN >> 64)
        while math.gcd(factor, self.rows) != 1:
            factor += 1
        return factor

    def owners(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank that has each row, and the row's number there."""
        places = _times(self._factor, ids, self.rows) if self.deal == "hash" else ids
        # Ranks without rows share their start with the next one, which is found.
        starts = self.starts_on(ids.device)
        owner = torch.searchsorted(starts, places, right=True) - 1
        return owner, places - starts[owner]

    def ids(self, first: int, last: int) -> torch.Tensor:
        """Return the rows at a range of places."""
        places = torch.arange(first, last)
        if self.deal == "range" or not self.rows:
            return places
        return _times(pow(self._factor, -1, self.rows), places, self.rows)


def _times(factor: int, numbers: torch.Tensor, modulus: int) -> Any:
    """Multiply modulo `modulus`: some bits of the factor at a time, so that nothing overflows."""
    bits = 62 - modulus.bit_length()
    found = torch.zeros_like(numbers)
    for shift in range(factor.bit_length() // bits * bits, -1, -bits):
        part = factor >> shift & ((1 << bits) - 1)
        found = ((found << bits) + part * numbers) % modulus  # each of the two is below 2^62
    return found
