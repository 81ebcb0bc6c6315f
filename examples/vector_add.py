"""Add two vectors in files that are larger than the cache: c = a + b.

    python examples/vector_add.py --elements 100000000

A warp takes one line of each array. It stores a line of `c` whole, so the line is not read first.
The write-back of the line begins at once, while other warps read on.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import flashwarp as fw

KERNEL = """
#include "flashwarp/array.cuh"

FW_KERNEL add(const FW_GRID_CONSTANT fw::array<const double> a,
              const FW_GRID_CONSTANT fw::array<const double> b,
              const FW_GRID_CONSTANT fw::array<double> c, double* scratch, uint64_t line) {
  using namespace fw;
  double* sums = scratch + warp::index() * line;
  cursor<const double> from_a(a), from_b(b);
  for (uint64_t first = warp::index() * line; first < c.size(); first += warp::count() * line) {
    // The lines for the next round arrive while this round adds.
    a.prefetch(first + warp::count() * line);
    b.prefetch(first + warp::count() * line);
    const uint64_t n = c.size() - first < line ? c.size() - first : line;
    for (uint64_t i = warp::lane(); i < n; i += warp::kWarpWidth) {
      sums[i] = from_a[first + i] + from_b[first + i];
    }
    warp::sync(warp::kFullMask);
    warp::write(c, first, n, sums);
    c.write_back(first, n);
  }
}
"""


def add(a, b, c):
    """Compute c = a + b; the three arrays share a cache."""
    device, cache = c.device, c.cache
    line = cache.line_bytes // 8
    # One line for each warp of the launch.
    warps = min(-(-c.size // line), 4096)
    with device.allocate(warps * cache.line_bytes) as scratch:
        fw.compile(KERNEL, device)["add"](a, b, c, scratch, line, warps=warps)
        for array in (a, b, c):
            array.wait()  # waits; raises if a transfer failed
    c.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 18)
    parser.add_argument("--device", help="cpu or cuda:N; default: the GPU")
    parser.add_argument("--cache", default="1 MiB")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        folder, n = Path(temporary), options.elements
        np.save(folder / "a.npy", np.arange(n, dtype=np.float64))
        np.save(folder / "b.npy", np.full(n, 0.5))
        with (
            fw.Cache(options.cache, device=options.device) as cache,
            fw.open(folder / "a.npy", cache=cache) as a,
            fw.open(folder / "b.npy", cache=cache) as b,
            fw.create(folder / "c.npy", "float64", n, cache=cache) as c,
        ):
            add(a, b, c)
            stats = c.stats
        right = np.array_equal(np.load(folder / "c.npy"), np.arange(n) + 0.5)
    print(f"{n} sums, {'all right' if right else 'WRONG'}")
    print(f"of c: read {stats.bytes_read} bytes, wrote {stats.bytes_written} of {8 * n}")
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
