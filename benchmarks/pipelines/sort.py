"""An out-of-core merge sort (figures 10a and 11 of the CAM paper), by three kinds of I/O.

`examples/sort_file.py` does it with pipelines. Serial steps gather and scatter in the step. The
baseline has threads that read ahead into pinned memory and write behind. All compute the same.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.pipelines.base import Bench, example
from benchmarks.pipelines.host import Ahead, Behind, cut
from benchmarks.pipelines.lines import code_lines

__all__ = ["measure"]

_BLOCK_KEYS = 4096  # 16 KiB
_AT_A_TIME = 1 << 24
_MIX = 0x1E3779B97F4A7C15
_OF_LONGER, _SERIAL = 0.9, 1.5
_POSIX = 1.5  # pieces of 16 KiB
_PAPER = "1.5 of POSIX (CAM figure 10a)"


def measure(bench: Bench, keys: int, run: int, tile: int, storages: list[str]) -> None:
    """Sort keys in each storage; `run` and `tile` are numbers of keys."""
    for storage in storages:
        _Sort(bench, keys, run, tile, storage).measure()
    ours, posix = (
        code_lines(example("sort_file").sort),
        code_lines(_Sort.by_posix, _Sort._ahead, _Sort._behind),
    )
    bench.add(
        "sort: lines that read and write, ours", ours, "lines", ("POSIX baseline", posix),
        paper="510 of 644 (CAM table VI)",
    )  # fmt: skip


class _Sort:
    """Keys on one storage, and where they go."""

    def __init__(self, bench: Bench, keys: int, run: int, tile: int, storage: str) -> None:
        self.bench, self.storage = bench, storage
        blocks = max(4, keys // _BLOCK_KEYS)
        self.shape = (blocks, _BLOCK_KEYS)
        self.nbytes = 4 * blocks * _BLOCK_KEYS
        self.run = max(1, min(blocks, run // _BLOCK_KEYS))
        self.tile = max(1, min(self.run, tile // _BLOCK_KEYS))
        self.label = f"sort, {storage}"
        random = np.random.default_rng(bench.seed)
        self.data = np.empty(self.shape, np.int32)
        flat = self.data.reshape(-1)
        for first in range(0, len(flat), _AT_A_TIME):
            part = flat[first : first + _AT_A_TIME]
            part[:] = random.integers(-(1 << 31), 1 << 31, len(part), np.int32)
        self.wanted = self._sum(flat)
        self.paths = [bench.folder / "keys.bin", bench.folder / "sorted.bin"]
        self.memories: list[Any] = []

    # The storage, before and after.

    def fill(self) -> None:
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

    @contextlib.contextmanager
    def arrays(self) -> Iterator[list[fw.Array]]:
        """Open both."""
        with contextlib.ExitStack() as undo:
            made = []
            for number in (0, 1):
                settings: dict[str, Any] = {
                    "cache": min(64 << 20, self.nbytes // 4),
                    "device": self.bench.device,
                }
                source: Any = self.paths[number]
                if self.storage == "memory":
                    source = fw.storage.Memory(self.memories[number])
                else:
                    settings["o_direct"] = self.storage == "O_DIRECT"
                array = fw.open(source, "r+", np.int32, self.shape, **settings)
                made.append(undo.enter_context(array))
            yield made

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
        ahead, behind = self._ahead(source, self.run), self._behind(source, self.run)
        tiles = [
            range(k, min(k + self.run, self.shape[0])) for k in range(0, self.shape[0], self.run)
        ]
        for tile, rows in ahead.iterate(tiles):
            run = torch.sort(tile.reshape(-1)).values.view_as(tile)
            firsts.append(run[:, 0].clone())
            behind.write(run, rows)
        behind.close()
        merge = example("sort_file").Merge(torch.cat(firsts).cpu().numpy(), self.run, self.tile)
        ahead = self._ahead(source, max(map(len, merge.batches)))
        behind = self._behind(target, self.tile)
        for blocks, _ in ahead.iterate(merge.batches):
            for rows, tile in merge.step(blocks):
                behind.write(tile, rows)
        behind.close()
        for file in self.files:
            os.fdatasync(file)

    def _ahead(self, file: int, rows: int) -> Ahead:
        loops, width = self.bench.loops, 4 * _BLOCK_KEYS

        def fill(into: Any, blocks: Any) -> int:
            if isinstance(blocks, range):
                offsets, nbytes = cut(blocks.start * width, len(blocks) * width)
            else:
                offsets, nbytes = blocks * width, width
            loops.read(file, into, offsets, nbytes)
            return len(blocks)

        torch = self.bench.torch
        return Ahead(torch, self.bench.place, (rows, _BLOCK_KEYS), torch.int32, fill)

    def _behind(self, file: int, rows: int) -> Behind:
        loops, width = self.bench.loops, 4 * _BLOCK_KEYS

        def drain(data: Any, where: range) -> None:
            loops.write(file, data, *cut(where.start * width, len(where) * width))

        torch = self.bench.torch
        return Behind(torch, self.bench.place, (rows, _BLOCK_KEYS), torch.int32, drain)

    # What they took.

    def measure(self) -> None:
        """Sort in all ways, once each, and move without sorting beside each: each begins afresh."""
        ways: dict[str, Callable[[], None]] = {"ours": self.ours, "serial": self.serial}
        if self.storage != "memory":
            ways["POSIX baseline"] = self.by_posix
        seconds, right, moving = {}, {}, []
        computing = self._computing()
        for name, way in ways.items():
            moving.append(self._seconds(self.moving))
            seconds[name] = self._seconds(way)
            right[name] = self.right()
        self._tell(seconds, right, computing, min(moving))
        for path in self.paths:
            path.unlink(missing_ok=True)

    def _seconds(self, way: Callable[[], None]) -> float:
        # Nothing of the way before is around while this one is timed.
        gc.collect()
        self.fill()
        with contextlib.ExitStack() as undo:
            if way == self.by_posix:
                self._open_files(undo)
            else:
                self.opened = undo.enter_context(self.arrays())
            return self.bench.cost(way).seconds

    def _open_files(self, undo: contextlib.ExitStack) -> None:
        flags = os.O_RDWR | (os.O_DIRECT if self.storage == "O_DIRECT" else 0)
        self.files = [os.open(path, flags) for path in self.paths]
        for file in self.files:
            undo.callback(os.close, file)

    def _computing(self) -> float:
        """Return the seconds of all sorts, with data that is there."""
        torch, bench = self.bench.torch, self.bench
        keys = torch.randint(-(1 << 31), 1 << 31, (self.run * _BLOCK_KEYS,), device=bench.place)
        keys = keys.int()
        runs = -(-self.shape[0] // self.run)
        pool = keys[: min(len(keys), (runs + self.tile) * _BLOCK_KEYS)]
        each = bench.median_cost(lambda: torch.sort(keys)).seconds
        merged = bench.median_cost(lambda: torch.sort(pool)).seconds
        return runs * each + -(-self.shape[0] // self.tile) * merged

    def _tell(
        self, seconds: dict[str, float], right: dict[str, bool], computing: float, moving: float
    ) -> None:
        keys = self.nbytes / 4e6
        rate = {name: keys / spent for name, spent in seconds.items()}
        note = (
            f"{4 * self.nbytes / seconds['ours'] / 1e9:.3g} GB/s read and written; of "
            f"{seconds['ours']:.3g} s sorts alone take {computing:.3g} s, moving {moving:.3g} s"
        )
        longer, comparable = max(computing, moving), 0.5 < computing / moving < 2
        targets = {"serial": _SERIAL if comparable else 0.0, "POSIX baseline": _POSIX}
        for name, target in targets.items():
            if name not in rate:
                continue
            self.bench.add(
                f"{self.label}: ours", rate["ours"], "M keys/s", (name, rate[name]), target,
                right["ours"] and right[name], paper=_PAPER if name != "serial" else "", note=note,
            )  # fmt: skip
        self.bench.add(
            f"{self.label}: ours", rate["ours"], "M keys/s",
            ("the longer of sorting and moving", keys / longer), _OF_LONGER, right["ours"],
        )  # fmt: skip
