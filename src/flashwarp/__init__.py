"""flashwarp: GPU memory that extends into flash.

Arrays larger than the GPU, the host or both, read and written by device threads through NVMe queue
pairs that a software controller serves. See `open` to begin.

Each name is imported when it is first used, and so is each room, such as `flashwarp.nvme`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from flashwarp import _names

if _TYPE_CHECKING:
    from flashwarp import array as array
    from flashwarp import device, errors, storage
    from flashwarp import explanation as explanation
    from flashwarp import file as file
    from flashwarp import nvme as nvme
    from flashwarp import observing as observing
    from flashwarp import policy as policy
    from flashwarp import program as program
    from flashwarp.array.array import Array
    from flashwarp.array.futures import Future
    from flashwarp.array.opening import create, open  # noqa: A004
    from flashwarp.cache.cache import Cache
    from flashwarp.checkpoint.checkpointer import Checkpointer
    from flashwarp.file.file import File
    from flashwarp.loading.load import load
    from flashwarp.pipeline.pipeline import Pipeline
    from flashwarp.program.compiling import compile, get_include  # noqa: A004

__version__ = "0.1.0"

__all__ = [
    "Array",
    "Cache",
    "Checkpointer",
    "File",
    "Future",
    "Pipeline",
    "compile",
    "create",
    "device",
    "errors",
    "get_include",
    "load",
    "open",
    "storage",
]

__getattr__, __dir__ = _names.later(
    __name__,
    {
        "Array": "array.array",
        "Cache": "cache.cache",
        "Checkpointer": "checkpoint.checkpointer",
        "File": "file.file",
        "Future": "array.futures",
        "Pipeline": "pipeline.pipeline",
        "compile": "program.compiling",
        "create": "array.opening",
        "get_include": "program.compiling",
        "load": "loading.load",
        "open": "array.opening",
    },
    rooms=(
        *("array", "device", "errors", "explanation"),
        *("file", "nvme", "observing", "policy", "program", "storage"),
    ),
)
