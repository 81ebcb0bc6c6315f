"""The manifest of a version: what its data file holds, and the checksum of every chunk.

Text for people and programs: one line with the format, the length and the checksum of what follows,
then JSON. `parse` believes nothing: what it returns lies inside of the data file, and its cost is
bounded by the size of the text.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwarp import _native
from flashwarp.checkpoint.directory import names
from flashwarp.checkpoint.directory.checksums import chunk_count
from flashwarp.checkpoint.region import Region
from flashwarp.config import SIZE_MAX
from flashwarp.errors import ArgumentError, FlashwarpError

FORMAT = 2
_WITHOUT_IDENTITY = 1
ALIGNMENT = 4096
"""Regions begin at its multiples in the data file, so that O_DIRECT and mappings reach them."""

CHUNK_BYTES_MIN = 4096
CHUNK_BYTES_MAX = 1 << 28
"""Up to here a CRC-32C finds every change of at most three bits (Koopman, DSN 2002)."""

MANIFEST_BYTES_MAX = 1 << 28
"""Enough for 30 TB in chunks of 1 MiB."""

REGIONS_MAX = 1 << 20
METADATA_BYTES_MAX = 1 << 20

_HEADER = re.compile(rb"flashwarp-checkpoint ([0-9]{1,9}) ([0-9]{12}) ([0-9a-f]{8})\n")
_HEADER_BYTES_MAX = 64
_DIGITS = re.compile("[0-9a-f]*")


@dataclass(frozen=True)
class StoredRegion:
    """A region in a data file."""

    region: Region
    offset: int
    checksums: NDArray[np.uint32] = field(repr=False)


@dataclass(frozen=True)
class Manifest:
    """What a manifest says. `data` is the name of the data file beside it."""

    name: str
    version: int
    rank: int
    data: str
    data_bytes: int
    chunk_bytes: int
    regions: tuple[StoredRegion, ...]
    metadata: Mapping[str, Any]
    written: str = ""
    """When, in UTC, by the writer's clock; for people only."""
    identity: str = ""
    """Of what was written: all copies share it, and no other version has it."""


def lay_out(regions: Sequence[Region]) -> tuple[list[int], int]:
    """Return where each region begins in the data file, and the size of the file."""
    offsets, end = [], 0
    for region in regions:
        offsets.append(end)
        end = -(-(end + region.nbytes) // ALIGNMENT) * ALIGNMENT
    # Never empty, so that a data file is like any other.
    return offsets, max(end, ALIGNMENT)


def least_bytes(data_bytes: int, chunk_bytes: int) -> int:
    """Return what the checksums of a data file take in its manifest."""
    return 8 * (data_bytes // chunk_bytes)


def encode(manifest: Manifest) -> bytes:
    """Return the text of a manifest; raises ArgumentError if it is too large."""
    body = {
        "name": manifest.name,
        "version": manifest.version,
        "rank": manifest.rank,
        "identity": manifest.identity,
        "written": manifest.written,
        "byte_order": sys.byteorder,
        "data": manifest.data,
        "data_bytes": manifest.data_bytes,
        "chunk_bytes": manifest.chunk_bytes,
        "metadata": manifest.metadata,
    }
    # A line for each region: short enough to look through, and quick for many regions.
    lines = ",\n  ".join(json.dumps(_region_fields(each)) for each in manifest.regions)
    head = json.dumps(body, indent=1, allow_nan=False).removesuffix("\n}")
    text = f'{head},\n "regions": [\n  {lines}\n ]\n}}\n'.encode()
    if len(text) > MANIFEST_BYTES_MAX - _HEADER_BYTES_MAX:
        raise ArgumentError(
            f"the manifest has {len(text)} bytes, more than {MANIFEST_BYTES_MAX}: take larger "
            "chunks (chunk_bytes) or fewer regions"
        )
    return _header(text) + text


def _header(text: bytes, number: int = FORMAT) -> bytes:
    return b"flashwarp-checkpoint %d %012d %08x\n" % (number, len(text), _native.crc32c(text))


def _region_fields(stored: StoredRegion) -> dict[str, Any]:
    return {
        "name": stored.region.name,
        "dtype": stored.region.dtype,
        "shape": list(stored.region.shape),
        "nbytes": stored.region.nbytes,
        "offset": stored.offset,
        "crc32c": stored.checksums.astype(">u4").tobytes().hex(),
    }


def check_metadata(metadata: object) -> Mapping[str, Any]:
    """Return what a user stores beside the regions; raises ArgumentError if JSON cannot."""
    if metadata is None:
        return {}
    try:
        if not isinstance(metadata, Mapping):
            raise TypeError(f"it is of type {type(metadata).__name__}, and not a mapping")
        text = json.dumps(dict(metadata), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"the metadata cannot be stored as JSON: {error}") from error
    if len(text) > METADATA_BYTES_MAX:
        raise ArgumentError(
            f"the metadata has {len(text)} bytes as JSON, more than {METADATA_BYTES_MAX}: store "
            "it as a region"
        )
    found: dict[str, Any] = json.loads(text)
    return found


def parse(text: bytes) -> Manifest:
    """Return what a manifest says; raises ValueError, with the reason, for anything else."""
    line = _HEADER.match(text[:_HEADER_BYTES_MAX])
    if line is None:
        raise ValueError("it does not begin as a manifest")
    number = int(line[1])
    if number not in (FORMAT, _WITHOUT_IDENTITY):
        raise ValueError(
            f"its format is {number}, and this version of flashwarp reads {_WITHOUT_IDENTITY} and "
            f"{FORMAT}"
        )
    body = text[line.end() :]
    if len(body) != int(line[2]):
        raise ValueError(f"its text has {len(body)} bytes, and {int(line[2])} were written")
    if _header(body, number) != line[0]:
        raise ValueError("its checksum is not that of its text")
    # From here on only a program that computes checksums can have made the text.
    try:
        found = json.loads(body)
        if number == _WITHOUT_IDENTITY:
            found["identity"] = _identity_by_contents(found)
        return _manifest(found)
    except FlashwarpError as error:
        raise ValueError(str(error)) from error
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"its fields are not those of a manifest: {error!r}") from error


def _manifest(found: Any) -> Manifest:
    if found["byte_order"] != sys.byteorder:
        raise ValueError(f"its bytes are {found['byte_order']!r}-endian, unlike this machine's")
    chunk_bytes = _integer(found["chunk_bytes"], CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)
    if chunk_bytes & (chunk_bytes - 1):
        raise ValueError(f"its chunks of {chunk_bytes} bytes are no power of two")
    data_bytes = _integer(found["data_bytes"], ALIGNMENT, SIZE_MAX)
    version = names.check_version(found["version"])
    if names.data_version(_text(found["data"])) != version:
        raise ValueError(f"{found['data'][:100]!r} is no name of its data file")
    if not isinstance(found["regions"], list) or len(found["regions"]) > REGIONS_MAX:
        raise ValueError(f"its regions are no list of at most {REGIONS_MAX}")
    if not isinstance(found["metadata"], dict):
        raise ValueError("its metadata is no object")
    stored = []
    end = 0
    for each in found["regions"]:
        stored.append(_stored_region(each, end, chunk_bytes))
        end = stored[-1].offset + stored[-1].region.nbytes
    if -(-max(end, 1) // ALIGNMENT) * ALIGNMENT != data_bytes:
        raise ValueError(f"its regions end at byte {end} of {data_bytes}")
    if len({each.region.name for each in stored}) != len(stored):
        raise ValueError("two of its regions have one name")
    return Manifest(
        names.check_name(found["name"]),
        version,
        names.check_rank(found["rank"]),
        found["data"],
        data_bytes,
        chunk_bytes,
        tuple(stored),
        found["metadata"],
        _text(found["written"])[:64],
        names.identity_of(_text(found["identity"])),
    )


def _identity_by_contents(found: dict[str, Any]) -> str:
    """Return the identity of a version of format 1, which its copies share, as all checksums do."""
    fields = ("name", "dtype", "shape", "nbytes", "crc32c")
    regions = [[region[field] for field in fields] for region in found["regions"]]
    text = json.dumps([found["name"], found["version"], found["chunk_bytes"], regions])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _stored_region(found: Any, end: int, chunk_bytes: int) -> StoredRegion:
    region = Region(
        _text(found["name"]), _text(found["dtype"]), tuple(found["shape"]), found["nbytes"]
    )
    offset = _integer(found["offset"], end, SIZE_MAX)
    if offset % ALIGNMENT or offset - end >= ALIGNMENT:
        raise ValueError(f"region {region.name!r} begins at byte {offset}, after {end}")
    digits = _text(found["crc32c"])
    wanted = 8 * chunk_count(region.nbytes, chunk_bytes)
    if len(digits) != wanted or not _DIGITS.fullmatch(digits):
        raise ValueError(f"region {region.name!r} does not have {wanted} digits of checksums")
    checksums = np.frombuffer(bytes.fromhex(digits), ">u4").astype(np.uint32)
    return StoredRegion(region, offset, checksums)


def _integer(value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{str(value)[:40]!r} is no integer between {low} and {high}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is no text")
    return value
