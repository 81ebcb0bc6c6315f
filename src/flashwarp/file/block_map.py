"""`BlockMap`: where the bytes of a file lie on its block device, as the file system says (FIEMAP).

A map is a look at one moment. The file system may move or free the blocks as soon as another
process opens the file. So who uses a map holds a lease on the file, and derives the map under it;
`MappedFile` does both. What the kernel answers is checked like any other input: no map points
outside of the device, or has a place twice.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from flashwarp.errors import PathError, StorageError
from flashwarp.file.volume import Volume, check_file_system
from flashwarp.storage import files

BLOCK_BYTES = 4096
"""What each extent is a multiple of, as `MappedStorage` in C++ checks again."""

STALE = errno.EREMCHG
"""errno of the StorageError for a map whose file may have other blocks by now."""

# linux/fs.h and linux/fiemap.h.
_FIEMAP, _GET_GENERATION = 0xC020660B, 0x80087601
_HEAD, _EXTENT = struct.Struct("<QQIIII"), struct.Struct("<QQQ16xI12x")
_SYNC = 0x1
_LAST, _MERGED = 0x1, 0x1000
_ANSWER_EXTENTS = 1024
# A map of so many extents takes a few hundred MiB here; a file of 16 TiB has a few thousand.
_EXTENTS_MAX = 1 << 20

_COPY = "cp --reflink=never --sparse=never makes a file that can be used"

_FLAG_REFUSALS = {
    0x0002: ("unknown", "its place is not known yet: end what writes it, and try again"),
    0x0004: ("delalloc", "it has no place yet: end what writes it, and try again"),
    0x0008: ("encoded", f"its bytes are not those of the file: {_COPY}"),
    0x0080: (
        "encrypted",
        "its bytes are not those of the file: copy it to a folder without encryption",
    ),
    0x0100: ("not aligned", f"it shares blocks with others: {_COPY}"),
    0x0200: ("inline", "its bytes lie among the file system's own: a longer file has blocks"),
    0x0400: ("tail", f"its bytes share a block with other files: {_COPY}"),
    0x0800: (
        "unwritten",
        f"blocks are allocated, but hold no bytes of the file: write zeros to it; or {_COPY}",
    ),
    0x2000: ("shared", f"other files have the same blocks: {_COPY}"),
}


class FileExtent(NamedTuple):
    """Bytes [logical, logical + nbytes) of a file, at byte `physical` of a device."""

    logical: int
    physical: int
    nbytes: int


class FileState(NamedTuple):
    """What changes if a file may have got other blocks, or its name another file."""

    device: int
    inode: int
    generation: int
    nbytes: int
    changed_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileState:
        """Return the state of an open file."""
        status = os.fstat(descriptor)
        answer = bytearray(8)
        fcntl.ioctl(descriptor, _GET_GENERATION, answer)
        (generation,) = struct.unpack_from("<I", answer)
        return cls(status.st_dev, status.st_ino, generation, status.st_size, status.st_ctime_ns)


@dataclass(frozen=True)
class BlockMap:
    """Where the bytes of a file lie.

    Attributes
    ----------
    path : str
        The file, as it was named.
    file_system : str
        Such as "ext4".
    volume : Volume
        The block device whose bytes the extents count.
    state : FileState
        Of the file when the map was derived.
    extents : tuple of FileExtent
        In the order of the file, without a gap. The last may end behind the file, in its block.

    Examples
    --------
    >>> import flashwarp as fw
    >>> block_map = fw.file.BlockMap.of("/data/table.npy")  # doctest: +SKIP
    >>> block_map.volume.path, block_map.extents[0]  # doctest: +SKIP
    ('/dev/nvme0n1p2', FileExtent(logical=0, physical=139264, nbytes=1048576))
    """

    path: str
    file_system: str
    volume: Volume
    state: FileState
    extents: tuple[FileExtent, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.state.nbytes

    def extents_of(self, offset: int, nbytes: int) -> tuple[FileExtent, ...]:
        """Return where a part of the file lies, counted from its first byte."""
        parts = []
        for extent in self.extents:
            begin = max(extent.logical, offset)
            end = min(
                extent.logical + extent.nbytes, -(-(offset + nbytes) // BLOCK_BYTES) * BLOCK_BYTES
            )
            if begin < end:
                physical = extent.physical + begin - extent.logical
                parts.append(FileExtent(begin - offset, physical, end - begin))
        return tuple(parts)

    @classmethod
    def of(cls, path: files.PathLike) -> BlockMap:
        """Return the map of a file. Any user who can read the file may call.

        Raises
        ------
        MissingFileError, PathError
            If it cannot be read; lies on no block device, or on a file system that may move it; or
            has a hole, or an extent that is not simply its bytes. The message says which, and the
            way out.
        """
        name = files.check_name(path)
        with files.open_for_reading(name) as file:
            return cls.derive(file.fileno(), name)

    @classmethod
    def derive(cls, descriptor: int, path: str) -> BlockMap:
        """Return the map of an open file; see `of`."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PathError(errno.EINVAL, "is no regular file: a device is its own map", path)
        if status.st_size == 0:
            raise PathError(errno.ENODATA, "is empty: it has no blocks", path)
        volume = Volume.of(status.st_dev, path)
        kind = check_file_system(descriptor, path)
        # Also what the file system itself writes about the blocks: after a power cut they are still
        # the file's.
        os.fsync(descriptor)
        before = FileState.of(descriptor)
        extents = _extents_of(descriptor, path, before.nbytes, volume.nbytes)
        if FileState.of(descriptor) != before:
            raise PathError(
                errno.EBUSY, "is changed by another process now: end it, and try again", path
            )
        return cls(path, kind, volume, before, extents)

    def check(self, descriptor: int | None = None) -> None:
        """Raise StorageError (errno `STALE`) unless the file has the same blocks and state.

        Parameters
        ----------
        descriptor : int, optional
            The open file. Default: whichever has the name now.
        """
        try:
            now = (
                BlockMap.of(self.path)
                if descriptor is None
                else BlockMap.derive(descriptor, self.path)
            )
        except (OSError, ValueError) as error:
            raise StorageError(STALE, f"stale block map: {error}", self.path) from error
        if now == self:
            return
        pairs = zip(FileState._fields, self.state, now.state, strict=True)
        changed = [f"{name} was {old} and is {new}" for name, old, new in pairs if old != new]
        if self.extents != now.extents:
            changed.append("its blocks have other places")
        raise StorageError(
            STALE,
            f"stale block map: {', '.join(changed) or 'it lies on another device'}; derive it anew "
            "with BlockMap.of",
            self.path,
        )

    def on_disk(self) -> BlockMap:
        """Return the map with places on the whole disk, as the drive's own commands count.

        Raises
        ------
        PathError
            If the volume is no plain disk or partition.
        """
        self.volume.check_plain(self.path)
        start = self.volume.start
        if start % BLOCK_BYTES:
            raise PathError(
                errno.EINVAL,
                f"lies on {self.volume.path}, which begins at byte {start} of its disk, no "
                f"multiple of {BLOCK_BYTES}: make the partition anew with aligned sectors",
                self.path,
            )
        disk = Volume(
            self.volume.disk, self.volume.disk_nbytes, self.volume.disk, 0, self.volume.disk_nbytes
        )
        moved = tuple(
            each._replace(physical=each.physical + start) if start else each
            for each in self.extents
        )
        return replace(self, volume=disk, extents=moved)


Ask = Callable[[int, int], bytes]
"""Returns the kernel's answer about the bytes [start, start + length) of a file."""


def _extents_of(
    descriptor: int, path: str, nbytes: int, device_bytes: int
) -> tuple[FileExtent, ...]:
    def ask(start: int, length: int) -> bytes:
        question = bytearray(_HEAD.size + _EXTENT.size * _ANSWER_EXTENTS)
        _HEAD.pack_into(question, 0, start, length, _SYNC, 0, _ANSWER_EXTENTS, 0)
        try:
            fcntl.ioctl(descriptor, _FIEMAP, question)
        except OSError as error:
            raise PathError(
                error.errno or errno.EIO,
                "lies on a file system that does not say where (FIEMAP): open it by its name, "
                "through Linux",
                path,
            ) from error
        return bytes(question)

    return read_extents(ask, path, nbytes, device_bytes)


def read_extents(ask: Ask, path: str, nbytes: int, device_bytes: int) -> tuple[FileExtent, ...]:
    """Return the extents of a file of `nbytes` on a device of `device_bytes`, all of them checked.

    Raises PathError for an extent that cannot be used, or an answer that cannot be true.
    """
    end = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
    found: list[FileExtent] = []
    at = 0
    while at < end:
        answer = ask(at, end - at)
        count = _HEAD.unpack_from(answer)[3]
        room = (len(answer) - _HEAD.size) // _EXTENT.size
        if count > room or len(found) + count > _EXTENTS_MAX:
            raise _untrue(path, f"{count} extents, behind {len(found)}")
        for index in range(count):
            fields = _EXTENT.unpack_from(answer, _HEAD.size + index * _EXTENT.size)
            extent, flags = FileExtent(*fields[:3]), int(fields[3])
            # It may begin before what was asked for, if that lies inside of it.
            if extent.logical < at < extent.logical + extent.nbytes:
                cut = at - extent.logical
                extent = FileExtent(at, extent.physical + cut, extent.nbytes - cut)
            _check_extent(extent, flags, at, path, device_bytes)
            at = extent.logical + extent.nbytes
            # The file system may have allocated more than the file has.
            found.append(extent._replace(nbytes=min(extent.nbytes, end - extent.logical)))
            if at >= end:
                break
            if flags & _LAST:
                raise _hole(path, at, end)
        if count == 0:
            raise _hole(path, at, end)
    places = sorted(found, key=lambda each: each.physical)
    for one, other in pairwise(places):
        if one.physical + one.nbytes > other.physical:
            raise _untrue(path, f"{one} and {other} overlap")
    return tuple(found)


def _check_extent(extent: FileExtent, flags: int, at: int, path: str, device_bytes: int) -> None:
    where = f"bytes [{extent.logical}, {extent.logical + extent.nbytes})"
    refused = [(name, why) for bit, (name, why) in _FLAG_REFUSALS.items() if flags & bit]
    if unknown := flags & ~(_LAST | _MERGED | sum(_FLAG_REFUSALS)):
        refused.append((f"flags {unknown:#x}", "they are not known here: open it by its name"))
    if refused:
        raise PathError(
            errno.EOPNOTSUPP,
            f"{where} are {' and '.join(name for name, _ in refused)}: {refused[0][1]}",
            path,
        )
    if extent.logical > at:
        raise _hole(path, at, extent.logical)
    if extent.logical < at or extent.nbytes == 0:
        raise _untrue(path, f"{where} behind byte {at}")
    if extent.physical % BLOCK_BYTES or extent.nbytes % BLOCK_BYTES:
        raise PathError(
            errno.EINVAL,
            f"{where} lie at byte {extent.physical} of the device, and not in whole blocks of "
            f"{BLOCK_BYTES}: make the file system with blocks of that size",
            path,
        )
    if extent.physical + extent.nbytes > device_bytes:
        raise _untrue(
            path, f"{where} at byte {extent.physical} of a device of {device_bytes} bytes"
        )


def _hole(path: str, begin: int, end: int) -> PathError:
    return PathError(
        errno.ENODATA, f"bytes [{begin}, {end}) are a hole, which has no blocks: {_COPY}", path
    )


def _untrue(path: str, what: str) -> PathError:
    return PathError(
        errno.EIO,
        f"its file system says what cannot be ({what}): check it with fsck or xfs_repair",
        path,
    )
