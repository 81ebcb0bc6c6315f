"""Launches: kernels that take arrays among their arguments, in the turn of the arrays' caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import cuda
from numba.cuda import types

from flashwarp.array.array import Array
from flashwarp.array.turns import in_turns
from flashwarp.device import CudaDevice
from flashwarp.errors import ArgumentError
from flashwarp.file.kernel_file import KernelFile
from flashwarp.interop import c_abi
from flashwarp.interop.numba.batches import PipelineType, pipeline_words
from flashwarp.interop.numba.data_types import ArrayType
from flashwarp.interop.numba.files import FILE_WORDS, FileType, file_words
from flashwarp.launch.order import in_order
from flashwarp.pipeline.device_calls import DeviceCalls


class _Extension:
    """Turns arrays into parameters when a kernel is launched."""

    def prepare_args(self, kind: Any, value: Any, stream: Any, retr: Any) -> tuple[Any, Any]:
        """Replace an array by its words; other arguments stay as they are."""
        del retr
        if isinstance(kind, PipelineType):
            _check_place(value)
            return types.UniTuple(types.uint64, 2), pipeline_words(value)
        if isinstance(kind, FileType):
            _join(value.array, stream)
            return types.UniTuple(types.uint64, FILE_WORDS), file_words(value)
        if not isinstance(kind, ArrayType):
            return kind, value
        _join(value, stream)
        words = c_abi.array_words(value)
        return types.UniTuple(types.uint64, len(words)), words


extension = _Extension()
"""For ``numba.cuda.jit(extensions=[...])``, where `jit` cannot be used."""


def _join(value: Array, stream: Any) -> None:
    """Order a launch on a stream behind the library's own work, and tell the array of it."""
    _check_place(value)
    handle = _handle(stream)
    if not handle:
        # That stream is in no capture: a replay would not repeat the launch.
        instead = "give it the stream, kernel[blocks, threads, stream]"
        value.device.refuse_capture("a launch on numba's default stream", instead)
    # Work that the library has queued on its own stream comes first.
    value.device.order(None, handle)
    value._turns.join_launch(handle)


def _check_place(array: Array | DeviceCalls) -> None:
    device = array.device
    if not isinstance(device, CudaDevice):
        raise ArgumentError(
            f"{array!r} is on the CPU device, where kernels of numba-cuda do not run: open it with "
            "device='cuda', or write the kernel in C++ for flashwarp.compile, which runs on both"
        )
    here = cuda.get_current_device().id
    if here != device.ordinal:
        raise ArgumentError(
            f"{array!r} is on {device.name}, and the kernel would run on cuda:{here}: launch it "
            f"under numba.cuda.gpus[{device.ordinal}]"
        )


def _handle(stream: Any) -> int:
    """Return the handle of numba's stream; 0 for its default stream."""
    return int(getattr(stream, "handle", stream) or 0)


class Kernel:
    """A kernel of numba-cuda whose launches take arrays' turns; made by `jit`.

    Launch it as ``kernel[blocks, threads, stream](...)``. What numba's dispatcher offers besides is
    here under the same names. The launch does not wait: `Array.wait` does, and raises what
    went wrong.
    """

    def __init__(self, dispatcher: Any) -> None:
        self.dispatcher = dispatcher

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        return _Launcher(self.dispatcher[configuration])

    def forall(self, tasks: int, *args: Any, **kwargs: Any) -> Callable[..., None]:
        """Configure for a number of threads, as numba's `forall` does."""
        return _Launcher(self.dispatcher.forall(tasks, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dispatcher, name)

    def __repr__(self) -> str:
        return f"<flashwarp.interop.numba.Kernel {self.dispatcher.py_func.__name__}>"


class _Launcher:
    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __call__(self, *args: Any) -> None:
        arrays = [arg.array if isinstance(arg, KernelFile) else arg for arg in args]
        arrays = [array for array in arrays if isinstance(array, Array)]
        caches = {array.cache for array in arrays}
        policies = {repr(cache.kernel_policy) for cache in caches}
        if len(policies) > 1:
            raise ArgumentError(
                "the caches of a kernel's arrays have one replacement policy, and all or none of "
                f"them are another process's: not {', '.join(sorted(policies))}"
            )
        # A kernel's type does not say whether it stores to an array that it may store to.
        accesses = [(array._attachment.launcher, array.writable) for array in arrays]
        stream = _handle(getattr(self._launch, "stream", 0))
        launch = partial(in_order, accesses, stream, partial(self._launch, *args))
        in_turns([(array, array.writable) for array in arrays], launch)
        calls = next((arg for arg in args if isinstance(arg, DeviceCalls)), None)
        if calls is not None:
            calls.device.note_served(stream)


_REGISTER_LIMIT = {"max_registers": 64}


def jit(function: Any = None, /, **options: Any) -> Any:
    """Compile a kernel as ``numba.cuda.jit`` does, with `flashwarp.Array`s among its arguments.

    Parameters
    ----------
    function : function or signature, optional
        As numba's. `array_type` makes the types of arrays for signatures.
    **options
        As numba's, but that ``max_registers`` is 64 by default. Functions with ``device=True`` are
        returned as numba makes them.

    Returns
    -------
    Kernel
        Launch it as ``kernel[blocks, threads](...)``.
    """
    if function is None or not callable(function) or isinstance(function, types.Type):
        return lambda actual: _jit(actual, options, function)
    return _jit(function, options, None)


def _jit(function: Any, options: dict[str, Any], given: Any) -> Any:
    extensions = [*options.get("extensions", ()), extension]
    # As FW_KERNEL has it: without a limit the slow path's registers would halve the warps.
    limit = {} if "launch_bounds" in options or options.get("device") else _REGISTER_LIMIT
    made = cuda.jit(given, **{**limit, **options, "extensions": extensions})(function)
    return made if options.get("device") else Kernel(made)
