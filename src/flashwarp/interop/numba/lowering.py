"""Lowering: what expressions with arrays and tokens become, which is calls of the C functions."""

# Numba says what these are called with.
# ruff: noqa: ARG001
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.cudaimpl import registry

from flashwarp.interop import c_abi
from flashwarp.interop.numba.data_types import TOKEN, ArrayType, TokenType, is_integer
from flashwarp.interop.numba.functions import atomic_add, prefetch, read_async, write_async
from flashwarp.policy import Policy

_BYTES = ir.IntType(8).as_pointer()
_WORD = ir.IntType(64)
# Accesses of the C functions are as wide as the element.
_ALIGNMENT_MAX = 16


def _call(context: Any, builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments)


@functools.cache
def _linkable(policy: Policy) -> Any:
    """Return the same object each time: numba links a set of them."""
    return cuda.LTOIR(c_abi.lto_ir(policy), name=f"flashwarp-{policy.name}.ltoir")


class _Lowered:
    """An array in the function that is being lowered."""

    def __init__(self, context: Any, builder: Any, kind: ArrayType, value: Any) -> None:
        self.context = context
        self.builder = builder
        self.kind = kind
        self._value = cgutils.create_struct_proxy(kind)(context, builder, value=value)

    @property
    def shape(self) -> list[Any]:
        return list(cgutils.unpack_tuple(self.builder, self._value.shape, self.kind.ndim))

    @property
    def size(self) -> Any:
        size = ir.Constant(_WORD, 1)
        for length in self.shape:
            size = self.builder.mul(size, length)
        return size

    def address(self) -> Any:
        """Put the array's struct where a function can look at it: optimization removes it."""
        place = cgutils.alloca_once(self.builder, self._value.struct.type)
        self.builder.store(self._value.struct, place)
        return self.builder.bitcast(place, _BYTES)

    def element(self, value: Any = None) -> Any:
        """Make room for an element, as aligned as its bytes are accessed."""
        data = self.context.get_data_type(self.kind.dtype)
        place = cgutils.alloca_once(self.builder, data)
        place.align = min(self.kind.numpy_dtype.itemsize, _ALIGNMENT_MAX)
        if value is not None:
            packed = self.context.data_model_manager[self.kind.dtype].as_data(self.builder, value)
            self.builder.store(packed, place, align=place.align)
        return place

    def load_element(self, place: Any) -> Any:
        model = self.context.data_model_manager[self.kind.dtype]
        data = self.builder.load(place, align=place.align)
        return model.from_data(self.builder, data)

    def flat(self, kind: Any, index: Any) -> Any:
        """Return the element's number; one that does not exist where an index leaves its axis."""
        builder = self.builder
        if is_integer(kind):
            kinds, indices = [kind], [index]
        else:
            kinds, indices = list(kind), cgutils.unpack_tuple(builder, index, len(kind))
        flat = ir.Constant(_WORD, 0)
        inside = ir.Constant(ir.IntType(1), 1)
        for each, at, length in zip(kinds, indices, self.shape, strict=True):
            at = self._wrapped(each, at, length)
            inside = builder.and_(inside, builder.icmp_unsigned("<", at, length))
            flat = builder.add(builder.mul(flat, length), at)
        if len(indices) == 1:
            return flat  # the function itself looks at the bound, and notes the very index
        return builder.select(inside, flat, ir.Constant(_WORD, -1))

    def flat_start(self, kind: Any, index: Any) -> Any:
        """Return the number of an element given by number, negative from the end."""
        return self._wrapped(kind, index, self.size)

    def _wrapped(self, kind: Any, index: Any, length: Any) -> Any:
        if not kind.signed:
            return index
        negative = self.builder.icmp_signed("<", index, ir.Constant(_WORD, 0))
        return self.builder.select(negative, self.builder.add(index, length), index)

    def call(self, verb: str, *arguments: Any) -> None:
        name = c_abi.function(verb, self.kind.numpy_dtype)
        void = ir.VoidType()
        self.context.active_code_library.add_linking_file(_linkable(self.kind.policy))
        _call(self.context, self.builder, name, void, self.address(), *arguments)

    def pointer(self, place: Any) -> Any:
        return self.builder.bitcast(place, _BYTES)


def _first(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> _Lowered:
    return _Lowered(context, builder, sig.args[0], args[0])


@registry.lower(operator.getitem, ArrayType, types.Any)
def _lower_getitem(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    array = _first(context, builder, sig, args)
    place = array.element()
    array.call("load", array.flat(sig.args[1], args[1]), array.pointer(place))
    return array.load_element(place)


@registry.lower(operator.setitem, ArrayType, types.Any, types.Any)
def _lower_setitem(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    array = _first(context, builder, sig, args)
    place = array.element(args[2])
    array.call("store", array.flat(sig.args[1], args[1]), array.pointer(place))
    return context.get_dummy_value()


@registry.lower(atomic_add, ArrayType, types.Any, types.Any)
def _lower_atomic_add(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    array = _first(context, builder, sig, args)
    value, before = array.element(args[2]), array.element()
    at = array.flat(sig.args[1], args[1])
    array.call("atomic_add", at, array.pointer(value), array.pointer(before))
    return array.load_element(before)


@registry.lower(prefetch, ArrayType, types.Any)
def _lower_prefetch(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    array = _first(context, builder, sig, args)
    array.call("prefetch", array.flat(sig.args[1], args[1]))
    return context.get_dummy_value()


@registry.lower(len, ArrayType)
def _lower_len(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    return _first(context, builder, sig, args).shape[0]


@registry.lower_getattr(ArrayType, "shape")
def _lower_shape(context: Any, builder: Any, kind: ArrayType, value: Any) -> Any:
    return context.make_tuple(
        builder,
        types.UniTuple(types.intp, kind.ndim),
        _Lowered(context, builder, kind, value).shape,
    )


@registry.lower_getattr(ArrayType, "size")
def _lower_size(context: Any, builder: Any, kind: ArrayType, value: Any) -> Any:
    return _Lowered(context, builder, kind, value).size


@registry.lower_getattr(ArrayType, "ndim")
def _lower_ndim(context: Any, builder: Any, kind: ArrayType, value: Any) -> Any:
    return ir.Constant(_WORD, kind.ndim)


# Tokens.


def _start_token(array: _Lowered, verb: str, *arguments: Any) -> Any:
    builder = array.builder
    # One for each place of the kernel that starts tokens, for as long as the function runs.
    site_words = ir.ArrayType(_WORD, c_abi.SITE_BYTES // 8)
    site = cgutils.alloca_once(builder, site_words)
    with builder.goto_entry_block():
        builder.store(ir.Constant(_WORD, 0), builder.bitcast(site, _WORD.as_pointer()))
    token = cgutils.create_struct_proxy(TOKEN)(array.context, builder)
    array.call(verb, *arguments, array.pointer(site), array.pointer(token._getpointer()))
    return token._getvalue()


@registry.lower(prefetch, ArrayType, types.Integer, types.Integer)
def _lower_fetch(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    array = _first(context, builder, sig, args)
    return _start_token(array, "fetch_async", array.flat_start(sig.args[1], args[1]), args[2])


def _lower_transfer(verb: str) -> Callable[..., Any]:
    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        array = _first(context, builder, sig, args)
        kind = sig.args[3]
        buffer = context.make_array(kind)(context, builder, args[3])
        # More than the buffer holds is more than the array holds: refused, and nothing is moved.
        fits = builder.icmp_unsigned("<=", args[2], buffer.nitems)
        start = array.flat_start(sig.args[1], args[1])
        start = builder.select(fits, start, ir.Constant(_WORD, -1))
        return _start_token(array, verb, start, args[2], array.pointer(buffer.data))

    return lower


for _verb, _stub in (("read_async", read_async), ("write_async", write_async)):
    registry.lower(_stub, ArrayType, types.Integer, types.Integer, types.Array)(
        _lower_transfer(_verb)
    )


def _lower_token(name: str, result: Any) -> Callable[..., Any]:
    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        place = cgutils.alloca_once_value(builder, args[0])
        return _call(context, builder, name, result, builder.bitcast(place, _BYTES))

    return lower


for _verb, _result in (
    ("wait", ir.IntType(32)),
    ("done", ir.IntType(1)),
    ("status", ir.IntType(32)),
):
    registry.lower(f"flashwarp.token.{_verb}", TokenType)(
        _lower_token(f"fw_token_{_verb}", _result)
    )
