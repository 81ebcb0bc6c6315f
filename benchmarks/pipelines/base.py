"""What the parts of `pipelines` share: a place to run, data to check, and costs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.base import Record, listed
from benchmarks.pipelines.host import Loops
from flashwarp.config import cores
from flashwarp.device import Device

__all__ = ["STORAGES", "WAYS", "Bench", "Cost", "Data", "example"]

WAYS: dict[str, dict[str, Any]] = {"default": {}, "without SMs": {"sms": 0}}
"""Options of pipelines, by name."""

STORAGES = ("memory", "page cache", "O_DIRECT")
_AT_A_TIME = 64 << 20
_THREADS = 12
_NAP_S = 2e-4


@functools.cache
def example(name: str) -> Any:
    """Load a program of `examples/`, whose functions are what is measured; needs torch."""
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec: Any = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Cost:
    """What a measurement took: wall-clock time, and the CPU time of all threads of the process."""

    seconds: float
    cpu_seconds: float
    kernel_seconds: float
    """The part of the CPU time that the kernel took."""


class Bench:
    """A device with torch, a folder, and the report of one run."""

    def __init__(
        self, device: Device, folder: Path, report: Record, runs: int, seed: int, ways: str
    ) -> None:
        # flashwarp.torch says what to install where torch is missing.
        self.operators: Any = importlib.import_module("flashwarp.torch")
        self.torch: Any = importlib.import_module("torch")
        self.device, self.folder, self.report = device, folder, report
        self.runs, self.seed = runs, seed
        self.on_gpu = device.kind == "cuda"
        self.place = f"cuda:{getattr(device, 'ordinal', 0)}" if self.on_gpu else "cpu"
        if self.on_gpu:
            self.torch.cuda.set_device(self.place)
        self.ways = {name: WAYS[name] for name in listed("ways", ways, tuple(WAYS))}
        self.threads = max(1, min(_THREADS, cores()))
        self.loops = Loops(folder, self.threads)

    @property
    def stream(self) -> Any:
        """The stream that torch works on."""
        return self.torch.cuda.current_stream() if self.on_gpu else None

    def add(
        self, name: str, value: float, unit: str, against: tuple[str, float] = ("", 0.0),
        target: float = 0.0, checked: bool | None = None, *, paper: str = "", note: str = "",
        footprint: int = 0,
    ) -> None:  # fmt: skip
        """Append a row; `against` is the name and value of what it stands beside."""
        self.report.row(name, value, unit, *against, target, checked, paper, note, footprint)

    def wait(self) -> None:
        """Wait for the current stream without keeping a core busy, so that CPU time means work."""
        if not self.on_gpu:
            return
        event = self.torch.cuda.current_stream().record_event()
        while not event.query():
            time.sleep(_NAP_S)

    def cost(self, call: Callable[[], object]) -> Cost:
        """Measure a call and what it has queued."""
        self.wait()
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        call()
        self.wait()
        spent, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        kernel = after.ru_stime - before.ru_stime
        return Cost(spent, after.ru_utime - before.ru_utime + kernel, kernel)

    def median_cost(self, call: Callable[[], object]) -> Cost:
        """Measure some times, after one that does not count."""
        call()
        seen = [self.cost(call) for _ in range(self.runs)]
        return sorted(seen, key=lambda cost: cost.seconds)[len(seen) // 2]

    def draw(self, number: int, rows: int, of: int) -> Any:
        """Draw rows at random, on the device; each number draws others."""
        made = self.torch.Generator(self.place).manual_seed(self.seed + 7919 * number)
        return self.torch.randint(0, of, (rows,), generator=made, device=self.place)

    def rows_right(self, rows: Any, ids: Any) -> bool:
        """Tell whether rows of a `Data` are the ones that were asked for."""
        torch = self.torch
        rows = torch.as_tensor(rows, device=self.place)
        words = rows.shape[1]
        wanted = torch.as_tensor(ids, device=rows.device).to(torch.int64)[:, None] * words
        there = torch.arange(words, device=rows.device)
        step = max(1, (64 << 20) // words)
        return all(
            bool((rows[k : k + step] == (wanted[k : k + step] + there).to(torch.int32)).all())
            for k in range(0, len(rows), step)
        )

    def close(self) -> None:
        """End the threads of the baselines."""
        self.loops.close()


class Data:
    """Bytes that say where they are: the 32-bit word i of the storage is i.

    In memory, or in a file that is in the page cache and on the disk.
    """

    def __init__(self, bench: Bench, nbytes: int) -> None:
        self.bench, self.nbytes = bench, nbytes // (1 << 20) * (1 << 20)
        self.path = bench.folder / "rows.bin"
        self._memory: NDArray[np.int32] | None = None

    @property
    def memory(self) -> NDArray[np.int32]:
        """The words in memory."""
        if self._memory is None:
            self._memory = np.arange(self.nbytes // 4, dtype=np.int32)
        return self._memory

    def write(self) -> None:
        """Write the file, durable, so that no write-back runs beside a measurement."""
        if self.path.exists():
            return
        with self.path.open("wb") as file:
            for first in range(0, self.nbytes // 4, _AT_A_TIME // 4):
                last = min(first + _AT_A_TIME // 4, self.nbytes // 4)
                file.write(np.arange(first, last, dtype=np.int32).data)
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def open(self, storage: str, row_bytes: int) -> Iterator[fw.Array]:
        """Open rows of some size."""
        shape = (self.nbytes // row_bytes, row_bytes // 4)
        settings: dict[str, Any] = {"dtype": np.int32, "shape": shape, "device": self.bench.device}
        if storage == "memory":
            source: Any = fw.storage.Memory(self.memory.view(np.uint8), writable=False)
        else:
            self.write()
            source = self.path
            settings |= {"o_direct": storage == "O_DIRECT", "immutable": True}
        # Pipelines need no cache, and a large one would keep what shall come from the storage.
        with fw.open(source, cache=min(16 << 20, self.nbytes // 16), **settings) as array:
            yield array
