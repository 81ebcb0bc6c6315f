"""`gather` and `scatter` as operators that torch can compile and capture.

An operator takes no array, so it takes the array's handle, a text. Compilers guard the handle like
any constant: another array compiles the function again, and a lost array is an error.

Compilers also have to know that `scatter` stores where `gather` reads. They follow tensors alone,
so each device has a tensor of one element that stands for the rows of all arrays on it, and every
operator says that it changes this tensor. Otherwise stores would be dropped, and reads moved past
them: reading the tensor is not enough, since Inductor then moves a gather behind the next scatter.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from flashwarp.array.array import Array
from flashwarp.array.handles import array_of
from flashwarp.device import Device
from flashwarp.device.foreign import torch_dtype
from flashwarp.errors import ArgumentError, DtypeError, IndexDtypeError

_library = torch.library.Library("flashwarp", "DEF")
_library.define("gather(Tensor idx, Tensor(a!) order, str array) -> Tensor")
_library.define("gather_into(Tensor idx, Tensor(a!) out, Tensor(b!) order, str array) -> ()")
_library.define("scatter(Tensor idx, Tensor values, Tensor(a!) order, str array) -> ()")


def gather(array: Array, idx: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copy rows ``array[idx]``, in the order of `idx`, as an operator of torch.

    Parameters
    ----------
    array : Array
        With at least one axis, on the device of `idx`.
    idx : torch.Tensor
        Rows of the first axis, int64 or int32, of any shape; negative ones count from the end.
    out : torch.Tensor, optional
        Contiguous tensor of shape ``idx.shape + array.shape[1:]`` and the array's dtype, which must
        not overlap the memory of `idx`.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor. Never requires a gradient.

    Raises
    ------
    BoundsError
        On the CPU device, for an index that is out of bounds. On a GPU the row of such an index is
        zero, and the next call on the array, `Array.check` or `Array.wait` raises.
    ArgumentError
        For operands that do not fit, and for an `out` that requires a gradient while gradients are
        recorded: rows are data, through which no gradient flows into the array.
    IndexDtypeError, DtypeError
        For indices of another dtype, and for a dtype of the array that torch does not have.

    Notes
    -----
    On a GPU the rows are copied in the order of torch's current stream, the call waits for nothing,
    and it can be captured in a CUDA graph. A graph reads the present `idx` at each replay; call
    `Array.check` between replays to see errors. Before a graph that reads an array is gone, `close`
    refuses to close the array.

    `torch.compile` compiles a function once for each array that it is called with. It reports some
    operands that do not fit as errors of its own, which have the messages of these errors. With
    ``mode="reduce-overhead"`` leave `out` out: torch makes no CUDA graph of a function that changes
    its arguments. An array that comes from a pickle must have been used before.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np, torch
    >>> import flashwarp.torch
    >>> with fw.create("rows.npy", "float32", (1000, 64), device="cpu") as x:
    ...     x[10:12] = 1.5
    ...     fw.torch.gather(x, torch.tensor([11, 3]))[:, 0].tolist()
    [1.5, 0.0]
    """
    handle = _handle_of(array, idx)
    if out is None and not torch.compiler.is_compiling() and is_eager(idx):
        return _gather_rows(array, idx)
    order = _order_of(str(idx.device))
    if out is None:
        rows: torch.Tensor = torch.ops.flashwarp.gather.default(idx, order, handle)
        return rows
    _refuse_gradient("out", out, "into a tensor that does not require a gradient")
    check_plain(idx=idx)
    torch.ops.flashwarp.gather_into.default(idx, out, order, handle)
    return out


def scatter(array: Array, idx: torch.Tensor, values: torch.Tensor) -> None:
    """Store rows, ``array[idx] = values``, as an operator of torch.

    Parameters
    ----------
    array : Array
        Open for writing, on the device of `idx`.
    idx : torch.Tensor
        As for `gather`. If an index repeats, one of its rows is kept.
    values : torch.Tensor
        Of shape ``idx.shape + array.shape[1:]`` and the array's dtype, on the same device.

    Raises
    ------
    ReadOnlyError
        If the array was opened for reading.
    BoundsError
        As for `gather`; if any index is out of bounds, nothing is stored.
    ArgumentError
        For operands that do not fit, and for values that require a gradient while gradients are
        recorded: no gradient flows through an array. Pass ``values.detach()``.
    IndexDtypeError, DtypeError
        For indices of another dtype, and for values of another dtype than the array's.

    Notes
    -----
    Streams, graphs and errors are as for `gather`. Compiled code keeps the order of all calls of
    `gather` and `scatter`, and drops none. The rows are in the cache afterwards; `Array.flush`
    makes them durable.
    """
    handle = _handle_of(array, idx)
    _refuse_gradient("values", values, "values.detach()")
    check_plain(idx=idx)
    torch.ops.flashwarp.scatter.default(idx, values, _order_of(str(idx.device)), handle)


def _handle_of(array: Array, idx: torch.Tensor) -> str:
    if not isinstance(array, Array):
        raise ArgumentError(f"the first argument is a flashwarp.Array, not {type(array).__name__}")
    if not isinstance(idx, torch.Tensor):
        raise ArgumentError(f"idx is a tensor, not {type(idx).__name__}: use Array.gather for it")
    return array._handle


def _refuse_gradient(name: str, tensor: torch.Tensor, instead: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name} is a tensor, not {type(tensor).__name__}")
    check_plain(**{name: tensor})
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} requires a gradient, and none flows through an array in a storage: use "
            f"{instead}, or torch.no_grad()"
        )


def check_plain(**tensors: torch.Tensor) -> None:
    """Raise ArgumentError for tensors without one block of memory with strides, by name."""
    for name, tensor in tensors.items():
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
            raise ArgumentError(
                f"{name} is a sparse, nested or quantized tensor: give a plain one, as to_dense() "
                "and dequantize() return"
            )


def is_eager(idx: torch.Tensor) -> bool:
    """Return whether nothing but the operator's own code would see a call with this tensor.

    Then the code is called directly: the way through torch's dispatcher takes 10 us. Compilers
    cannot follow this function, so ask `torch.compiler.is_compiling` first.
    """
    return (
        type(idx) is torch.Tensor
        and not torch._C._len_torch_dispatch_stack()  # modes, as those that trace
        and torch._C._functorch.peek_interpreter_stack() is None  # transforms, as vmap
        and torch._C._get_tracing_state() is None
        and not torch.autograd._profiler_enabled()
    )


def torch_device(device: Device) -> torch.device:
    """Return torch's name of a device."""
    return torch.device(device.name)


_orders: dict[str, torch.Tensor] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _order_of(device: str) -> torch.Tensor:
    """Return the tensor that stands for the rows of all arrays on a device.

    Compilers run this while they compile. They are told that its address never changes, so a CUDA
    graph may contain operators that change it.
    """
    if device not in _orders:
        with torch.inference_mode(False):
            made = torch.zeros(1, device=device)
        torch._dynamo.mark_static_address(made, guard=False)
        _orders[device] = made
    return _orders[device]


# What the operators do.


def _gather(idx: torch.Tensor, _order: torch.Tensor, handle: str) -> torch.Tensor:
    return _gather_rows(array_of(handle), idx)


def _gather_rows(array: Array, idx: torch.Tensor) -> torch.Tensor:
    check_plain(idx=idx)
    rows = _empty_rows(array, idx)
    array.gather(idx.contiguous(), rows, _stream_of(idx))
    return rows


def _gather_into(idx: torch.Tensor, out: torch.Tensor, _order: torch.Tensor, handle: str) -> None:
    array = array_of(handle)
    _check_place(array, idx, out)
    array.gather(idx.contiguous(), out, _stream_of(idx))
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # as torch's own operators do


def _scatter(idx: torch.Tensor, values: torch.Tensor, _order: torch.Tensor, handle: str) -> None:
    array = array_of(handle)
    _check_rows(array, idx, values, "values")
    array.scatter(idx.contiguous(), values.detach().contiguous(), _stream_of(idx))


# What compilers ask instead of running them.


def _shape_of_gather(idx: torch.Tensor, _order: torch.Tensor, handle: str) -> torch.Tensor:
    return _empty_rows(array_of(handle), idx)


def _check_gather_into(
    idx: torch.Tensor, out: torch.Tensor, _order: torch.Tensor, handle: str
) -> None:
    _check_rows(array_of(handle), idx, out, "out")


def _check_scatter(
    idx: torch.Tensor, values: torch.Tensor, _order: torch.Tensor, handle: str
) -> None:
    _check_rows(array_of(handle), idx, values, "values")


for _key in ("CPU", "CUDA"):
    _library.impl("gather", _gather, _key)
    _library.impl("gather_into", _gather_into, _key)
    _library.impl("scatter", _scatter, _key)
torch.library.register_fake("flashwarp::gather", _shape_of_gather, lib=_library)
torch.library.register_fake("flashwarp::gather_into", _check_gather_into, lib=_library)
torch.library.register_fake("flashwarp::scatter", _check_scatter, lib=_library)


# Checks, by which both agree.


@functools.cache
def _dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    found: torch.dtype = torch_dtype(torch, dtype)
    return found


def _stream_of(idx: torch.Tensor) -> int | None:
    # Without an object of torch, which would take microseconds.
    return int(torch._C._cuda_getCurrentRawStream(idx.get_device())) if idx.is_cuda else None


def _empty_rows(array: Array, idx: torch.Tensor) -> torch.Tensor:
    _check_place(array, idx, idx)
    return idx.new_empty((*idx.shape, *array.shape[1:]), dtype=_dtype_of(array.dtype))


def _check_place(array: Array, idx: torch.Tensor, other: torch.Tensor) -> None:
    for tensor in (idx, other):
        kind, ordinal = tensor.device.type, tensor.device.index
        if kind != array.device.kind or (kind == "cuda" and ordinal != array.device.ordinal):
            raise ArgumentError(
                f"a tensor on {tensor.device}, and an array on {array.device.name!r}: move the "
                "tensor, or use Array.gather and Array.scatter, which copy"
            )
    if idx.dtype not in (torch.int64, torch.int32):
        raise IndexDtypeError(f"indices of dtype {idx.dtype}: use int64 or int32")
    if not array.shape:
        raise ArgumentError("an array without axes has no rows")


def _check_rows(array: Array, idx: torch.Tensor, rows: torch.Tensor, name: str) -> None:
    _check_place(array, idx, rows)
    shape, dtype = (*idx.shape, *array.shape[1:]), _dtype_of(array.dtype)
    if rows.dtype != dtype:
        raise DtypeError(f"{name} has dtype {rows.dtype}, the array {dtype}")
    if tuple(rows.shape) != shape:
        raise ArgumentError(f"{name} has shape {tuple(rows.shape)}, the rows have {shape}")
