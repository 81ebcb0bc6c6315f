"""The arguments of the caller's own kernels: checked, and packed into bytes.

The kernel's mangled name has the types of its parameters, and the compiled code their sizes.
"""

# Packing a number needs no launch.
# ruff: noqa: ARG002
from __future__ import annotations

import ctypes
import numbers
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashwarp import _native
from flashwarp import device as devices
from flashwarp._jit import spelling
from flashwarp._jit.program import LoadedKernel
from flashwarp.array.array import Array
from flashwarp.device import ArrayView, Device, DeviceMemory, stream_handle
from flashwarp.errors import (
    ArgumentError,
    CaptureError,
    CompileError,
    DeviceError,
    DtypeError,
    ReadOnlyError,
)
from flashwarp.file.kernel_file import KernelFile
from flashwarp.pipeline.device_calls import DeviceCalls


class Launch:
    """Orders one launch with the work of other libraries, if it uses their arrays."""

    __slots__ = ("_neighbours", "device", "handle", "served", "stream")

    def __init__(self, device: Device, stream: object) -> None:
        self.device = device
        self.stream = stream
        self.handle = None if stream is None or device.kind == "cpu" else stream_handle(stream)
        self._neighbours: dict[int, None] = {}
        self.served = False  # whether host threads serve the kernel while it runs

    def view(self, array: object) -> ArrayView:
        """Describe an argument, and note the streams that may use it."""
        run = self.device.own_stream() if self.stream is None else self.stream
        seen = devices.view(array, stream=run)
        if seen.device_kind == "cuda":
            neighbour = self.device.current_stream(seen.library)
            self._neighbours[neighbour.handle] = None
            if seen.stream is not None:
                self._neighbours[seen.stream] = None
        return seen

    def run(
        self, prepared: devices.PreparedLaunch, params: tuple[bytes, ...], uses: Sequence[object]
    ) -> None:
        """Launch after the libraries' present work, and after our own uploads.

        Unless the caller chose a stream, the libraries' next work waits for the launch.
        """
        self._run(prepared, params, uses)
        if self.served:
            self.device.note_served(self.handle)

    def _run(
        self, prepared: devices.PreparedLaunch, params: tuple[bytes, ...], uses: Sequence[object]
    ) -> None:
        if self.device.kind == "cpu":
            prepared(params, None, uses)
            return
        own = self.device.own_stream()
        if self.handle is not None:
            if not prepared.among(params, self.handle, (own,)):
                self.device.order(None, self.handle)
                prepared(params, self.handle, uses)
            return
        self.device.refuse_capture("a launch without stream=", "give it the stream")
        others = (*self._neighbours,)
        if not prepared.among(params, own, others, both_ways=True):
            captured = next(each for each in others if self.device.capture(each) is not None)
            raise CaptureError(
                f"an argument of the launch is in use on stream {captured:#x}, which is being "
                "captured into a CUDA graph: give the launch that stream"
            )


def parse_signature(signature: str, loaded: LoadedKernel) -> tuple[str, list[Param]]:
    """Return the name and the parameters of a kernel from its C++ spelling."""
    name, types = spelling.split_signature(signature)
    if len(types) != len(loaded.param_bytes):
        raise CompileError(
            f"{signature} has {len(loaded.param_bytes)} parameters in the compiled code"
        )
    sizes = zip(types, loaded.param_bytes, loaded.element_bytes, strict=True)
    params = [Param.parse(i, *each, signature) for i, each in enumerate(sizes)]
    return name, params


# Parameters, by the C++ spelling of their types.


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel: checks an argument and packs it into bytes."""

    place: str  # for messages: "argument 2 (float*) of scale(..)"
    nbytes: int

    @staticmethod
    def parse(index: int, text: str, nbytes: int, element_bytes: int, signature: str) -> Param:
        """Make the parameter number `index` of `signature`, whose type is spelled `text`."""
        place = f"argument {index} ({text}) of {signature}"
        to = spelling.elements_of(text)
        if to is not None and to.of_pipeline:
            return _PipelineParam(place, nbytes, to.type, element_bytes, to.constant)
        if to is not None and to.rank:
            return _ArrayParam(place, nbytes, to.type, element_bytes, to.constant, to.rank)
        if to is not None:
            return _PointerParam(place, nbytes, to.type, element_bytes, to.constant)
        if text == "fw::file":
            return _FileParam(place, nbytes)
        if text in spelling.NUMBERS:
            return _NumberParam(place, nbytes, np.dtype(spelling.NUMBERS[text]))
        return _BytesParam(place, nbytes)

    @property
    def kind(self) -> str:
        """What the extension's short way takes: a kind of number as numpy has it, or "bytes"."""
        return "bytes"

    def pack(self, argument: object, launch: Launch) -> bytes:
        """Return the bytes of the parameter; raises if the argument does not fit it."""
        raise NotImplementedError


def _check_element(
    place: str, element: str, element_bytes: int, dtype: np.dtype[Any], what: str
) -> None:
    """Compare number types by dtype, and others by size if it is known."""
    if element in spelling.NUMBERS:
        wanted = np.dtype(spelling.NUMBERS[element])
        # C++ does not say whether plain char has a sign.
        if dtype == wanted or (element == "char" and dtype == np.uint8):
            return
        raise DtypeError(f"{place} takes elements of dtype {wanted}, {what} has {dtype}")
    if element_bytes not in (0, dtype.itemsize):
        raise DtypeError(
            f"{place} takes elements of {element_bytes} bytes, those of {what} ({dtype}) have "
            f"{dtype.itemsize}"
        )


@dataclass(frozen=True)
class _HandleParam(Param):
    """A parameter for an object of ours, of which kernels get a struct."""

    def _taken(self, launch: Launch, what: str, given: Any, wanted: str, fits: bool) -> Any:
        """Return what is given, if it `fits` by its type and is on the kernel's device."""
        if not fits:
            raise ArgumentError(f"{self.place} takes {wanted}, not {type(given).__name__}")
        device = given.array.device if isinstance(given, KernelFile) else given.device
        if device is not launch.device:
            # In a forked child, the kernel is of a device of the parent, with the same name.
            launch.device._check_usable()
            opens = (
                "" if isinstance(given, DeviceCalls) else f": open the {what} with device= this one"
            )
            raise ArgumentError(
                f"{self.place}: the {what} is on {device.name}, the kernel on "
                f"{launch.device.name}{opens}"
            )
        return given

    def _whole(self, handle: bytes) -> bytes:
        if len(handle) != self.nbytes:
            raise DeviceError(
                f"{self.place} has {self.nbytes} bytes in the compiled code and {len(handle)} "
                "here: the headers that it was compiled with are not this version's"
            )
        return handle


@dataclass(frozen=True)
class _ArrayParam(_HandleParam):
    element: str
    element_bytes: int
    constant: bool
    rank: int

    @property
    def kind(self) -> str:
        return "const array" if self.constant else "array"

    def pack(self, argument: object, launch: Launch) -> bytes:
        fits = isinstance(argument, Array)
        array = self._taken(launch, "array", argument, "a flashwarp.Array", fits)
        _check_element(self.place, self.element, self.element_bytes, array.dtype, "the array")
        if self.rank > 1 and array.ndim != self.rank:
            raise ArgumentError(
                f"{self.place} takes {self.rank} axes, the array has shape {array.shape}"
            )
        array._turns.check_usable()
        handle = array._attachment.launcher.handle
        if not self.constant and not array.writable:
            raise ReadOnlyError(
                f"{self.place} can be stored to, but the array is read-only: open it with "
                f'mode="r+", or write fw::array<const {self.element}>'
            )
        if self.rank > 1:
            handle += struct.pack(f"<{self.rank}Q", *array.shape)
        return self._whole(handle)


@dataclass(frozen=True)
class _FileParam(_HandleParam):
    def pack(self, argument: object, launch: Launch) -> bytes:
        fits = isinstance(argument, KernelFile)
        file = self._taken(launch, "file", argument, "a file for kernels", fits)
        return self._whole(file.pack())


@dataclass(frozen=True)
class _PipelineParam(_HandleParam):
    element: str
    element_bytes: int
    constant: bool

    def pack(self, argument: object, launch: Launch) -> bytes:
        found = getattr(argument, "device_calls", argument)
        fits = isinstance(found, DeviceCalls)
        given = found if fits else argument
        calls = self._taken(launch, "pipeline", given, "a flashwarp.Pipeline", fits)
        _check_element(self.place, self.element, self.element_bytes, calls.dtype, "the pipeline")
        if not self.constant and not calls.writable:
            raise ReadOnlyError(
                f"{self.place} can write rows, but the pipeline only reads: write "
                f"fw::pipeline<const {self.element}>"
            )
        launch.served = True
        return self._whole(calls.handle)


def accesses_of(params: Sequence[Param], arguments: Sequence[object]) -> list[tuple[Array, bool]]:
    """Return the arrays among the arguments of a launch, and those behind files.

    With each comes whether the kernel may store to it.
    """
    found: list[tuple[Array, bool]] = []
    for param, argument in zip(params, arguments, strict=True):
        if isinstance(argument, Array):
            found.append((argument, isinstance(param, _ArrayParam) and not param.constant))
        elif isinstance(argument, KernelFile):
            found.append((argument.array, argument.array.writable))
    return found


_ADDRESS = struct.Struct("<Q")

_ARRAY_PROTOCOLS = (
    "__flashwarp_view__",
    "__cuda_array_interface__",
    "__dlpack__",
    "__array_interface__",
)


@dataclass(frozen=True)
class _PointerParam(Param):
    element: str
    element_bytes: int
    constant: bool

    @property
    def kind(self) -> str:
        return "pointer"

    def pack(self, argument: object, launch: Launch) -> bytes:
        return _ADDRESS.pack(self._address(argument, launch))

    def _address(self, argument: object, launch: Launch) -> int:
        if argument is None:
            return 0
        if isinstance(argument, DeviceMemory):
            return self._memory_address(argument, launch)
        if isinstance(argument, Array):
            raise ArgumentError(
                f"{self.place} is a pointer, and a flashwarp.Array has no address: declare it "
                f"fw::array<{argument.dtype}>"
            )
        if not any(hasattr(type(argument), name) for name in _ARRAY_PROTOCOLS):
            raise ArgumentError(
                f"{self.place} takes an array in the memory of {launch.device.name}, not "
                f"{type(argument).__name__}"
            )
        seen = launch.view(argument)
        self._check(seen, launch.device)
        return seen.address

    def _memory_address(self, memory: DeviceMemory, launch: Launch) -> int:
        if memory.device is not launch.device:
            raise ArgumentError(
                f"{self.place}: the memory is of {memory.device.name}, the kernel on "
                f"{launch.device.name}"
            )
        if memory.closed:
            raise ArgumentError(f"{self.place}: the memory was freed")
        return memory.address

    def _check(self, seen: ArrayView, device: Device) -> None:
        here = seen.device_kind == device.kind and (
            seen.ordinal is None or device.name == f"cuda:{seen.ordinal}"
        )
        if not here:
            place = seen.device_kind if seen.ordinal is None else f"cuda:{seen.ordinal}"
            raise ArgumentError(
                f"{self.place}: the array is on {place}, the kernel on {device.name}: copy it there"
            )
        if not seen.contiguous:
            raise ArgumentError(f"{self.place}: the array is not contiguous: copy it first")
        if seen.read_only and not self.constant:
            raise ReadOnlyError(
                f"{self.place} can be stored to, but the array is read-only: write "
                f"const {self.element}*"
            )
        if self.element != "void":
            _check_element(self.place, self.element, self.element_bytes, seen.dtype, "the array")


_PLAIN: dict[str, tuple[Any, str, Callable[[Any], bool | int | float]]] = {
    "b": (bool | np.bool_, "True or False", bool),
    "f": (numbers.Real, "a number", float),
    "i": (int | np.integer, "an integer", int),
}
"""By the kind of a number: what is taken, its name, and Python's type of it."""


@dataclass(frozen=True)
class _NumberParam(Param):
    dtype: np.dtype[Any]

    @property
    def kind(self) -> str:
        return self.dtype.kind

    def pack(self, argument: object, launch: Launch) -> bytes:
        if isinstance(argument, np.ndarray) and argument.ndim == 0:
            argument = argument[()]
        packed = _native.number_bytes(self.kind, self.nbytes, self._plain(argument))
        if packed is not None:
            return packed
        if self.kind == "f":
            raise ArgumentError(f"{self.place}: {argument} is too large for {self.dtype}")
        limits = np.iinfo(self.dtype)
        raise ArgumentError(f"{self.place}: {argument} is outside of {limits.min} .. {limits.max}")

    def _plain(self, argument: Any) -> bool | int | float:
        """Return Python's number of this kind that an argument is."""
        types, wanted, plain = _PLAIN.get(self.kind, _PLAIN["i"])
        if not isinstance(argument, types) or (isinstance(argument, bool) and plain is not bool):
            raise DtypeError(f"{self.place} takes {wanted}, not {type(argument).__name__}")
        return plain(argument)


@dataclass(frozen=True)
class _BytesParam(Param):
    """A type that the program defines, as it lies in memory."""

    def pack(self, argument: object, launch: Launch) -> bytes:
        if isinstance(argument, np.ndarray) and argument.ndim == 0:
            argument = argument[()]
        if not isinstance(argument, bytes | bytearray | ctypes.Structure | np.generic):
            raise DtypeError(
                f"{self.place} takes bytes, a ctypes structure or a numpy record, not "
                f"{type(argument).__name__}"
            )
        content = argument.tobytes() if isinstance(argument, np.generic) else bytes(argument)
        if len(content) != self.nbytes:
            raise DtypeError(f"{self.place} has {self.nbytes} bytes, not {len(content)}")
        return content
