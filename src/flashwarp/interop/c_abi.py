"""Arrays in kernels of other compilers: the functions of `c_abi.cuh`, by name, and as LTO-IR.

What any compiler needs that links LTO-IR, and nothing of a particular one: `interop.numba` gives
these functions types. An array is named by the address of its words, which a kernel takes as
parameters by value.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import numpy as np

from flashwarp._jit import compiler
from flashwarp.array.array import Array
from flashwarp.errors import DtypeError
from flashwarp.launch.rows import ArrayStruct
from flashwarp.policy import Policy

ATOMIC_ADD_DTYPES = ("int32", "uint32", "int64", "uint64", "float32", "float64")
"""Types for which `fw_atomic_add_*` exists."""

# As c_abi.cuh asserts.
TOKEN_BYTES = 80
"""Size of a token, a value."""
SITE_BYTES = 8 + 8 * 72
"""Size of what a place that starts tokens keeps of them; its first 8 bytes begin as zero."""

_DTYPES = frozenset(
    np.dtype(name)
    for name in ("bool", "float16", "float32", "float64", "complex64", "complex128")
    + tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
)


@functools.cache
def lto_ir(policy: Policy) -> bytes:
    """Return the functions as LTO-IR, compiled or found on disk. Needs NVRTC, but no GPU.

    A kernel links those of one policy: that of its arrays' caches.
    """
    source = compiler.Source("c_abi.cu", b'#include "flashwarp/c_abi.cuh"\n').behind(policy)
    return compiler.compile_lto(source, options=policy.options)


@functools.cache
def batch_lto_ir() -> bytes:
    """Return the functions of batches as LTO-IR (`batch_abi.cuh`); see `lto_ir`."""
    source = compiler.Source("batch_abi.cu", b'#include "flashwarp/batch_abi.cuh"\n')
    return compiler.compile_lto(source)


@functools.cache
def file_lto_ir(policy: Policy) -> bytes:
    """Return the functions of files as LTO-IR (`file_abi.cuh`); see `lto_ir`."""
    source = compiler.Source("file_abi.cu", b'#include "flashwarp/file_abi.cuh"\n').behind(policy)
    return compiler.compile_lto(source, options=policy.options)


def check_dtype(dtype: np.dtype[np.generic]) -> None:
    """Raise DtypeError for elements that are no numbers in this machine's byte order."""
    if dtype not in _DTYPES:
        raise DtypeError(
            f"kernels in Python have no elements of dtype {dtype}: numbers of up to 16 bytes in "
            "this machine's byte order work, and flashwarp.compile takes kernels in C++ for others"
        )


def function(verb: str, dtype: np.dtype[np.generic]) -> str:
    """Return the name of the function for elements of a dtype, such as "fw_load_4"."""
    if verb == "atomic_add":
        return f"fw_atomic_add_{dtype.name}"
    return f"fw_{verb}_{dtype.itemsize}"


def word_count(axes: int) -> int:
    """Count the 64-bit words of an array's argument: its struct, and the length of each axis."""
    return ctypes.sizeof(ArrayStruct) // 8 + axes


def array_words(array: Array) -> tuple[int, ...]:
    """Return the words that name the array in kernels, until it is closed."""
    array._turns.check_usable()
    head = bytes(array._attachment.launcher.hand_out(array.cache.kernel_policy))
    return (*struct.unpack(f"<{len(head) // 8}Q", head), *array.shape)
