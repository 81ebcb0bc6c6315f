"""What one call costs: small gathers, futures and launches, beside what they replace.

Each call is timed alone, from Python, and the median of many is kept: *host* until the call has
returned, *done* until its rows are there. Alternatives run in turns with ours: numpy on the CPU
device; on a GPU `torch.index_select` of a table in GPU memory, the same into pinned memory with a
copy, and kernels of CuPy. On a GPU, gathers as nodes of CUDA graphs follow (`calls_graphs`).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record
from benchmarks.calls import graphs as calls_graphs
from benchmarks.calls.base import CallsBench
from flashwarp.config import parse_bytes
from flashwarp.device import resolve
from flashwarp.probe.timing import wall_seconds

__all__ = ["run"]

_RESIDENT = 32
_COLD = (32, 1024)
_FIRST_RUNS = 3
_QUEUED = (1, 32, 1024, 8192)
_IN_FLIGHT = 100

_KERNELS = """
#include "flashwarp/array.cuh"

FW_KERNEL nothing() {}

FW_KERNEL load(const FW_GRID_CONSTANT fw::array<const uint32_t, 2> a, const int64_t* index,
               uint32_t* out) {
  if (fw::base::thread_index() == 0) *out = a(uint64_t(*index), 0);
}
"""

_FIRST_GATHER = """
import json
import os
import time
begin = time.perf_counter()
import numpy as np
import flashwarp as fw
from flashwarp.device import resolve
imported = time.perf_counter()
device = resolve({device!r})
device.allocate(4096).close()
ready = time.perf_counter()
folder = os.environ["FLASHWARP_CACHE_DIR"]
found = os.listdir(folder)
array = fw.open(fw.storage.Memory(np.arange(1 << 20, dtype=np.uint32), writable=False),
                dtype=np.uint32, shape=(1024, 1024), device=device)
opened = time.perf_counter()
rows = array.gather(np.arange(32))
done = time.perf_counter()
array.gather(np.arange(32, 64))
again = time.perf_counter()
right = int(rows[3, 5]) == 3 * 1024 + 5
array.close()
made = len([name for _, _, names in os.walk(folder) for name in names])
print(json.dumps([done - ready, imported - begin, ready - imported, opened - ready, done - opened,
                  again - done, made, not found and right]))
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
) -> Record:
    """Time calls of a few rows, one at a time, beside what a program would call without us."""
    where = resolve(device)
    bench = _Calls(where, parse_bytes(row), runs, np.random.default_rng(seed))
    settings = {"row": row, "resident": resident, "cold": cold, "runs": runs}
    bench.report = Record("Calls", where.describe(), settings, {"rows": seed})
    bench.resident(parse_bytes(resident))
    bench.cold(parse_bytes(cold), folder)
    bench.launches()
    if bench.on_gpu:
        calls_graphs.resident(bench, parse_bytes(resident))
        calls_graphs.cold(bench, parse_bytes(cold))
    if first:
        bench.first_gather(where.name)
    return bench.report


class _Calls(CallsBench):
    """Ours and the alternatives: calls of the host, one at a time."""

    def resident(self, nbytes: int) -> None:
        """Rows that are in the cache: blocking, on a stream, and as a future."""
        data = self.counter(nbytes)
        with self.opened(data, cache=nbytes) as array:
            array.prefetch(slice(None))
            array.gather(np.arange(len(data))[:: max(1, len(data) // 64)])
            index = self.index(len(data), _RESIDENT)
            out = self.out(_RESIDENT)
            for _ in range(3):
                array.gather(index, out)
            if self.on_gpu:
                plain = self.torch.from_numpy(data.view(np.int32)).cuda()
                into = out.view(self.torch.int32)
                select = self.torch_done(lambda: self.torch.index_select(plain, 0, index, out=into))
                name = "torch.index_select of a table in GPU memory, waited for"
            else:
                select = self.timed(lambda: data.take(index, 0, out=out))
                name = "numpy.take of an array in memory"
            ways = {"ours": self.timed(lambda: array.gather(index, out)), "other": select}
            if self.on_gpu:
                stream = self.torch.cuda.current_stream()
                ways["stream"] = self.host(lambda: array.gather(index, out, stream=stream))
                ways["stream done"] = self.torch_done(
                    lambda: array.gather(index, out, stream=stream)
                )
                ways["other host"] = self.host(
                    lambda: self.torch.index_select(plain, 0, index, out=into)
                )
            times = self.in_turns(ways)
            checked = self.right(out, data, index)
            what = f"gather of {_RESIDENT} resident rows"
            self.add(f"{what}, blocking", times["ours"], name, times["other"], checked, nbytes)
            if self.on_gpu:
                host_name, host = "torch.index_select, host", times["other host"]
                self.add(
                    f"{what}, on a stream, host", times["stream"], host_name, host, checked, nbytes
                )
                done = times["stream done"]
                self.add(f"{what}, on a stream, done", done, name, times["other"], checked, nbytes)
            for count in sorted({min(count, len(data)) for count in _QUEUED}):
                self._future(array, data, count)
            self._futures(array, data)

    def _future(self, array: fw.Array, data: np.ndarray[Any, Any], count: int) -> None:
        index, out = self.index(len(data), count), self.out(count)
        made: list[float] = []
        for _ in range(self.runs):
            start = time.perf_counter()
            future = array.gather_async(index, out)
            made.append(time.perf_counter() - start)
            future.result()
        self.add(
            f"gather_async of {count} resident rows, host",
            median(made),
            checked=self.right(out, data, index),
            footprint=data.nbytes,
        )

    def _futures(self, array: fw.Array, data: np.ndarray[Any, Any]) -> None:
        """Calls that are made before the ones before them are over, each with rows of its own."""
        each = [(self.index(len(data), _RESIDENT), self.out(_RESIDENT)) for _ in range(_IN_FLIGHT)]
        made: list[float] = []
        for _ in range(max(3, self.runs // _IN_FLIGHT)):
            futures = []
            for index, out in each:
                start = time.perf_counter()
                futures.append(array.gather_async(index, out))
                made.append(time.perf_counter() - start)
            for future in futures:
                future.result()
        self.add(
            f"each of {_IN_FLIGHT} gather_async in flight, {_RESIDENT} resident rows, host",
            sum(made) / len(made),
            checked=all(self.right(out, data, index) for index, out in each),
            footprint=data.nbytes,
        )

    def cold(self, nbytes: int, folder: Path) -> None:
        """Rows that no call has read before: in memory that the device reads, and in a file."""
        data = self.counter(nbytes)
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
                out = self.out(count)
                draws = iter(self.rng.permutation(len(data)).astype(np.int64))
                last: list[Any] = []

                def ours(out: Any = out, draws: Any = draws, last: list[Any] = last) -> float:
                    last[:] = [self.placed(np.fromiter(draws, np.int64, len(out)))]
                    return wall_seconds(lambda: array.gather(last[0], out))

                def other(out: Any = out) -> float:
                    index = self.host_index(len(data), len(out))
                    return self._copied(data, index, out)

                runs = min(self.runs, len(data) // count - 1)
                times = self.in_turns({"other": other, "ours": ours}, runs)
                self.add(
                    f"gather of {count} cold rows of {where}, {array.explain().route}",
                    times["ours"],
                    "index_select into pinned memory, and a copy"
                    if self.on_gpu
                    else "numpy.take of the memory map",
                    times["other"],
                    self.right(out, data, last[0]),
                    data.nbytes,
                )

    def _copied(self, data: np.ndarray[Any, Any], index: Any, out: Any) -> float:
        if not self.on_gpu:
            return wall_seconds(lambda: data.take(index, 0, out=out))
        torch = self.torch
        table = torch.from_numpy(np.asarray(data).view(np.int32))
        pinned = torch.empty((len(out), self.words), dtype=torch.int32, pin_memory=True)
        into = out.view(torch.int32)

        def call() -> None:
            torch.index_select(table, 0, index, out=pinned)
            into.copy_(pinned, non_blocking=True)
            torch.cuda.current_stream().synchronize()

        return wall_seconds(call)

    def launches(self) -> None:
        """An empty kernel of `fw.compile`, and one with an array and two pointers."""
        program = fw.compile(_KERNELS, self.device)
        data = self.counter(1 << 20)
        index, out = self.index(len(data), 1), self.out(1)
        nothing, read = program["nothing"], program["load"]
        with self.opened(data, cache=1 << 20) as array:
            ways = {
                "nothing": self.host(lambda: nothing(warps=1)),
                "read": self.host(lambda: read(array, index, out, warps=1)),
            }
            name = "an empty cupy.RawKernel", "a cupy.RawKernel with three pointers"
            if self.on_gpu:
                self._add_launches(ways, index, out)
            times = self.in_turns(ways)
            for way, what in (("nothing", "an empty kernel"), ("read", "a kernel with an array")):
                other = times.get(f"cupy {way}", 0.0)
                known = name[way == "read"] if other else ""
                self.add(f"launch of {what}, host", times[way], known, other)
            if "torch" in times:
                self.add("launch of torch.add, host", times["torch"])
            array.wait()

    def _add_launches(self, ways: dict[str, Any], index: Any, out: Any) -> None:
        """Add launches of torch, and of cupy if it is installed."""
        torch = self.torch
        place = index.clone()
        ways["torch"] = self.host(lambda: torch.add(index, 1, out=place))
        try:
            cupy = importlib.import_module("cupy")
        except ImportError:
            print("cupy is not installed: no other launch to stand beside")
            return
        empty = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
        source = 'extern "C" __global__ void read(void* a, long long* i, unsigned* o) { *o = *i; }'
        three = cupy.RawKernel(source, "read")
        given = cupy.zeros(8), cupy.from_dlpack(index), cupy.from_dlpack(out.view(torch.int32))
        ways["cupy nothing"] = self.host(lambda: empty((1,), (32,), ()))
        ways["cupy read"] = self.host(lambda: three((1,), (32,), given))

    def first_gather(self, device: str) -> None:
        """The first gather of a process, on a machine that has compiled nothing.

        The driver keeps what NVRTC compiles in a cache of its own, which has to be off: with it, a
        gather seemed to take a fifth of a second, because an earlier process had compiled the same.
        """
        runs = []
        for _ in range(_FIRST_RUNS):
            with tempfile.TemporaryDirectory() as cache:
                found = subprocess.run(
                    [sys.executable, "-c", _FIRST_GATHER.format(device=device)],
                    env={**os.environ, "FLASHWARP_CACHE_DIR": cache, "CUDA_CACHE_DISABLE": "1"},
                    capture_output=True,
                    text=True,
                    check=True,
                )
            runs.append(json.loads(found.stdout))
        seconds, imported, context, opened, gathered, again, made, right = sorted(runs)[
            len(runs) // 2
        ]
        self.report.row(
            "first gather of a process, with its open, nothing compiled before",
            seconds * 1e6,
            "us",
            checked=bool(right),
            note=(
                f"median of {len(runs)} processes ({min(runs)[0]:.3g} to {max(runs)[0]:.3g} s):"
                f" open {opened:.3g} s, gather {gathered:.3g} s, the next gather "
                f"{again * 1e6:.0f} us; before, import {imported:.3g} s and context "
                f"{context:.3g} s. It left {made} files of compiled code."
            ),
        )
