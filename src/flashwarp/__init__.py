"""flashwarp: GPU memory that extends into flash.

Arrays larger than the GPU, the host or both, read and written by device threads through NVMe queue
pairs that a software controller serves. See `open` to begin.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from flashwarp import errors, storage
from flashwarp import sharing as _sharing
from flashwarp.array.array import Array
from flashwarp.array.futures import Future
from flashwarp.array.opening import create, open  # noqa: A004
from flashwarp.cache.cache import Cache
from flashwarp.device import CpuDevice, CudaDevice
from flashwarp.nvme.software import SoftwareController
from flashwarp.policy import Policy
from flashwarp.stats import Stats

if _TYPE_CHECKING:
    from flashwarp.array.explanation import Explanation
    from flashwarp.array.share_table import ShareTable
    from flashwarp.checkpoint.checkpointer import Checkpointer
    from flashwarp.file.block_map import BlockMap
    from flashwarp.file.file import File
    from flashwarp.file.mapped_file import MappedFile
    from flashwarp.loading.load import load
    from flashwarp.nvme.drive_model import SSDModel
    from flashwarp.nvme.vfio import VfioController
    from flashwarp.pipeline.pipeline import Pipeline
    from flashwarp.program.compiling import Kernel, Program, compile, get_include  # noqa: A004

__version__ = "0.1.0"

__all__ = [
    "Array",
    "BlockMap",
    "Cache",
    "Checkpointer",
    "CpuDevice",
    "CudaDevice",
    "Explanation",
    "File",
    "Future",
    "Kernel",
    "MappedFile",
    "Pipeline",
    "Policy",
    "Program",
    "SSDModel",
    "ShareTable",
    "SoftwareController",
    "Stats",
    "VfioController",
    "compile",
    "create",
    "errors",
    "get_include",
    "load",
    "open",
    "storage",
]

# What programs without kernels of their own do not need is imported when it is first used: the
# compilers alone take longer than the rest.
_LATER = {
    "BlockMap": "flashwarp.file.block_map",
    "Checkpointer": "flashwarp.checkpoint.checkpointer",
    "Explanation": "flashwarp.array.explanation",
    "File": "flashwarp.file.file",
    "Kernel": "flashwarp.program.compiling",
    "MappedFile": "flashwarp.file.mapped_file",
    "Pipeline": "flashwarp.pipeline.pipeline",
    "Program": "flashwarp.program.compiling",
    "SSDModel": "flashwarp.nvme.drive_model",
    "ShareTable": "flashwarp.array.share_table",
    "VfioController": "flashwarp.nvme.vfio",
    "compile": "flashwarp.program.compiling",
    "get_include": "flashwarp.program.compiling",
    "load": "flashwarp.loading.load",
}


# Arrays serve what caches share.
_sharing.serve_with(
    lambda cache: _import_module("flashwarp.array.serving").Serving(cache),
)


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(_import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
