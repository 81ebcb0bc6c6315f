"""Edges to compressed sparse rows on disk, in bounded memory.

Each edge becomes a 64-bit key, vertex above neighbour. Keys are dealt to buckets, which are ranges
of vertices, in memory up to a budget and in files beyond it; a bucket is sorted, freed of loops and
duplicates, and written behind the one before. All steps use a thread a core.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from flashwarp.config import SIZE_MAX, integer
from flashwarp.device import CpuDevice
from flashwarp.errors import ArgumentError, FileFormatError
from flashwarp.graphs.csr import (
    NEIGHBOURS,
    OFFSETS,
    WEIGHTS,
    CsrGraph,
    check_replaceable,
    publish,
    save_labels,
)
from flashwarp.graphs.edges import VERTICES_MAX, Edges, EdgeSource, parallel_map
from flashwarp.storage import files, npy
from flashwarp.storage.progress import counting

MEMORY_BYTES = 2 << 30
"""Keys held in memory before they go to files. Sorting takes twice a bucket more."""

_BUCKETS = 64
_RECORD = np.dtype([("key", "<u8"), ("weight", "<f4")])
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def write_csr(source: EdgeSource, folder: Path, memory_bytes: int = MEMORY_BYTES) -> CsrGraph:
    """Write the graph of these edges to `folder`, which is made if it is not there.

    Lists are sorted, without loops; of duplicate edges the first counts. With
    `source.symmetric`, every edge is stored in both directions. A graph that is there stays until
    the new one is written.

    Raises
    ------
    ExistingFileError
        For a folder with files of these names that are no graph.
    FileFormatError
        For an edge to a vertex outside the graph, and for so many vertices that their offsets
        exceed the free memory.
    """
    if not 1 <= source.vertices <= VERTICES_MAX:
        raise ArgumentError(f"{source.vertices} vertices: 1 to {VERTICES_MAX} fit into 4 bytes")
    memory_bytes = integer("memory_bytes", memory_bytes, 1, SIZE_MAX)
    # Degrees, and the offsets that they add up to.
    needed, free = 16 * (source.vertices + 1), CpuDevice(1).memory_info().free_bytes
    if needed > free:
        raise FileFormatError(
            f"{source.vertices} vertices need {needed} bytes of memory, and {free} are free: "
            "number the vertices without gaps"
        )
    check_replaceable(folder)
    with files.writing(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    dtype: np.dtype[Any] = _RECORD if source.weighted else np.dtype("<u8")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
        buckets = _Buckets(source, dtype, Path(scratch), memory_bytes)
        entries = source.count * (1 + source.symmetric)
        count = counting("reading edges", entries, "entries")
        for pieces in parallel_map(lambda edges: _deal(edges, source, buckets), source.edges):
            buckets.add(pieces)
            count(sum(map(len, pieces)))
        count(0)
        buckets.seal()
        offsets = _write_lists(buckets, source, Path(scratch))
        with Path(scratch, OFFSETS).open("wb") as file:
            file.write(npy.header(offsets.shape, offsets.dtype))
            offsets.tofile(file)
        if source.labels is not None:
            save_labels(Path(scratch), source.labels)
        publish(Path(scratch), folder)
    return CsrGraph(folder, offsets, source.weighted, source.labels)


class _Buckets:
    """Records by range of vertices: in memory until there are too many, in files from then on."""

    def __init__(
        self, source: EdgeSource, dtype: np.dtype[Any], scratch: Path, memory_bytes: int
    ) -> None:
        self.dtype = dtype
        self.first_vertices = _bounds(source)
        count = len(self.first_vertices) - 1
        self._scratch = scratch
        self._budget = memory_bytes
        self._held: list[list[NDArray[Any]]] = [[] for _ in range(count)]
        self._held_bytes = 0
        self._spilled = False

    def __len__(self) -> int:
        return len(self._held)

    def add(self, pieces: list[NDArray[Any]]) -> None:
        """Take one piece for each bucket."""
        for held, piece in zip(self._held, pieces, strict=True):
            held.append(piece)
            self._held_bytes += piece.nbytes
        if self._held_bytes > self._budget:
            self._spill()

    def _spill(self) -> None:
        for number, held in enumerate(self._held):
            with self._path(number).open("ab") as file:
                for piece in held:
                    piece.tofile(file)
            held.clear()
        self._held_bytes = 0
        self._spilled = True

    def seal(self) -> None:
        """Say that all records are here."""
        if self._spilled:
            self._spill()

    def take(self, number: int) -> NDArray[Any]:
        """Return all records of a bucket, and keep none of it in memory."""
        if self._spilled:
            if self._path(number).stat().st_size == 0:
                return np.empty(0, self.dtype)
            # Sorted in place in its file: a bucket may be larger than memory.
            return np.memmap(self._path(number), dtype=self.dtype, mode="r+")
        held, self._held[number] = self._held[number], []
        return np.concatenate(held) if held else np.empty(0, self.dtype)

    def _path(self, number: int) -> Path:
        return self._scratch / str(number)


def _bounds(source: EdgeSource) -> NDArray[np.uint64]:
    """Return the first vertex of each bucket, and the number of vertices."""
    count = min(_BUCKETS, source.vertices)
    if source.degrees is None:
        return (
            np.arange(count + 1, dtype=np.uint64) * np.uint64(source.vertices) // np.uint64(count)
        )
    # As many edges in each. A bucket may be without vertices, beside one that has a hub.
    before = np.cumsum(source.degrees) - source.degrees
    wanted = np.arange(1, count) * int(source.degrees.sum()) // count
    cuts = np.searchsorted(before, wanted)
    return np.concatenate([[0], cuts, [source.vertices]]).astype(np.uint64)


def _deal(edges: Edges, source: EdgeSource, buckets: _Buckets) -> list[NDArray[Any]]:
    """Make the records of some edges, cut at the ends of the buckets."""
    for ends in (edges.source, edges.target):
        if len(ends) and int(ends.max()) >= source.vertices:
            raise FileFormatError(
                f"an edge has vertex {int(ends.max())}, and there are {source.vertices} vertices"
            )
    a, b = edges.source.astype(np.uint64), edges.target.astype(np.uint64)
    keys = (a << _SHIFT) | b
    if source.symmetric:
        keys = np.concatenate([keys, (b << _SHIFT) | a])
    records: NDArray[Any] = keys
    if edges.weight is not None:
        records = np.empty(len(keys), _RECORD)
        records["key"] = keys
        records["weight"] = np.tile(edges.weight, 1 + source.symmetric)
    records, keys = _sorted(records)
    cuts = np.searchsorted(keys, buckets.first_vertices[1:-1] << _SHIFT)
    return np.split(records, cuts)


def _write_lists(buckets: _Buckets, source: EdgeSource, folder: Path) -> NDArray[np.int64]:
    """Write neighbours and weights bucket by bucket; return the offsets."""
    degrees = np.zeros(source.vertices + 1, np.int64)
    entries = 0
    with ExitStack() as stack:
        lists = stack.enter_context((folder / NEIGHBOURS).open("wb"))
        lists.write(npy.header((0,), np.uint32))
        weights: BinaryIO | None = None
        if source.weighted:
            weights = stack.enter_context((folder / WEIGHTS).open("wb"))
            weights.write(npy.header((0,), np.float32))
        lists_of = parallel_map(lambda n: _without_repeats(buckets.take(n)), range(len(buckets)))
        count = counting("sorting them", len(buckets), "parts")
        for number, records in enumerate(lists_of):
            count(1)
            keys = records["key"] if weights is not None else records
            first, last = (int(v) for v in buckets.first_vertices[number : number + 2])
            owners = (keys >> _SHIFT).astype(np.int64) - first
            degrees[first + 1 : last + 1] = np.bincount(owners, minlength=last - first)
            (keys & _LOW).astype(np.uint32).tofile(lists)
            if weights is not None:
                np.ascontiguousarray(records["weight"]).tofile(weights)
            entries += len(keys)
        # The headers say how much there is, which is known now.
        for file, dtype in ((lists, np.uint32), (weights, np.float32)):
            if file is not None:
                file.seek(0)
                file.write(npy.header((entries,), dtype))
    return np.cumsum(degrees)


def _sorted(records: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.uint64]]:
    """Sort records by key; return them, and their keys."""
    if records.dtype == _RECORD:
        records = records[np.argsort(records["key"], kind="stable")]
        return records, records["key"]
    records.sort()
    return records, records


def _without_repeats(records: NDArray[Any]) -> NDArray[Any]:
    """Sort records by key; drop loops, and all but the first of equal keys."""
    records, keys = _sorted(records)
    keep = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=keep[1:])
    keep &= (keys >> _SHIFT) != (keys & _LOW)
    return records[keep]
