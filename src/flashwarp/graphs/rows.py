"""`Rows`: places of a graph's lists, in device memory, for kernels that include `graph.cuh`."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import numpy as np

from flashwarp.array.array import Array
from flashwarp.device import CpuDevice
from flashwarp.device.layouts import fields_of
from flashwarp.endings import Closing
from flashwarp.errors import ArgumentError
from flashwarp.graphs.csr import CsrGraph

_ENTRY_BYTES = 4
# The work of one warp at a time: a line of 4 KiB. Of longer lines it is a part.
_CHUNK_BYTES_MAX = 4096

# Lines that the threads of the CPU device together ask for ahead of those they work on: a disk
# wants some tens of requests, and there are as few threads as cores.
_AHEAD_MAX = 64

# The share of the cache from which on a pass has replaced what the cache held. On Kronecker graphs
# of scale 18 to 22 anything from a quarter to a half does.
_MUCH = 1 / 4


class RowsStruct(ctypes.Structure):
    """Mirror of `fw::graph::rows`."""

    _fields_ = fields_of("graph_rows")


class Rows(Closing):
    """The offsets of a graph on a device: 8 bytes for each vertex and 4 for each chunk.

    Parameters
    ----------
    graph : CsrGraph
    neighbours : Array
        Its lists, as `CsrGraph.neighbours` opens them.
    ahead : int, optional
        How many chunks, of a line or 4 KiB of one, a thread of the CPU device requests before it
        needs them. A GPU has enough warps that wait. Default: enough for a disk, if the cache has
        room.
    """

    def __init__(self, graph: CsrGraph, neighbours: Array, ahead: int | None = None) -> None:
        if graph.entries == 0:
            raise ArgumentError("a graph without edges has no lists to visit")
        if neighbours.size != graph.entries:
            raise ArgumentError(
                f"the array has {neighbours.size} elements, the lists of the graph {graph.entries}"
            )
        device, cache = neighbours.device, neighbours.cache
        chunk = min(cache.line_bytes, _CHUNK_BYTES_MAX) // _ENTRY_BYTES
        chunks = -(-graph.entries // chunk)
        # The list with entry e is the last one that begins at e or before: lists without entries
        # begin where the next one does.
        starts = np.append(np.arange(chunks, dtype=np.int64) * chunk, graph.entries - 1)
        first = (np.searchsorted(graph.offsets, starts, side="right") - 1).astype(np.uint32)
        with ExitStack() as undo:
            offsets = undo.enter_context(device.allocate(graph.offsets.nbytes))
            device.upload(offsets.address, graph.offsets)
            firsts = undo.enter_context(device.allocate(first.nbytes))
            device.upload(firsts.address, first)
            self._owned = undo.pop_all()
        if ahead is None:
            ahead = 0  # a GPU has warps enough
            if isinstance(device, CpuDevice):
                # A quarter of the cache may be on its way.
                lines = min(_AHEAD_MAX, cache.set_count * cache.ways // 4)
                ahead = lines * (cache.line_bytes // _ENTRY_BYTES // chunk) // device.threads
        self.chunks = chunks
        self._neighbours = neighbours
        self._bytes_read = neighbours.stats.bytes_read
        self._handle = RowsStruct(
            offsets=offsets.address,
            first=firsts.address,
            vertices=graph.vertices,
            entries=graph.entries,
            chunks=chunks,
            chunk_log2=chunk.bit_length() - 1,
            ahead=ahead,
        )

    @property
    def handle(self) -> RowsStruct:
        """The argument of a kernel for a parameter of type `fw::graph::rows`.

        Read it at each launch: if a writer has opened the file meanwhile, kernels can no longer
        read the lists in place. Its `backwards` is the direction of the next pass, which should
        begin with the lines that the last pass left in the cache. See `turn`.
        """
        self._handle.in_place = self._neighbours.in_place or 0
        return self._handle

    def turn(self) -> None:
        """Choose the direction of the next pass; call it when a pass has ended.

        A pass that read little has left the cache as it was, so the next pass keeps the direction.
        After any other pass, the direction changes. Takes a few tenths of a millisecond: if passes
        are as short, flip `handle.backwards` after each instead.
        """
        cache, read = self._neighbours.cache, self._neighbours.stats.bytes_read
        if read - self._bytes_read > _MUCH * cache.set_count * cache.ways * cache.line_bytes:
            self._handle.backwards ^= 1
        self._bytes_read = read

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._owned.close()
