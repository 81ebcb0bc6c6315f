"""New images: their header, and their file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from flashwarp import _native
from flashwarp.config import flag, integer, parse_bytes
from flashwarp.errors import ArgumentError
from flashwarp.file.gvdk.layout import (
    BLOCK_MAX,
    BLOCK_MIN,
    CAPACITY_MAX,
    HEADERS,
    PAGE,
    Header,
    ImageType,
    Sealer,
    mark_pages,
    places,
)
from flashwarp.file.gvdk.tables import Disk
from flashwarp.storage import files
from flashwarp.storage.progress import counting

COPY_BYTES = 4 << 20
_KEY_BYTES_MIN = 16


def checked_key(key: object) -> bytes | None:
    """Return a key that is long enough, or None; raises ArgumentError."""
    if key is None:
        return None
    if not isinstance(key, bytes) or len(key) < _KEY_BYTES_MIN:
        raise ArgumentError(
            f"key is no bytes object of at least {_KEY_BYTES_MIN} bytes: take os.urandom(32), and "
            "keep it where only you can read it"
        )
    return key


def rounded(nbytes: int, block: int) -> int:
    """Return the whole blocks that hold so many bytes: at least one."""
    return max(1, -(-nbytes // block)) * block


def new_header(
    size: int | str, block: int | str, capacity: int | str | None, fixed: bool, key: bytes | None
) -> Header:
    """Check the numbers of a new image, and return its header."""
    nbytes = integer("size", parse_bytes(size, "size"), 0, CAPACITY_MAX)
    unit = integer("block", parse_bytes(block, "block"), BLOCK_MIN, BLOCK_MAX)
    if unit & (unit - 1):
        raise ArgumentError(f"block={unit} is not a power of two")
    most = nbytes if capacity is None else parse_bytes(capacity, "capacity")
    most = rounded(integer("capacity", most, nbytes, CAPACITY_MAX), unit)
    kind = ImageType.FIXED if fixed else ImageType.SPARSE
    marks = mark_pages(most, unit)
    header = Header(os.urandom(16), kind, unit, nbytes, most, marks, keyed=key is not None)
    if kind is ImageType.SPARSE:
        header = replace(header, root=Sealer(key).tag(b""))
    return header


@contextmanager
def drafted(
    path: files.PathLike, header: Header, key: bytes | None, overwrite: bool, *, zeros: bool
) -> Iterator[files.Draft]:
    """Make the file of an image beside its name, which it takes by `publish`; durable then."""
    at, sealer = places(header), Sealer(key)
    target = files.check_new(files.check_name(path), flag("overwrite", overwrite))
    with files.Draft(target, overwrite, lock=True) as draft:
        with files.writing(target):
            disk = Disk(draft.descriptor)
            end = at.data + (header.capacity if header.type is ImageType.FIXED else 0)
            if header.type is ImageType.FIXED:
                take_space(draft.descriptor, end)
            else:
                os.ftruncate(draft.descriptor, end)
            for begin in range(at.data, end, COPY_BYTES) if zeros else ():
                disk.write(begin, bytes(min(COPY_BYTES, end - begin)))
            for copy in range(HEADERS):
                disk.write(copy * PAGE, header.pack(sealer))
            os.fsync(draft.descriptor)
        yield draft


def exported(
    path: files.PathLike, size: int, read: Callable[[int, int], bytes], overwrite: bool
) -> None:
    """Write the bytes that `read` returns to an ordinary file, durably; holes stay holes."""
    target = files.check_new(files.check_name(path), flag("overwrite", overwrite))
    with files.Draft(target, overwrite, lock=True) as draft:
        with files.writing(target):
            disk = Disk(draft.descriptor)
            count = counting(f"writing {target}", size)
            for begin in range(0, size, COPY_BYTES):
                data = read(begin, min(COPY_BYTES, size - begin))
                if any(data):
                    disk.write(begin, data)
                count(len(data))
            os.ftruncate(draft.descriptor, size)
            os.fsync(draft.descriptor)
        draft.publish()


def take_space(descriptor: int, nbytes: int) -> None:
    """Give a file its size, and its space where the file system can do so without writing."""
    try:
        _native.allocate(descriptor, nbytes)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        os.ftruncate(descriptor, nbytes)
