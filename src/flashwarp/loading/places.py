"""Where tensors go: memory of torch, cupy or numpy that is allocated here, or the caller's own.

A file's tensors share one allocation, each in 256-byte alignment, because a GPU takes longer for
hundreds of allocations than for the bytes in them. Each tensor knows its own bytes alone, and the
allocation is freed when the last of them is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashwarp.config import choice
from flashwarp.device import Device
from flashwarp.device.memory import align_up
from flashwarp.errors import ArgumentError, DeviceOutOfMemory, DtypeError
from flashwarp.loading.contents import Content

_ALIGNMENT = 256
# So many tensors are made between two pauses.
_AT_A_TIME = 16
_PAUSE_S = 20e-6

# What each dtype of the format is called in torch and numpy; torch packs two numbers of F4 into an
# element. F6 has no name in any library.
_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}  # fmt: skip
_PACKED = "F4"


@dataclass(frozen=True)
class Place:
    """Memory that a tensor's bytes go to."""

    address: int
    stream: int | None
    """On which earlier work may still use it; None on the CPU."""


class Library(ABC):
    """A library's tensors on one device."""

    name: str

    def __init__(self, device: Device) -> None:
        self.device = device

    @abstractmethod
    def dtype(self, content: Content) -> Any:
        """Return the library's dtype of what a file holds; raises DtypeError if it has none."""

    def shape(self, content: Content) -> tuple[int, ...]:
        """Return the shape that the tensor has in the library."""
        if content.dtype != _PACKED:
            return content.shape
        if not content.shape or content.shape[-1] % 2:
            raise DtypeError(
                f"{content} has rows of half bytes, which no tensor can have: leave it out by only="
            )
        return (*content.shape[:-1], content.shape[-1] // 2)

    @abstractmethod
    def block(self, nbytes: int) -> Any:
        """Allocate bytes with any content; raises DeviceOutOfMemory."""

    @abstractmethod
    def place(self, block: Any) -> Place:
        """Return where a block is."""

    def note_changes(self, tensors: Iterable[Any]) -> None:
        """Let the library know that tensors of the caller change behind its back."""
        del tensors  # most keep no versions

    @abstractmethod
    def cut(self, block: Any, begin: int, content: Content) -> Any:
        """Return the bytes of a block from `begin` on as a tensor that holds the block."""

    def refuse(self, content: Content, why: str = "") -> DtypeError:
        """Make the error for a dtype that the library does not have."""
        return DtypeError(
            f"{content} has a dtype that {self.name} does not have{why}: leave it out by only=, or "
            f"read its bytes by flashwarp.open(path, dtype='u1', offset={content.offset})"
        )


class _Torch(Library):
    name = "torch"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._torch: Any = importlib.import_module("torch")
        self._capsule: Any = importlib.import_module("torch.utils.dlpack").to_dlpack

    def dtype(self, content: Content) -> Any:
        kind = content.dtype
        name = _NAMES.get(kind, "") if isinstance(kind, str) else kind.name
        found = getattr(self._torch, name, None)
        native = isinstance(kind, str) or kind.isnative
        if not isinstance(found, self._torch.dtype) or not native:
            raise self.refuse(content)
        return found

    def block(self, nbytes: int) -> Any:
        try:
            return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.device.name)
        except self._torch.OutOfMemoryError as error:
            raise _no_room(nbytes, self.device, error) from error
        except RuntimeError as error:  # torch's allocator of host memory raises no other
            if "alloc" not in str(error):
                raise
            raise _no_room(nbytes, self.device, error) from error

    def place(self, block: Any) -> Place:
        on_gpu = self.device.kind == "cuda"
        stream = self.device.current_stream("torch").handle if on_gpu else None
        return Place(block.data_ptr(), stream)

    def note_changes(self, tensors: Iterable[Any]) -> None:
        # So that a backward that needs what they were before raises, as after a change by torch.
        for tensor in tensors:
            if not tensor.is_inference():
                self._torch.autograd.graph.increment_version(tensor)

    def cut(self, block: Any, begin: int, content: Content) -> Any:
        dtype, shape = self.dtype(content), self.shape(content)
        if not content.nbytes:
            return self._torch.empty(shape, dtype=dtype, device=self.device.name)
        # By DLPack each tensor has a storage of its own size: `torch.save` of a view would store
        # the whole block. A capsule spares torch the questions of streams, which take longer.
        part = self._torch.from_dlpack(self._capsule(block[begin : begin + content.nbytes]))
        return part.view(dtype).view(shape)


class _Numpy(Library):
    name = "numpy"

    def dtype(self, content: Content) -> Any:
        if isinstance(content.dtype, np.dtype):
            return content.dtype
        name = _NAMES.get(content.dtype, "")
        if content.dtype == _PACKED or not name:
            raise self.refuse(content)
        try:
            return np.dtype(name)
        except TypeError:
            pass
        try:
            return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        except ImportError:
            raise self.refuse(content, " without the package ml_dtypes") from None

    def block(self, nbytes: int) -> Any:
        try:
            made = np.empty(nbytes + _ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise _no_room(nbytes, self.device, error) from error
        return made[-made.ctypes.data % _ALIGNMENT :][:nbytes]

    def place(self, block: Any) -> Place:
        return Place(block.ctypes.data, None)

    def cut(self, block: Any, begin: int, content: Content) -> Any:
        part = block[begin : begin + content.nbytes]
        return part.view(self.dtype(content)).reshape(self.shape(content))


class _Cupy(_Numpy):
    name = "cupy"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._cupy: Any = importlib.import_module("cupy")

    def block(self, nbytes: int) -> Any:
        try:
            with self._cupy.cuda.Device(self.device.ordinal):
                return self._cupy.empty(nbytes, np.uint8)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise _no_room(nbytes, self.device, error) from error

    def place(self, block: Any) -> Place:
        return Place(block.data.ptr, self.device.current_stream("cupy").handle)


_KINDS: dict[str, type[Library]] = {"torch": _Torch, "cupy": _Cupy, "numpy": _Numpy}

LIBRARIES = tuple(_KINDS)


def library_for(name: str | None, device: Device) -> Library:
    """Return the library of this name; by default torch, else cupy or numpy as the device needs.

    Raises ArgumentError if it is not installed, or has no tensors on the device.
    """
    on_gpu = device.kind == "cuda"
    if name is None:
        name = "torch" if _installed("torch") else "cupy" if on_gpu else "numpy"
    choice("library", name, LIBRARIES)
    if (name == "numpy" and on_gpu) or (name == "cupy" and not on_gpu):
        other = "cpu" if on_gpu else "cuda"
        raise ArgumentError(
            f"library={name!r} has no tensors on {device.name}: give device={other!r}"
        )
    if not _installed(name):
        raise ArgumentError(f"tensors on {device.name} need {name}, which is not installed")
    return _KINDS[name](device)


def _installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _no_room(nbytes: int, device: Device, error: BaseException) -> DeviceOutOfMemory:
    info = device.memory_info()
    return DeviceOutOfMemory(
        f"{nbytes} bytes of tensors do not fit on {device.name}, which has {info.free_bytes} of "
        f"{info.total_bytes} bytes free ({str(error).splitlines()[0]}): load fewer by only=, or "
        "free some"
    )


def allocate(
    contents: Collection[Content], library: Library
) -> tuple[dict[str, Place], Callable[[], dict[str, Any]]]:
    """Allocate memory for some contents; return the places, and what makes the tensors there.

    To make hundreds of tensors takes milliseconds, in which their bytes may come already: it pauses
    at times, because threads that move bytes would wait 5 ms for Python's lock.

    Raises
    ------
    DtypeError
        The library lacks a dtype. Nothing is allocated then.
    DeviceOutOfMemory
    """
    shards: dict[str, list[Content]] = {}
    for each in sorted(contents, key=lambda each: (each.path, each.offset)):
        library.dtype(each), library.shape(each)
        shards.setdefault(each.path, []).append(each)
    cuts: dict[str, tuple[Any, int, Content]] = {}
    places: dict[str, Place] = {}
    for shard in shards.values():
        begins, end = _layout(shard)
        block = library.block(end)
        where = library.place(block)
        for each, begin in zip(shard, begins, strict=True):
            cuts[each.name] = block, begin, each
            places[each.name] = Place(where.address + begin, where.stream)

    def make() -> dict[str, Any]:
        made: dict[str, Any] = {}
        for number, each in enumerate(contents, 1):
            made[each.name] = library.cut(*cuts[each.name])
            if number % _AT_A_TIME == 0:
                time.sleep(_PAUSE_S)
        return made

    return places, make


def _layout(shard: Iterable[Content]) -> tuple[list[int], int]:
    """Return where each tensor begins in the allocation of its file, and how large that is."""
    begins, end = [], 0
    for each in shard:
        begins.append(end)
        end = align_up(end + each.nbytes, _ALIGNMENT)
    return begins, end
