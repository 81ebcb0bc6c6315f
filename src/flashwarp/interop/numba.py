"""Arrays in Python kernels: numba-cuda's `jit` with arrays larger than memory among the arguments.

    from flashwarp.interop.numba import jit, prefetch

    @jit
    def gather(out, data, indices):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = data[indices[i]]

`data[i]`, `data[i, j]`, `data[i] = v`, `len(data)`, `data.shape`, `data.size` and `data.ndim` work
as with numpy arrays, negative indices too; an index out of bounds reads zero, stores nothing and is
raised by `Array.synchronize`. The device headers are linked as LTO-IR, so a load that hits is a few
instructions of the kernel itself. Kernels compile without a GPU.
"""

# Stubs take what kernels call them with; typing and lowering take what numba calls them with.
# ruff: noqa: ARG001, ARG002
from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashwarp.array import Array
from flashwarp.device import CudaDevice
from flashwarp.errors import ArgumentError, DeviceError
from flashwarp.interop import c_abi
from flashwarp.policy import CLOCK, Policy, resolve_policy

try:
    from llvmlite import ir
    from numba import cuda
    from numba.cuda import cgutils, types
    from numba.cuda.core.errors import TypingError
    from numba.cuda.cudadecl import registry as typing_registry
    from numba.cuda.cudaimpl import registry as lowering_registry
    from numba.cuda.datamodel import models
    from numba.cuda.extending import register_model, typeof_impl
    from numba.cuda.np import numpy_support
    from numba.cuda.typing.templates import (
        AbstractTemplate,
        AttributeTemplate,
        bound_function,
        signature,
    )
except (ImportError, AttributeError) as error:
    advice = "install it with: pip install 'flashwarp[numba]'"
    if "row_stack" in str(error):
        advice = "this numba needs a numpy that still has row_stack: pip install 'numpy<2.5'"
    raise DeviceError(f"numba-cuda cannot be imported ({error}): {advice}") from error

__all__ = [
    "ArrayType",
    "TokenType",
    "array_type",
    "atomic_add",
    "extension",
    "jit",
    "prefetch",
    "read_async",
    "write_async",
]


# What kernels call.


def prefetch(data: Any, i: Any, n: Any = None) -> Any:
    """Start bringing in element `i`, or the elements i .. i + n - 1; in kernels only.

    With `n` returns a token, whose `wait` returns when each of them has been in the cache.
    """
    raise _outside("prefetch")


def read_async(data: Any, i: Any, n: Any, dst: Any) -> Any:
    """Start copying the elements i .. i + n - 1 to the array `dst`; in kernels only.

    `data` has one axis, or `i` counts elements as its flat view has them. `dst` is contiguous, has
    the same dtype, and is the thread's own until the token's `wait` or `done` says that the copy is
    over.

    Returns
    -------
    token
        With `wait()` and `status()`, an NVMe status, 0 for success, and `done()`.
    """
    raise _outside("read_async")


def write_async(data: Any, i: Any, n: Any, src: Any) -> Any:
    """Start storing the array `src` to the elements i .. i + n - 1; as `read_async`."""
    raise _outside("write_async")


def atomic_add(data: Any, i: Any, value: Any) -> Any:
    """Add to element `i` in one step, and return what was there; in kernels only.

    For 32-bit and 64-bit integers and floats.
    """
    raise _outside("atomic_add")


def _outside(name: str) -> Exception:
    return ArgumentError(f"{name} works in kernels: functions under flashwarp.interop.numba.jit")


# Types.


class ArrayType(types.Type):  # type: ignore[misc]
    """A `flashwarp.Array` in a kernel."""

    def __init__(self, dtype: Any, ndim: int, readonly: bool, policy: Policy) -> None:
        self.dtype = dtype
        self.ndim = ndim
        self.readonly = readonly
        self.policy = policy
        kind = "read-only, " if readonly else ""
        chosen = "" if policy == CLOCK else f", {policy.name}"
        super().__init__(name=f"flashwarp.Array({kind}{dtype}, {ndim}d{chosen})")

    @property
    def key(self) -> Any:
        """What makes it differ from others."""
        return self.dtype, self.ndim, self.readonly, self.policy

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The dtype of the elements as numpy has it."""
        dtype: np.dtype[np.generic] = numpy_support.as_dtype(self.dtype)
        return dtype


class TokenType(types.Type):  # type: ignore[misc]
    """A transfer that a kernel has started."""

    def __init__(self) -> None:
        super().__init__(name="flashwarp.token")


_token = TokenType()


def array_type(
    dtype: Any, ndim: int = 1, *, readonly: bool = False, policy: str | Policy = CLOCK
) -> ArrayType:
    """Return the type of arrays, to compile kernels for before there is one.

    `policy` is the replacement policy of the array's cache.

    Examples
    --------
    >>> from flashwarp.interop.numba import array_type
    >>> array_type("float32")
    flashwarp.Array(float32, 1d)
    """
    dtype = np.dtype(dtype)
    c_abi.check_dtype(dtype)
    return ArrayType(numpy_support.from_dtype(dtype), ndim, readonly, resolve_policy(policy))


@typeof_impl.register(Array)
def _typeof_array(array: Array, _context: Any) -> ArrayType:
    policy = array.cache.policy
    return array_type(array.dtype, array.ndim, readonly=not array.writable, policy=policy)


@register_model(ArrayType)
class _ArrayModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: ArrayType) -> None:
        words = c_abi.word_count(0)
        members = [
            ("struct", types.UniTuple(types.uint64, words)),
            ("shape", types.UniTuple(types.int64, kind.ndim)),
        ]
        super().__init__(manager, kind, members)


@register_model(TokenType)
class _TokenModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: TokenType) -> None:
        words = types.UniTuple(types.uint64, c_abi.TOKEN_BYTES // 8)
        super().__init__(manager, kind, [("words", words)])

    def as_return(self, builder: Any, value: Any) -> Any:
        """Refuse: a token refers to the frame of the function that started it."""
        raise TypingError("a function cannot return a token: wait for it where it was started")


# Typing: what expressions with arrays mean.


def _is_integer(kind: Any) -> bool:
    return isinstance(kind, types.Integer)


def _index_types(array: ArrayType, index: Any) -> Any:
    """Return the type that an index is taken as, or None for what is no index."""
    if _is_integer(index):
        if array.ndim != 1:
            raise TypingError(
                f"{array} has {array.ndim} axes: a kernel indexes all of them, as in data[i, j]"
            )
        return _wide(index)
    if isinstance(index, types.BaseTuple) and all(_is_integer(each) for each in index):
        if len(index) != array.ndim:
            raise TypingError(f"{len(index)} indices for {array}")
        return types.Tuple([_wide(each) for each in index])
    raise TypingError(f"{array} is indexed by integers in kernels, not by {index}")


def _wide(index: Any) -> Any:
    return types.int64 if index.signed else types.uint64


@typing_registry.register_global(operator.getitem)
class _GetItem(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Sequence[Any], kws: Any) -> Any:
        assert not kws
        array, index = args
        if isinstance(array, ArrayType):
            return signature(array.dtype, array, _index_types(array, index))
        return None


@typing_registry.register_global(operator.setitem)
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


@typing_registry.register_global(len)
class _Len(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Sequence[Any], kws: Any) -> Any:
        assert not kws
        (array,) = args
        return signature(types.intp, array) if isinstance(array, ArrayType) else None


@typing_registry.register_attr
class _ArrayAttributes(AttributeTemplate):  # type: ignore[misc]
    key = ArrayType

    def resolve_shape(self, array: ArrayType) -> Any:
        return types.UniTuple(types.intp, array.ndim)

    def resolve_size(self, array: ArrayType) -> Any:
        return types.intp

    def resolve_ndim(self, array: ArrayType) -> Any:
        return types.intp


@typing_registry.register_global(prefetch)
class _Prefetch(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Sequence[Any], kws: Any) -> Any:
        assert not kws
        array = _array_argument("prefetch", args)
        if len(args) == 2:
            return signature(types.none, array, _index_types(array, args[1]))
        return signature(_token, array, *_range_types("prefetch", args[1:3]))


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
        return signature(_token, array, *_range_types(self.name, args[1:3]), buffer)


@typing_registry.register_global(read_async)
class _ReadAsync(_Transfer):
    name = "read_async"


@typing_registry.register_global(write_async)
class _WriteAsync(_Transfer):
    name = "write_async"
    stores = True


@typing_registry.register_global(atomic_add)
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
    if not all(_is_integer(each) for each in args):
        raise TypingError(f"{name} takes integers for where and how many, not {args}")
    return _wide(args[0]), _wide(args[1])


@typing_registry.register_attr
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


# Lowering: calls of the C functions.

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
        if _is_integer(kind):
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


@lowering_registry.lower(operator.getitem, ArrayType, types.Any)
def _lower_getitem(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    array = _first(context, builder, sig, args)
    place = array.element()
    array.call("load", array.flat(sig.args[1], args[1]), array.pointer(place))
    return array.load_element(place)


@lowering_registry.lower(operator.setitem, ArrayType, types.Any, types.Any)
def _lower_setitem(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    array = _first(context, builder, sig, args)
    place = array.element(args[2])
    array.call("store", array.flat(sig.args[1], args[1]), array.pointer(place))
    return context.get_dummy_value()


@lowering_registry.lower(atomic_add, ArrayType, types.Any, types.Any)
def _lower_atomic_add(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    array = _first(context, builder, sig, args)
    value, before = array.element(args[2]), array.element()
    at = array.flat(sig.args[1], args[1])
    array.call("atomic_add", at, array.pointer(value), array.pointer(before))
    return array.load_element(before)


@lowering_registry.lower(prefetch, ArrayType, types.Any)
def _lower_prefetch(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    array = _first(context, builder, sig, args)
    array.call("prefetch", array.flat(sig.args[1], args[1]))
    return context.get_dummy_value()


@lowering_registry.lower(len, ArrayType)
def _lower_len(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
    return _first(context, builder, sig, args).shape[0]


@lowering_registry.lower_getattr(ArrayType, "shape")
def _lower_shape(context: Any, builder: Any, kind: ArrayType, value: Any) -> Any:
    return context.make_tuple(
        builder,
        types.UniTuple(types.intp, kind.ndim),
        _Lowered(context, builder, kind, value).shape,
    )


@lowering_registry.lower_getattr(ArrayType, "size")
def _lower_size(context: Any, builder: Any, kind: ArrayType, value: Any) -> Any:
    return _Lowered(context, builder, kind, value).size


@lowering_registry.lower_getattr(ArrayType, "ndim")
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
    token = cgutils.create_struct_proxy(_token)(array.context, builder)
    array.call(verb, *arguments, array.pointer(site), array.pointer(token._getpointer()))
    return token._getvalue()


@lowering_registry.lower(prefetch, ArrayType, types.Integer, types.Integer)
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
    lowering_registry.lower(_stub, ArrayType, types.Integer, types.Integer, types.Array)(
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
    lowering_registry.lower(f"flashwarp.token.{_verb}", TokenType)(
        _lower_token(f"fw_token_{_verb}", _result)
    )


# Launches.


class _Extension:
    """What turns arrays into parameters when a kernel is launched."""

    def prepare_args(self, kind: Any, value: Any, stream: Any, retr: Any) -> tuple[Any, Any]:
        """Replace an array by its words; other arguments stay as they are."""
        del retr
        if not isinstance(kind, ArrayType):
            return kind, value
        _check_place(value)
        handle = _handle(stream)
        # What the library has queued on a stream of its own comes first.
        value.device.order(None, handle)
        value._join_launch(handle)
        words = c_abi.array_words(value)
        return types.UniTuple(types.uint64, len(words)), words


extension = _Extension()
"""For ``numba.cuda.jit(extensions=[...])``, where `jit` cannot be used."""


def _check_place(array: Array) -> None:
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
    """Return the handle of numba's stream, whose default is 0."""
    return int(getattr(stream, "handle", stream) or 0)


class Kernel:
    """A kernel of numba-cuda whose launches take arrays' turns; made by `jit`.

    Launch it as ``kernel[blocks, threads, stream](...)``. What numba's dispatcher offers besides is
    here under the same names. The launch does not wait: `Array.synchronize` does, and raises what
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
        caches = {arg.cache for arg in args if isinstance(arg, Array)}
        policies = {cache.policy.name for cache in caches}
        if len(policies) > 1:
            raise ArgumentError(
                "the caches of a kernel's arrays have one replacement policy, not "
                f"{', '.join(sorted(policies))}"
            )
        with contextlib.ExitStack() as turns:
            # In one order everywhere, so that two launches never wait for each other.
            for cache in sorted(caches, key=id):
                turns.enter_context(cache.turn)
            self._launch(*args)


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
