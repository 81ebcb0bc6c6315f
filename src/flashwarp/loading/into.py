"""The caller's own tensors as targets: a state dict, a module, or a mapping of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashwarp.device import Device
from flashwarp.errors import ArgumentError, DtypeError, FileFormatError
from flashwarp.loading.contents import Content, shown
from flashwarp.loading.places import LIBRARIES, Library, Place
from flashwarp.transfer.operand import describe

__all__ = ["device_of", "library_of", "places_of", "tensors_of"]


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
        A tensor is not dense, or not writable.
    """
    places: dict[str, Place] = {}
    absent: list[str] = []
    filled: set[int] = set()
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
        places[name] = place
        filled.add(place.address)
    # Tied weights are stored under one of their names.
    missing = [n for n in absent if not _shares(tensors[n], filled, device)]
    if missing:
        raise FileFormatError(
            f"into: no file has {shown(missing)}; they have {shown(found)}: leave these tensors "
            "out of into, or name them by only="
        )
    return places


def _shares(tensor: Any, filled: set[int], device: Device) -> bool:
    return describe(device, tensor, "tensor of into", writable=True).address in filled
