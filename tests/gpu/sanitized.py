"""A small pass over every built-in kernel, for compute-sanitizer. Run by run.sh."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import flashwarp as fw
from flashwarp.demo.graph import BreadthFirstSearch, build_csr, pick_sources


def search(device: fw.CudaDevice, path: Path) -> None:
    """Index an array in divergent code: lanes part, prefetch, miss and meet again."""
    offsets, neighbours = build_csr(8, seed=1)
    np.save(path, neighbours)
    for direct in (True, False):
        with (
            fw.open(path, device=device, cache="8 KiB", line=512, direct=direct) as array,
            BreadthFirstSearch(array, offsets) as levels,
        ):
            reached = sum(1 for _ in levels.levels(pick_sources(offsets, 1, seed=2)[0]))
            assert reached > 2


def main() -> None:
    rng = np.random.default_rng(1)
    device = fw.CudaDevice(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npy"
        content = rng.standard_normal((300, 700)).astype(np.float32)
        np.save(path, content)
        for options in ({}, {"direct": True}, {"line": 512}):
            with fw.open(path, device=device, cache="64 KiB", **options) as x:
                index = rng.integers(-300, 300, 200)
                x.prefetch(index[:8])
                assert (x.gather(index) == content[index]).all(), options
                assert (x[3:100] == content[3:100]).all(), options
        with fw.open(path, "r+", device=device, cache="64 KiB") as x:
            content[5:50] = 1.5
            x[5:50] = 1.5
            content[[7, 90]] = 2.5
            x[[7, 90]] = 2.5
            x.flush()
        assert (np.load(path) == content).all()
        column = np.arange(5000, dtype=np.int32)
        np.save(path, column)
        with fw.open(path, "r+", device=device, cache="16 KiB") as x:
            index = rng.integers(0, 5000, 600)
            assert (x.gather(index) == column[index]).all()
            x.scatter(np.arange(100), np.arange(100, dtype=np.int32))
        search(device, Path(folder) / "graph.npy")
    device.close()


if __name__ == "__main__":
    main()
