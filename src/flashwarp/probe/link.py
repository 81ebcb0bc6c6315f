"""What moves bytes between host and GPU without flashwarp: the copy engine, and a plain kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flashwarp as fw
from flashwarp.device import Device
from flashwarp.probe.timing import wall_seconds

# The copy engine reaches its full rate from some 16 MiB on.
LINK_BYTES = 128 << 20
"""Bytes of one copy, and of the pinned memory that it needs."""

_ROUNDS = 4

# What a GPU does best with host memory: a warp copies a row, all rows side by side.
_PULL = """
#include "flashwarp/array.cuh"

FW_KERNEL pull_rows(uint64_t table, const int64_t* rows, uint64_t out, uint64_t count,
                    uint32_t row_bytes) {
  using namespace fw;
  for (uint64_t i = warp::index(); i < count; i += warp::count()) {
    warp::copy<warp::source::kStream>(lanes::all(), out + i * row_bytes,
                                      table + uint64_t(rows[i]) * row_bytes, row_bytes);
  }
}
"""


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second each way; the best of some copies."""

    to_gpu: float
    to_host: float


def measure_link(device: Device) -> LinkRates:
    """Copy pinned memory to the device and back. Blocks for some hundredths of a second.

    Raises DeviceError, DeviceOutOfMemory included.
    """
    with device.allocate_host(LINK_BYTES) as pinned, device.allocate(LINK_BYTES) as memory:
        host = pinned.as_numpy()
        return LinkRates(
            to_gpu=_best_rate(lambda: device.upload(memory.address, host)),
            to_host=_best_rate(lambda: device.download_into(memory.address, host)),
        )


def _best_rate(copy: Callable[[], None]) -> float:
    return LINK_BYTES / min(wall_seconds(copy) for _ in range(_ROUNDS))


def compile_pull(device: Device) -> fw.program.Program:
    """Compile what the UVA gather runs. Blocks."""
    return fw.compile(_PULL, device)
