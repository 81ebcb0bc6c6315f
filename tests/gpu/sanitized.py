"""A small pass over every built-in kernel, for compute-sanitizer. Run by run.sh.

python sanitized.py TOOL
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import flashwarp as fw
from demo.graph import BreadthFirstSearch
from flashwarp import graphs
from flashwarp._jit import compiler
from flashwarp.table.lookup import Bags, Ids, Lookup, Number, Pooling, Table

KERNELS = """
#include "flashwarp/array.cuh"

struct record { float x, y, z; };

FW_KERNEL use(fw::array<float> data, fw::array<const record> records, float* buffer) {
  const uint64_t i = fw::base::thread_index() * 7 % data.size();
  float value = data[i];
  fw::token t = data.read_async(i / 2, 3, buffer + fw::base::thread_index() * 4);
  data.prefetch(i, 400);
  if (i % 3 == 0) value += records[i % records.size()].y;
  if (i % 5 == 0) data.store(i, value);
  t.wait();
  fw::token back = data.write_back(i, 1);
  data.atomic_add(i, 1.0f);
  back.wait();
  fw::block::read(data, 0, 700, buffer + 4096);
  fw::warp::write(data, 1000, 300, buffer + 4096);
  fw::range<float>(data, i, i + 40 < data.size() ? i + 40 : data.size()).each(
      [&](uint64_t, float v) { value += v; });
  buffer[fw::base::thread_index() * 4 + 3] = value;
}
"""


def use_arrays(device: fw.device.CudaDevice, path: Path) -> None:
    """Everything that a kernel does with an array, in small."""
    np.save(path, np.zeros(9000, np.float32))
    program = fw.compile(KERNELS, device)
    records = np.zeros(500, [("x", "f4"), ("y", "f4"), ("z", "f4")])
    np.save(path.with_name("records.npy"), records)
    with (
        fw.open(path, "r+", device=device, cache="16 KiB", line=512) as data,
        fw.open(
            path.with_name("records.npy"), device=device, cache="8 KiB", line=512, o_direct=True
        ) as held,
        device.empty_array((8192,), np.float32) as buffer,
    ):
        program["use"](data, held, buffer, warps=16)
        data.wait()
        held.wait()


def look_up(device: fw.device.CudaDevice, path: Path, rng: np.random.Generator) -> None:
    """Pool bags of rows whose lines a block fetches before, and bring others into the cache."""
    content = rng.integers(-8, 8, (4000, 100)).astype(np.float32)
    np.save(path, content)
    chosen = rng.integers(0, len(content), (250, 8))
    os.environ["FLASHWARP_DRAIN_BLOCKS"] = "1"
    with (
        fw.open(path, device=device, cache="2 MiB", line=512) as x,
        device.empty_array(chosen.shape, np.int64) as index,
        device.empty_array((len(chosen), 100), np.float32) as out,
    ):
        device.upload(index.address, chosen.tobytes())
        ids = Ids(index.address, chosen.size, 8)
        bags = Bags(len(chosen), 8)
        lookup = Lookup([Table(x, Number.FLOAT32, 100, range(len(content)))])
        for _ in range(2):
            lookup.bags(ids, bags, Pooling.SUM, None, out.address, Number.FLOAT32, None)
            found = np.frombuffer(device.download(out.address, out.nbytes), np.float32)
            assert (found.reshape(-1, 100) == content[chosen].sum(1)).all()
            x.drop_cache()
            lookup.prefetch(ids, None, None)
        lookup.close()
    del os.environ["FLASHWARP_DRAIN_BLOCKS"]


def search(device: fw.device.CudaDevice, folder: Path) -> None:
    """Index an array in divergent code: lanes part, prefetch, miss and meet again."""
    graph = graphs.load("kron:8", folder, seed=1)
    for o_direct in (True, False):
        with (
            graph.neighbours(device=device, cache="8 KiB", line=512, o_direct=o_direct) as array,
            BreadthFirstSearch(graph, array) as levels,
        ):
            reached = sum(1 for _ in levels.levels(graph.pick_sources(1, seed=2)[0]))
            assert reached > 2


def main(tool: str) -> None:
    if tool == "racecheck":
        # It knows barriers alone. The users of the staging buffer take turns by a lock in memory.
        compiler.PROGRAM_OPTIONS += ("-DFW_WHOLE_WARPS=1",)
    rng = np.random.default_rng(1)
    device = fw.device.CudaDevice(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npy"
        content = rng.standard_normal((300, 700)).astype(np.float32)
        np.save(path, content)
        for options in ({}, {"o_direct": True}, {"line": 512}):
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
        search(device, Path(folder) / "graph")
        use_arrays(device, Path(folder) / "data.npy")
        look_up(device, Path(folder) / "table.npy", rng)
    device.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
