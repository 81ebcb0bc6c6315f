"""Pipelines for programs in torch whose ids are on the host: rows as tensors, torch's stream."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import flashwarp as fw
from flashwarp.array.array import Array

__all__ = ["batches", "cut", "pipeline"]


def pipeline(array: Array, rows: int, **options: Any) -> fw.Pipeline:
    """Make a pipeline for batches of some rows, ordered with torch's current stream."""
    torch: Any = importlib.import_module("torch")
    on_gpu = array.device.kind == "cuda"
    stream = torch.cuda.current_stream(place(array)) if on_gpu else None
    return fw.Pipeline(array, rows, stream=stream, **options)


def place(array: Array) -> str:
    """Return torch's name of an array's device."""
    on_gpu = array.device.kind == "cuda"
    return f"cuda:{getattr(array.device, 'ordinal', 0)}" if on_gpu else "cpu"


def batches(reading: fw.Pipeline, ids: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield rows as tensors that share the pipeline's buffers, and their ids."""
    torch: Any = importlib.import_module("torch")
    for rows, which in reading.iterate(ids):
        yield torch.as_tensor(rows, device=place(reading.array)), which


def cut(rows: int, at_a_time: int) -> list[range]:
    """Cut rows into ranges."""
    return [range(k, min(k + at_a_time, rows)) for k in range(0, rows, at_a_time)]
