"""An application on one storage, done once each by pipelines, by serial steps and by threads.

Serial steps gather and scatter in the step. The baseline has threads that read ahead into pinned
memory and write behind. Beside each way the same bytes are moved without computing.
"""

from __future__ import annotations

import contextlib
import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

import flashwarp as fw
from benchmarks.pipelines.base import Bench
from benchmarks.pipelines.host import Ahead, Behind, cut
from benchmarks.pipelines.lines import code_lines

__all__ = ["Job"]

_OF_LONGER, _SERIAL = 0.9, 1.5


class Job(ABC):
    """Arrays of one dtype on one storage, of which some are written, and the ways to do it.

    Attributes
    ----------
    paths : list of Path
        Where the arrays are, if they are in files; `memories` has them otherwise.
    opened, files : list
        The arrays of the way that runs, or the files of the baseline.
    """

    computes: ClassVar[str]
    unit: ClassVar[str]
    posix: ClassVar[float]
    """The least ratio to the baseline that this project accepts."""
    paper: ClassVar[str]
    modes: ClassVar[tuple[Any, ...]]
    """How each array is opened."""
    memories: list[npt.NDArray[Any]]
    opened: list[fw.Array]
    files: list[int]

    def __init__(
        self, bench: Bench, storage: str, label: str, paths: list[Path], shape: tuple[int, int],
        dtype: npt.DTypeLike, cache: int,
    ) -> None:  # fmt: skip
        self.bench, self.storage, self.label, self.paths = bench, storage, label, paths
        self.shape, self.dtype, self.cache = shape, np.dtype(dtype), cache
        self.memories = []

    @abstractmethod
    def reset(self) -> None:
        """Store the inputs, and nothing where results go."""

    @abstractmethod
    def right(self) -> bool:
        """Return whether the results are what they should be."""

    @abstractmethod
    def ours(self) -> None:
        """Do it by pipelines."""

    @abstractmethod
    def serial(self) -> None:
        """Gather and scatter in the step."""

    @abstractmethod
    def moving(self) -> None:
        """Read and write as `ours` does, and compute nothing."""

    @abstractmethod
    def by_posix(self) -> None:
        """Read ahead and write behind by threads."""

    @abstractmethod
    def computing(self) -> float:
        """Return the seconds of all computation, with data that is there."""

    @abstractmethod
    def work(self) -> tuple[float, int]:
        """Return the work in units, and the bytes that are read and written."""

    def measure(self) -> None:
        """Do it in all ways, once each, and move beside each: each begins afresh."""
        ways: dict[str, Callable[[], None]] = {"ours": self.ours, "serial": self.serial}
        if self.storage != "memory":
            ways["POSIX baseline"] = self.by_posix
        seconds, right, moving = {}, {}, []
        computing = self.computing()
        for name, way in ways.items():
            moving.append(self._seconds(self.moving))
            seconds[name] = self._seconds(way)
            right[name] = self.right()
        self._tell(seconds, right, computing, min(moving))
        for path in self.paths:
            path.unlink(missing_ok=True)

    @classmethod
    def count_lines(cls, bench: Bench, name: str, ours: Callable[..., Any], paper: str) -> None:
        """Add the lines that read and write, ours beside the baseline's."""
        posix = code_lines(cls.by_posix, Job.ahead, Job.behind)
        what = f"{name}: lines that read and write, ours"
        bench.add(what, code_lines(ours), "lines", ("POSIX baseline", posix), paper=paper)

    def ahead(self, file: int, rows: int) -> Ahead:
        """Return threads that read batches of as many rows."""
        loops, width = self.bench.loops, self.shape[1] * self.dtype.itemsize

        def fill(into: Any, which: Any) -> int:
            if isinstance(which, range):
                offsets, nbytes = cut(which.start * width, len(which) * width)
            else:
                offsets, nbytes = which * width, width
            loops.read(file, into, offsets, nbytes)
            return len(which)

        return Ahead(self.bench.torch, self.bench.place, (rows, self.shape[1]), self._kind, fill)

    def behind(self, file: int, rows: int) -> Behind:
        """Return a thread that writes batches of as many rows."""
        loops, width = self.bench.loops, self.shape[1] * self.dtype.itemsize

        def drain(data: Any, which: range) -> None:
            loops.write(file, data, *cut(which.start * width, len(which) * width))

        return Behind(self.bench.torch, self.bench.place, (rows, self.shape[1]), self._kind, drain)

    @property
    def _kind(self) -> Any:
        return getattr(self.bench.torch, self.dtype.name)

    @contextlib.contextmanager
    def _arrays(self) -> Iterator[list[fw.Array]]:
        settings: dict[str, Any] = {"cache": self.cache, "device": self.bench.device}
        sources: list[Any] = list(map(fw.storage.Memory, self.memories))
        if self.storage != "memory":
            sources, settings["o_direct"] = list(self.paths), self.storage == "O_DIRECT"
        with contextlib.ExitStack() as undo:
            yield [
                undo.enter_context(fw.open(source, mode, self.dtype, self.shape, **settings))
                for source, mode in zip(sources, self.modes, strict=True)
            ]

    def _seconds(self, way: Callable[[], None]) -> float:
        # Nothing of the way before is around while this one is timed.
        gc.collect()
        self.reset()
        with contextlib.ExitStack() as undo:
            if way == self.by_posix:
                flags = os.O_RDWR | (os.O_DIRECT if self.storage == "O_DIRECT" else 0)
                self.files = [os.open(path, flags) for path in self.paths]
                for file in self.files:
                    undo.callback(os.close, file)
            else:
                self.opened = undo.enter_context(self._arrays())
            return self.bench.cost(way).seconds

    def _tell(
        self, seconds: dict[str, float], right: dict[str, bool], computing: float, moving: float
    ) -> None:
        work, moved = self.work()
        ours = work / seconds["ours"]
        note = (
            f"{moved / seconds['ours'] / 1e9:.3g} GB/s read and written; of "
            f"{seconds['ours']:.3g} s {self.computes} alone takes {computing:.3g} s, moving "
            f"{moving:.3g} s"
        )
        longer, comparable = max(computing, moving), 0.5 < computing / moving < 2
        targets = {"serial": _SERIAL if comparable else 0.0, "POSIX baseline": self.posix}
        for name, target in targets.items():
            if name in seconds:
                self.bench.add(
                    f"{self.label}: ours", ours, self.unit, (name, work / seconds[name]), target,
                    right["ours"] and right[name], note=note,
                    paper=self.paper if name != "serial" else "",
                )  # fmt: skip
        against = f"the longer of {self.computes} and moving", work / longer
        self.bench.add(f"{self.label}: ours", ours, self.unit, against, _OF_LONGER, right["ours"])
