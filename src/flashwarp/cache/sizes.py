"""How large a cache is: its lines, the sets that its bytes make, the places of its host tier."""

from __future__ import annotations

from dataclasses import dataclass

from flashwarp.cache.structs import GeometryStruct
from flashwarp.config import parse_bytes
from flashwarp.device import Device
from flashwarp.errors import CacheError

LINE_BYTES_MIN = 512
LINE_BYTES_MAX = 2 << 20
LINE_DEFAULT = "4 KiB"
# Kernels keep the number of a frame in 32 bits: see cursor.cuh.
_FRAMES_MAX = 1 << 32
_TIER_WAYS_MAX = 16
_TIER_PLACES_MAX = (1 << 32) - 1
# Share of the free device memory that cache="auto" may take.
_AUTOMATIC_SHARE = 0.25


def divide(wanted: int, ways: int, line_bytes: int) -> int:
    """Return into how many sets `wanted` bytes of frames are divided; raises CacheError."""
    set_bytes = ways * line_bytes
    if wanted < set_bytes:
        raise CacheError(
            f"a cache of {wanted} bytes is smaller than one set of {ways} lines of "
            f"{line_bytes} bytes: give it at least {set_bytes} bytes"
        )
    # An odd number of sets spreads strides that are powers of two.
    sets = wanted // set_bytes
    sets = sets if sets <= 2 or sets % 2 else sets - 1
    if sets * ways > _FRAMES_MAX:
        raise CacheError(
            f"a cache of {wanted} bytes has {sets * ways} lines of {line_bytes} bytes, more "
            f"than {_FRAMES_MAX}: give it longer lines"
        )
    return sets


def geometry_of(tags: int, frames: int, sets: int, ways: int, line_bytes: int) -> GeometryStruct:
    """Return the struct of a cache whose tags and frames lie at these addresses."""
    return GeometryStruct(
        tags=tags,
        frames=frames,
        set_count=sets,
        # ceil(2^64 / sets); set_of() in the header handles a single set separately.
        set_reciprocal=-(-(1 << 64) // sets) if sets > 1 else 0,
        ways=ways,
        line_shift=line_bytes.bit_length() - 1,
    )


@dataclass(frozen=True)
class TierShape:
    """The division of the host tier: subsets of places for lines, for each set of the cache."""

    sets: int
    subsets: int
    ways: int

    @classmethod
    def of(cls, capacity: int | str | None, sets: int, line_bytes: int) -> TierShape:
        """Divide `capacity` bytes; None makes a tier without places.

        Raises CacheError if it has less than a line for each set, or more lines than can be
        numbered.
        """
        if capacity is None:
            return cls(sets, 1, 0)
        wanted = parse_bytes(capacity, "host_memory")
        each = wanted // (sets * line_bytes)
        if each == 0:
            raise CacheError(
                f"a host tier of {wanted} bytes is smaller than a line for each of the {sets} sets "
                f"of the cache: give it at least {sets * line_bytes} bytes"
            )
        # A miss scans all ways of a subset.
        subsets = -(-each // _TIER_WAYS_MAX)
        shape = cls(sets, subsets, each // subsets)
        if shape.places > _TIER_PLACES_MAX:
            raise CacheError(
                f"a host tier of {wanted} bytes has {shape.places} lines: at most "
                f"{_TIER_PLACES_MAX}, so use longer ones"
            )
        return shape

    @property
    def places(self) -> int:
        """Lines that it holds."""
        return self.sets * self.subsets * self.ways


def check_line(line: int | str) -> int:
    """Return the bytes of a line; raises CacheError."""
    nbytes = parse_bytes(line, "line")
    if not LINE_BYTES_MIN <= nbytes <= LINE_BYTES_MAX or nbytes & (nbytes - 1):
        raise CacheError(
            f"a line of {nbytes} bytes is not a power of two from {LINE_BYTES_MIN} to "
            f"{LINE_BYTES_MAX}"
        )
    return nbytes


def automatic_capacity(nbytes: int, line: int | str, device: Device) -> int:
    """Choose the size for ``cache="auto"``: the whole array, or a share of the free memory."""
    line_bytes = check_line(line)
    whole = (nbytes // line_bytes + 1) * line_bytes
    share = int(device.memory_info().free_bytes * _AUTOMATIC_SHARE)
    # More than the data, because the number of sets is rounded down to an odd one.
    return max(8 * line_bytes, min(whole + 8 * line_bytes, share))
