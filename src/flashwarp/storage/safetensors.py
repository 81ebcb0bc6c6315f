"""Tensors of safetensors files: where each begins in which file, found in the headers alone.

A checkpoint is one file, several, or a folder with ``model.safetensors.index.json``. Headers come
from strangers, so everything in them is checked: a tensor is known only if all of its bytes lie in
its file, and no byte belongs to two tensors.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flashwarp.config import SIZE_MAX, brief
from flashwarp.errors import ArgumentError, FileFormatError, MissingFileError
from flashwarp.storage import containers, files

Checkpoint: TypeAlias = files.PathLike | Sequence[files.PathLike]
"""A safetensors file, an index, the folder of either, or several files."""

# The format's own library refuses longer headers.
_HEADER_BYTES_MAX = 100_000_000
_INDEX_BYTES_MAX = 100_000_000
# numpy's arrays, and so ours, have no more axes.
_AXES_MAX = 64

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of an element of each dtype that the format names."""

NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
    "F8_E4M3FNUZ": "u1", "F8_E5M2FNUZ": "u1", "I16": "<i2", "U16": "<u2", "F16": "<f2",
    "BF16": "<u2", "I32": "<i4", "U32": "<u4", "F32": "<f4", "F64": "<f8", "I64": "<i8",
    "U64": "<u8", "C64": "<c8",
}  # fmt: skip
"""numpy's dtype for each of whole bytes: integers of the same size for what numpy lacks."""

_NAMES_SHOWN = 5
_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file."""

    name: str
    path: str
    dtype: str
    """As the format spells it, such as ``"BF16"``."""
    shape: tuple[int, ...]
    offset: int
    """Byte of the file at which it begins."""
    nbytes: int
    stamp: files.Stamp = field(compare=False)
    """The file when its header was read."""

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)} in {self.path})"


def read_header(path: files.PathLike) -> dict[str, Tensor]:
    """Read which tensors lie in a safetensors file, in the order of their bytes.

    Reads its header alone. Raises FileFormatError if the file is none, is cut short, or its header
    contradicts itself: the message names the tensor and the numbers. Also MissingFileError,
    PathError.
    """
    name = files.check_name(path)
    with files.open_for_reading(name) as file:
        nbytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(containers.HEAD_BYTES)
        if not containers.is_safetensors(head, nbytes):
            containers.refuse_container(name, head, nbytes, None, "a safetensors file")
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if nbytes < 10 or not 2 <= length <= nbytes - 8:
            raise FileFormatError(
                f"{name} is no safetensors file, or is cut short: its {nbytes} bytes begin with "
                f"{length} as the length of the header"
            )
        if length > _HEADER_BYTES_MAX:
            raise FileFormatError(
                f"{name} has a header of {length} bytes, more than {_HEADER_BYTES_MAX}"
            )
        text = file.read(length)
        stamp = files.stamp(file.fileno())
    entries = _json_object(text, f"the header of {name}")
    begin = 8 + length
    tensors = [
        _tensor(tensor, entry, name, stamp, begin, nbytes - begin)
        for tensor, entry in entries.items()
        if tensor != "__metadata__"
    ]
    return _without_overlaps(tensors, name, nbytes)


def _tensor(
    name: str, entry: object, path: str, stamp: files.Stamp, begin: int, room: int
) -> Tensor:
    """Check one entry of a header, after which `room` bytes of data follow from `begin` on."""
    where = f"tensor {name!r} of {path}"
    if not isinstance(entry, dict):
        raise FileFormatError(f"{where} is described by {_short(entry)}, not by an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        known = ", ".join(DTYPE_BITS)
        raise FileFormatError(f"{where} has dtype {_short(dtype)}, which is none of {known}")
    lengths = _integers(shape, f"the shape of {where}")
    if len(lengths) > _AXES_MAX:
        raise FileFormatError(f"{where} has {len(lengths)} axes, more than {_AXES_MAX}")
    places = _integers(offsets, f"data_offsets of {where}")
    if len(places) != 2 or not places[0] <= places[1] <= room:
        raise FileFormatError(
            f"{where} has data_offsets {list(places)}, which are no range in the {room} bytes of "
            "data that the file has"
        )
    bits = math.prod(lengths) * DTYPE_BITS[dtype]
    nbytes = places[1] - places[0]
    if bits != 8 * nbytes:
        raise FileFormatError(
            f"{where} has {nbytes} bytes, but {dtype} of shape {list(lengths)} needs {bits / 8:g}"
        )
    return Tensor(name, path, dtype, lengths, begin + places[0], nbytes, stamp)


def _without_overlaps(tensors: list[Tensor], path: str, nbytes: int) -> dict[str, Tensor]:
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end, before = 0, ""
    for tensor in tensors:
        if tensor.nbytes and tensor.offset < end:
            raise FileFormatError(
                f"tensor {tensor.name!r} of {path} begins at byte {tensor.offset}, inside of "
                f"{before!r}, which ends at {end} (the file has {nbytes} bytes)"
            )
        if tensor.nbytes:
            end, before = tensor.offset + tensor.nbytes, tensor.name
    return {tensor.name: tensor for tensor in tensors}


def read_checkpoint(given: Checkpoint) -> dict[str, Tensor]:
    """Read which tensors a checkpoint has; reads headers and the index alone.

    `given` is a ``.safetensors`` file, an index (``.json``), a folder that has
    ``model.safetensors.index.json``, ``model.safetensors`` or other files of the format, or several
    files.

    Raises FileFormatError for a file or index that is not as it must be, and for a tensor that two
    files have; MissingFileError if a file that the index names, or the folder, is absent;
    PathError; ArgumentError.
    """
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        if not given:
            raise ArgumentError("files is an empty sequence: name one safetensors file at least")
        return _all_of(map(files.check_name, given))
    name = files.check_name(given)
    if os.path.isdir(name):
        index = os.path.join(name, _INDEX_NAME)
        single = os.path.join(name, _SINGLE_NAME)
        if os.path.exists(index):
            return _indexed(index)
        if os.path.exists(single):
            return read_header(single)
        found = sorted(each for each in os.listdir(name) if each.endswith(".safetensors"))
        if not found:
            raise MissingFileError(2, f"the folder has no {_INDEX_NAME} and no safetensors", name)
        return _all_of(os.path.join(name, each) for each in found)
    return _indexed(name) if name.endswith(".json") else read_header(name)


def find(given: Checkpoint, name: object) -> Tensor:
    """Return a tensor of a checkpoint by its name.

    Raises ArgumentError, which has names that are there, and as `read_checkpoint` does.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"tensor={_short(name)} is not the name of a tensor")
    tensors = read_checkpoint(given)
    if name not in tensors:
        near = difflib.get_close_matches(name, tensors, 3)
        told = f"close to it is {shown(near)}" if near else f"there are {shown(tensors)}"
        raise ArgumentError(f"tensor={_short(name)} is in none of the files: {told}")
    return tensors[name]


def shown(names: Mapping[str, object] | Sequence[str]) -> str:
    """Return a few names, for a message."""
    some = ", ".join(map(repr, list(names)[:_NAMES_SHOWN])) or "none"
    return some + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def _all_of(paths: Iterable[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        for tensor in read_header(path).values():
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise FileFormatError(
                    f"tensor {tensor.name!r} is in {other.path} and in {path}: name one of them"
                )
    return tensors


def _indexed(path: str) -> dict[str, Tensor]:
    with files.open_for_reading(path) as file:
        text = file.read(_INDEX_BYTES_MAX + 1)
    if len(text) > _INDEX_BYTES_MAX:
        raise FileFormatError(f"{path} has more than the {_INDEX_BYTES_MAX} bytes of an index")
    wanted = _json_object(text, path).get("weight_map")
    if not isinstance(wanted, dict) or not all(isinstance(n, str) for n in wanted.values()):
        raise FileFormatError(f"{path} has no weight_map from names of tensors to names of files")
    folder = os.path.dirname(path)
    shards: dict[str, dict[str, Tensor]] = {}
    for shard in sorted(set(wanted.values())):
        # An index names neighbours. Another path would read files that nobody meant to give.
        if os.path.basename(shard) != shard or shard in ("", ".", ".."):
            raise FileFormatError(f"{path} names the file {shard!r}, which is not in its folder")
        shards[shard] = read_header(os.path.join(folder, shard))
    return {name: _in_shard(shards, name, shard, path) for name, shard in wanted.items()}


def _in_shard(
    shards: Mapping[str, Mapping[str, Tensor]], name: str, shard: str, path: str
) -> Tensor:
    try:
        return shards[shard][name]
    except KeyError:
        raise FileFormatError(
            f"{path} says that tensor {name!r} is in {shard}, whose header does not have it"
        ) from None


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    """Parse JSON whose outermost value is an object; names may not repeat in any object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise FileFormatError(f"{what} has the name {_short(name)} twice")
            found[name] = value
        return found

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{what} is no JSON: {_short(error)}") from None
    if not isinstance(found, dict):
        raise FileFormatError(f"{what} is no JSON object")
    return found


def _integers(found: object, what: str) -> tuple[int, ...]:
    """Return a list of integers from 0 to `SIZE_MAX` as a tuple."""
    if not isinstance(found, list) or not all(
        type(each) is int and 0 <= each <= SIZE_MAX for each in found
    ):
        raise FileFormatError(
            f"{what} is {_short(found)}, not a list of integers between 0 and {SIZE_MAX}"
        )
    return tuple(found)


def _short(found: object) -> str:
    if not isinstance(found, Exception):
        return brief(found)
    text = str(found)
    return text if len(text) <= 200 else f"{text[:200]}..."
