"""Arrays in Python kernels: numba-cuda's `jit` with arrays larger than memory among the arguments.

    from flashwarp.interop.numba import jit, prefetch

    @jit
    def gather(out, data, indices):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = data[indices[i]]

`data[i]`, `data[i, j]`, `data[i] = v`, `len(data)`, `data.shape`, `data.size` and `data.ndim` work
as with numpy arrays, negative indices too; an index out of bounds reads zero, stores nothing and is
raised by `Array.wait`. The device headers are linked as LTO-IR, so a load that hits is a few
instructions of the kernel itself. Kernels compile without a GPU.

A `flashwarp.File` has the methods `read(buffer, offset, nbytes)`, `write(buffer, offset, nbytes)`,
`append(buffer, nbytes)`, `size()` and `capacity()`. With `warp_` or `block_` before their names,
they are calls of a whole warp or block, as is `flush(offset, nbytes)`. They return what they return
in C++, but that an append returns where its bytes begin.
"""

from __future__ import annotations

from flashwarp.errors import DeviceError

try:
    # Numba knows what expressions mean, and what they become, when these have been imported.
    from flashwarp.interop.numba import lowering, typing_rules  # noqa: F401
    from flashwarp.interop.numba.batches import PipelineType, pipeline_type
    from flashwarp.interop.numba.data_types import ArrayType, TokenType, array_type
    from flashwarp.interop.numba.files import FileType, file_type
    from flashwarp.interop.numba.functions import atomic_add, prefetch, read_async, write_async
    from flashwarp.interop.numba.launching import Kernel, extension, jit
except (ImportError, AttributeError) as error:
    advice = "install it with: pip install 'flashwarp[numba]'"
    if "row_stack" in str(error):
        advice = "this numba needs a numpy that still has row_stack: pip install 'numpy<2.5'"
    raise DeviceError(f"numba-cuda cannot be imported ({error}): {advice}") from error

__all__ = [
    "ArrayType",
    "FileType",
    "Kernel",
    "PipelineType",
    "TokenType",
    "array_type",
    "atomic_add",
    "extension",
    "file_type",
    "jit",
    "pipeline_type",
    "prefetch",
    "read_async",
    "write_async",
]
