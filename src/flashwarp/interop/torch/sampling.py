"""`NeighborSampler`: mini-batches of a graph that stays in its files.

Lists are read through two arrays, so the graph may be larger than the memory of the GPU. Kernels of
`sampling.cu` sample and number, on the device of the arrays; ids and counts stay there. A sample
waits for its stream once, to learn how many vertices and edges it has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.utils.data

from flashwarp.array.array import Array
from flashwarp.config import SIZE_MAX, flag, integer
from flashwarp.endings import Closing
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    CaptureError,
    ClosedError,
    DtypeError,
    IndexDtypeError,
)
from flashwarp.interop.torch.operators import check_plain, torch_device
from flashwarp.launch.launcher import deferred_by
from flashwarp.program.compiling import Kernel, Program
from flashwarp.program.compiling import compile as compile_kernels

_SLOTS_MAX = (1 << 31) - 1
_FANOUT_MAX = 1024
_ALL = -1
_OFFSETS_AT_ONCE = 1 << 22
_COLUMNS = {"uint32": "uint32_t", "int32": "int32_t", "uint64": "uint64_t", "int64": "int64_t"}
_OFFSETS = {"int64": "int64_t", "uint64": "uint64_t"}
_FREE = -1


class Graph(Protocol):
    """What a sampler needs of `flashwarp.graphs.CsrGraph`."""

    labels: Any

    def neighbours(self, **options: Any) -> Array:
        """Open the lists."""

    def list_offsets(self, **options: Any) -> Array:
        """Open the offsets of the lists."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Sampled neighbourhoods of some seeds, as PyG's loaders return them.

    Attributes
    ----------
    nodes : torch.Tensor
        Vertices, int64: the seeds in their order, then what each hop has found, each vertex once.
    edge_index : torch.Tensor
        Two rows, int64: places in `nodes` of a neighbour, and of the vertex in whose list it is.
        Messages flow along them towards the seeds.
    num_sampled_nodes : tuple of int
        How many vertices are seeds, and how many each hop has found.
    num_sampled_edges : tuple of int
        Edges of each hop, in the order of `edge_index`.
    edge_ids : torch.Tensor or None
        For ``edge_ids=True``: the place of each edge among the neighbours of the graph, int64.
    """

    nodes: torch.Tensor
    edge_index: torch.Tensor
    num_sampled_nodes: tuple[int, ...]
    num_sampled_edges: tuple[int, ...]
    edge_ids: torch.Tensor | None = None

    @property
    def batch_size(self) -> int:
        """How many seeds there are; they are ``nodes[:batch_size]``."""
        return self.num_sampled_nodes[0]

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the tensors until the present work of another stream is done."""
        for tensor in (self.nodes, self.edge_index, self.edge_ids):
            if tensor is not None:
                tensor.record_stream(stream)


class NeighborSampler(Closing):
    """Uniform samples of neighbours, hop by hop, from a graph that stays in its files.

    Parameters
    ----------
    graph : flashwarp.graphs.CsrGraph, or (Array, Array)
        A graph, whose files the sampler opens and closes; or your own arrays of offsets and
        neighbours. The list of vertex v is ``neighbours[offsets[v]:offsets[v + 1]]``.
    fanouts : sequence of int
        For each hop, how many neighbours of a vertex are sampled, from 1 to 1024. A list that is
        not longer is taken whole. -1: all lists are; then memory for the longest list is taken for
        each vertex of the hop, and the sampler reads all offsets once, when it is made.
    seed : int
        Of the random numbers. The same seed and number of a sample give the same sample, on a GPU
        and on the CPU device.
    edge_ids : bool
        Whether samples say which entries of the lists their edges are, as features of edges need.
    **options
        For a graph: options of `flashwarp.open` for its lists, such as ``device=`` and ``cache=``.

    Raises
    ------
    ArgumentError
        For fan-outs that make no sense; for a graph whose vertices were numbered by degree, because
        ids would not be the user's labels: give ``(graph.list_offsets(), graph.neighbours())`` to
        sample by number.
    DtypeError
        For arrays that hold no integers.

    Notes
    -----
    Every set of `fanout` entries of a list has the same chance, independent of all other lists.
    Each vertex is sampled once, in the hop after the one that has found it, as in PyG.

    `sample` works on torch's current stream, and waits for it once, at its end, because torch must
    know the sizes of its tensors. On a stream with other work it would wait for that, too:
    `iterate` samples on a stream of its own while the GPU trains. A sample cannot be captured into
    a CUDA graph.

    If the cache of the lists is smaller than they are, and a GPU may read the file in place, it
    reads single entries past the cache: a line of 4 KiB costs the link more than it saves.

    Examples
    --------
    >>> import tempfile, torch, flashwarp as fw, flashwarp.torch
    >>> from flashwarp import graphs
    >>> graph = graphs.load("kron:8", tempfile.mkdtemp())
    >>> with fw.torch.NeighborSampler(graph, (5, 3), device="cpu") as sampler:
    ...     sample = sampler.sample(torch.tensor([3, 141, 59]))
    >>> sample.nodes[:sample.batch_size].tolist(), sample.edge_index.shape[0]
    ([3, 141, 59], 2)
    """

    def __init__(
        self, graph: Graph | tuple[Array, Array], fanouts: Iterable[int], *, seed: int = 0,
        edge_ids: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self._asked = self.fanouts = _fanouts(fanouts)
        self.edge_ids = flag("edge_ids", edge_ids)
        self.seed = integer("seed", seed, 0, SIZE_MAX)
        self._numbers = itertools.count()
        self._program: Program | None = None
        self._owned = not isinstance(graph, tuple)
        self.offsets, self.neighbours = _arrays_of(graph, options)
        try:
            self._check_arrays()
            if _ALL in self._asked:
                longest = max(1, self._longest())
                self.fanouts = tuple(longest if each == _ALL else each for each in self._asked)
        except BaseException:
            self.close()
            raise
        self.closed = False

    def _check_arrays(self) -> None:
        offsets, neighbours = self.offsets, self.neighbours
        for name, array, known in (
            ("offsets", offsets, _OFFSETS), ("neighbours", neighbours, _COLUMNS),
        ):  # fmt: skip
            if array.dtype.name not in known or not array.dtype.isnative:
                raise DtypeError(f"{name} have dtype {array.dtype}, not one of {', '.join(known)}")
            if array.ndim != 1:
                raise ArgumentError(f"{name} have shape {array.shape}: give an array of one axis")
        if len(offsets) == 0:
            raise ArgumentError("offsets are empty: they have one element more than vertices")
        if offsets.device is not neighbours.device:
            raise ArgumentError(
                f"offsets are on {offsets.device.name} and neighbours on {neighbours.device.name}: "
                "open both on one device"
            )
        first, last = offsets[0], offsets[-1]
        if first != 0 or last != len(neighbours):
            raise ArgumentError(
                f"offsets run from {first} to {last}, and there are {len(neighbours)} neighbours: "
                "give (offsets, neighbours) of one graph, in this order"
            )

    def _longest(self) -> int:
        """Return the length of the longest list, by a pass over the offsets."""
        firsts = range(0, self.vertices, _OFFSETS_AT_ONCE)
        blocks = (self.offsets[first : first + _OFFSETS_AT_ONCE + 1] for first in firsts)
        return max((int(np.diff(np.asarray(each)).max()) for each in blocks), default=0)

    @property
    def vertices(self) -> int:
        """Number of vertices of the graph."""
        return len(self.offsets) - 1

    @property
    def device(self) -> torch.device:
        """Where ids and samples are."""
        return torch_device(self.neighbours.device)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        vertices, edges = len(self.offsets) - 1, len(self.neighbours)
        return f"NeighborSampler({vertices} vertices, {edges} edges, {self.fanouts}{state})"

    def nodes_max(self, seeds: int) -> int:
        """Return the most vertices that a sample of so many seeds can have.

        It is what a `flashwarp.Pipeline` needs that reads the features of samples.
        """
        seeds = integer("seeds", seeds, 0, SIZE_MAX)
        frontier = found = seeds
        for fanout in self.fanouts:
            frontier = min(frontier * fanout, self.vertices)
            found += frontier
        return min(found, seeds + self.vertices)

    def sample(self, seeds: Any, *, number: int | None = None) -> Sample:
        """Sample the neighbourhoods of some seeds.

        Parameters
        ----------
        seeds : torch.Tensor or array of int
            Vertices; on the device of the graph, else they are copied there. If one repeats, each
            of its places gets the same neighbours.
        number : int, optional
            Which of the samples of these seeds. Default: how many this sampler has made before;
            in a worker of a `DataLoader`, which has a sampler of its own, plus the worker's seed.

        Returns
        -------
        Sample
            On the device of the graph.

        Raises
        ------
        BoundsError
            If a seed is no vertex.
        IndexDtypeError, ArgumentError
            For seeds that are no integers or have more than one axis, and for more than 2^31
            neighbours.
        StorageError
            If the graph could not be read.
        CaptureError
            If the stream is being captured into a CUDA graph.
        """
        if self.closed:
            raise ClosedError("the sampler is closed")
        ids = self._seeds(seeds)
        draw = self._next() if number is None else integer("number", number, 0, SIZE_MAX)
        if ids.is_cuda:
            with torch.cuda.device(ids.device):
                return self._sample(ids, draw)
        return self._sample(ids, draw)

    def iterate(self, batches: Iterable[Any]) -> Iterator[Sample]:
        """Sample batches of seeds one after the other, beside the work of the caller's stream.

        On a GPU, sampling runs on a stream of its own, so it neither waits for what the caller
        queues between two samples, nor is the GPU idle while the host waits for a sample. Each
        batch of seeds is taken before the sample of the last one is handed out. Samples are for the
        stream that is current when they are asked for.
        """
        if self.device.type == "cpu":
            yield from map(self.sample, batches)
            return
        side = torch.cuda.Stream(self.device)
        rest = iter(batches)
        seeds, ready = next(rest, None), torch.cuda.current_stream(self.device).record_event()
        while seeds is not None:
            side.wait_event(ready)
            if isinstance(seeds, torch.Tensor) and seeds.is_cuda:
                seeds.record_stream(side)
            with torch.cuda.stream(side):
                sample = self.sample(seeds)
            current = torch.cuda.current_stream(self.device)
            # The next seeds are there at this event, and what the caller queues comes after it.
            seeds, ready = next(rest, None), current.record_event()
            current.wait_stream(side)
            sample.record_stream(current)
            yield sample

    def close(self) -> None:
        """Close the arrays, if the sampler has opened them. May be called twice."""
        self.closed = True
        if self._owned:
            self.offsets.close()
            self.neighbours.close()

    # In other processes.

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        number = next(self._numbers)
        self._numbers = itertools.count(number)
        arrays = (self.offsets, self.neighbours)
        return _restored, (arrays, self._asked, self.seed, self.edge_ids, self._owned, number)

    # A sample.

    def _next(self) -> int:
        worker = torch.utils.data.get_worker_info()
        return next(self._numbers) + (0 if worker is None else worker.seed)

    def _seeds(self, seeds: Any) -> torch.Tensor:
        try:
            ids = seeds if isinstance(seeds, torch.Tensor) else torch.from_numpy(np.array(seeds))
        except TypeError as error:
            raise IndexDtypeError(f"seeds that are no integers: {error}") from error
        check_plain(seeds=ids)
        if ids.numel() == 0:
            ids = ids.to(torch.int64)
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
            raise IndexDtypeError(f"seeds of dtype {ids.dtype}: give integers")
        if ids.ndim != 1:
            raise ArgumentError(f"seeds of shape {tuple(ids.shape)}: give one axis")
        if ids.is_cuda and self.device.type == "cpu":
            raise ArgumentError(
                f"seeds on {ids.device}, and a graph on the CPU device: open the graph with "
                f"device='{ids.device}', or give seeds.cpu()"
            )
        return ids.to(device=self.device, dtype=torch.int64).contiguous()

    def _sample(self, seeds: torch.Tensor, draw: int) -> Sample:
        hops = len(self.fanouts)
        if len(seeds) == 0:
            empty = (0,) * hops
            ids = seeds.new_empty(0) if self.edge_ids else None
            return Sample(seeds, seeds.new_empty((2, 0)), (0, *empty), empty, ids)
        stream: int | None = None
        if seeds.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    "a sample cannot become part of a CUDA graph, because the sizes of its tensors "
                    "depend on the graph: sample before the capture"
                )
            stream = torch.cuda.current_stream(seeds.device).cuda_stream
        launch = functools.partial(self._launch, stream)
        work = _Work(self, seeds)
        launch("enter_seeds", len(seeds), work.nodes, len(seeds), self.vertices, *work.table())
        for hop in range(1, hops + 1):
            work.hop(launch, hop, (draw * hops + hop) % (1 << 64))
        try:
            counts = self._read(work.counts, stream)
        except BoundsError as error:  # of the offsets, which have one more than there are vertices
            wrong = seeds[(seeds < 0) | (seeds >= self.vertices)]
            if not len(wrong):
                raise
            raise BoundsError(
                f"seed {int(wrong[0])} is no vertex: the graph has {self.vertices}"
            ) from error
        return work.finish(launch, counts)

    def _launch(self, stream: int | None, name: str, items: int, *arguments: object) -> None:
        """Launch a kernel that has a thread for each item, or, of lists, a warp."""
        warps = items if name == "sample_lists" else -(-items // 32)
        self._kernel(name)(*arguments, warps=warps, stream=stream)

    def _kernel(self, name: str) -> Kernel:
        program = self._program
        if program is None or program.device is not self.neighbours.device:
            # First, and in a forked child, whose arrays have a device of its own.
            defines = {
                "OFFSET": _OFFSETS[self.offsets.dtype.name],
                "COLUMN": _COLUMNS[self.neighbours.dtype.name],
            }
            program = compile_kernels(
                Path(__file__).with_suffix(".cu"),
                self.neighbours.device,
                defines=defines,
                policy=self.neighbours.cache.policy,
            )
            self._program = program
        return program[name]

    def _read(self, counts: torch.Tensor, stream: int | None) -> list[int]:
        """Wait for the kernels, raise what they have noted, and return the counts."""
        if stream is None:
            found = counts
        else:
            found = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            found.copy_(counts, non_blocking=True)
        self.neighbours.wait(stream)
        self.offsets.wait(stream)
        listed: list[int] = found.tolist()
        return listed

    def _deferred(self, lists: int) -> tuple[int, int, int]:
        """Return how a launch, a warp for each list, leaves those that wait to few blocks."""
        arrays = self.offsets, self.neighbours
        launchers = [array._attachment.launcher for array in arrays]
        return deferred_by(launchers, lists, lists)[:3]

    @property
    def _in_place(self) -> int:
        """The address of the lists for kernels that read them past the cache; else 0."""
        array = self.neighbours
        if array.cache.capacity >= array.nbytes:
            return 0
        return array.in_place or 0


class _Work:
    """The tensors of one sample while it is made; their sizes are the most that it can need."""

    def __init__(self, sampler: NeighborSampler, seeds: torch.Tensor) -> None:
        self._sampler = sampler
        self._fanouts = sampler.fanouts
        self._seeds = len(seeds)
        frontier, total = len(seeds), len(seeds)
        self._frontiers, self._first_slots = [], []
        for fanout in self._fanouts:
            self._frontiers.append(frontier)
            self._first_slots.append(total)
            slots = frontier * fanout
            total += slots
            frontier = min(slots, sampler.vertices)
        if total > _SLOTS_MAX:
            raise ArgumentError(
                f"{len(seeds)} seeds with fan-outs {self._fanouts} may have {total} neighbours, "
                f"more than {_SLOTS_MAX}: give fewer seeds at a time"
            )
        hops = len(self._fanouts)
        nodes_max = sampler.nodes_max(len(seeds))
        self.nodes = seeds.new_empty(nodes_max)
        self.nodes[: len(seeds)] = seeds
        self.counts = seeds.new_zeros(2 * hops + 2)
        self._nodes_end, self._edges_end = self.counts[: hops + 1], self.counts[hops + 1 :]
        self._nodes_end[0].fill_(len(seeds))
        places = 1 << (2 * nodes_max - 1).bit_length()
        self._mask = places - 1
        self._keys = seeds.new_full((places,), _FREE)
        self._first = seeds.new_full((places,), _FREE, dtype=torch.int32)
        self._number = seeds.new_empty(places, dtype=torch.int32)
        self._hops: list[tuple[torch.Tensor, ...]] = []
        self._entries: list[torch.Tensor | None] = []

    def table(self) -> tuple[object, ...]:
        return self._keys, self._first, self._mask

    def hop(self, launch: Callable[..., None], hop: int, draw: int) -> None:
        """Sample the lists of what the hop before has found, and number what is new."""
        sampler = self._sampler
        fanout, first_slot = self._fanouts[hop - 1], self._first_slots[hop - 1]
        lists = self._frontiers[hop - 1]
        slots = lists * fanout
        found = self.nodes.new_empty(slots)
        entries = self.nodes.new_empty(slots) if sampler.edge_ids else None
        places = self.nodes.new_empty(slots, dtype=torch.int32)
        launch(
            "sample_lists", lists, sampler.offsets, sampler.neighbours, sampler._in_place,
            self.nodes, self._nodes_end, hop, fanout, sampler.seed, draw, first_slot, found,
            entries, places, *self.table(), *sampler._deferred(lists),
        )  # fmt: skip
        own = torch.empty_like(found)
        launch(
            "rank_slots", slots, self._nodes_end, hop, fanout, first_slot, found, places,
            self._first, own,
        )  # fmt: skip
        ranks = torch.cumsum(own, 0)
        launch(
            "number_vertices", slots, self._nodes_end, self._edges_end, hop, fanout, first_slot,
            found, places, self._first, ranks, self._number, self.nodes,
        )  # fmt: skip
        self._hops.append((found, places, ranks))
        self._entries.append(entries)

    def finish(self, launch: Callable[..., None], counts: list[int]) -> Sample:
        """Write the edges, now that their number is known."""
        hops = len(self._hops)
        nodes_end, edges_end = counts[: hops + 1], counts[hops + 1 :]
        edges = self.nodes.new_empty((2, edges_end[-1]))
        ids = self.nodes.new_empty(edges_end[-1]) if self._sampler.edge_ids else None
        for hop, (found, places, ranks) in enumerate(self._hops, 1):
            launch(
                "write_edges", len(found), self._nodes_end, self._edges_end, hop,
                self._fanouts[hop - 1], self._seeds, found, places, self._first, self._number,
                ranks, self._entries[hop - 1], edges[0], edges[1], ids,
            )  # fmt: skip
        return Sample(
            self.nodes[: nodes_end[-1]],
            edges,
            (nodes_end[0], *(b - a for a, b in itertools.pairwise(nodes_end))),
            tuple(b - a for a, b in itertools.pairwise(edges_end)),
            ids,
        )


def _restored(
    arrays: tuple[Array, Array],
    fanouts: tuple[int, ...],
    seed: int,
    edge_ids: bool,
    owned: bool,
    number: int,
) -> NeighborSampler:
    sampler = NeighborSampler(arrays, fanouts, seed=seed, edge_ids=edge_ids)
    sampler._owned = owned
    sampler._numbers = itertools.count(number)
    return sampler


def _fanouts(fanouts: Iterable[int]) -> tuple[int, ...]:
    if isinstance(fanouts, int) or not isinstance(fanouts, Iterable):
        raise ArgumentError(f"fanouts={fanouts!r} is no sequence of integers: one for each hop")
    found = tuple(_ALL if each == _ALL else _fanout(each) for each in fanouts)
    if not found:
        raise ArgumentError("fanouts are empty: give one for each hop")
    return found


def _fanout(each: object) -> int:
    try:
        return integer("a fan-out", each, 1, _FANOUT_MAX)
    except ArgumentError as error:
        raise ArgumentError(f"{error}, nor -1, which takes all") from None


def check_graph(graph: Any) -> None:
    """Raise ArgumentError for what is neither a graph whose ids are labels, nor two arrays."""
    if isinstance(graph, tuple):
        if len(graph) != 2 or not all(isinstance(each, Array) for each in graph):
            raise ArgumentError("the arrays of a graph are two: (offsets, neighbours)")
        return
    if not all(callable(getattr(graph, name, None)) for name in ("neighbours", "list_offsets")):
        raise ArgumentError(
            f"graph={graph!r} is no graph: give what flashwarp.graphs.load returns, or "
            "(offsets, neighbours)"
        )
    if graph.labels is not None:
        raise ArgumentError(
            f"the vertices of {graph.folder} are numbered by degree, so ids would not be your "
            "labels: give the graph as it was before, or, to use the numbers, "
            "(graph.list_offsets(), graph.neighbours())"
        )


def _arrays_of(graph: Any, options: dict[str, Any]) -> tuple[Array, Array]:
    check_graph(graph)
    if isinstance(graph, tuple):
        if options:
            raise ArgumentError(f"{', '.join(options)}= is for graphs: these arrays are open")
        return graph
    neighbours: Array = graph.neighbours(**options)
    try:
        rest = {name: options[name] for name in options.keys() & {"device", "immutable", "lock"}}
        return graph.list_offsets(**rest), neighbours
    except BaseException:
        neighbours.close()
        raise
