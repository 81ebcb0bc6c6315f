"""One side of a copy: an address, a staging buffer, device memory, or a library's array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashwarp.config import integer
from flashwarp.device import Device, DeviceMemory
from flashwarp.device.memory import host_bytes
from flashwarp.errors import ArgumentError, BoundsError, ClosedError
from flashwarp.transfer.buffer import TransferBuffer

_ADDRESS_MAX = (1 << 64) - 1


@dataclass(slots=True)
class Operand:
    """One side of a copy, kept alive by its `owner`.

    Only the caller knows its size if `nbytes` is None. Its library may still be writing or reading
    it on `stream`; None: that is not known.
    """

    address: int
    nbytes: int | None
    owner: object
    stream: int | None = None

    def check(self, nbytes: int, what: str) -> None:
        """Raise BoundsError if so many bytes do not fit."""
        if self.nbytes is not None and nbytes > self.nbytes:
            raise BoundsError(f"the {what} has {self.nbytes} bytes, and {nbytes} are to be copied")


def describe(device: Device, thing: object, what: str, *, writable: bool) -> Operand:
    """Describe one side of a copy; raises ArgumentError if nothing can be copied there."""
    if isinstance(thing, int | np.integer) and not isinstance(thing, bool):
        return Operand(integer(what, thing, 1, _ADDRESS_MAX), None, None)
    if isinstance(thing, TransferBuffer):
        return Operand(thing.address, thing.nbytes, thing)
    if isinstance(thing, DeviceMemory):
        if thing.closed:
            raise ClosedError(f"the {what} was closed")
        return Operand(thing.address, thing.nbytes, (thing, thing.owners))
    if isinstance(thing, bytes | bytearray | memoryview):
        held = host_bytes(thing, writable=writable)
        return Operand(held.ctypes.data, held.nbytes, (thing, held))
    if isinstance(thing, list | tuple | float | str):
        raise ArgumentError(
            f"the {what} is a {type(thing).__name__}: give an array, a buffer or an address"
        )
    if hasattr(thing, "data_ptr") and hasattr(thing, "untyped_storage"):
        return _describe_tensor(device, thing, what)
    view = device.view(thing)
    if not view.contiguous:
        raise ArgumentError(f"the {what} is not contiguous: copy it piece by piece")
    if writable and view.read_only:
        raise ArgumentError(f"the {what} is read-only")
    stream = view.stream
    if stream is None and view.device_kind == device.kind == "cuda":
        stream = device.current_stream(view.library).handle
    return Operand(view.address, view.nbytes, view.owner, stream)


def _describe_tensor(device: Device, tensor: Any, what: str) -> Operand:
    """Describe a tensor of torch, of any dtype: those that numpy does not know, too."""
    dense = str(tensor.layout) == "torch.strided"
    if not dense or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(f"the {what} is not contiguous: copy it piece by piece")
    stream = device.current_stream("torch").handle if tensor.is_cuda else None
    return Operand(tensor.data_ptr(), tensor.nbytes, tensor, stream)
