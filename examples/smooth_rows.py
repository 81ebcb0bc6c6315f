"""Threads of several blocks change one line together: a share table gives them one copy of it.

    python examples/smooth_rows.py [--device cpu | cuda]

Each row of a file is one line of the cache. All threads work on a row at the same time: in each
round, an element becomes the mean of its neighbours, which other threads have just changed. Without
a share table each thread would copy the row into a buffer of its own, and miss what the others
store. With one, the first thread copies the row, the others find its buffer, and the row is written
back once.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import flashwarp as fw

SOURCE = """
#include "flashwarp/array/shared.cuh"

// Waits until all threads have come to a meeting; then each sees what the others stored before it.
// Returns false if one of them has not come within ten seconds.
FW_DEVICE bool meet(uint32_t* arrived, uint32_t meeting) {
  fw::atomic::fence();
  fw::atomic::add(arrived, 1u);
  const uint32_t all = meeting * fw::base::thread_count();
  const uint64_t end = fw::base::clock_ns() + 10'000'000'000;
  while (fw::atomic::load_acquire(arrived) < all) {
    if (fw::base::clock_ns() > end) return false;
    fw::base::pause(100);
  }
  return true;
}

FW_KERNEL smooth(fw::array<double> rows, fw::share_table table, double* buffers, uint64_t columns,
                 uint32_t rounds, uint32_t* arrived, uint32_t* copies, uint32_t* failed) {
  const uint64_t thread = fw::base::thread_index();
  fw::shared<double> s(rows, table);
  uint32_t meeting = 0;
  for (uint64_t row = 0; row < rows.size(); row += columns) {
    bool ok = s.acquire(row, buffers + thread * columns) == fw::nvme::kSuccess;
    if (s.owns_line()) fw::atomic::add(copies, 1u);
    bool met = meet(arrived, ++meeting);
    for (uint32_t round = 0; met && round < rounds; round++) {
      // Odd elements of even rounds, and even ones of odd rounds: nobody stores to a neighbour.
      uint64_t k = 1 + round % 2 + 2 * thread;
      for (; k + 1 < columns; k += 2 * fw::base::thread_count()) {
        const double mean = (s[row + k - 1] + s[row + k + 1]) / 2;
        ok = s.store(row + k, mean) == fw::nvme::kSuccess && ok;
      }
      met = meet(arrived, ++meeting);
    }
    ok = s.release() == fw::nvme::kSuccess && ok && met;
    if (!ok) fw::atomic::add(failed, 1u);
    if (!met) return;
  }
}
"""
ROWS, COLUMNS, ROUNDS = 48, 512, 20


def smoothed(rows: np.ndarray) -> np.ndarray:
    """Compute the same with numpy."""
    rows = rows.copy()
    for number in range(ROUNDS):
        first = 1 + number % 2
        left, right = rows[:, first - 1 : -2 : 2], rows[:, first + 1 :: 2]
        rows[:, first:-1:2] = (left + right) / 2
    return rows


def main(device: fw.device.Device, warps: int) -> None:
    """Smooth the rows of a file, and count how often a row was copied."""
    values = np.random.default_rng(1).random((ROWS, COLUMNS))
    program = fw.compile(SOURCE, device)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "rows.npy", values)
        with (
            fw.open(Path(folder) / "rows.npy", "r+", device=device, cache="64 KiB") as rows,
            fw.array.ShareTable(rows) as table,
        ):
            line_bytes = rows.cache.line_bytes
            threads = warps * (1 if device.kind == "cpu" else 32)
            buffers = device.allocate(threads * line_bytes)
            counts = [device.empty_array((1,), np.uint32) for _ in range(3)]
            program["smooth"](
                rows, table.kernel_handle, buffers, COLUMNS, ROUNDS, *counts, warps=warps
            )
            rows.wait()
            table.check()
            _, copies, failed = (int(count.copy_to_host()[0]) for count in counts)
            assert failed == 0
            assert (rows[:] == smoothed(values)).all()
            rows.flush()
            written = rows.stats.bytes_written // line_bytes
            buffers.close()
    assert copies == ROWS
    print(
        f"{device.name}: {threads} threads used {ROWS} rows: {copies} copies of a row, not "
        f"{threads * ROWS}, and {written} lines written"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cpu or cuda:N; default: the GPU")
    device = fw.device.resolve(parser.parse_args().device)
    if device.kind == "cpu":
        with fw.device.CpuDevice(threads=4) as four:
            main(four, 4)
    else:
        main(device, 16)
