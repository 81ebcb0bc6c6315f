"""How many warps fill the link: waiting for each block, or with the next one on its way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np

import flashwarp as fw
from benchmarks.base import Record
from flashwarp.config import parse_bytes
from flashwarp.device import resolve
from flashwarp.errors import ArgumentError
from flashwarp.probe.timing import device_seconds, median_of

__all__ = ["run"]

_WORD = 4
_SATURATED = 0.95


def run(
    device: str | None,
    size: Annotated[str, "Bytes of the data, in pinned host memory."] = "16 GiB",
    cache: Annotated[str, "Bytes of the cache."] = "512 MiB",
    line: Annotated[str, "Bytes of a line, and of a read."] = "4 KiB",
    bytes_each: Annotated[str, "Bytes that one measurement reads."] = "2 GiB",
    seed: Annotated[int, "Of the random blocks."] = 1,
) -> Record:
    """Sweep the number of warps for synchronous and asynchronous reads of cold random blocks."""
    where = resolve(device)
    line_bytes = parse_bytes(line)
    words = line_bytes // _WORD
    blocks = parse_bytes(size) // line_bytes
    reads = parse_bytes(bytes_each) // line_bytes
    if blocks == 0:
        raise ArgumentError(f"size={size!r} is less than a line of {line_bytes} bytes")
    report = Record(
        title="Waiting warps",
        device=where.describe(),
        settings={"bytes": blocks * line_bytes, "cache": cache, "line": line_bytes},
        seeds={"blocks": seed},
    )
    program = fw.compile(Path(__file__).with_suffix(".cu"), where)
    data = np.arange(blocks * words, dtype=np.uint32)
    most = 4096 if where.kind == "cuda" else 4
    with (
        fw.open(
            fw.storage.Memory(data, writable=False),
            "r",
            data.dtype,
            data.shape,
            device=where,
            cache=cache,
            line=line,
        ) as array,
        where.empty_array((most * 32 * words,), np.uint32) as buffers,
        where.empty_array((1,), np.uint64) as wrong,
    ):
        turn = iter(range(1 << 30))

        def rate(kernel: str, warps: int) -> float:
            count = min(reads, warps * 4096)

            def measure() -> float:
                return device_seconds(
                    where,
                    lambda: program[kernel](
                        array,
                        buffers,
                        words,
                        blocks,
                        count,
                        seed + (next(turn) << 32),
                        wrong,
                        warps=warps,
                    ),
                )

            gigabytes = count * line_bytes / 1e9
            return gigabytes / median_of(measure, 3)

        sweep = [1 << k for k in range(most.bit_length())]
        rates = {
            kernel: {warps: rate(kernel, warps) for warps in sweep}
            for kernel in ("read_and_wait", "read_ahead")
        }
        array.synchronize()
        checked = int(wrong.copy_to_host()[0]) == 0
    _tell(report, rates, checked, blocks * line_bytes)
    return report


def _tell(
    report: Record, rates: dict[str, dict[int, float]], checked: bool, footprint: int
) -> None:
    ceiling = max(max(found.values()) for found in rates.values())
    names = {"read_and_wait": "synchronous", "read_ahead": "asynchronous"}
    for kernel, found in rates.items():
        for warps, value in found.items():
            report.row(
                f"{names[kernel]}, {warps} warps",
                value,
                "GB/s",
                "the best of the sweep",
                ceiling,
                checked=checked,
                footprint=footprint,
            )
        enough = min(
            (w for w, value in found.items() if value >= _SATURATED * ceiling), default=None
        )
        report.row(
            f"{names[kernel]}: multiprocessors' worth of warps (64) for {_SATURATED:.0%}",
            (enough or 0) / 64,
            "SMs",
            checked=checked,
            note="no number of warps in the sweep reaches it" if enough is None else "",
        )
