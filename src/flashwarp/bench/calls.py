"""What one call costs: small gathers, futures and launches, beside what they replace.

Each call is timed alone, from Python, and the median of many is kept: *host* until the call has
returned, *done* until its rows are there. Alternatives run in turns with ours: numpy on the CPU
device; on a GPU `torch.index_select` of a table in GPU memory, the same into pinned memory with a
copy, and an empty kernel of CuPy.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from flashwarp.config import parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.probe.report import Report, Row
from flashwarp.probe.timing import in_turns

__all__ = ["run"]

_RESIDENT = 32
_COLD = (32, 1024)
_QUEUED = (1, 1024, 8192)

_FIRST_GATHER = """
import time
import numpy as np
import flashwarp as fw
from flashwarp.device import resolve
device = resolve({device!r})
array = fw.open(fw.storage.Memory(np.arange(1 << 20, dtype=np.uint32), writable=False),
                dtype=np.uint32, shape=(1024, 1024), device=device)
start = time.perf_counter()
rows = array.gather(np.arange(32))
seconds = time.perf_counter() - start
assert int(rows[3, 5]) == 3 * 1024 + 5
array.close()
print(seconds)
"""


def run(
    device: str | None,
    folder: Path,
    row: Annotated[str, "Bytes of a row, and of a line."] = "4 KiB",
    resident: Annotated[str, "Bytes of the table that is resident."] = "64 MiB",
    cold: Annotated[str, "Bytes of the table whose rows are new at each call."] = "4 GiB",
    runs: Annotated[int, "Calls of each kind."] = 200,
    first: Annotated[bool, "Also the first gather of a process without compiled kernels."] = True,
    seed: Annotated[int, "Of the random rows."] = 1,
) -> Report:
    """Time calls of a few rows, one at a time, beside what a program would call without us."""
    where = resolve(device)
    bench = _Calls(where, parse_bytes(row), runs, np.random.default_rng(seed))
    settings = {"row": row, "resident": resident, "cold": cold, "runs": runs}
    bench.report = Report("Calls", where.describe(), settings, {"rows": seed})
    bench.resident(parse_bytes(resident))
    bench.cold(parse_bytes(cold), folder)
    bench.launches()
    if first:
        bench.first_gather(where.name)
    return bench.report


class _Calls:
    """Ours and the alternatives, on one device, with rows of one width."""

    report: Report

    def __init__(self, device: Device, row_bytes: int, runs: int, rng: np.random.Generator) -> None:
        self.device = device
        self.words = row_bytes // 4
        self.runs = runs
        self.rng = rng
        self.on_gpu = device.kind == "cuda"
        self.torch: Any = importlib.import_module("torch") if self.on_gpu else None

    def resident(self, nbytes: int) -> None:
        """Rows that are in the cache: blocking, on a stream, and as a future."""
        data = self._counter(nbytes)
        with self._opened(data, cache=nbytes) as array:
            array.prefetch(slice(None))
            array.gather(np.arange(len(data))[:: max(1, len(data) // 64)])
            index = self._index(len(data), _RESIDENT)
            out = self._out(_RESIDENT)
            self._warm(array, index, out)
            if self.on_gpu:
                plain = self.torch.from_numpy(data.view(np.int32)).cuda()
                into = out.view(self.torch.int32)
                select = self._torch_done(
                    lambda: self.torch.index_select(plain, 0, index, out=into)
                )
                name = "torch.index_select of a table in GPU memory, waited for"
            else:
                select = self._timed(lambda: data.take(index, 0, out=out))
                name = "numpy.take of an array in memory"
            ways = {"ours": self._timed(lambda: array.gather(index, out)), "other": select}
            if self.on_gpu:
                stream = self.torch.cuda.current_stream()
                ways["stream"] = self._host(lambda: array.gather(index, out, stream=stream))
                ways["stream done"] = self._torch_done(
                    lambda: array.gather(index, out, stream=stream)
                )
            times = self._in_turns(ways)
            checked = self._is(out, data, index)
            what = f"gather of {_RESIDENT} resident rows"
            self._add(f"{what}, blocking", times["ours"], name, times["other"], checked, nbytes)
            if self.on_gpu:
                self._add(f"{what}, on a stream, host", times["stream"], "", 0.0, checked, nbytes)
                done = times["stream done"]
                self._add(f"{what}, on a stream, done", done, name, times["other"], checked, nbytes)
            for count in sorted({min(count, len(data)) for count in _QUEUED}):
                self._future(array, data, count)

    def _future(self, array: fw.Array, data: np.ndarray[Any, Any], count: int) -> None:
        index, out = self._index(len(data), count), self._out(count)
        made: list[float] = []
        for _ in range(self.runs):
            start = time.perf_counter()
            future = array.gather_async(index, out)
            made.append(time.perf_counter() - start)
            future.result()
        self._add(
            f"gather_async of {count} resident rows, host",
            median(made),
            checked=self._is(out, data, index),
            footprint=data.nbytes,
        )

    def cold(self, nbytes: int, folder: Path) -> None:
        """Rows that no call has read before: in memory that the device reads, and in a file."""
        data = self._counter(nbytes)
        path = folder / "cold.bin"
        data.tofile(path)
        self._cold("memory", data, fw.storage.Memory(data, writable=False))
        self._cold("a page-cached file", np.memmap(path, np.uint32, "c").reshape(data.shape), path)

    def _cold(self, where: str, data: np.ndarray[Any, Any], source: Any) -> None:
        # The storage holds what is opened; a cache of a sixteenth holds nothing of the last calls.
        with fw.open(
            source, dtype=np.uint32, shape=data.shape, device=self.device,
            cache=max(data.nbytes // 16, 1 << 24), line=self.words * 4,
            o_direct=False if isinstance(source, Path) else None,
        ) as array:  # fmt: skip
            # No row twice, in all runs and the one that warms up.
            for count in sorted({min(count, len(data) // 4) for count in _COLD}):
                out = self._out(count)
                draws = iter(self.rng.permutation(len(data)).astype(np.int64))
                last: list[Any] = []

                def ours(out: Any = out, draws: Any = draws, last: list[Any] = last) -> float:
                    last[:] = [self._placed(np.fromiter(draws, np.int64, len(out)))]
                    return _seconds(lambda: array.gather(last[0], out))

                def other(out: Any = out) -> float:
                    index = self._host_index(len(data), len(out))
                    return self._copied(data, index, out)

                runs = min(self.runs, len(data) // count - 1)
                times = self._in_turns({"other": other, "ours": ours}, runs)
                self._add(
                    f"gather of {count} cold rows of {where}, {array.explain().path}",
                    times["ours"],
                    "index_select into pinned memory, and a copy"
                    if self.on_gpu
                    else "numpy.take of the memory map",
                    times["other"],
                    self._is(out, data, last[0]),
                    data.nbytes,
                )

    def _copied(self, data: np.ndarray[Any, Any], index: Any, out: Any) -> float:
        if not self.on_gpu:
            return _seconds(lambda: data.take(index, 0, out=out))
        torch = self.torch
        table = torch.from_numpy(np.asarray(data).view(np.int32))
        pinned = torch.empty((len(out), self.words), dtype=torch.int32, pin_memory=True)
        into = out.view(torch.int32)

        def call() -> None:
            torch.index_select(table, 0, index, out=pinned)
            into.copy_(pinned, non_blocking=True)
            torch.cuda.current_stream().synchronize()

        return _seconds(call)

    def launches(self) -> None:
        """An empty kernel of `fw.compile`."""
        program = fw.compile(
            '#include "flashwarp/array.cuh"\nFW_KERNEL nothing() {}\n', self.device
        )
        ways = {"ours": self._host(lambda: program["nothing"](warps=1))}
        name = ""
        if self.on_gpu:
            try:
                cupy = importlib.import_module("cupy")
            except ImportError:
                print("cupy is not installed: no other launch to stand beside")
            else:
                other = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
                ways["other"] = self._host(lambda: other((1,), (32,), ()))
                name = "an empty cupy.RawKernel"
        times = self._in_turns(ways)
        self._add("launch of an empty kernel, host", times["ours"], name, times.get("other", 0.0))

    def first_gather(self, device: str) -> None:
        """The first gather of a process, on a machine that has compiled nothing."""
        with tempfile.TemporaryDirectory() as cache:
            found = subprocess.run(
                [sys.executable, "-c", _FIRST_GATHER.format(device=device)],
                env={**os.environ, "FLASHWARP_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=True,
            )
        self._add("first gather of a process, nothing compiled before", float(found.stdout))

    # What they share.

    def _counter(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Rows that count their elements, so that any of them tells where it is from."""
        rows = nbytes // (self.words * 4)
        return np.arange(rows * self.words, dtype=np.uint32).reshape(rows, self.words)

    def _opened(self, data: np.ndarray[Any, Any], cache: int) -> fw.Array:
        return fw.open(
            fw.storage.Memory(data, writable=False),
            dtype=data.dtype,
            shape=data.shape,
            device=self.device,
            cache=2 * cache,
            line=self.words * 4,
        )

    def _host_index(self, rows: int, count: int) -> Any:
        index = self.rng.integers(0, rows, count)
        return self.torch.from_numpy(index) if self.on_gpu else index

    def _placed(self, index: np.ndarray[Any, Any]) -> Any:
        return self.torch.from_numpy(index).cuda() if self.on_gpu else index

    def _index(self, rows: int, count: int) -> Any:
        return self._placed(self.rng.integers(0, rows, count))

    def _out(self, count: int) -> Any:
        if self.on_gpu:
            return self.torch.empty((count, self.words), dtype=self.torch.uint32, device="cuda")
        return np.empty((count, self.words), np.uint32)

    def _warm(self, array: fw.Array, index: Any, out: Any) -> None:
        for _ in range(3):
            array.gather(index, out)

    def _timed(self, call: Callable[[], object]) -> Callable[[], float]:
        return lambda: _seconds(call)

    def _torch_done(self, call: Callable[[], object]) -> Callable[[], float]:
        def measure() -> float:
            start = time.perf_counter()
            call()
            self.torch.cuda.current_stream().synchronize()
            return time.perf_counter() - start

        return measure

    def _host(self, call: Callable[[], object]) -> Callable[[], float]:
        """Time a call that returns before its work is done, with nothing queued before it."""

        def measure() -> float:
            seconds = _seconds(call)
            self.device.synchronize()
            if self.on_gpu:
                self.torch.cuda.synchronize()
            return seconds

        return measure

    def _in_turns(
        self, ways: dict[str, Callable[[], float]], runs: int | None = None
    ) -> dict[str, float]:
        return in_turns(ways, runs or self.runs)

    def _is(self, out: Any, data: np.ndarray[Any, Any], index: Any) -> bool:
        rows = np.asarray(index.cpu() if self.on_gpu else index)
        got = out.view(self.torch.int32).cpu().numpy().view(np.uint32) if self.on_gpu else out
        return bool(np.array_equal(got, data[rows]))

    def _add(
        self,
        name: str,
        seconds: float,
        other_name: str = "",
        other: float = 0.0,
        checked: bool | None = None,
        footprint: int = 0,
    ) -> None:
        self.report.add(
            Row(
                name,
                seconds * 1e6,
                "us",
                other_name,
                other * 1e6,
                checked=checked,
                footprint=footprint,
            )
        )


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
