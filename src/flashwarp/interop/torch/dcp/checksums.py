"""The file of checksums beside a checkpoint, and the verification that needs nothing but it.

``.checksums-ID`` lists every byte of the data files and of the metadata file that it belongs to. It
is written before the metadata file, whose rename commits the checkpoint; torch ignores it. Nothing
here unpickles, and torch is not imported.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwarp import _native
from flashwarp.errors import DamagedVersionError, MissingFileError, StorageError

METADATA = ".metadata"
_PREFIX = ".checksums-"
_HEADER = re.compile(rb"flashwarp-dcp-checksums ([0-9]{1,9}) ([0-9]{12}) ([0-9a-f]{8})\n")
_FORMAT = 1
_NAME = re.compile(r"__[0-9]{1,9}_[0-9a-f]{16}_[0-9]{1,9}\.distcp")
_ID = re.compile(r"[0-9a-f]{16}")

_FILE_BYTES_MAX = 1 << 30
_FILES_MAX = 10_000  # of checksums in one folder
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Item:
    """One tensor or object in a data file: its place, and the CRC-32C of its bytes."""

    offset: int
    nbytes: int
    crc32c: int


@dataclass(frozen=True)
class Checksums:
    """What a file of checksums says."""

    metadata: Item  # the whole metadata file
    # The items of each data file, ascending and without gaps, from byte 0 to its end.
    files: dict[str, list[Item]]


def metadata_name(rank: int | None) -> str:
    """Return the name of the metadata file; ranks without coordination have one each."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


def checksums_name(save: str, rank: int | None) -> str:
    """Return the name of the file of checksums of one save."""
    return f"{_PREFIX}{save}" if rank is None else f"{_PREFIX}{rank}-{save}"


def is_data_name(name: str) -> bool:
    """Return whether a file is a data file of some save, complete or not."""
    return _NAME.fullmatch(name.removesuffix(".tmp")) is not None


def encode(checksums: Checksums) -> bytes:
    """Return the content of the file."""
    text = json.dumps(
        {
            "metadata": [checksums.metadata.nbytes, checksums.metadata.crc32c],
            "files": {
                name: [[each.offset, each.nbytes, each.crc32c] for each in items]
                for name, items in sorted(checksums.files.items())
            },
        },
        separators=(",", ":"),
    ).encode()
    header = f"flashwarp-dcp-checksums {_FORMAT} {len(text):012d} {_native.crc32c(text):08x}\n"
    return header.encode() + text


def parse(path: Path) -> Checksums:
    """Read a file of checksums; raises DamagedVersionError for anything but what was written."""
    with path.open("rb") as file:
        content = file.read(_FILE_BYTES_MAX + 1)
    header = _HEADER.match(content)
    if header is None:
        raise DamagedVersionError(str(path), "it does not begin as a file of checksums")
    number, nbytes, crc32c = int(header[1]), int(header[2]), int(header[3], 16)
    text = content[header.end() :]
    if number != _FORMAT:
        raise DamagedVersionError(str(path), f"it has format {number}; this is format {_FORMAT}")
    if len(text) != nbytes or _native.crc32c(text) != crc32c:
        raise DamagedVersionError(str(path), "its own checksum differs")
    return _checksums(path, json.loads(text))


def _checksums(path: Path, found: Any) -> Checksums:
    """Check what a program with a fault, or an adversary, could have written."""
    try:
        metadata = Item(0, *map(_natural, found["metadata"]))
        files: dict[str, list[Item]] = {}
        for name, items in found["files"].items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a data file")
            files[name] = [Item(*map(_natural, each)) for each in items]
            end = 0
            for item in files[name]:
                if item.offset != end:
                    raise ValueError(f"{name} has a gap or an overlap at byte {end}")
                end += item.nbytes
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedVersionError(str(path), f"its content makes no sense ({error})") from error
    return Checksums(metadata, files)


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no size")
    return value


def checksum_files(folder: Path, rank: int | None) -> list[Path]:
    """Return the files of checksums in a folder, for `metadata_name` of the same rank."""
    start = _PREFIX if rank is None else f"{_PREFIX}{rank}-"
    found = []
    for path in folder.iterdir():
        if path.name.startswith(start) and _ID.fullmatch(path.name.removeprefix(start)):
            found.append(path)
            if len(found) > _FILES_MAX:
                raise DamagedVersionError(str(folder), f"more than {_FILES_MAX} of {start}*")
    return sorted(found)


def find(folder: Path, rank: int | None = None) -> tuple[bytes, Checksums]:
    """Return the metadata file of a checkpoint, checked, and its checksums.

    Raises
    ------
    MissingFileError
        Nothing was committed there.
    DamagedVersionError
        The metadata file is not what was committed, or nothing says what was.
    """
    path = folder / metadata_name(rank)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise MissingFileError(
            errno.ENOENT,
            "there is no committed checkpoint: its metadata file is missing",
            str(path),
        ) from error
    candidates = checksum_files(folder, rank)
    if not candidates:
        raise DamagedVersionError(
            str(path),
            "no checksums lie beside it: it was written by another program, which "
            "torch.distributed.checkpoint.load can load without a check",
        )
    found = Item(0, len(content), _native.crc32c(content))
    problems = []
    for candidate in candidates:
        try:
            checksums = parse(candidate)
        except DamagedVersionError as error:
            problems.append(str(error))
            continue
        if checksums.metadata == found:
            return content, checksums
    detail = "; ".join(problems) or "its checksum differs from what was committed"
    raise DamagedVersionError(str(path), detail)


def verify(path: str | Path, rank: int | None = None) -> int:
    """Read a whole checkpoint of `Writer` and compare every byte's checksum.

    Blocks, and reads each file once. Unpickles nothing.

    Parameters
    ----------
    path : path-like
        The folder of the checkpoint.
    rank : int, optional
        Whose part, of a checkpoint that was saved with ``use_collectives=False``.

    Returns
    -------
    int
        Bytes that were checked.

    Raises
    ------
    DamagedVersionError
        A file is missing, is of another size, or has other bytes; it names the place. Also if no
        checksums lie beside the checkpoint.
    MissingFileError
        Nothing was committed there.
    StorageError
        A file cannot be read.
    """
    folder = Path(path)
    content, checksums = find(folder, rank)
    total = len(content)
    for name, items in checksums.files.items():
        _verify_file(folder / name, items)
        total += sum(item.nbytes for item in items)
    return total


def _verify_file(path: Path, items: list[Item]) -> None:
    wanted = sum(item.nbytes for item in items)
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            if size != wanted:
                raise DamagedVersionError(str(path), f"it has {size} bytes, not {wanted}")
            file.seek(0)
            for item in items:
                value = 0
                for chunk in _chunks(file, item.nbytes):
                    value = _native.crc32c(chunk, value)
                check_item(path, item, value)
    except FileNotFoundError as error:
        raise DamagedVersionError(str(path), "it is missing") from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.errno or errno.EIO, str(error), str(path)) from error


def check_item(path: Path, item: Item, crc32c: int) -> None:
    """Raise DamagedVersionError if the bytes of an item have another checksum."""
    if crc32c != item.crc32c:
        raise DamagedVersionError(
            str(path),
            f"bytes {item.offset} to {item.offset + item.nbytes} have checksum {crc32c:08x}, not "
            f"{item.crc32c:08x}",
        )


def _chunks(file: Any, nbytes: int) -> Iterator[bytes]:
    while nbytes:
        chunk = file.read(min(nbytes, _CHUNK_BYTES))
        if not chunk:
            return
        nbytes -= len(chunk)
        yield chunk
