"""An out-of-core merge sort (figures 10a and 11 of the CAM paper), by three kinds of I/O.

`examples/sort_file.py` does it with pipelines. Serial steps gather and scatter in the step. The
baseline has threads that read ahead into pinned memory and write behind. All compute the same.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.pipelines.base import Bench, example
from benchmarks.pipelines.job import Job

__all__ = ["measure"]

_BLOCK_KEYS = 4096  # 16 KiB
_AT_A_TIME = 1 << 24
_MIX = 0x1E3779B97F4A7C15
_PAPER_LINES = "510 of 644 (CAM table VI)"


def measure(bench: Bench, keys: int, run: int, tile: int, storages: list[str]) -> None:
    """Sort keys in each storage; `run` and `tile` are numbers of keys."""
    for storage in storages:
        _Sort(bench, keys, run, tile, storage).measure()
    _Sort.count_lines(bench, "sort", example("sort_file").sort, _PAPER_LINES)


class _Sort(Job):
    """Keys on one storage, and where they go."""

    computes, unit, paper = "sorting", "M keys/s", "1.5 of POSIX (CAM figure 10a)"
    posix = 1.5  # pieces of 16 KiB
    modes = ("r+", "r+")

    def __init__(self, bench: Bench, keys: int, run: int, tile: int, storage: str) -> None:
        blocks = max(4, keys // _BLOCK_KEYS)
        self.nbytes = 4 * blocks * _BLOCK_KEYS
        paths = [bench.folder / "keys.bin", bench.folder / "sorted.bin"]
        shape, cache = (blocks, _BLOCK_KEYS), min(64 << 20, self.nbytes // 4)
        super().__init__(bench, storage, f"sort, {storage}", paths, shape, np.int32, cache)
        self.run = max(1, min(blocks, run // _BLOCK_KEYS))
        self.tile = max(1, min(self.run, tile // _BLOCK_KEYS))
        random = np.random.default_rng(bench.seed)
        self.data = np.empty(self.shape, np.int32)
        flat = self.data.reshape(-1)
        for first in range(0, len(flat), _AT_A_TIME):
            part = flat[first : first + _AT_A_TIME]
            part[:] = random.integers(-(1 << 31), 1 << 31, len(part), np.int32)
        self.wanted = self._sum(flat)

    # The storage, before and after.

    def reset(self) -> None:
        """Store the keys anew, and zeros where they go."""
        if self.storage == "memory":
            if not self.memories:
                self.memories = [self.data.copy(), np.zeros_like(self.data)]
            else:
                self.memories[0][:] = self.data
                self.memories[1][:] = 0
            return
        with self.paths[0].open("wb") as file:
            file.write(self.data.data)
            os.fsync(file.fileno())
        with self.paths[1].open("wb") as file:
            file.write(bytes(1 << 20))
            file.truncate(self.nbytes)
            os.fsync(file.fileno())

    def right(self) -> bool:
        """Tell whether the keys ascend, and are those that were there."""
        kept, total, before = True, 0, np.int32(-(1 << 31))
        flat = self.memories[1].reshape(-1) if self.memories else None
        for first in range(0, self.nbytes // 4, _AT_A_TIME):
            count = min(_AT_A_TIME, self.nbytes // 4 - first)
            if flat is None:
                part = np.fromfile(self.paths[1], np.int32, count, offset=4 * first)
            else:
                part = flat[first : first + count]
            kept = kept and bool(part[0] >= before and (part[1:] >= part[:-1]).all())
            total, before = total + self._sum(part), part[-1]
        return kept and total % (1 << 64) == self.wanted % (1 << 64)

    def _sum(self, keys: Any) -> int:
        """Return a number of the set of keys: a sum of what each is mixed to."""
        torch, total = self.bench.torch, 0
        for first in range(0, len(keys), _AT_A_TIME):
            part = torch.from_numpy(keys[first : first + _AT_A_TIME])
            mixed = part.to(self.bench.place, torch.int64) * _MIX
            mixed ^= mixed >> 29
            total += int((mixed * _MIX).sum())
        return total

    # Ways.

    def ours(self) -> None:
        """Sort by pipelines."""
        keys, target = self.opened
        example("sort_file").sort(keys, target, run_rows=self.run, tile_rows=self.tile)

    def serial(self) -> None:
        """Gather and scatter in the step."""
        torch, (keys, target) = self.bench.torch, self.opened
        firsts = []
        for first in range(0, len(keys), self.run):
            rows = torch.arange(first, min(first + self.run, len(keys)), device=self.bench.place)
            tile = self.bench.operators.gather(keys, rows)
            run = torch.sort(tile.reshape(-1)).values.view_as(tile)
            firsts.append(run[:, 0].clone())
            self.bench.operators.scatter(keys, rows, run)
        keys.flush()
        merge = example("sort_file").Merge(torch.cat(firsts).cpu().numpy(), self.run, self.tile)
        for batch in merge.batches:
            ids = torch.as_tensor(batch, device=self.bench.place)
            for rows, tile in merge.step(self.bench.operators.gather(keys, ids)):
                places = torch.arange(rows.start, rows.stop, device=self.bench.place)
                self.bench.operators.scatter(target, places, tile.contiguous())
        target.flush()

    def moving(self) -> None:
        """Read and write as `ours` does, and sort nothing."""
        torch, (keys, target) = self.bench.torch, self.opened
        firsts = []
        for tile in fw.Pipeline.tiles(keys, self.run, writable=True, library="torch"):
            firsts.append(tile[:, 0].clone())
        merge = example("sort_file").Merge(torch.cat(firsts).cpu().numpy(), self.run, self.tile)
        most, done = max(map(len, merge.batches)), 0
        with (
            fw.Pipeline(keys, most, library="torch") as reading,
            fw.Pipeline(target, most, library="torch") as writing,
        ):
            for blocks, _ in reading.iterate(merge.batches):
                writing.write_back(range(done, done + len(blocks)), blocks)
                done += len(blocks)
            writing.flush()

    def by_posix(self) -> None:
        """Read ahead and write behind by threads."""
        torch, (source, target) = self.bench.torch, self.files
        firsts = []
        ahead, behind = self.ahead(source, self.run), self.behind(source, self.run)
        tiles = [
            range(k, min(k + self.run, self.shape[0])) for k in range(0, self.shape[0], self.run)
        ]
        for tile, rows in ahead.iterate(tiles):
            run = torch.sort(tile.reshape(-1)).values.view_as(tile)
            firsts.append(run[:, 0].clone())
            behind.write(run, rows)
        behind.close()
        merge = example("sort_file").Merge(torch.cat(firsts).cpu().numpy(), self.run, self.tile)
        ahead = self.ahead(source, max(map(len, merge.batches)))
        behind = self.behind(target, self.tile)
        for blocks, _ in ahead.iterate(merge.batches):
            for rows, tile in merge.step(blocks):
                behind.write(tile, rows)
        behind.close()
        for file in self.files:
            os.fdatasync(file)

    def computing(self) -> float:
        """Return the seconds of all sorts, with data that is there."""
        torch, bench = self.bench.torch, self.bench
        keys = torch.randint(-(1 << 31), 1 << 31, (self.run * _BLOCK_KEYS,), device=bench.place)
        keys = keys.int()
        runs = -(-self.shape[0] // self.run)
        pool = keys[: min(len(keys), (runs + self.tile) * _BLOCK_KEYS)]
        each = bench.median_cost(lambda: torch.sort(keys)).seconds
        merged = bench.median_cost(lambda: torch.sort(pool)).seconds
        return runs * each + -(-self.shape[0] // self.tile) * merged

    def work(self) -> tuple[float, int]:
        """Return millions of keys, and the bytes of two passes."""
        return self.nbytes / 4e6, 4 * self.nbytes
