"""Large restores from a file: the loader's threads read it straight into arrays, and check it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashwarp.checkpoint.directory import VersionReader
from flashwarp.checkpoint.directory.checksums import Checksums
from flashwarp.checkpoint.region import Region
from flashwarp.device import Device, resolve, stream_handle
from flashwarp.errors import DamagedVersionError, StorageError
from flashwarp.loading.contents import Content
from flashwarp.loading.moving import Checks, move
from flashwarp.loading.places import Place
from flashwarp.storage import files
from flashwarp.storage.progress import counting

LEAST_BYTES = 16 << 20
"""Less is read sooner by threads that are there."""


@dataclass(frozen=True)
class Part:
    """Bytes of a region in memory; `after`: streams whose present work comes before a copy."""

    region: Region
    address: int
    on_host: bool
    after: object
    owner: object = None  # keeps the memory


class _Unwanted(Exception):
    pass


def read_straight(
    reader: VersionReader,
    parts: Sequence[Part],
    device: Device,
    staging_bytes: int,
    timeout_s: float,
    wanted: Callable[[], bool],
    filled: list[tuple[str, int]],
) -> bool:
    """Fill regions' memory from the file of a version; return False once it is not wanted.

    Adds each region and bytes of it to `filled` that are there.

    Raises
    ------
    DamagedVersionError
        Bytes are missing, or not what was written.
    StorageError
        A read failed. ETIMEDOUT: one does not end, and may still write to the memory.
    """
    checking = _Checking(reader, filled)
    total = sum(each.region.nbytes for each in parts)
    count = counting(f"restoring {reader.name} {reader.version}", total)
    for on_host in (False, True):
        mine = [each for each in parts if each.on_host is on_host]
        if mine and not _moved(
            reader, mine, resolve("cpu") if on_host else device, staging_bytes, timeout_s,
            _Progress(count, wanted), checking,
        ):  # fmt: skip
            return False
    checking.finish()
    return True


def _moved(
    reader: VersionReader,
    parts: Sequence[Part],
    device: Device,
    staging_bytes: int,
    timeout_s: float,
    progress: _Progress,
    checking: _Checking,
) -> bool:
    places = {
        each.region.name: Place(
            each.address, None if each.on_host or each.after is None else stream_handle(each.after)
        )
        for each in parts
    }
    try:
        move(
            [checking.content(each.region) for each in parts],
            places,
            device,
            o_direct=reader.o_direct,
            staging_bytes=staging_bytes,
            progress=progress,
            meanwhile=lambda: None,
            checks=Checks(reader.descriptor, reader.manifest.chunk_bytes, checking.put),
            timeout_s=timeout_s,
        )
    except _Unwanted:
        return False
    except StorageError as error:
        if error.errno != errno.ENODATA:
            raise
        raise DamagedVersionError(reader.path, f"it was cut short: {error}") from error
    return True


class _Progress:
    """Shows progress if that is asked for, and ends a load that is not wanted any more."""

    def __init__(self, count: Callable[[int], None], wanted: Callable[[], bool]) -> None:
        self._count, self._wanted, self._done = count, wanted, 0

    def __call__(self, done: int, _: int) -> None:
        if not self._wanted():
            raise _Unwanted
        self._count(done - self._done)
        self._done = done


class _Checking:
    """Compares checksums of what is read with those that were written. Any thread may call."""

    def __init__(self, reader: VersionReader, filled: list[tuple[str, int]]) -> None:
        self._reader = reader
        self._filled = filled
        self._stamp = files.stamp(reader.descriptor)
        self._found: dict[str, tuple[Region, Checksums]] = {}

    def content(self, region: Region) -> Content:
        """Return where a region is in the file."""
        chunk = self._reader.manifest.chunk_bytes
        self._found[region.name] = region, Checksums(region.name, region.nbytes, chunk)
        begin = self._reader.place(region)
        return Content(region.name, self._reader.path, "U8", (), begin, region.nbytes, self._stamp)

    def put(self, content: Content, at: int, nbytes: int, found: NDArray[np.uint32]) -> None:
        """Compare the whole chunks of some bytes, and keep what is found of parts of chunks."""
        region, checksums = self._found[content.name]
        checksums.reserve(at, nbytes)
        checksums.put(at, nbytes, found)
        chunk, end = self._reader.manifest.chunk_bytes, at + nbytes
        first = -(-at // chunk)
        last = -(-end // chunk) if end == region.nbytes else end // chunk
        skipped = first - at // chunk
        self._reader.check(region, first, found[skipped : skipped + max(0, last - first)])
        self._filled.append((region.name, nbytes))

    def finish(self) -> None:
        """Compare all checksums, also of chunks that came in parts."""
        for region, checksums in self._found.values():
            self._reader.check(region, 0, checksums.finish())
