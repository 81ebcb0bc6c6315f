"""Pipelines: batches and tiles that arrive while the device computes (the CAM paper, section IV).

Each part measures what the machine can do, what programs do today, and our ways, in one run, and
checks all data. `pipelines_rows.py` and the files beside it say what each part does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from benchmarks.base import Record, by_kind, bytes_of, listed
from benchmarks.pipelines import gemm as pipelines_gemm
from benchmarks.pipelines import gnn as pipelines_gnn
from benchmarks.pipelines import overlap as pipelines_overlap
from benchmarks.pipelines import rows as pipelines_rows
from benchmarks.pipelines import sort as pipelines_sort
from benchmarks.pipelines import where as pipelines_where
from benchmarks.pipelines.base import STORAGES, Bench, Data
from flashwarp.device import resolve

__all__ = ["PARTS", "run"]

PARTS = ("rows", "overlap", "gnn", "sort", "gemm", "where")


def run(
    device: str | None,
    folder: Path,
    parts: Annotated[str, f"What to measure, with commas: {', '.join(PARTS)}."] = ",".join(PARTS),
    size: Annotated[str, "Bytes of the storage; empty: 4 GiB, 16 MiB on the CPU device."] = "",
    batch: Annotated[str, "Bytes of a batch; empty: 256 MiB, 2 MiB on the CPU device."] = "",
    rows: Annotated[str, "Bytes of rows, with commas."] = "512,4 KiB,16 KiB,64 KiB,256 KiB",
    steps: Annotated[int, "Batches of one measurement of overlap."] = 24,
    dims: Annotated[str, "Features of a vertex, with commas."] = "128,1024",
    models: Annotated[str, "Graph networks, with commas."] = "GraphSAGE,GCN,GAT",
    seeds: Annotated[int, "Vertices of a mini-batch; 0: 8000, 64 on the CPU device."] = 0,
    keys: Annotated[float, "Millions of keys to sort; 0: 256, 0.25 on the CPU device."] = 0.0,
    side: Annotated[int, "Of the matrices; 0: 16384, 128 on the CPU device."] = 0,
    storages: Annotated[
        str, "Where rows, features, keys and matrices are: memory, page cache and O_DIRECT."
    ] = "memory,page cache,O_DIRECT",
    ways: Annotated[str, "Ways of pipelines: default, without SMs."] = "default,without SMs",
    runs: Annotated[int, "How often each way is measured."] = 3,
    seed: Annotated[int, "Of the rows that are drawn."] = 1,
) -> Record:
    """Measure the parts, one after the other."""
    wanted, kinds = listed("parts", parts, PARTS), listed("storages", storages, STORAGES)
    where = resolve(device)
    nbytes = bytes_of(where, size, "4 GiB", "16 MiB")
    batch_bytes = bytes_of(where, batch, "256 MiB", "2 MiB")
    report = Record(
        "Pipelines",
        where.describe(),
        {
            "parts": parts,
            "ways": ways,
            "storages": storages,
            "size": nbytes,
            "batch": batch_bytes,
            "steps": steps,
            "runs": runs,
        },
        {"rows": seed},
    )
    bench = Bench(where, folder, report, runs, seed, ways)
    data = Data(bench, nbytes)
    count = int(by_kind(where, keys, 256.0, 0.25) * 2**20)
    length = by_kind(where, side, 16384, 128)
    measures: dict[str, Callable[[], None]] = {
        "rows": lambda: pipelines_rows.measure(bench, data, rows, batch_bytes, kinds),
        "gnn": lambda: pipelines_gnn.measure(
            bench, nbytes, dims, models, kinds, by_kind(where, seeds, 8000, 64), steps
        ),
        "sort": lambda: pipelines_sort.measure(bench, count, count // 8, count // 32, kinds),
        "where": lambda: pipelines_where.measure(bench, data),
        "gemm": lambda: pipelines_gemm.measure(bench, length, length // 2, length // 16, kinds),
        "overlap": lambda: pipelines_overlap.measure(bench, data, batch_bytes, steps),
    }
    with contextlib.closing(bench):
        for name in wanted:
            measures[name]()
    return report
