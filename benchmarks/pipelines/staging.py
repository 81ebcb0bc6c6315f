"""Bytes straight to their place, against a stop on the way (figures 14 and 15 of the CAM paper).

Measured on the CPU device, for no drive here writes to a GPU's memory: a controller that writes
frames itself against one that stages, and workers that use the caller's memory against a ring that
another thread moves on. Each is measured alone, and beside threads that copy memory without a
pause: the paper takes memory channels away instead. What a byte costs the memory of a GPU's host is
a model, and is named so.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.pipelines.base import Bench, Cost
from flashwarp.device import CpuDevice
from flashwarp.pipeline.engine import BatchDirection, BatchEngine, Ring

__all__ = ["measure"]

_NBYTES = 64 << 20
_ROW_BYTES = 4096
_CHUNK_BYTES, _CHUNKS = 1 << 20, 8
_PIECE_BYTES = 1 << 20
_TRAFFIC_PAPER = "staging: nearly twice the drives' bandwidth (CAM figure 14)"
_RATE_PAPER = "staging loses with few memory channels, CAM does not (CAM figure 15)"

# How often the host's memory is crossed for each byte that a GPU gets.
_CROSSED = {
    "rows in memory or page cache, pulled or by copies": (1, "one read by the link"),
    "rows in memory or page cache, gathered by host threads": (
        3,
        "read and written by a thread, read by the link",
    ),
    "O_DIRECT into pinned memory": (2, "written by the disk, read by the link"),
    "pread through the page cache into pinned memory, cold": (
        4,
        "written by the disk, read and written by a thread, read by the link",
    ),
    "a controller that writes to the GPU's memory": (0, "no such drive is here"),
}


class _Seen(NamedTuple):
    """One way, as it was measured."""

    cost: Cost
    right: bool
    others: float
    """The GB/s that the threads beside it have copied."""

    @property
    def rate(self) -> float:
        return _NBYTES / self.cost.seconds / 1e9


def measure(bench: Bench) -> None:
    """Measure each pair of ways, and add the model."""
    words = np.arange(_NBYTES // 4, dtype=np.int32).reshape(-1, _ROW_BYTES // 4)
    ids = np.random.default_rng(bench.seed).permutation(len(words))
    pairs: dict[str, Callable[[bool, int], _Seen]] = {
        "reads, a controller that writes frames itself": partial(_controller, bench, words, ids),
        "reads, workers that write the caller's memory": partial(
            _workers, bench, "prefetch", words, ids
        ),
        "writes, workers that read the caller's memory": partial(
            _workers, bench, "write_back", words, ids
        ),
    }
    for name, way in pairs.items():
        for threads in (0, max(1, bench.threads // 2)):
            direct, staged = (way(staging, threads) for staging in (False, True))
            beside = f"beside {threads} threads that copy memory" if threads else "alone"
            note = (
                f"the others copy {direct.others:.3g} GB/s, and {staged.others:.3g} beside staging"
                if threads
                else f"{_cpu(direct)} s of CPU a GB, and {_cpu(staged)} with staging"
            )
            bench.add(
                f"CPU device: {name}, {beside}", direct.rate, "GB/s", ("staging", staged.rate),
                checked=direct.right and staged.right, paper=_RATE_PAPER, note=note,
                footprint=_NBYTES,
            )  # fmt: skip
    for name, (times, why) in _CROSSED.items():
        bench.add(
            f"model: {name}", float(times), "bytes of memory traffic a byte", note=why,
            paper=_TRAFFIC_PAPER,
        )  # fmt: skip


def _cpu(seen: _Seen) -> str:
    return f"{seen.cost.cpu_seconds / _NBYTES * 1e9:.2g}"


def _controller(
    bench: Bench, words: NDArray[np.int32], ids: NDArray[np.int64], staging: bool, threads: int
) -> _Seen:
    memory = fw.storage.Memory(words.view(np.uint8).reshape(-1), writable=False)
    with fw.open(
        memory, "r", np.int32, words.shape, device=CpuDevice(), cache=_NBYTES // 4,
        controller=fw.nvme.SoftwareController(route="bounce" if staging else "direct"),
    ) as array:  # fmt: skip
        rows = np.zeros_like(words)
        with _busy_memory(bench, threads) as others:
            cost = bench.median_cost(partial(array.gather, ids, rows))
            copied = others()
        return _Seen(cost, bool((rows == words[ids]).all()), copied)


def _workers(
    bench: Bench, direction: BatchDirection, words: NDArray[np.int32], ids: NDArray[np.int64],
    staging: bool, threads: int,
) -> _Seen:  # fmt: skip
    reads = direction == "prefetch"
    # Row ids[k] of the storage is row k of the buffer, before or after.
    stored = words if reads else np.zeros_like(words)
    buffer = np.zeros_like(words) if reads else words[ids]
    with BatchEngine(
        CpuDevice(), fw.storage.Memory(stored, writable=not reads), rows=len(words),
        row_bytes=_ROW_BYTES, batch_rows=len(ids), directions=(direction,),
        ring=Ring(_CHUNK_BYTES, _CHUNKS) if staging else None, copies=staging,
        workers=max(1, bench.threads // 4),
    ) as engine:  # fmt: skip

        def move() -> None:
            engine.wait(direction, engine.submit(direction, ids, buffer.ctypes.data))

        with _busy_memory(bench, threads) as others:
            cost = bench.median_cost(move)
            copied = others()
    return _Seen(cost, bool((buffer == words[ids]).all() and (stored == words).all()), copied)


@contextlib.contextmanager
def _busy_memory(bench: Bench, threads: int) -> Iterator[Callable[[], float]]:
    """Copy memory by some threads without a pause; the function says at how many GB/s so far."""
    source, into = (np.ones(_NBYTES if threads else 0, np.uint8) for _ in range(2))
    offsets = np.arange(0, source.nbytes, _PIECE_BYTES)
    over, copied, start = threading.Event(), [0], time.perf_counter()

    def copy() -> None:
        for first in itertools.cycle(range(0, len(offsets), threads)):
            part = offsets[first : first + threads]
            bench.loops.gather(source, into, part, _PIECE_BYTES, threads)
            copied[0] += len(part) * _PIECE_BYTES
            if over.is_set():
                return

    thread = threading.Thread(target=copy)
    if threads:
        thread.start()
    try:
        yield lambda: copied[0] / (time.perf_counter() - start) / 1e9
    finally:
        over.set()
        if threads:
            thread.join()
