"""Calls whose stream waits for the storage, beside the same calls whose warps wait.

The figures that decide the default of `Config.split_misses`, in one run: gathers of a few rows that
no call has read, and of rows that are resident; and on a GPU what matrix products, or an all-reduce
between two GPUs, keep of their rate beside a large cold gather, and what that gather keeps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record
from benchmarks.calls.base import CallsBench
from benchmarks.calls.neighbours import Pair
from flashwarp.device import resolve
from flashwarp.errors import ArgumentError
from flashwarp.probe.disk import direct_reads_work
from flashwarp.probe.timing import wall_seconds

__all__ = ["run"]

_ROW_BYTES = 4096
_VARIABLE = "FLASHWARP_SPLIT_MISSES"
_MODES = {"spin": "0", "split": "1"}
_COLD = (32, 1024)
_RESIDENT = 32


def run(
    device: str | None,
    folder: Path,
    rows: Annotated[int, "Rows of 4 KiB in the file, and of the gather beside others."] = 200_000,
    cache: Annotated[str, "Bytes of the cache."] = "256 MiB",
    runs: Annotated[int, "Calls of each kind."] = 100,
    seed: Annotated[int, "Of the random rows."] = 1,
) -> Record:
    """Time gathers with split misses and without, alone and beside other work."""
    where = resolve(device)
    if rows < 2 * max(_COLD):
        raise ArgumentError(f"rows={rows} are too few: at least {2 * max(_COLD)}")
    bench = _Split(where, _ROW_BYTES, runs, np.random.default_rng(seed))
    bench.cache = cache
    settings = {"rows": rows, "cache": cache, "runs": runs}
    bench.report = Record("Split misses", where.describe(), settings, {"rows": seed})
    data = np.arange(rows * bench.words, dtype=np.uint32).reshape(rows, bench.words)
    path = folder / "split.bin"
    data.tofile(path)
    os.sync()
    ways: dict[str, Mapping[str, Any]] = {
        "page cache, bounce": {
            "o_direct": False,
            "controller": fw.nvme.SoftwareController(route="bounce"),
        }
    }
    if direct_reads_work(path):
        ways["O_DIRECT"] = {"o_direct": True}
    else:
        print("no O_DIRECT on this file system: give another folder to measure the disk")
    for name, how in ways.items():
        bench.small(path, data, name, how)
        if bench.on_gpu:
            for mode in _MODES:
                with bench.in_mode(path, data, mode, how) as array:
                    Pair(bench, array, data, f"{name}, {mode}").measure()
    return bench.report


class _Split(CallsBench):
    """The same array in both modes."""

    cache: str

    @contextlib.contextmanager
    def in_mode(
        self, path: Path, data: np.ndarray[Any, Any], mode: str, settings: Mapping[str, Any]
    ) -> Iterator[fw.Array]:
        """Open the file in a mode, which arrays look up when they open."""
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = _MODES[mode]
        try:
            array = fw.open(
                path, dtype=data.dtype, shape=data.shape, device=self.device, cache=self.cache,
                line=_ROW_BYTES, **settings,
            )  # fmt: skip
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before
        with array:
            yield array

    def small(
        self, path: Path, data: np.ndarray[Any, Any], where: str, settings: Mapping[str, Any]
    ) -> None:
        """Rows that are new at each call, and rows that are resident."""
        with contextlib.ExitStack() as opened:
            arrays = {
                mode: opened.enter_context(self.in_mode(path, data, mode, settings))
                for mode in _MODES
            }
            for count in _COLD:
                ways = {mode: self._cold(array, count) for mode, array in arrays.items()}
                self._compare(f"{count} cold rows, {where}", ways, arrays, data, count)
            ways = {mode: self._resident(array) for mode, array in arrays.items()}
            self._compare(f"{_RESIDENT} resident rows, {where}", ways, arrays, data, _RESIDENT)

    def _compare(
        self,
        what: str,
        ways: Mapping[str, Callable[[], float]],
        arrays: Mapping[str, fw.Array],
        data: np.ndarray[Any, Any],
        count: int,
    ) -> None:
        seconds = self.in_turns(dict(ways))
        right = True
        for array in arrays.values():
            index, out = self.index(len(data), count), self.out(count)
            array.gather(index, out)
            right = right and self.right(out, data, index)
        self.add(f"a gather of {what}, split", seconds["split"], "spin", seconds["spin"], right)

    def _cold(self, array: fw.Array, count: int) -> Callable[[], float]:
        out, turns = self.out(count), self._turns(array, count)

        def measure() -> float:
            index = next(turns)
            return wall_seconds(lambda: array.gather(index, out))

        return measure

    def _turns(self, array: fw.Array, count: int) -> Iterator[Any]:
        while True:
            order = self.rng.permutation(len(array)).astype(np.int64)
            array.drop_cache()
            for begin in range(0, len(order) - count + 1, count):
                yield self.placed(order[begin : begin + count])

    def _resident(self, array: fw.Array) -> Callable[[], float]:
        index, out = self.index(len(array), _RESIDENT), self.out(_RESIDENT)
        array.gather(index, out)
        return self.timed(lambda: array.gather(index, out))
