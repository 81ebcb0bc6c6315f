"""States saved while the work goes on, beside a copy to the host and a file.

A training waits in `Checkpointer.checkpoint` until its state may change again; the version becomes
durable behind its back. What most programs do is to copy the state to the host, and to write a
file. Each way saves the same states, is durable before the next begins, and is read back.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from demo.check import check_equal
from demo.progress import Steps
from flashwarp.device import Device

__all__ = ["FILE", "SIZES", "CheckpointResult", "run"]

FILE = "copy to the host, numpy.save, fsync"
# Bytes of a state, on a GPU. The CPU device, beside which nothing is compared, takes a quarter.
SIZES = {"quick": 256 << 20, "full": 2 << 30}
_VERSIONS = 3
_DURABLE_S = 120.0


@dataclass(frozen=True)
class CheckpointResult:
    """How long a program waited for each state that it saved; medians of the versions."""

    state_bytes: int
    versions: int
    held_s: float
    """By flashwarp: until the state may change."""
    durable_s: float
    """By flashwarp: until it is durable."""
    file_s: float
    """By a copy to the host and a file."""


def run(directory: Path, state_bytes: int, device: Device, steps: Steps) -> CheckpointResult:
    """Save states of so many bytes by both ways, and check what comes back."""
    if device.kind == "cpu":
        state_bytes //= 4
    first = np.arange(state_bytes // 4, dtype=np.int32)
    with steps.step("checkpoints: save states, and go back"), ExitStack() as stack:
        state = _State(device, first, stack)
        held, durable = _by_flashwarp(directory / "versions", state)
        files = [_by_file(directory / f"{n}.npy", state, n) for n in range(_VERSIONS)]
    return CheckpointResult(
        state_bytes=first.nbytes,
        versions=_VERSIONS,
        held_s=float(np.median(held)),
        durable_s=float(np.median(durable)),
        file_s=float(np.median(files)),
    )


class _State:
    """What a training changes: an array on the GPU, or one of numpy."""

    def __init__(self, device: Device, first: NDArray[np.int32], stack: ExitStack) -> None:
        self.device, self.first = device, first
        self.array: Any = np.empty_like(first)
        if device.kind != "cpu":
            self.array = stack.enter_context(device.empty_array(first.shape, first.dtype))

    def change(self, version: int) -> None:
        if self.device.kind == "cpu":
            self.array[:] = self.first + version
        else:
            self.device.upload(self.array.address, self.first + version)
        self.device.wait()

    def on_host(self) -> NDArray[np.int32]:
        self.device.wait()
        return np.asarray(self.array)


def _by_flashwarp(folder: Path, state: _State) -> tuple[list[float], list[float]]:
    room = 2 * state.first.nbytes + (1 << 20)
    held, durable = [], []
    with fw.Checkpointer(folder, state.device, gpu_memory=room, host_memory=room) as checkpointer:
        checkpointer.protect("state", state.array)
        for version in range(_VERSIONS + 1):  # one more, to warm up
            state.change(version)
            start = time.perf_counter()
            saved = checkpointer.checkpoint(version)
            state.device.wait()
            held.append(time.perf_counter() - start)
            saved.result(timeout=_DURABLE_S)
            durable.append(time.perf_counter() - start)
        for version in reversed(range(_VERSIONS + 1)):
            checkpointer.restart(version)
            check_equal(f"checkpoints: version {version}", state.on_host(), state.first + version)
    return held[1:], durable[1:]


def _by_file(path: Path, state: _State, version: int) -> float:
    state.change(version)
    start = time.perf_counter()
    with path.open("wb") as file:
        np.save(file, state.on_host())
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    check_equal(f"checkpoints: {path.name}", np.load(path), state.first + version)
    path.unlink()
    return seconds
