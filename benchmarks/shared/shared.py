"""A cache that processes share: hits of one alone and of each of two, misses, and the memory taken.

Each process gathers random rows that are resident, for the same time. An array with a cache of its
own is what a client is compared with; and two of these at once, for two clients: processes take
turns on a GPU whether they share anything or not.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record
from flashwarp.config import cores, parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.errors import ArgumentError, FlashwarpError

__all__ = ["run"]

_NAME = "bench"
_VARIABLE = "FLASHWARP_RUNTIME_DIR"
_CALL_BYTES = 32 << 20
_START_S = 120.0
_SETTLE_S = 30.0


def run(
    device: str | None,
    folder: Path,
    size: Annotated[str, "Bytes of the file, all of which the cache holds."] = "1 GiB",
    row: Annotated[str, "Bytes of a row."] = "4 KiB",
    seconds: Annotated[float, "For which each process reads."] = 3.0,
    threads: Annotated[int, "Of each process on the CPU device; 0: half of the cores."] = 0,
    seed: Annotated[int, "Of the rows."] = 1,
) -> Record:
    """Measure clients of a shared cache, one and two at a time."""
    nbytes, row_bytes = parse_bytes(size), parse_bytes(row)
    if row_bytes % 4 or not 4 <= row_bytes <= min(nbytes, _CALL_BYTES):
        raise ArgumentError(f"row={row!r} is no multiple of 4 bytes up to {_CALL_BYTES}")
    threads = threads or max(1, cores() // 2)
    where = _device(None if device is None else str(device), threads)
    settings = {"size": size, "row": row, "seconds": seconds, "threads": threads}
    report = Record("A shared cache", resolve(device).describe(), settings, {"rows": seed})
    path = folder / "rows.npy"
    rows = nbytes // row_bytes
    data = np.lib.format.open_memmap(path, "w+", "i4", (rows, row_bytes // 4))
    data[:] = np.arange(rows, dtype="i4")[:, None]
    data.flush()
    capacity = nbytes + nbytes // 16 + (1 << 20)
    reads = _Reads(where, str(path), capacity, seconds, threads, seed)
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(folder / "names")
    try:
        with report.part("processes"):
            _compare(report, where, reads, capacity, nbytes)
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
    return report


def _compare(report: Record, where: Device, reads: _Reads, capacity: int, nbytes: int) -> None:
    def add(
        name: str, rate: float, other: str = "", than: float = 0.0, target: float = 0.0
    ) -> None:
        report.row(name, rate, "GB/s", other, than, target, right, footprint=nbytes)

    own = "an array with a cache of its own"
    (alone,), first, _, right = reads.run(1, shared=False)
    add(own, alone)
    add(f"the first pass of {own}", first)
    # What two processes do to each other without sharing anything, such as taking turns on a GPU.
    apart = "each of two such arrays at once"
    rates, _, private, right = reads.run(2, shared=False)
    each = sum(rates) / len(rates)
    add(apart, each, own, alone)
    with fw.Cache(capacity, shared=_NAME, device=where):
        client = "one client alone"
        (one,), cold, _, right = reads.run(1, shared=True)
        add(client, one, own, alone)
        add(f"the first pass of {client}", cold, f"the first pass of {own}", first)
        both, _, memory, right = reads.run(2, shared=True)
        for k, rate in enumerate(both, 1):
            add(f"client {k} of two at once", rate, client, one, 0.95)
            add(f"client {k} of two at once", rate, apart, each, 0.95)
        add("two clients at once, together", sum(both), client, one)
    note = "shared memory of the three processes, each page counted once"
    if where.kind != "cpu":
        note = "what the GPU had less free, with a context of each process"
        name = "memory of two processes with caches of their own"
        report.row(name, private / 1e9, "GB", "two caches", 2 * capacity / 1e9, note=note)
    whole = "memory of owner and two clients"
    report.row(whole, memory / 1e9, "GB", "the cache", capacity / 1e9, note=note)


def _device(name: str | None, threads: int) -> Device:
    found = resolve(name)
    return fw.device.CpuDevice(threads) if found.kind == "cpu" else found


class _Reads:
    """Processes that read the same file."""

    def __init__(self, where: Device, *settings: Any) -> None:
        self._where = where
        self._free = where.memory_info().free_bytes
        self._settings = (where.name, *settings)

    def run(self, count: int, *, shared: bool) -> tuple[list[float], float, int, bool]:
        """Return the rates, the first pass of one, bytes taken, and whether all is right."""
        spawn = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_read, args=(theirs, shared, *self._settings))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            colds = [_next(pipe) for pipe in pipes]  # all are warm
            for pipe in pipes:
                pipe.send("go")
            done = [_next(pipe) for pipe in pipes]
            if self._where.kind == "cpu":
                memory = _mapped([os.getpid(), *(process.pid for process in processes)])
            else:
                memory = self._free - self._where.memory_info().free_bytes
            for pipe in pipes:
                pipe.send("end")
        finally:
            for process in processes:
                process.join(_START_S)
                process.kill()
        return [rate for rate, _ in done], colds[0], memory, all(right for _, right in done)


def _next(pipe: Connection) -> Any:
    if not pipe.poll(_START_S):
        raise FlashwarpError(f"a process of the benchmark has not answered for {_START_S:g} s")
    answer = pipe.recv()
    if isinstance(answer, str):
        raise FlashwarpError(f"a process of the benchmark failed: {answer}")
    return answer


def _read(
    pipe: Connection,
    shared: bool,
    device: str,
    path: str,
    capacity: int,
    seconds: float,
    threads: int,
    seed: int,
) -> None:
    """Read in a process: the whole file once, then random rows of it."""
    try:
        where = _device(device, threads)
        made = fw.Cache(shared=_NAME, device=where) if shared else fw.Cache(capacity, device=where)
        with made as cache, fw.open(path, cache=cache) as x:
            count = max(1, _CALL_BYTES // (x.nbytes // len(x)))
            random = np.random.default_rng(seed + os.getpid())
            drawn = random.integers(0, len(x), count)
            calls = _Calls(where, x, count)
            begin = time.perf_counter()
            for first in range(0, len(x), count):
                calls.gather(np.arange(first, first + count) % len(x))
            pipe.send(x.nbytes / (time.perf_counter() - begin) / 1e9)
            pipe.recv()
            calls.place(drawn)
            # The pass has left few lines in an own cache on the CPU device.
            x.prefetch(drawn)
            calls.again()
            # Lines of a client on a GPU enter the cache behind the answers.
            misses, end = -1, time.perf_counter() + _SETTLE_S
            while misses != x.stats.misses and time.perf_counter() < end:
                misses = x.stats.misses
                time.sleep(0.1)
                calls.again()
            misses, moved, begin = x.stats.misses, 0, time.perf_counter()
            while time.perf_counter() - begin < seconds:
                calls.again()
                moved += count * (x.nbytes // len(x))
            rate = moved / (time.perf_counter() - begin) / 1e9
            right = bool((calls.rows()[:, 0] == drawn).all()) and x.stats.misses == misses
            pipe.send((rate, right))
            pipe.recv()
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


class _Calls:
    """Gathers whose operands stay where the device reads them."""

    def __init__(self, device: Device, x: fw.Array, count: int) -> None:
        self._device, self._x = device, x
        shape = (count, *x.shape[1:])
        on_cpu = device.kind == "cpu"
        self._out: Any = np.empty(shape, x.dtype) if on_cpu else device.empty_array(shape, x.dtype)
        self._index: Any = None if on_cpu else device.empty_array((count,), np.int64)

    def place(self, index: np.ndarray[Any, Any]) -> None:
        """Choose the rows of `again`."""
        if self._device.kind == "cpu":
            self._index = index
        else:
            self._device.upload(self._index.address, np.ascontiguousarray(index))

    def again(self) -> None:
        """Gather the rows."""
        self._x.gather(self._index, out=self._out)

    def gather(self, index: np.ndarray[Any, Any]) -> None:
        """Gather these rows."""
        self.place(index)
        self.again()

    def rows(self) -> Any:
        """Return the rows on the host."""
        return self._out if self._device.kind == "cpu" else self._out.copy_to_host()


def _mapped(pids: list[int | None]) -> int:
    """Return the bytes of shared caches in these processes, each page counted once."""
    found, ours = 0, False
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                ours = "/memfd:flashwarp" in line
            elif ours and line.startswith("Pss:"):
                found += int(line.split()[1]) << 10
    return found
