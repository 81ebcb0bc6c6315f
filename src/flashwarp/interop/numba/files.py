"""Files in Python kernels: the type of files, its methods, and their lowering."""

# Numba says what these are called with.
# ruff: noqa: ARG001
from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.core.errors import TypingError
from numba.cuda.cudadecl import registry as typing_registry
from numba.cuda.cudaimpl import registry
from numba.cuda.datamodel import models
from numba.cuda.extending import register_model, typeof_impl
from numba.cuda.typing.templates import AttributeTemplate, bound_function, signature

from flashwarp.file.kernel_file import KernelFile
from flashwarp.interop import c_abi
from flashwarp.policy import CLOCK, Policy, resolve_policy

_WORD = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()

FILE_WORDS = 12
"""The 64-bit words of `fw::file`."""


class FileType(types.Type):  # type: ignore[misc]
    """A file in a kernel."""

    def __init__(self, readonly: bool, policy: Policy) -> None:
        self.readonly = readonly
        self.policy = policy
        chosen = "" if policy == CLOCK else f", {policy.name}"
        super().__init__(name=f"flashwarp.File({'read-only' if readonly else 'r+'}{chosen})")

    @property
    def key(self) -> Any:
        """The values that distinguish it from other types."""
        return self.readonly, self.policy


def file_type(*, readonly: bool = False, policy: str | Policy = CLOCK) -> FileType:
    """Return the type of files, to compile kernels for before there is one.

    `policy` is the replacement policy of the file's cache.

    Examples
    --------
    >>> from flashwarp.interop.numba import file_type
    >>> file_type()
    flashwarp.File(r+)
    """
    return FileType(readonly, resolve_policy(policy))


@typeof_impl.register(KernelFile)
def _typeof_file(file: KernelFile, _context: Any) -> FileType:
    return file_type(readonly=not file.array.writable, policy=file.array.cache.policy)


def file_words(file: KernelFile) -> tuple[int, ...]:
    """Return the words that name the file in kernels."""
    return struct.unpack(f"<{FILE_WORDS}Q", file.pack())


@register_model(FileType)
class _FileModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: FileType) -> None:
        words = types.UniTuple(types.uint64, FILE_WORDS)
        super().__init__(manager, kind, [("words", words)])


# Typing.


def _integers(name: str, *values: Any) -> list[Any]:
    if not all(isinstance(value, types.Integer) for value in values):
        raise TypingError(f"{name} takes integers for where and how many, not {values}")
    return [types.uint64] * len(values)


def _check_buffer(name: str, kind: FileType, buffer: Any, stores: bool) -> None:
    if stores and kind.readonly:
        raise TypingError(f'{kind} cannot be written to: open the file with mode="r+"')
    if not isinstance(buffer, types.Array) or buffer.layout != "C":
        raise TypingError(f"{name} needs a contiguous array as its buffer, not {buffer}")
    if not stores and not buffer.mutable:
        raise TypingError(f"{name} needs an array that it may change, not {buffer}")


def _typed_transfer(name: str, stores: bool) -> Callable[..., Any]:
    def typed(kind: FileType, args: Sequence[Any]) -> Any:
        if len(args) != 3:
            raise TypingError(f"{name}(buffer, offset, nbytes)")
        _check_buffer(name, kind, args[0], stores)
        return signature(types.int64, args[0], *_integers(name, *args[1:]))

    return typed


def _typed_append(name: str) -> Callable[..., Any]:
    def typed(kind: FileType, args: Sequence[Any]) -> Any:
        if len(args) != 2:
            raise TypingError(f"{name}(buffer, nbytes)")
        _check_buffer(name, kind, args[0], stores=True)
        return signature(types.int64, args[0], *_integers(name, args[1]))

    return typed


def _typed_flush(name: str) -> Callable[..., Any]:
    def typed(kind: FileType, args: Sequence[Any]) -> Any:
        if len(args) != 2:
            raise TypingError(f"{name}(offset, nbytes)")
        if kind.readonly:
            raise TypingError(f'{kind} cannot be written to: open the file with mode="r+"')
        return signature(types.int64, *_integers(name, *args))

    return typed


def _typed_fact(name: str) -> Callable[..., Any]:
    def typed(kind: FileType, args: Sequence[Any]) -> Any:
        if args:
            raise TypingError(f"{name}() takes no arguments")
        return signature(types.uint64)

    return typed


# Lowering.


@functools.cache
def _linkable(policy: Policy) -> Any:
    """Return the same object each time: numba links a set of them."""
    return cuda.LTOIR(c_abi.file_lto_ir(policy), name=f"flashwarp-files-{policy.name}.ltoir")


def _lower(function: str) -> Callable[..., Any]:
    """Call a function of `file_abi.cuh`; optimization removes the struct's memory."""

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        place = builder.bitcast(cgutils.alloca_once_value(builder, args[0]), _BYTES)
        passed = [place]
        for kind, value in zip(sig.args[1:], args[1:], strict=True):
            is_buffer = isinstance(kind, types.Array)
            passed.append(_data(context, builder, kind, value) if is_buffer else value)
        result = ir.FunctionType(_WORD, [each.type for each in passed])
        called = cgutils.get_or_insert_function(builder.module, result, function)
        context.active_code_library.add_linking_file(_linkable(sig.args[0].policy))
        return builder.call(called, passed)

    return lower


def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return builder.bitcast(context.make_array(kind)(context, builder, value).data, _BYTES)


def _resolve(key: str, typed: Callable[..., Any]) -> Any:
    @bound_function(key)
    def resolve(self: Any, kind: FileType, args: Any, kws: Any) -> Any:
        return None if kws else typed(kind, args)

    return resolve


def _methods() -> dict[str, Any]:
    """Make the methods: of one thread, and under ``warp_`` and ``block_`` those of more."""
    calls: dict[str, Callable[..., Any]] = {}
    for scope in ("", "warp_", "block_"):
        for verb in ("read", "read_around"):
            calls[f"{scope}{verb}"] = _typed_transfer(f"{scope}{verb}", stores=False)
        for verb in ("write", "write_around"):
            calls[f"{scope}{verb}"] = _typed_transfer(f"{scope}{verb}", stores=True)
        calls[f"{scope}append"] = _typed_append(f"{scope}append")
        if scope:
            calls[f"{scope}flush"] = _typed_flush(f"{scope}flush")
    for fact in ("size", "capacity"):
        calls[fact] = _typed_fact(fact)
    found: dict[str, Any] = {"key": FileType}
    for name, typed in calls.items():
        key = f"flashwarp.file.{name}"
        found[f"resolve_{name}"] = _resolve(key, typed)
        registry.lower(key, FileType, types.VarArg(types.Any))(_lower(f"fw_file_{name}"))
    return found


typing_registry.register_attr(type("_FileAttributes", (AttributeTemplate,), _methods()))
