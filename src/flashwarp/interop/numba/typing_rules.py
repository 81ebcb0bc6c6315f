"""Typing: what expressions with arrays and tokens mean, and which of them mean nothing."""

# Numba says what these are called with.
# ruff: noqa: ARG002
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.cudadecl import registry
from numba.cuda.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    bound_function,
    signature,
)

from flashwarp.interop import c_abi
from flashwarp.interop.numba.data_types import TOKEN, ArrayType, TokenType, is_integer
from flashwarp.interop.numba.functions import atomic_add, prefetch, read_async, write_async


def _index_types(array: ArrayType, index: Any) -> Any:
    """Return the type that an index is taken as, or None for what is no index."""
    if is_integer(index):
        if array.ndim != 1:
            raise TypingError(
                f"{array} has {array.ndim} axes: a kernel indexes all of them, as in data[i, j]"
            )
        return _wide(index)
    if isinstance(index, types.BaseTuple) and all(is_integer(each) for each in index):
        if len(index) != array.ndim:
            raise TypingError(f"{len(index)} indices for {array}")
        return types.Tuple([_wide(each) for each in index])
    raise TypingError(f"{array} is indexed by integers in kernels, not by {index}")


def _wide(index: Any) -> Any:
    return types.int64 if index.signed else types.uint64


@registry.register_global(operator.getitem)
class _GetItem(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Sequence[Any], kws: Any) -> Any:
        assert not kws
        array, index = args
        if isinstance(array, ArrayType):
            return signature(array.dtype, array, _index_types(array, index))
        return None


@registry.register_global(operator.setitem)
class _SetItem(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Sequence[Any], kws: Any) -> Any:
        assert not kws
        array, index, value = args
        if not isinstance(array, ArrayType):
            return None
        _check_stored(self.context, array, value)
        return signature(types.none, array, _index_types(array, index), array.dtype)


def _check_stored(context: Any, array: ArrayType, value: Any) -> None:
    if array.readonly:
        raise TypingError(f'{array} cannot be stored to: open it with mode="r+"')
    if context.can_convert(value, array.dtype) is None:
        raise TypingError(f"{value} cannot be stored to {array}")


@registry.register_global(len)
class _Len(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Sequence[Any], kws: Any) -> Any:
        assert not kws
        (array,) = args
        return signature(types.intp, array) if isinstance(array, ArrayType) else None


@registry.register_attr
class _ArrayAttributes(AttributeTemplate):  # type: ignore[misc]
    key = ArrayType

    def resolve_shape(self, array: ArrayType) -> Any:
        return types.UniTuple(types.intp, array.ndim)

    def resolve_size(self, array: ArrayType) -> Any:
        return types.intp

    def resolve_ndim(self, array: ArrayType) -> Any:
        return types.intp


@registry.register_global(prefetch)
class _Prefetch(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Sequence[Any], kws: Any) -> Any:
        assert not kws
        array = _array_argument("prefetch", args)
        if len(args) == 2:
            return signature(types.none, array, _index_types(array, args[1]))
        return signature(TOKEN, array, *_range_types("prefetch", args[1:3]))


class _Transfer(AbstractTemplate):  # type: ignore[misc]
    name = ""
    stores = False

    def generic(self, args: Sequence[Any], kws: Any) -> Any:
        assert not kws
        array = _array_argument(self.name, args)
        if len(args) != 4:
            raise TypingError(f"{self.name}(data, i, n, buffer)")
        if self.stores:
            _check_stored(self.context, array, array.dtype)
        buffer = args[3]
        fits = (
            isinstance(buffer, types.Array)
            and buffer.dtype == array.dtype
            and buffer.layout == "C"
            and (self.stores or buffer.mutable)
        )
        if not fits:
            raise TypingError(
                f"{self.name} of {array} needs a contiguous array of {array.dtype}, not {buffer}"
            )
        return signature(TOKEN, array, *_range_types(self.name, args[1:3]), buffer)


@registry.register_global(read_async)
class _ReadAsync(_Transfer):
    name = "read_async"


@registry.register_global(write_async)
class _WriteAsync(_Transfer):
    name = "write_async"
    stores = True


@registry.register_global(atomic_add)
class _AtomicAdd(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Sequence[Any], kws: Any) -> Any:
        assert not kws
        array = _array_argument("atomic_add", args)
        _check_stored(self.context, array, args[2])
        if array.numpy_dtype.name not in c_abi.ATOMIC_ADD_DTYPES:
            raise TypingError(f"atomic_add works on {', '.join(c_abi.ATOMIC_ADD_DTYPES)}")
        return signature(array.dtype, array, _index_types(array, args[1]), array.dtype)


def _array_argument(name: str, args: Sequence[Any]) -> ArrayType:
    if not args or not isinstance(args[0], ArrayType):
        found = args[0] if args else "nothing"
        raise TypingError(f"{name} takes a flashwarp.Array, not {found}")
    return args[0]


def _range_types(name: str, args: Sequence[Any]) -> tuple[Any, Any]:
    if not all(is_integer(each) for each in args):
        raise TypingError(f"{name} takes integers for where and how many, not {args}")
    return _wide(args[0]), _wide(args[1])


@registry.register_attr
class _TokenAttributes(AttributeTemplate):  # type: ignore[misc]
    key = TokenType

    @bound_function("flashwarp.token.wait")
    def resolve_wait(self, token: TokenType, args: Any, kws: Any) -> Any:
        return None if args or kws else signature(types.uint32)

    @bound_function("flashwarp.token.done")
    def resolve_done(self, token: TokenType, args: Any, kws: Any) -> Any:
        return None if args or kws else signature(types.boolean)

    @bound_function("flashwarp.token.status")
    def resolve_status(self, token: TokenType, args: Any, kws: Any) -> Any:
        return None if args or kws else signature(types.uint32)
