"""One large state: what saving it blocks, what it slows down, and how soon it is durable.

Arrays are of numpy on the CPU device, and of torch on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record
from benchmarks.checkpoints.disk import Disk
from flashwarp.checkpoint.buffer import ALIGNMENT, FragmentTable
from flashwarp.checkpoint.directory import Directory, writer
from flashwarp.checkpoint.directory.checksums import chunk_checksums, chunk_count
from flashwarp.checkpoint.eviction import Score
from flashwarp.checkpoint.region import Region
from flashwarp.device import Device
from flashwarp.errors import WaitTimeout
from flashwarp.probe.timing import in_turns, median_of, wall_seconds

__all__ = [
    "VALUES",
    "add_checksums",
    "add_decision",
    "add_durable",
    "add_overlapped",
    "add_saved",
    "add_training",
    "blocked",
    "copy",
    "ends_are",
    "finish",
    "new_array",
    "pinned_array",
    "wait_until_pinned",
]

VALUES = 251
"""What a version is filled with is its number modulo this; arrays to be filled hold this number."""

_LIMIT_S = 120.0
_BLOCKS = 455
"""Which leave 57 gaps: 512 fragments."""
_DECISIONS_PER_S = 20_000.0
_MATRIX = 8192
_PRODUCTS = 24
_TRAINING_S = 1.5
_STOPS_S = 0.1
_DISK_BYTES_MAX = 2 << 30


def new_array(device: Device, nbytes: int) -> Any:
    """Return an array of bytes in the memory of a device."""
    if device.kind == "cpu":
        return np.zeros(nbytes, np.uint8)
    torch: Any = importlib.import_module("torch")
    return torch.zeros(nbytes, dtype=_uint8(), device=device.name)


def pinned_array(device: Device, nbytes: int) -> Any:
    """Return an array of bytes in host memory that the device copies from and to."""
    if device.kind == "cpu":
        return np.zeros(nbytes, np.uint8)
    return importlib.import_module("torch").zeros(nbytes, dtype=_uint8(), pin_memory=True)


def _uint8() -> Any:
    return importlib.import_module("torch").uint8


def copy(target: Any, source: Any) -> None:
    """Copy an array, in the order of the caller's stream."""
    if hasattr(target, "copy_"):
        target.copy_(source, non_blocking=True)
    else:
        target[:] = source


def ends_are(array: Any, value: int) -> bool:
    """Return whether the first and the last byte have a value."""
    return int(array[0]) == int(array[-1]) == value


def finish(device: Device) -> None:
    """Wait for the caller's stream on a device, and for no other."""
    if device.kind == "cuda":
        importlib.import_module("torch").cuda.current_stream(device.name).synchronize()


def blocked(device: Device, call: Callable[[], object]) -> float:
    """Return how long a call keeps its caller, and the caller's stream."""
    finish(device)
    began = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - began


def wait_until_pinned(made: fw.Checkpointer, nbytes: int) -> None:
    """Wait until both caches have their full size, of so many bytes together."""
    until = time.monotonic() + _LIMIT_S
    while sum(made.stats.cache_bytes.values()) < nbytes - 2 * ALIGNMENT:
        if time.monotonic() > until:
            raise WaitTimeout(f"caches of {nbytes} bytes were not pinned in {_LIMIT_S:g} s")
        time.sleep(0.01)


def add_saved(report: Record, device: Device, folder: Path, nbytes: int, runs: int) -> float:
    """Add what `checkpoint` blocks with room in the GPU cache; return it in seconds."""
    state, target = new_array(device, nbytes), new_array(device, nbytes)
    # A discarded version keeps its room until its flush has stopped, at its next piece.
    room = 2 * nbytes + (64 << 20)
    calls: list[float] = []
    right = True
    with fw.Checkpointer(folder / "saved", device, room, 0) as made:
        made.protect("state", state)
        numbers = count()

        def save() -> float:
            nonlocal right
            number = next(numbers)
            state[:] = number % VALUES
            call = partial(made.checkpoint, number)
            seconds = blocked(device, lambda: calls.append(wall_seconds(call)))
            state[:] = VALUES
            made.restart(number)
            finish(device)
            right &= ends_are(state, number % VALUES)
            made.discard(number)
            time.sleep(_STOPS_S)
            return seconds

        found = in_turns(
            {"copy": lambda: blocked(device, lambda: copy(target, state)), "save": save}, runs
        )
    report.row(
        "a state saved, with room in the GPU cache",
        nbytes / found["save"] / 1e9,
        "GB/s",
        "a plain copy inside the device",
        nbytes / found["copy"] / 1e9,
        target=1 / 1.3,
        checked=right,
        note=f"blocks the stream {found['save'] * 1e3:.3f} ms, and the thread "
        f"{median(calls) * 1e3:.3f} ms; the plain copy takes {found['copy'] * 1e3:.3f} ms",
        footprint=nbytes,
    )
    return found["save"]


def add_overlapped(report: Record, device: Device, folder: Path, nbytes: int) -> None:
    """Add what is left of the copy to the host when the state changes; without a GPU cache."""
    state = new_array(device, nbytes)
    copy_s = _to_host_seconds(device, state, nbytes)
    # Room for two: a discarded version keeps its own until its flush has stopped.
    room = 2 * nbytes + (64 << 20)
    with fw.Checkpointer(folder / "overlapped", device, 0, room) as made:
        wait_until_pinned(made, room)
        made.protect("state", state)
        for number, share in enumerate((0.0, 0.5, 1.2)):
            state[:] = number
            finish(device)
            began = time.perf_counter()
            made.checkpoint(number, overlap=True)
            call_s = time.perf_counter() - began
            time.sleep(max(0.0, copy_s * share - call_s))
            computed_s = time.perf_counter() - began
            left_s = wall_seconds(made.wait_staged)
            state[:] = VALUES
            made.restart(number)
            finish(device)
            right = ends_are(state, number)
            made.discard(number)
            time.sleep(_STOPS_S)
            allowed_s = max(0.0, copy_s - computed_s)
            report.row(
                f"left of the copy to the host after {share:g} of its time",
                (call_s + left_s) * 1e3,
                "ms",
                "of the copy engine's time",
                allowed_s * 1e3,
                checked=right,
                note=f"the call {call_s * 1e3:.2f} ms, wait_staged {left_s * 1e3:.2f} ms; the "
                f"copy engine takes {copy_s * 1e3:.1f} ms for {nbytes} bytes",
            )


def _to_host_seconds(device: Device, state: Any, nbytes: int) -> float:
    host = pinned_array(device, nbytes)
    return median_of(lambda: blocked(device, lambda: copy(host, state)), 3)


def add_training(report: Record, device: Device, folder: Path, nbytes: int) -> None:
    """Add how fast steps of matrix products are while a version is flushed, beside steps alone."""
    torch: Any = importlib.import_module("torch")
    state = new_array(device, nbytes)
    factor = torch.randn(_MATRIX, _MATRIX, device=device.name, dtype=torch.bfloat16)
    product = torch.empty_like(factor)

    def step() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(factor, factor, out=product)
        finish(device)

    def steps(more: Callable[[], bool]) -> list[float]:
        found: list[float] = []
        began = time.perf_counter()
        while not found or (more() and time.perf_counter() - began < _TRAINING_S):
            found.append(wall_seconds(step))
        return found

    room = nbytes + (64 << 20)
    alone: list[float] = []
    beside: list[float] = []
    with fw.Checkpointer(folder / "training", device, room, room) as made:
        wait_until_pinned(made, 2 * room)
        made.protect("state", state)
        steps(lambda: True)
        for number in range(2):
            alone += steps(lambda: True)
            saved = made.checkpoint(number)
            finish(device)
            beside += steps(lambda saved=saved: not saved.done())  # type: ignore[misc]
            saved.result(_LIMIT_S)
            made.discard(number)
    report.row(
        "training steps while a version is flushed",
        1 / median(beside),
        "steps/s",
        "the same steps alone",
        1 / median(alone),
        target=0.97,
        note=f"{_PRODUCTS} products of {_MATRIX} x {_MATRIX} bfloat16 matrices a step; "
        f"{len(beside)} steps beside flushes, mean {np.mean(beside) * 1e3:.2f} ms, longest "
        f"{max(beside) * 1e3:.2f}; {len(alone)} alone, mean {np.mean(alone) * 1e3:.2f}, "
        f"longest {max(alone) * 1e3:.2f}",
    )


def add_durable(
    report: Record,
    device: Device,
    folder: Path,
    nbytes: int,
    counts: Sequence[int],
    disk: Disk,
    runs: int,
) -> Disk:
    """Add the rates at which a state becomes durable; return the best that the disk gave.

    Each is measured between two measurements of the disk, whose rate changes with time.
    """
    most = min(nbytes, _DISK_BYTES_MAX)
    before = Disk.measured_writes(folder, most)
    best = max(disk.writes, before)
    rates: dict[int, list[float]] = {versions: [] for versions in counts}
    ceilings: dict[int, list[float]] = {versions: [] for versions in counts}
    right = True
    for versions in [*counts] * runs:
        rate, good = _durable(device, folder, nbytes, versions)
        after = Disk.measured_writes(folder, most)
        right &= good
        rates[versions].append(rate)
        ceilings[versions].append((before + after) / 2)
        best, before = max(best, after), after
    for versions in counts:
        shares = [a / b for a, b in zip(rates[versions], ceilings[versions], strict=True)]
        report.row(
            f"durable, {versions} version" + "s" * (versions > 1),
            median(rates[versions]) / 1e9,
            "GB/s",
            "the disk's writes, just before and after",
            median(rates[versions]) / median(shares) / 1e9,
            target=0.90,
            checked=right,
            note=f"{nbytes} bytes, from the first call to the last commit; median of {runs} "
            f"shares, {min(shares):.3f} to {max(shares):.3f}; the disk wrote "
            f"{min(ceilings[versions]) / 1e9:.2f} to {max(ceilings[versions]) / 1e9:.2f} GB/s",
            footprint=nbytes,
        )
    return Disk(best, disk.reads)


def _durable(device: Device, folder: Path, nbytes: int, versions: int) -> tuple[float, bool]:
    state = new_array(device, nbytes // versions)
    room = nbytes + (64 << 20)
    with fw.Checkpointer(folder / "durable", device, room, room) as made:
        wait_until_pinned(made, 2 * room)
        made.protect("state", state)
        finish(device)
        began = time.perf_counter()
        for number in range(versions):
            state[:] = number % VALUES
            made.checkpoint(number)
        made.wait()
        seconds = time.perf_counter() - began
    with fw.Checkpointer(folder / "durable", device, 0, 0) as again:
        again.restart(versions - 1, into={"state": state})
        finish(device)
        right = ends_are(state, (versions - 1) % VALUES)
        for number in range(versions):
            again.discard(number)
    return nbytes / seconds, right


def add_checksums(report: Record, folder: Path, nbytes: int, runs: int) -> None:
    """Add the rate of writing a version with checksums, beside the same without."""
    buffer = np.frombuffer(np.random.default_rng(1).bytes(1 << 20) * (nbytes >> 20), np.uint8)
    source = memoryview(buffer.data)
    piece = 16 << 20
    numbers = count()
    with Directory(folder / "checksums") as directory:

        def store() -> None:
            number = next(numbers)
            region = Region("state", "|u1", (nbytes,), nbytes)
            with directory.begin("bench", number, [region]) as version:
                for offset in range(0, nbytes, piece):
                    version.write(region, offset, source[offset : offset + piece])
                version.commit()
            directory.discard("bench", number)

        def without() -> float:
            with _no_checksums():
                return wall_seconds(store)

        found = in_turns({"with": lambda: wall_seconds(store), "without": without}, runs)
    one_core = nbytes / median_of(lambda: wall_seconds(lambda: chunk_checksums(source, 1 << 20)), 3)
    report.row(
        "a version written with checksums",
        nbytes / found["with"] / 1e9,
        "GB/s",
        "the same without",
        nbytes / found["without"] / 1e9,
        target=0.95,
        note=f"one core computes {one_core / 1e9:.1f} GB/s of checksums, while the disk writes",
        footprint=nbytes,
    )


@contextlib.contextmanager
def _no_checksums() -> Iterator[None]:
    """Let writers store zeros as checksums; such versions do not verify."""

    def zeros(view: memoryview, chunk_bytes: int, first_bytes: int | None = None) -> Any:
        before = 0 if first_bytes in (None, chunk_bytes) else min(first_bytes or 0, view.nbytes)
        chunks = chunk_count(view.nbytes - before, chunk_bytes) + (before > 0)
        return np.zeros(chunks, np.uint32)

    with unittest.mock.patch.object(writer, "chunk_checksums", zeros):
        yield


def add_decision(report: Record, runs: int) -> None:
    """Add how often a second the score chooses among many fragments."""
    rng = np.random.default_rng(1)
    block = 1 << 20
    table, score = FragmentTable(_BLOCKS * block), Score()
    now_ns = time.monotonic_ns()
    for number in range(_BLOCKS):
        window = score.choose(table, block, now_ns)
        assert window is not None
        table.take(window, block, number)
        waits = 0 if rng.random() < 0.5 else now_ns + int(rng.integers(1, 10**9))
        table.set(number, ready_ns=waits, urgency=int(rng.integers(0, 1 << 40)))
    for number in range(1, _BLOCKS, 8):
        table.free(number)
        window = score.choose(table, block, now_ns)
        assert window is not None
        table.take(window, block // 2, number)
    times = []
    for _ in range(runs * 200):
        began_ns = time.perf_counter_ns()
        found = score.choose(table, 4 * block, now_ns)
        times.append(time.perf_counter_ns() - began_ns)
        assert found is not None
    decision_ns = median(times)
    report.row(
        f"decisions of the score among {len(table)} fragments",
        1e9 / decision_ns,
        "decisions/s",
        "one in 50 us",
        _DECISIONS_PER_S,
        target=1.0,
        note=f"{decision_ns / 1e3:.1f} us each",
    )
