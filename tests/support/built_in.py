"""Which built-in kernels there are, as the CPU device has them in one library."""

from __future__ import annotations

from flashwarp.device import CpuDevice
from flashwarp.policy import CLOCK


def built_in_kernels() -> list[str]:
    """Return their names, without the prefix of their symbols."""
    with CpuDevice() as device:
        device.built_in("gather_rows")
        return [symbol.removeprefix("fw_") for symbol in device._built_in[CLOCK]]
