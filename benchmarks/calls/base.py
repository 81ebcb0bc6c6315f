"""What the parts of `bench calls` share: operands, ways to time a call, and the report."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record
from flashwarp.device import Device
from flashwarp.probe.timing import in_turns, wall_seconds

__all__ = ["CallsBench"]


class CallsBench:
    """Ours and the alternatives, on one device, with rows of one width."""

    report: Record

    def __init__(self, device: Device, row_bytes: int, runs: int, rng: np.random.Generator) -> None:
        self.device = device
        self.words = row_bytes // 4
        self.runs = runs
        self.rng = rng
        self.on_gpu = device.kind == "cuda"
        self.torch: Any = importlib.import_module("torch") if self.on_gpu else None

    def counter(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Rows that count their elements, so that any of them tells where it is from."""
        rows = nbytes // (self.words * 4)
        return np.arange(rows * self.words, dtype=np.uint32).reshape(rows, self.words)

    def opened(self, data: np.ndarray[Any, Any], cache: int) -> fw.Array:
        """Open data in memory, with a cache of twice these bytes and lines of a row."""
        return fw.open(
            fw.storage.Memory(data, writable=False),
            dtype=data.dtype,
            shape=data.shape,
            device=self.device,
            cache=2 * cache,
            line=self.words * 4,
        )

    def host_index(self, rows: int, count: int) -> Any:
        """Draw rows, for a call that chooses them on the host."""
        index = self.rng.integers(0, rows, count)
        return self.torch.from_numpy(index) if self.on_gpu else index

    def placed(self, index: np.ndarray[Any, Any]) -> Any:
        """Bring an index to the device."""
        return self.torch.from_numpy(index).cuda() if self.on_gpu else index

    def index(self, rows: int, count: int) -> Any:
        """Draw rows, on the device."""
        return self.placed(self.rng.integers(0, rows, count))

    def out(self, count: int) -> Any:
        """Make room for rows."""
        if self.on_gpu:
            return self.torch.empty((count, self.words), dtype=self.torch.uint32, device="cuda")
        return np.empty((count, self.words), np.uint32)

    def timed(self, call: Callable[[], object]) -> Callable[[], float]:
        """Time a call that blocks."""
        return lambda: wall_seconds(call)

    def torch_done(self, call: Callable[[], object]) -> Callable[[], float]:
        """Time a call on torch's current stream, and a wait for it."""

        def measure() -> float:
            start = time.perf_counter()
            call()
            self.torch.cuda.current_stream().synchronize()
            return time.perf_counter() - start

        return measure

    def host(self, call: Callable[[], object]) -> Callable[[], float]:
        """Time a call that returns before its work is done, with nothing queued before it."""

        def measure() -> float:
            seconds = wall_seconds(call)
            self.device.synchronize()
            if self.on_gpu:
                self.torch.cuda.synchronize()
            return seconds

        return measure

    def in_turns(
        self, ways: dict[str, Callable[[], float]], runs: int | None = None
    ) -> dict[str, float]:
        """Return the medians of ways that take turns."""
        return in_turns(ways, runs or self.runs)

    def right(self, out: Any, data: np.ndarray[Any, Any], index: Any) -> bool:
        """Return whether these rows have come."""
        rows = np.asarray(index.cpu() if self.on_gpu else index)
        got = out.view(self.torch.int32).cpu().numpy().view(np.uint32) if self.on_gpu else out
        return bool(np.array_equal(got, data[rows]))

    def add(
        self,
        name: str,
        seconds: float,
        other_name: str = "",
        other: float = 0.0,
        checked: bool | None = None,
        footprint: int = 0,
    ) -> None:
        """Report seconds in microseconds."""
        self.report.row(
            name,
            seconds * 1e6,
            "us",
            other_name,
            other * 1e6,
            checked=checked,
            footprint=footprint,
        )
