"""Arrays of the user as bytes in memory: checked each time before they move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashwarp.checkpoint.region import Region, dtype_text, numpy_dtype
from flashwarp.device import Device
from flashwarp.device.foreign import ArrayView, view
from flashwarp.errors import ArgumentError, CheckpointError, DtypeError


@dataclass(frozen=True)
class Bytes:
    """A region's bytes in the memory of the user."""

    region: Region  # what they are
    address: int  # of the first byte; valid while `owner` lives
    on_device: bool  # whether they are in the memory of a GPU
    owner: object  # the array
    stream: object = None  # the stream on which the user's work on it runs; None: there is none
    # The array of the user's of which `owner` is a copy in C order; None: `owner` is it.
    origin: object = None


def check_target(region: Region, array: object, device: Device) -> Bytes:
    """Return the bytes of an array that a stored region fills; raises if they do not fit."""
    found = describe(region.name, array, device, writable=True)
    if found.region.dtype != region.dtype:
        raise DtypeError(
            f"region {region.name!r} was stored as {region.dtype}, but the array for it has dtype "
            f"{found.region.dtype}: pass an array of {region.dtype}"
        )
    if found.region.shape != region.shape:
        raise CheckpointError(
            f"region {region.name!r} was stored with shape {region.shape}, {region.nbytes} bytes, "
            f"but the array for it has shape {found.region.shape}, {found.region.nbytes} bytes: "
            "make one of the stored size (see recover_size), and protect it or pass it in into="
        )
    return found


def describe(
    name: str,
    array: object,
    device: Device,
    *,
    writable: bool = False,
    known: Region | None = None,
) -> Bytes:
    """Check an array, and return its bytes; `known` is what it was before."""
    dtype, found = _view(name, array, device)
    region = known
    if region is None or (region.dtype, region.shape) != (dtype, found.shape):
        region = Region(name, dtype, found.shape, found.nbytes)
    if writable and found.read_only:
        raise ArgumentError(
            f"the array of region {name!r} is read-only, as those of jax are: pass a writable one "
            "in into=, or protect a callable with restore=, which takes the restored array"
        )
    if region.nbytes and (found.address == 0 or _storage_bytes(array) < region.nbytes):
        raise CheckpointError(
            f"the memory of region {name!r} was freed: its array has {region.nbytes} bytes and no "
            "storage for them; protect an array that has"
        )
    lazily = getattr(array, "is_conj", bool)() or getattr(array, "is_neg", bool)()
    if lazily or not found.contiguous:
        made = _in_order(array, found)
        if made is None:
            raise ArgumentError(
                f"the array of region {name!r} is not contiguous, and has gaps or is of a library "
                "that cannot be copied here: protect a contiguous one, or a callable that returns "
                "a contiguous copy"
            )
        return replace(describe(name, made, device, writable=writable), origin=array)
    on_device = found.device_kind == "cuda"
    if on_device and (device.kind != "cuda" or found.ordinal not in (None, device.ordinal)):
        raise ArgumentError(
            f"the array of region {name!r} is on cuda:{found.ordinal}, and the checkpointer on "
            f"{device.name}: open one for that device"
        )
    stream = None
    if on_device:
        own = found.stream
        stream = own if own is not None else device.current_stream(found.library)
    return Bytes(region, found.address, on_device, array, stream)


def region_of(name: str, array: object, device: Device) -> Region:
    """Return the region that an array makes, without a copy of it."""
    dtype, found = _view(name, array, device)
    return Region(name, dtype, found.shape, found.nbytes)


def give_back(filled: Bytes) -> object:
    """Return the user's array of a region that was filled, after a copy into it if need be."""
    origin: Any = filled.origin
    copied: Any = filled.owner
    if origin is None:
        return copied
    if isinstance(origin, np.ndarray):
        np.copyto(origin, copied)
    else:
        origin.detach().copy_(copied)
    return origin


def _in_order(array: Any, found: ArrayView) -> Any:
    """Copy an array whose axes lie in another order into C order; None if it has gaps."""
    if isinstance(array, np.ndarray):
        strides, unit = array.strides, array.itemsize
    elif found.library == "torch":
        strides, unit = array.stride(), 1
    else:
        return None
    axes = sorted((stride, n) for stride, n in zip(strides, found.shape, strict=True) if n != 1)
    for stride, length in axes:
        if stride != unit:
            return None
        unit *= length
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    return array.detach().resolve_conj().resolve_neg().contiguous()


def new_array(region: Region, device: Device) -> Any:
    """Allocate an array for a stored region: of numpy, or on the device for its libraries."""
    dtype = numpy_dtype(region.dtype)
    if dtype is None:
        raise DtypeError(
            f"region {region.name!r} has dtype {region.dtype}, which numpy has not: pass an array "
            "for it in into="
        )
    if device.kind == "cpu":
        return np.empty(region.shape, dtype)
    return device.empty_like_library("numpy", region.shape, dtype)


_WANTED = (
    "protect an array, whose memory can be filled again, something with state_dict and "
    "load_state_dict, a dict that has it, or a callable that returns an array"
)


def _view(name: str, array: object, device: Device) -> tuple[str, ArrayView]:
    if array is None or isinstance(array, str | bytes | int | float | complex | Mapping | list):
        raise ArgumentError(f"region {name!r} is of type {type(array).__name__}: {_WANTED}")
    stream = device.default_stream() if device.kind == "cuda" else None
    try:
        found = view(array, stream=stream)
    except DtypeError as error:
        if not hasattr(array, "data_ptr"):
            raise DtypeError(f"region {name!r}: {error}; {_WANTED}") from error
        return _view_unknown_to_numpy(array, stream)
    return dtype_text(found.dtype), found


def _view_unknown_to_numpy(tensor: Any, stream: object) -> tuple[str, ArrayView]:
    """Describe a torch tensor of a dtype that numpy has not, such as bfloat16, by its bytes."""
    import torch

    itemsize = tensor.element_size()
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if itemsize not in same_size:
        raise DtypeError(f"{tensor.dtype} cannot be stored: pass an integer view of the tensor")
    found = view(tensor.detach().view(same_size[itemsize]), stream=stream)
    return str(tensor.dtype).removeprefix("torch."), found


def _storage_bytes(array: Any) -> int:
    """Return how many bytes the memory of an array has from its first element on."""
    storage = getattr(array, "untyped_storage", None)
    if storage is None:
        return math.inf  # type: ignore[return-value]
    used = array.storage_offset() * array.element_size()
    return int(storage().nbytes()) - int(used)
