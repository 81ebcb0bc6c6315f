"""The caller's own tensors as targets: a state dict, a module, or a mapping of arrays."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

from flashwarp.device import Device
from flashwarp.errors import ArgumentError, DtypeError, FileFormatError, StorageError
from flashwarp.loading.contents import Content
from flashwarp.loading.places import LIBRARIES, Library, Place
from flashwarp.storage.files import open_for_reading
from flashwarp.storage.safetensors import shown
from flashwarp.transfer.operand import describe

_COMPARED_BYTES = 4 << 20


def tensors_of(into: object) -> dict[str, Any]:
    """Return the tensors of a mapping or module by name; not copies."""
    given: Any = into.state_dict() if hasattr(into, "state_dict") else into
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"into={type(into).__name__} is neither a mapping of names to tensors nor a module"
        )
    tensors = dict(given)
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not hasattr(tensor, "shape"):
            raise ArgumentError(
                f"into: {name!r} is a {type(tensor).__name__}, not a tensor under a name: leave it "
                "out of the mapping"
            )
    return tensors


def device_of(tensors: Mapping[str, Any]) -> str:
    """Return the one device that all tensors are on."""
    found = {name: _device_name(tensor) for name, tensor in tensors.items()}
    if len(set(found.values())) > 1:
        some = {where: name for name, where in found.items()}
        raise ArgumentError(
            "into: the tensors are on several devices ("
            + ", ".join(f"{name!r} on {where}" for where, name in some.items())
            + "): load those of each device by a call of its own"
        )
    return next(iter(found.values()), "cpu")


def library_of(tensors: Mapping[str, Any], device: Device) -> str:
    """Return the library that all tensors are of."""
    found = {type(tensor).__module__.partition(".")[0] for tensor in tensors.values()}
    if not tensors:
        return "numpy" if device.kind == "cpu" else "cupy"
    if len(found) > 1 or not found <= set(LIBRARIES):
        raise ArgumentError(
            f"into: the tensors are of {', '.join(sorted(found))}: give those of one of "
            f"{', '.join(LIBRARIES)} in a call"
        )
    return found.pop()


def _device_name(tensor: Any) -> str:
    where = getattr(tensor, "device", "cpu")
    if isinstance(where, str) or hasattr(where, "type"):
        return str(where)
    return f"cuda:{where.id}"  # cupy's


def places_of(
    found: Mapping[str, Content], tensors: Mapping[str, Any], library: Library, device: Device
) -> dict[str, Place]:
    """Return the places of the tensors that are to be filled, by name.

    Raises
    ------
    FileFormatError
        A tensor is in no file, unless it shares its memory with one that is; or has another shape.
    DtypeError
        A tensor has another dtype than the file.
    ArgumentError
        A tensor is not dense, or not writable; or two share memory, and the files have other bytes
        for one than for the other.
    """
    places: dict[str, Place] = {}
    absent: list[str] = []
    filled: list[_Filled] = []
    for name, tensor in tensors.items():
        content = found.get(name)
        if content is None:
            absent.append(name)
            continue
        dtype, shape = library.dtype(content), library.shape(content)
        if tensor.dtype != dtype:
            raise DtypeError(
                f"into: {name!r} is {tensor.dtype}, and the file has {dtype}: load it without "
                "into= and convert it, or make the tensor of the file's dtype"
            )
        if tuple(tensor.shape) != shape:
            raise FileFormatError(
                f"into: {name!r} has shape {list(tensor.shape)}, and the file has {list(shape)}"
            )
        place = Place(1, None)
        if content.nbytes:
            side = describe(device, tensor, f"tensor {name!r} of into", writable=True)
            place = Place(side.address, side.stream)
            filled.append(_Filled(side.address, side.address + content.nbytes, content))
        places[name] = place
    covered = _covered(filled)
    # Tied weights are stored under one of their names.
    missing = [n for n in absent if not _is_in(tensors[n], covered, device)]
    if missing:
        raise FileFormatError(
            f"into: no file has {shown(missing)}; they have {shown(found)}: leave these tensors "
            "out of into, or name them by only="
        )
    library.note_changes(tensors[name] for name in places)
    return places


class _Filled(NamedTuple):
    """Memory [begin, end) of a tensor of `into`, and what fills it."""

    begin: int
    end: int
    content: Content


def _covered(filled: list[_Filled]) -> list[tuple[int, int]]:
    """Return the memory that is filled; raises ArgumentError if two entries differ in a byte."""
    ranges: list[tuple[int, int]] = []
    last: _Filled | None = None  # the one that ends last: all before agree with it where they meet
    for each in sorted(filled, key=lambda each: each[:2]):
        if last is None or each.begin > last.end:
            ranges.append((each.begin, each.end))
        else:
            _check_same(last, each)
            ranges[-1] = ranges[-1][0], max(last.end, each.end)
        if last is None or each.end > last.end:
            last = each
    return ranges


def _check_same(one: _Filled, two: _Filled) -> None:
    """Raise ArgumentError unless the files have the same bytes for memory that both fill."""
    shared = min(one.end, two.end) - two.begin
    first, second = one.content.offset + two.begin - one.begin, two.content.offset
    if shared <= 0 or (one.content.path == two.content.path and first == second):
        return
    pieces = range(0, shared, _COMPARED_BYTES)
    with open_for_reading(one.content.path) as a, open_for_reading(two.content.path) as b:
        for at in pieces:
            size = min(_COMPARED_BYTES, shared - at)
            here = _read(a, one.content.path, size, first + at)
            if here != _read(b, two.content.path, size, second + at):
                raise ArgumentError(
                    f"into: {one.content.name!r} and {two.content.name!r} share memory, and the "
                    "files have different bytes for them: load one of them by only=, or give each "
                    "memory of its own"
                )


def _read(file: BinaryIO, path: str, nbytes: int, offset: int) -> bytes:
    try:
        return os.pread(file.fileno(), nbytes, offset)
    except OSError as error:
        number = error.errno or errno.EIO
        raise StorageError(number, f"read: {os.strerror(number)}", path, offset=offset) from error


def _is_in(tensor: Any, covered: list[tuple[int, int]], device: Device) -> bool:
    """Whether all bytes of a tensor are among those that are filled."""
    side = describe(device, tensor, "tensor of into", writable=True)
    nbytes = side.nbytes or 0
    return any(begin <= side.address <= end - nbytes for begin, end in covered)
