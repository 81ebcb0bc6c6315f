"""Batches of rows in Python kernels: the type of pipelines, its methods, and their lowering."""

# Numba says what these are called with.
# ruff: noqa: ARG001
from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.core.errors import TypingError
from numba.cuda.cudadecl import registry as typing_registry
from numba.cuda.cudaimpl import registry
from numba.cuda.datamodel import models
from numba.cuda.extending import register_model, typeof_impl
from numba.cuda.np import numpy_support
from numba.cuda.typing.templates import AttributeTemplate, bound_function, signature

from flashwarp.interop import c_abi
from flashwarp.pipeline.device_calls import DeviceCalls

_WORD = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_OLDEST = (1 << 64) - 1

_MOVES = ("prefetch", "write_back")


class PipelineType(types.Type):  # type: ignore[misc]
    """The batches of a pipeline in a kernel."""

    def __init__(self, dtype: Any, readonly: bool) -> None:
        self.dtype = dtype
        self.readonly = readonly
        kind = "read-only, " if readonly else ""
        super().__init__(name=f"flashwarp.Pipeline({kind}{dtype})")


def pipeline_type(dtype: Any, *, readonly: bool = False) -> PipelineType:
    """Return the type of pipelines, to compile kernels for before there is one.

    Examples
    --------
    >>> from flashwarp.interop.numba import pipeline_type
    >>> pipeline_type("float32")
    flashwarp.Pipeline(float32)
    """
    dtype = np.dtype(dtype)
    c_abi.check_dtype(dtype)
    return PipelineType(numpy_support.from_dtype(dtype), readonly)


@typeof_impl.register(DeviceCalls)
def _typeof_calls(calls: DeviceCalls, _context: Any) -> PipelineType:
    return pipeline_type(calls.dtype, readonly=not calls.writable)


def pipeline_words(calls: DeviceCalls) -> tuple[int, ...]:
    """Return the words that name the pipeline in kernels."""
    return struct.unpack("<2Q", calls.handle)


@register_model(PipelineType)
class _PipelineModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: PipelineType) -> None:
        super().__init__(manager, kind, [("words", types.UniTuple(types.uint64, 2))])


# Typing.


def _check_integers(name: str, *values: Any) -> None:
    if not all(isinstance(value, types.Integer) for value in values):
        raise TypingError(f"{name} takes integers for where and how many, not {values}")


def _check_buffer(name: str, kind: PipelineType, buffer: Any, stores: bool) -> None:
    if stores and kind.readonly:
        raise TypingError(f'{kind} cannot be written to: open the array with mode="r+"')
    fits = isinstance(buffer, types.Array) and buffer.layout == "C" and buffer.dtype == kind.dtype
    if not fits or not (stores or buffer.mutable):
        wanted = f"a contiguous array of {kind.dtype}"
        raise TypingError(f"{name} of {kind} needs {wanted}, not {buffer}")


def _typed_move(name: str, stores: bool) -> Callable[..., Any]:
    def typed(kind: PipelineType, args: Sequence[Any]) -> Any:
        if len(args) != 3:
            raise TypingError(f"{name}(ids, n, buffer)")
        ids, n, buffer = args
        wide = (types.int32, types.int64)
        if not isinstance(ids, types.Array) or ids.layout != "C" or ids.dtype not in wide:
            wanted = "a contiguous array of int32 or int64"
            raise TypingError(f"{name} takes ids as {wanted}, not {ids}")
        _check_integers(name, n)
        _check_buffer(name, kind, buffer, stores)
        return signature(types.uint64, ids, types.uint64, buffer)

    return typed


def _typed_sequence(name: str, stores: bool) -> Callable[..., Any]:
    def typed(kind: PipelineType, args: Sequence[Any]) -> Any:
        if len(args) != 3:
            raise TypingError(f"{name}(start, n, buffer)")
        _check_integers(name, *args[:2])
        _check_buffer(name, kind, args[2], stores)
        return signature(types.uint64, types.uint64, types.uint64, args[2])

    return typed


def _typed_wait(name: str, stores: bool) -> Callable[..., Any]:
    def typed(kind: PipelineType, args: Sequence[Any]) -> Any:
        if len(args) > 2:
            raise TypingError(f"{name}(ticket, statuses), or without either")
        if stores and kind.readonly:
            raise TypingError(f'{kind} cannot be written to: open the array with mode="r+"')
        if args:
            _check_integers(name, args[0])
        if len(args) < 2:
            return signature(types.uint64, *[types.uint64 for _ in args])
        statuses = args[1]
        if not (
            isinstance(statuses, types.Array)
            and statuses.layout == "C"
            and statuses.dtype == types.uint16
            and statuses.mutable
        ):
            raise TypingError(f"{name} takes statuses as a contiguous array of uint16")
        return signature(types.uint64, types.uint64, statuses)

    return typed


# Lowering.


@functools.cache
def _linkable() -> Any:
    """Return the same object each time: numba links a set of them."""
    return cuda.LTOIR(c_abi.batch_lto_ir(), name="flashwarp-batches.ltoir")


def _call(context: Any, builder: Any, name: str, pipeline: Any, *arguments: Any) -> Any:
    """Call a function of `batch_abi.cuh`; optimization removes the struct's memory."""
    place = builder.bitcast(cgutils.alloca_once_value(builder, pipeline), _BYTES)
    kind = ir.FunctionType(_WORD, [_BYTES, *[each.type for each in arguments]])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    context.active_code_library.add_linking_file(_linkable())
    return builder.call(function, [place, *arguments])


def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return builder.bitcast(context.make_array(kind)(context, builder, value).data, _BYTES)


def _lower_move(name: str) -> Callable[..., Any]:
    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        pipeline, ids, n, buffer = args
        function = f"fw_{name}_rows_{sig.args[1].dtype.bitwidth}"
        lists = _data(context, builder, sig.args[1], ids)
        rows = _data(context, builder, sig.args[3], buffer)
        return _call(context, builder, function, pipeline, lists, n, rows)

    return lower


def _lower_sequence(name: str) -> Callable[..., Any]:
    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        pipeline, start, n, buffer = args
        rows = _data(context, builder, sig.args[3], buffer)
        return _call(context, builder, f"fw_{name}_seq", pipeline, start, n, rows)

    return lower


def _lower_wait(name: str) -> Callable[..., Any]:
    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        ticket = args[1] if len(args) > 1 else ir.Constant(_WORD, _OLDEST)
        statuses: Any = ir.Constant(_BYTES, None)
        if len(args) > 2:
            statuses = _data(context, builder, sig.args[2], args[2])
        return _call(context, builder, f"fw_{name}_wait", args[0], ticket, statuses)

    return lower


def _resolve(key: str, typed: Callable[..., Any]) -> Any:
    @bound_function(key)
    def resolve(self: Any, kind: PipelineType, args: Any, kws: Any) -> Any:
        return None if kws else typed(kind, args)

    return resolve


def _methods() -> dict[str, Any]:
    """Make the methods of a pipeline: of the launch, and under ``block_`` those of one block."""
    found: dict[str, Any] = {"key": PipelineType}
    for move in _MOVES:
        for scope in ("", "block_"):
            calls = (
                (f"{scope}{move}", _typed_move, _lower_move),
                (f"{scope}{move}_seq", _typed_sequence, _lower_sequence),
                (f"{scope}{move}_wait", _typed_wait, _lower_wait),
            )
            for name, typing, lowering in calls:
                key = f"flashwarp.pipeline.{name}"
                found[f"resolve_{name}"] = _resolve(key, typing(name, move == "write_back"))
                registry.lower(key, PipelineType, types.VarArg(types.Any))(
                    lowering(f"{scope}{move}")
                )
    return found


typing_registry.register_attr(type("_PipelineAttributes", (AttributeTemplate,), _methods()))
