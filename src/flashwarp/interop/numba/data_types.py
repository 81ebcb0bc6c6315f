"""The types of arrays and tokens in kernels, and the words that each of them is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.datamodel import models
from numba.cuda.extending import register_model, typeof_impl
from numba.cuda.np import numpy_support

from flashwarp.array.array import Array
from flashwarp.interop import c_abi
from flashwarp.policy import CLOCK, Policy, resolve_policy


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
        """The values that distinguish it from other types."""
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


TOKEN = TokenType()


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
    policy = array.cache.kernel_policy
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
        del builder, value
        raise TypingError("a function cannot return a token: wait for it where it was started")


def is_integer(kind: Any) -> bool:
    """Whether a value of this type can be an index or a count."""
    return isinstance(kind, types.Integer)
