"""Runs what a Python kernel was lowered to on the host, for tests: LLVM compiles it for this CPU.

The functions that it calls are the same headers, compiled by g++. One thread, so no barriers.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba.cuda import compiler, types
from numba.cuda.np import numpy_support

import flashwarp as fw
from flashwarp.interop import c_abi
from flashwarp.interop.numba import ArrayType, file_type
from flashwarp.interop.numba.files import file_words

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

# numba-cuda writes pointers with the type that they point to, as LLVM of NVVM has them; LLVM of
# today has one type of pointers.
_TYPED_POINTER = re.compile(
    r"(?:\bi\d+|\bhalf|\bfloat|\bdouble|\bptr|\{[^{}]*\}|\[\d+ x [^\[\]]*\])\*+"
)
_SPECIAL = {"tid.x": 0, "ntid.x": 1, "ctaid.x": 0, "nctaid.x": 1}


def link_headers(device: fw.device.CpuDevice) -> None:
    """Make the headers' functions known to the host's linker, for as long as the device is."""
    names = re.findall(r"\bfw_\w+\b", _declared())
    source = "\n".join(f"  to[{i}] = (void*)&{name};" for i, name in enumerate(names))
    program = fw.compile(
        '#include "flashwarp/c_abi.cuh"\n#include "flashwarp/file_abi.cuh"\n'
        f"FW_KERNEL addresses(void** to) {{\n{source}\n}}\n",
        device,
    )
    found = np.zeros(len(names), np.uint64)
    memory = device.allocate(8 * len(names))
    program["addresses"](memory, warps=1)
    found[:] = memory.as_numpy().view(np.uint64)
    for name, address in zip(names, found, strict=True):
        llvm.add_symbol(name, int(address))


_FILE_VERBS = ("read", "read_around", "write", "write_around", "append")


def _declared() -> str:
    verbs = ("load", "store", "prefetch", "fetch_async", "read_async", "write_async")
    functions = [f"fw_{verb}_{width}" for verb in verbs for width in (1, 2, 4, 8, 16)]
    functions += [f"fw_atomic_add_{name}" for name in c_abi.ATOMIC_ADD_DTYPES]
    functions += [f"fw_token_{verb}" for verb in ("wait", "done", "status")]
    for scope in ("", "warp_", "block_"):
        functions += [f"fw_file_{scope}{verb}" for verb in _FILE_VERBS]
    functions += [f"fw_file_{verb}" for verb in ("warp_flush", "block_flush", "size", "capacity")]
    return " ".join(functions)


_keep: list[Any] = []


def _special(value: int) -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_int32)(lambda: value)
    _keep.append(function)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def run(
    function: Callable[..., Any], *arguments: fw.Array | fw.File | np.ndarray[Any, Any] | int
) -> None:
    """Compile the kernel for the types of its arguments, and run it with one thread."""
    kinds = [_type_of(argument) for argument in arguments]
    library, _ = compiler._compile_pyfunc_with_fixup(
        function,
        types.void(*kinds),
        debug=False,
        lineinfo=False,
        device=False,
        fastmath=False,
        cc=(9, 0),
        opt=None,
        abi="numba",
        abi_info=None,
        forceinline=False,
        launch_bounds=None,
        lto=True,
    )
    (text,) = library.llvm_strs
    text = re.sub(r"^target .*$", "", text, flags=re.MULTILINE)
    text = text.replace("llvm.nvvm.read.ptx.sreg.", "host.")
    while _TYPED_POINTER.search(text):
        text = _TYPED_POINTER.sub("ptr", text)
    for name, value in _SPECIAL.items():
        llvm.add_symbol(f"host.{name}", _special(value))
    module = llvm.parse_assembly(text)
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    entry = next(each.name for each in module.functions if not each.is_declaration)
    with llvm.create_mcjit_compiler(module, machine) as engine:
        engine.finalize_object()
        words = [word for argument in arguments for word in _words(argument)]
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * len(words))
        kind(engine.get_function_address(entry))(*words)


def _type_of(argument: Any) -> Any:
    if isinstance(argument, fw.Array):
        return ArrayType(
            numpy_support.from_dtype(argument.dtype),
            argument.ndim,
            not argument.writable,
            argument.cache.policy,
        )
    if isinstance(argument, fw.File):
        return file_type(readonly=not argument.writable, policy=argument.array.cache.policy)
    if isinstance(argument, np.ndarray):
        return types.Array(numpy_support.from_dtype(argument.dtype), argument.ndim, "C")
    return types.int64


def _words(argument: Any) -> list[int]:
    """The parameters of a kernel, as numba flattens them."""
    if isinstance(argument, fw.Array):
        return list(c_abi.array_words(argument))
    if isinstance(argument, fw.File):
        return list(file_words(argument))
    if isinstance(argument, np.ndarray):
        head = [0, 0, argument.size, argument.itemsize, argument.ctypes.data]
        return [*head, *argument.shape, *argument.strides]
    return [argument & ((1 << 64) - 1)]
