"""The regions that a user has protected, as bytes in memory: checked each time before they move.

An array may have been resized, freed or closed since it was protected. Nothing is read or written
before all arrays of a call have been checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Protected:
    """What `Checkpointer.protect` was given."""

    source: object  # an array, or a callable that returns one
    restore: Callable[[Any], object] | None  # takes the restored array of a callable region
    region: Region | None  # the array as it was when it was protected; None for a callable


def names_of(only: Iterable[str]) -> list[str]:
    """Return the names of regions that a caller has listed, each once; raises for a text."""
    if isinstance(only, str):
        raise ArgumentError(f"only={only!r} is a text: pass a list of names, [{only!r}]")
    return list(dict.fromkeys(only))


class RegionSet:
    """Protected regions, by name. Not thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._regions: dict[str, Protected] = {}

    def add(
        self, name: str, source: object, restore: Callable[[Any], object] | None = None
    ) -> None:
        """Protect an array or a callable; a name that is protected already gets the new one."""
        called = callable(source) and not hasattr(source, "__array__")
        if restore is not None and not (called and callable(restore)):
            raise ArgumentError("restore= takes a callable, for a region that is a callable")
        region = None if called else describe(name, source, self._device).region
        if called:
            Region(name, "|u1", (0,), 0)  # checks the name
        self._regions[name] = Protected(source, restore, region)

    def remove(self, name: str) -> None:
        """Unprotect a region."""
        self._find(name)
        del self._regions[name]

    def names(self, only: Iterable[str] | None = None) -> list[str]:
        """Return the names of the regions, or of those in `only`; raises for unknown ones."""
        if only is None:
            return list(self._regions)
        names = names_of(only)
        for name in names:
            self._find(name)
        return names

    def get(self, name: str) -> Protected | None:
        """Return a protected region, or None."""
        return self._regions.get(name)

    def collect(self, only: Iterable[str] | None = None) -> list[Bytes]:
        """Return the present bytes of the regions; calls those that are callables."""
        names = self.names(only)
        if not names:
            raise CheckpointError("no region is protected: call protect() before checkpoint()")
        return [self._collect(name, self._regions[name]) for name in names]

    def target(self, region: Region) -> Bytes | None:
        """Return where a stored region goes, as it was protected; None: a new array is needed."""
        found = self._regions.get(region.name)
        if found is None or found.region is None:
            return None
        self._check_present(region.name, found)
        return check_target(region, found.source, self._device)

    def _collect(self, name: str, found: Protected) -> Bytes:
        if found.region is None:
            source = found.source
            assert callable(source)
            return describe(name, source(), self._device)
        return self._check_present(name, found)

    def _check_present(self, name: str, found: Protected) -> Bytes:
        present = describe(name, found.source, self._device, known=found.region)
        if present.region != found.region:
            assert found.region is not None
            raise CheckpointError(
                f"the array of region {name!r} was {_text(found.region)} when it was protected, "
                f"and is {_text(present.region)} now: protect it again after resizing it"
            )
        return present

    def _find(self, name: str) -> Protected:
        if name not in self._regions:
            raise ArgumentError(
                f"region {name!r} is not protected; protected are: "
                f"{', '.join(map(repr, self._regions)) or 'none'}"
            )
        return self._regions[name]


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
    if not found.contiguous:
        raise ArgumentError(
            f"the array of region {name!r} is not contiguous: protect a contiguous one, or a "
            "callable that returns a contiguous copy"
        )
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


def _view(name: str, array: object, device: Device) -> tuple[str, ArrayView]:
    if array is None or isinstance(array, str | bytes | int | float | complex | Mapping | list):
        raise ArgumentError(
            f"region {name!r} is of type {type(array).__name__}: protect an array, whose memory "
            "can be filled again, or a callable that returns one"
        )
    stream = device.default_stream() if device.kind == "cuda" else None
    try:
        found = view(array, stream=stream)
    except DtypeError:
        if not hasattr(array, "data_ptr"):
            raise
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


def _text(region: Region) -> str:
    return f"{region.dtype} {region.shape}"
