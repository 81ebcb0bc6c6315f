"""The comparison with managed memory restores what it wrote, and never asks for too much memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.base import Record
from benchmarks.checkpoints import managed as checkpoints_managed
from benchmarks.checkpoints.shots import HINTS, Links, sizes_of

LINKS = Links(1e10, 1e10, 1e10, 1e9, 1e9)


class Context:
    """Host memory in place of a GPU's; notes what is placed where."""

    def __init__(self) -> None:
        self.blocks: dict[int, np.ndarray] = {}
        self.on_gpu: set[int] = set()
        self.most_on_gpu = 0

    def create_stream(self) -> int:
        return 7

    def allocate_managed(self, nbytes: int) -> int:
        block = np.zeros(nbytes, np.uint8)
        self.blocks[block.ctypes.data] = block
        return int(block.ctypes.data)

    def place_managed(self, address: int, nbytes: int, stream: int, *, on_host: bool) -> None:
        assert len(self.blocks[address]) == nbytes
        assert stream == 7
        (self.on_gpu.discard if on_host else self.on_gpu.add)(address)
        self.most_on_gpu = max(self.most_on_gpu, len(self.on_gpu))

    def call(self, name: str, *arguments: int) -> None:
        if name == "cuMemcpyAsync":
            ctypes.memmove(*arguments[:3])
        elif name == "cuMemFree":
            del self.blocks[arguments[0]]


class Array(np.ndarray):
    def data_ptr(self) -> int:
        return int(self.ctypes.data)


def device_with(context: Context, free_bytes: int) -> Any:
    memory = SimpleNamespace(free_bytes=free_bytes)
    return SimpleNamespace(kind="cpu", context=context, memory_info=lambda: memory)


def add(device: Any, steps: int, total: int) -> tuple[str, Record]:
    report = Record(title="managed", device="none", settings={}, seeds={})
    lengths = sizes_of("uniform", steps, total, 0)
    return checkpoints_managed.add_managed(report, device, lengths, LINKS), report


def test_shots_are_restored_and_few_snapshots_stay_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        checkpoints_managed, "new_array", lambda _, nbytes: np.zeros(nbytes, np.uint8).view(Array)
    )
    monkeypatch.setattr(checkpoints_managed, "_INTERVAL_S", 0)
    context = Context()

    why, report = add(device_with(context, 1 << 30), steps=24, total=24 << 12)

    assert why == ""
    assert len(report.rows) == 2 * len(HINTS)
    assert all(row.checked for row in report.rows)
    assert context.blocks == {}
    assert context.most_on_gpu <= 24 // 12 + 1


def test_more_than_a_quarter_of_the_free_memory_is_never_asked_for() -> None:
    context = Context()

    why, report = add(device_with(context, 1 << 20), steps=24, total=1 << 19)

    assert "exceed a quarter" in why
    assert report.rows == []
    assert context.blocks == {}
