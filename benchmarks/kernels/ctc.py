"""Computation against communication: AGILE's section 4.2, loads that are waited for or run ahead.

Each thread loads its own blocks and computes with them for a given share of the time that loading
takes. The drive is a model, so loading takes as long as a drive would need; see docs/hardware.md.
As in AGILE, the threads of one block of 1024 load together and compute together. If warps ran
independently, some would load while others compute, and reading ahead would gain nothing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.base import Record, by_kind
from flashwarp.device import Device, DeviceMemory, resolve
from flashwarp.probe.timing import device_seconds, in_turns, median_of
from flashwarp.program.compiling import Program

__all__ = ["KERNELS", "run"]

KERNELS = Path(__file__).with_name("ctc.cu")

_WORDS = 1024
_RATIOS = (0.0, 0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.25, 1.5, 2.0)
# The best that AGILE reports, at a ratio of 0.9.
_PAPER_BEST = "1.88 at 0.9 (AGILE Fig. 4)"
_TARGET = 1.85
# A launch takes some microseconds: too little of this to count.
_LONG_ENOUGH_S = 0.01


def run(
    device: str | None,
    threads: Annotated[int, "Threads that load and compute; 1024 on a GPU."] = 0,
    blocks: Annotated[int, "Blocks of 4 KiB for each thread; 64 on a GPU."] = 0,
    ahead: Annotated[int, "Blocks that are on their way while a thread computes."] = 1,
    model: Annotated[str, "The drive; 'none': memory as fast as it is."] = "AGILE",
    runs: Annotated[int, "How often each way has its turn."] = 3,
) -> Record:
    """Sweep the ratio, synchronously and asynchronously."""
    where = resolve(device)
    threads = by_kind(where, threads, 1024, 8)
    blocks = by_kind(where, blocks, 64, 16)
    report = Record(
        title="Computation and communication",
        device=where.describe(),
        settings={"threads": threads, "blocks": blocks, "ahead": ahead, "drive": model},
        seeds={"drive": 1},
    )
    data = np.arange(threads * blocks * _WORDS, dtype=np.uint32)
    controller = None if model == "none" else fw.SoftwareController(model=model)
    with (
        fw.open(
            fw.storage.Memory(data),
            "r",
            "uint32",
            device=where,
            # Room for what is on its way of every thread, and plenty, since sets fill unevenly.
            cache=max(1 << 20, 8 * (ahead + 2) * threads * 4 * _WORDS),
            controller=controller,
        ) as array,
        where.allocate(4 * threads) as sums,
    ):
        _Sweep(where, report, array, sums, threads, blocks, ahead, runs).measure()
    return report


class _Sweep:
    def __init__(
        self,
        device: Device,
        report: Record,
        array: fw.Array,
        sums: DeviceMemory,
        threads: int,
        blocks: int,
        ahead: int,
        runs: int,
    ) -> None:
        self.device = device
        self.report = report
        self.array = array
        self.sums = sums
        self.threads = threads
        self.blocks = blocks
        self.ahead = ahead
        self.runs = runs
        self.program: Program = fw.compile(KERNELS, device)
        self.right = True

    def measure(self) -> None:
        loading = median_of(partial(self._run, 0, 0), self.runs)
        a_step = self._seconds_a_step()
        best, best_ratio = 0.0, 0.0
        for ratio in _RATIOS:
            steps = round(ratio * loading / a_step)
            self.right = True
            seconds = in_turns(
                {
                    "waiting": partial(self._run, steps, 0),
                    "ahead": partial(self._run, steps, self.ahead),
                },
                self.runs,
            )
            speedup = seconds["waiting"] / seconds["ahead"]
            ideal = (1 + ratio) / max(1.0, ratio)
            # What is above the ideal is a delay of the synchronous way's own.
            if min(speedup, ideal) > best:
                best, best_ratio = min(speedup, ideal), ratio
            self.report.row(
                f"ratio {ratio:g}: asynchronous",
                seconds["ahead"] * 1e3,
                "ms",
                "synchronous",
                seconds["waiting"] * 1e3,
                checked=self.right,
                footprint=self.array.nbytes,
                note=f"{speedup:.2f} times as fast; ideal {ideal:.2f}",
            )
        self.report.row(
            f"best speed-up, at ratio {best_ratio:g}",
            best,
            "x",
            "synchronous",
            1.0,
            _TARGET,
            paper=_PAPER_BEST,
        )

    def _seconds_a_step(self) -> float:
        """Time of one step of computation in all blocks, from a run that is long enough."""
        kernel, steps = self.program["compute_only"], 1000
        while True:
            launch = partial(
                kernel,
                self.sums,
                self.threads,
                self.blocks,
                steps,
                warps=self._warps,
                block_threads=self._block_threads,
            )
            seconds = median_of(partial(device_seconds, self.device, launch), self.runs)
            if seconds > _LONG_ENOUGH_S:
                return seconds / steps
            steps *= 4

    @property
    def _warps(self) -> int:
        return -(-self.threads // 32) if self.device.kind == "cuda" else self.threads

    @property
    def _block_threads(self) -> int:
        return min(1024, 32 * self._warps) if self.device.kind == "cuda" else 256

    def _run(self, steps: int, ahead: int) -> float:
        self.array.drop_cache()
        seconds = device_seconds(
            self.device,
            lambda: self.program["load_and_compute"](
                self.array,
                self.sums,
                self.threads,
                self.blocks,
                _WORDS,
                steps,
                ahead,
                warps=self._warps,
                block_threads=self._block_threads,
            ),
        )
        self.array.synchronize()
        found = np.empty(self.threads, np.uint32)
        self.device.download_into(self.sums.address, found)
        self.right = self.right and bool((found == self._expected(steps)).all())
        return seconds

    def _expected(self, steps: int) -> NDArray[np.uint32]:
        # All steps as one: x * factor + term, composed by squaring.
        factor, term = 1, 0
        square_factor, square_term = 1664525, 1013904223
        while steps:
            if steps & 1:
                factor, term = factor * square_factor, term * square_factor + square_term
            square_factor, square_term = (
                square_factor**2 % (1 << 32),
                (square_term * square_factor + square_term) % (1 << 32),
            )
            factor, term, steps = factor % (1 << 32), term % (1 << 32), steps >> 1
        block = np.arange(self.threads * self.blocks, dtype=np.uint32)
        loaded = block * np.uint32(_WORDS) + block % np.uint32(self.blocks)
        computed: NDArray[np.uint32] = loaded * np.uint32(factor) + np.uint32(term)
        sums: NDArray[np.uint32] = computed.reshape(self.threads, -1).sum(axis=1, dtype=np.uint32)
        return sums
