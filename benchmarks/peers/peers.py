"""One cache of several GPUs, beside plain loads over NVLink and a cache for each GPU.

Rows and elements are resident in the memory of all GPUs. Then both the cache and the data are
smaller: what fits the caches together and none of them alone is read by all GPUs at once. The data
lies in host memory, from which GPUs read in place.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record, listed
from flashwarp.config import parse_bytes
from flashwarp.device import CudaDevice, Device, DeviceArray, resolve
from flashwarp.errors import ArgumentError, DeviceError
from flashwarp.probe.timing import device_seconds, in_turns

__all__ = ["devices_of", "run"]

_GPUS_MAX = 16
_ROUNDS = 8
_DRAWS = ("random", "Zipf's")
_PRIME = 2_654_435_761
_FITS = 0.6
"""The share of the data that the cache of one GPU holds where all GPUs together hold all."""


def run(
    gpus: Annotated[int, "How many share the cache; 0: all."] = 0,
    size: Annotated[str, "Bytes of the data."] = "4 GiB",
    rows: Annotated[str, "Bytes of a row, and of a line, with commas."] = "4 KiB,512",
    call: Annotated[str, "Bytes of the rows of a call."] = "512 MiB",
    loads: Annotated[int, "Random elements of a launch."] = 1 << 26,
    seed: Annotated[int, "Of the random rows."] = 1,
) -> Record:
    """Measure hits in the memory of another GPU, and what fits only the caches of all."""
    devices = devices_of(gpus)
    settings = {"gpus": len(devices), "size": size, "rows": rows, "call": call, "loads": loads}
    report = Record("Peers", devices[0].describe(), settings, {"rows": seed})
    data = np.arange(parse_bytes(size) // 4, dtype=np.uint32)
    for row in listed("rows", rows):
        bench = _Bench(report, devices, data, parse_bytes(row), parse_bytes(call), seed)
        bench.resident(loads)
        bench.together()
    return report


def devices_of(count: int) -> list[CudaDevice]:
    """Return so many GPUs, or all if it is 0; raises ArgumentError if there are no two."""
    found: list[CudaDevice] = []
    for place in range(count or _GPUS_MAX):
        try:
            device = resolve(f"cuda:{place}")
        except DeviceError:
            if count:
                raise
            break
        if isinstance(device, CudaDevice):
            found.append(device)
    if len(found) < 2:
        raise ArgumentError(f"{len(found)} GPUs: a cache that GPUs share needs two")
    return found


class _Bench:
    """The data, rows of one width, and room for what calls read on each GPU."""

    def __init__(
        self,
        report: Record,
        devices: list[CudaDevice],
        data: np.ndarray[Any, np.dtype[np.uint32]],
        row: int,
        call: int,
        seed: int,
    ) -> None:
        self.report, self.devices, self.row = report, devices, row
        self.data = data.reshape(-1, row // 4)
        self.count = min(call // row, len(self.data))
        self.rng = np.random.default_rng(seed)

    def resident(self, loads: int) -> None:
        """Rows and elements that all lie in the memory of the GPUs."""
        first, nbytes = self.devices[0], self.data.nbytes
        capacity = nbytes // len(self.devices) + nbytes // 16
        with contextlib.ExitStack() as made:
            cache = made.enter_context(self._cache(capacity, peers=self.devices))
            arrays = [made.enter_context(self._opened(each, cache)) for each in self.devices]
            plain, descriptors = first.allocate_across(
                range(len(self.devices)), self.devices, nbytes
            )
            made.enter_context(plain)
            for each in descriptors:
                os.close(each)
            first.upload(plain.address, self.data)
            arrays[0].prefetch(slice(None))
            program = fw.compile(
                Path(__file__).with_suffix(".cu"), first, policy=arrays[0].cache.policy
            )
            ours = self._homes(program, arrays[0])
            part = -(-nbytes // len(self.devices) >> 21 << 21)  # of the plain memory, on each GPU
            theirs = np.arange(len(self.data)) * self.row // part
            for where, here in (("this GPU", (0,)), ("another GPU", (1,)), ("all GPUs", None)):
                with contextlib.ExitStack() as operands:
                    indices = [
                        self._drawn(first, homes, here, operands) for homes in (ours, theirs)
                    ]
                    out = operands.enter_context(self._out(first))
                    self._compare_rows(where, program, arrays[0], plain.address, indices, out)
            self._all_at_once(arrays)
            self._elements(program, arrays[0], plain.address, loads)
            misses = sum(x.stats.misses for x in arrays)
            self.report.row(
                f"lines read from storage, {self.row} B lines", misses, "lines",
                "lines of the data", nbytes // self.row, checked=misses == nbytes // self.row,
            )  # fmt: skip

    def together(self) -> None:
        """Read what fits the caches of all GPUs together, by all GPUs at once."""
        capacity = int(self.data.nbytes * _FITS * 2 / len(self.devices))
        rates: dict[tuple[str, str], float] = {}
        right = True
        for name, count, peers in (
            ("one GPU with its cache", 1, False),
            ("each GPU with a cache of its own", len(self.devices), False),
            ("GPUs that share a cache", len(self.devices), True),
        ):
            with contextlib.ExitStack() as made:
                devices = self.devices[:count]
                shared = self._cache(capacity, peers=devices) if peers else None
                if shared is not None:
                    made.enter_context(shared)
                arrays = [
                    made.enter_context(self._opened(each, shared or capacity)) for each in devices
                ]
                for draw in _DRAWS:
                    rates[draw, name], checked = self._rate(arrays, draw)
                    right = right and checked
                if peers:
                    misses = sum(x.stats.misses for x in arrays)
                    lines = self.data.nbytes // self.row
                    self.report.row(
                        f"lines that all GPUs read from storage, {self.row} B lines", misses,
                        "lines", "lines of the data", lines, checked=misses <= lines,
                    )  # fmt: skip
        for draw in _DRAWS:
            *others, (name, rate) = [(name, each) for (k, name), each in rates.items() if k == draw]
            for other, alone in others:
                self.report.row(
                    f"{draw} rows of {self.row} B, {name}, in all", rate, "GB/s", other, alone,
                    checked=right, footprint=self.data.nbytes,
                )  # fmt: skip

    def _cache(self, capacity: int, **where: Any) -> fw.Cache:
        return fw.Cache(capacity, line=self.row, **where)

    def _opened(self, device: Device, cache: fw.Cache | int) -> fw.Array:
        return fw.open(
            fw.storage.Memory(self.data, writable=False), "r", self.data.dtype, self.data.shape,
            device=device, cache=cache, line=None if isinstance(cache, fw.Cache) else self.row,
        )  # fmt: skip

    def _homes(self, program: Any, array: fw.Array) -> np.ndarray[Any, Any]:
        """Return for each row the number of the GPU in whose memory it lies."""
        device = array.device
        with device.empty_array((len(self.data),), np.uint32) as places:
            program["homes"](array, places, len(self.data), warps=1 << 14)
            device.wait()
            found = places.copy_to_host().astype(np.uint64) * np.uint64(len(self.devices))
        return (found >> np.uint64(32)).astype(np.int64)

    def _drawn(
        self, device: Device, homes: Any, here: tuple[int, ...] | None, made: Any
    ) -> tuple[DeviceArray, np.ndarray[Any, Any]]:
        """Draw rows that lie on these GPUs; returns them on the device, and on the host."""
        among = np.arange(len(homes)) if here is None else np.flatnonzero(np.isin(homes, here))
        index = among[self.rng.integers(0, len(among), self.count)].astype(np.int64)
        return made.enter_context(_placed(device, index)), index

    def _random(self, device: Device, draw: str, made: Any) -> tuple[DeviceArray, Any]:
        """Draw rows of the whole data; returns them on the device, and on the host."""
        rows = len(self.data)
        index = self.rng.integers(0, rows, self.count)
        if draw == "Zipf's":  # of exponent 1; its hot rows lie anywhere
            ranks = (rows ** self.rng.random(self.count)).astype(np.int64) - 1
            index = ranks * _PRIME % rows
        return made.enter_context(_placed(device, index)), index

    def _out(self, device: Device) -> DeviceArray:
        return device.empty_array((self.count, self.data.shape[1]), np.uint32)

    def _right(self, out: DeviceArray, index: np.ndarray[Any, Any]) -> bool:
        return bool(np.array_equal(out.copy_to_host(), self.data[index]))

    def _compare_rows(
        self, where: str, program: Any, array: fw.Array, plain: int, indices: Any, out: DeviceArray
    ) -> None:
        device = array.device
        nbytes = self.count * self.row
        (mine, on_host), (other, other_on_host) = indices
        words, shift = nbytes // 16, (self.row // 16).bit_length() - 1
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda: array.gather(mine, out, stream=device.own_stream()),
            "plain": lambda: program["plain_rows"](
                plain, other, out.address, words, shift, warps=1 << 16
            ),
        }
        right = True
        for name, index in (("ours", on_host), ("plain", other_on_host)):
            ways[name]()
            device.wait()
            right = right and self._right(out, index)
        seconds = in_turns({name: partial(_timed, device, way) for name, way in ways.items()})
        self.report.row(
            f"rows of {self.row} B in the memory of {where}", nbytes / seconds["ours"] / 1e9,
            "GB/s", "plain warps", nbytes / seconds["plain"] / 1e9, checked=right,
            footprint=self.data.nbytes,
        )  # fmt: skip

    def _all_at_once(self, arrays: list[fw.Array]) -> None:
        rate, right = self._rate(arrays)
        alone, _ = self._rate(arrays[:1])
        self.report.row(
            f"rows of {self.row} B in the memory of all GPUs, read by all at once", rate, "GB/s",
            "by one", alone, checked=right, footprint=self.data.nbytes,
        )  # fmt: skip

    def _rate(self, arrays: list[fw.Array], draw: str = _DRAWS[0]) -> tuple[float, bool]:
        """Read random rows by all arrays at once; returns GB/s of all, and whether they came.

        Each call draws its own rows, so a hit is on a line that the cache held already.
        """
        with contextlib.ExitStack() as made:
            operands = []
            for x in arrays:
                drawn = [self._random(x.device, draw, made) for _ in range(_ROUNDS)]
                operands.append((x, drawn, made.enter_context(self._out(x.device))))
            for x in arrays:
                x.prefetch(slice(None))
            for x, drawn, out in operands:
                x.gather(drawn[0][0], out)
            start = time.perf_counter()
            for k in range(_ROUNDS):
                for x, drawn, out in operands:
                    x.gather(drawn[k][0], out, stream=x.device.own_stream())
            for x in arrays:
                x.wait()
            seconds = time.perf_counter() - start
            right = all(self._right(out, drawn[-1][1]) for _, drawn, out in operands)
            return _ROUNDS * len(arrays) * self.count * self.row / seconds / 1e9, right

    def _elements(self, program: Any, array: fw.Array, plain: int, loads: int) -> None:
        device = array.device
        sums: set[int] = set()

        def rate(name: str, *arguments: Any) -> float:
            with device.empty_array((1,), np.uint64) as total:
                device.fill(total.address, 0, 8)
                seconds = _timed(
                    device, lambda: program[name](*arguments, loads, 7, total, warps=1 << 16)
                )
                sums.add(int(total.copy_to_host()[0]))
                return loads / seconds / 1e9

        ways = {
            "ours": partial(rate, "elements_array", array),
            "plain": partial(rate, "elements_plain", plain, self.data.size),
        }
        rates = in_turns(ways)
        self.report.row(
            f"random elements in the memory of all GPUs, {self.row} B lines", rates["ours"], "G/s",
            "plain loads", rates["plain"], checked=len(sums) == 1, footprint=self.data.nbytes,
        )  # fmt: skip


def _timed(device: Device, launch: Callable[[], object]) -> float:
    return device_seconds(device, launch, device.own_stream())


@contextlib.contextmanager
def _placed(device: Device, values: np.ndarray[Any, Any]) -> Iterator[DeviceArray]:
    with device.empty_array(values.shape, values.dtype) as array:
        device.upload(array.address, values)
        yield array
