"""flashwarp: GPU memory that extends into flash.

Arrays larger than the GPU, the host or both, read and written by device threads through NVMe queue
pairs that a software controller serves. See `open` to begin.
"""

from flashwarp import errors, storage
from flashwarp.array.array import Array, Explanation
from flashwarp.array.futures import Future
from flashwarp.array.opening import create, open  # noqa: A004
from flashwarp.array.share_table import ShareTable
from flashwarp.cache.cache import Cache
from flashwarp.device import CpuDevice, CudaDevice
from flashwarp.nvme.drive_model import SSDModel
from flashwarp.nvme.software import SoftwareController
from flashwarp.policy import Policy
from flashwarp.program.compiling import Kernel, Program, compile, get_include  # noqa: A004
from flashwarp.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "Array",
    "Cache",
    "CpuDevice",
    "CudaDevice",
    "Explanation",
    "Future",
    "Kernel",
    "Policy",
    "Program",
    "SSDModel",
    "ShareTable",
    "SoftwareController",
    "Stats",
    "compile",
    "create",
    "errors",
    "get_include",
    "open",
    "storage",
]
