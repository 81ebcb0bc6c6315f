"""What a hit costs: through `fw::array`, with a reference count for each line, and plain.

Everything is resident. The reference-counting design is BaM's without its statistics, written anew
in `hits.cu`; all ways read the same elements in the same order and must find the same sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record
from flashwarp.config import parse_bytes
from flashwarp.device import Device, DeviceArray, resolve
from flashwarp.probe.timing import device_seconds, in_turns

__all__ = ["run"]

_VALID = np.uint32(1 << 31)
_WORD = 4
# Elements that a warp reads in a row: four lines of 4 KiB.
_SPAN = 4096


def run(
    device: str | None,
    size: Annotated[str, "Bytes of the data, all of them resident."] = "4 GiB",
    loads: Annotated[int, "Random loads of a measurement."] = 1 << 28,
    seed: Annotated[int, "Of the random elements."] = 1,
) -> Record:
    """Compare loads of resident 4-byte elements, random, in order and one by one, by line size."""
    where = resolve(device)
    # Whole rounds of whole spans, so that no way has a rest of its own to handle.
    elements = parse_bytes(size) // _WORD // _SPAN * _SPAN
    report = Record(
        title="Hits",
        device=where.describe(),
        settings={"bytes": elements * _WORD, "random_loads": loads},
        seeds={"elements": seed, "frames": seed + 1},
    )
    source = Path(__file__).with_suffix(".cu")
    program = fw.compile(source, where)
    many = fw.compile(source, where, defines={"BENCH_MANY_WARPS": None})
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 1 << 32, elements, np.uint32)
    for line in (4096, 512):
        _compare(where, program, many, report, data, line, loads, seed)
    return report


def _compare(
    device: Device,
    program: fw.program.Program,
    many: fw.program.Program,
    report: Record,
    data: np.ndarray[Any, np.dtype[np.uint32]],
    line: int,
    loads: int,
    seed: int,
) -> None:
    lines = -(-data.nbytes // line)
    rng = np.random.default_rng(seed + 1)
    with (
        fw.open(
            fw.storage.Memory(data, writable=False),
            "r",
            data.dtype,
            data.shape,
            device=device,
            line=line,
        ) as array,
        _uploaded(device, np.full(lines, _VALID)) as states,
        _uploaded(device, rng.permutation(lines).astype(np.uint32)) as frames,
        device.empty_array((lines * line // _WORD,), np.uint32) as framed,
        _uploaded(device, data) as plain,
    ):
        _fill_frames(device, framed, data, frames.copy_to_host(), line)
        array.prefetch(slice(None))
        shift = line.bit_length() - 1
        table = (states, frames, framed, shift, data.size)
        warps = 1 << 20

        def way(name: str, amount: float, *arguments: Any) -> Callable[[], tuple[float, int]]:
            kernel = (many if name.endswith("_of_many") else program)[name]

            def measure() -> tuple[float, int]:
                with device.empty_array((1,), np.uint64) as total:
                    seconds = device_seconds(device, lambda: kernel(*arguments, total, warps=warps))
                    return amount / seconds / 1e9, int(total.copy_to_host()[0])

            return measure

        random = {
            "array": way("random_array", loads, array, loads, seed),
            "counted": way("random_counted", loads, *table, loads, seed),
            "streamed": way("random_streamed", loads, *table, loads, seed),
            "unordered": way("random_unordered", loads, *table, loads, seed),
            "plain": way("random_plain", loads, plain, data.size, loads, seed),
        }
        ordered = {
            "array": way("ordered_array", data.size, array, _SPAN),
            "counted": way("ordered_counted", data.size, *table, _SPAN),
            "reused": way("ordered_counted_reused", data.size, *table, _SPAN),
            "plain": way("ordered_plain", data.size, plain, data.size, _SPAN),
        }
        others = {
            "reused": way("single_reused", data.size, *table, _SPAN),
            "plain": way("single_plain", data.size, plain, data.size, _SPAN),
        }
        single = {
            "cursor[i]": (way("single_cursor", data.size, array, _SPAN), 0.0),
            "cursor[i], 64 warps": (way("single_cursor_of_many", data.size, array, _SPAN), 0.0),
            "range": (way("single_range", data.size, array, _SPAN), 1.0),
            "each": (way("single_each", data.size, array), 1.0),
        }
        _report(
            report, f"random, {line} B lines", random, 1.5 if line == 4096 else 2.0, data.nbytes
        )
        _report(report, f"in order, {line} B lines", ordered, 1.0, data.nbytes)
        for name, (ours, target) in single.items():
            ways = {"array": ours, **others}
            _report(report, f"one by one by {name}, {line} B lines", ways, target, data.nbytes)
        array.wait()
        misses = array.stats.misses
        if misses > lines:
            raise AssertionError(f"{misses} misses for {lines} lines: the data was not resident")


def _report(
    report: Record,
    name: str,
    ways: dict[str, Callable[[], tuple[float, int]]],
    target: float,
    footprint: int,
) -> None:
    sums: dict[str, set[int]] = {way: set() for way in ways}

    def timed(way: str) -> float:
        rate, total = ways[way]()
        sums[way].add(total)
        return rate

    rates = in_turns({way: partial(timed, way) for way in ways})
    checked = len(set().union(*sums.values())) == 1
    others = {
        "counted": "reference counts, lanes find each other",
        "reused": "reference counts, each thread keeps its line",
        "streamed": "reference counts, elements first out of the L2 cache",
        "unordered": "reference counts without an order, which is no cache",
        "plain": "plain loads",
    }
    for other, text in others.items():
        if other in rates:
            report.row(
                f"{name}: fw::array against {text}",
                rates["array"],
                "G/s",
                text,
                rates[other],
                target if other in ("counted", "reused") else 0.0,
                checked,
                paper="BaM section 3.4" if other in ("counted", "reused") else "",
                footprint=footprint,
            )


def _uploaded(device: Device, values: np.ndarray[Any, Any]) -> DeviceArray:
    array = device.empty_array(values.shape, values.dtype)
    device.upload(array.address, values)
    return array


def _fill_frames(
    device: Device,
    framed: DeviceArray,
    data: np.ndarray[Any, np.dtype[np.uint32]],
    frames: np.ndarray[Any, np.dtype[np.uint32]],
    line: int,
) -> None:
    """Put each line where its frame number says."""
    padded = np.zeros((len(frames), line // _WORD), np.uint32)
    padded.reshape(-1)[: data.size] = data
    placed = np.empty_like(padded)
    placed[frames] = padded
    device.upload(framed.address, placed)
