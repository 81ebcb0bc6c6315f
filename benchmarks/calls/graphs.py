"""The part of `bench calls` about CUDA graphs: what a gather costs as a node of one.

A graph holds the same gather many times, with rows of its own in each, and events around a replay
take the time of all. Alternatives are graphs of `torch.index_select`, from GPU memory for resident
rows, and for cold rows from the same host memory, which the GPU reads through its own addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.calls.base import CallsBench
from flashwarp.probe.timing import device_seconds

__all__ = ["MappedRows", "cold", "resident"]

_RESIDENT = 32
_COLD = (32, 1024)
_ROWS_OF_A_GRAPH = 2048


@dataclass
class MappedRows:
    """Rows in host memory at the address at which the GPU reads them."""

    address: int
    shape: tuple[int, ...]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": "<i4",
            "data": (self.address, False),
            "version": 3,
        }


def resident(bench: CallsBench, nbytes: int) -> None:
    """Rows that are in the cache: a node, and a replay that is waited for."""
    data = bench.counter(nbytes)
    with bench.opened(data, cache=nbytes) as array:
        array.gather(bench.placed(np.arange(len(data))))
        plain = bench.torch.from_numpy(data.view(np.int32)).cuda()
        nodes = _Nodes(bench, len(data), _RESIDENT)
        one = _Nodes(bench, len(data), _RESIDENT, 1)
        graphs = [nodes.gathers(array), nodes.selects(plain), one.gathers(array)]
        ours, other, alone = graphs
        times = bench.in_turns(
            {
                "ours": lambda: nodes.seconds(ours),
                "other": lambda: nodes.seconds(other),
                "done": bench.torch_done(alone.replay),
                "select": bench.torch_done(lambda: one.select(plain, 0)),
            }
        )
        ours.replay()
        what = f"gather of {_RESIDENT} resident rows"
        right = nodes.right(data)
        name = "torch.index_select of a table in GPU memory"
        bench.add(
            f"{what}, in a graph",
            times["ours"],
            f"{name}, in a graph",
            times["other"],
            right,
            nbytes,
        )
        alone.replay()
        bench.add(
            f"{what}, a graph of one, waited for",
            times["done"],
            f"{name}, waited for",
            times["select"],
            one.right(data),
            nbytes,
        )
        _drop(graphs)


def cold(bench: CallsBench, nbytes: int) -> None:
    """Rows of host memory that no call has read before."""
    data = bench.counter(nbytes)
    with fw.open(
        fw.storage.Memory(data, writable=False), dtype=np.uint32, shape=data.shape,
        device=bench.device, cache=max(nbytes // 16, 1 << 24), line=bench.words * 4,
    ) as array:  # fmt: skip
        mapped = None
        if array.in_place is not None:
            rows = MappedRows(array.in_place, data.shape)
            mapped = bench.torch.as_tensor(rows, device=f"cuda:{bench.device.ordinal}")
        for count in sorted({min(count, len(data) // 16) for count in _COLD}):
            _cold(bench, array, data, mapped, count)


def _cold(bench: CallsBench, array: fw.Array, data: Any, mapped: Any, count: int) -> None:
    nodes = _Nodes(bench, len(data), count)
    graphs = {"ours": nodes.gathers(array)}
    if mapped is not None:
        graphs["other"] = nodes.selects(mapped)
    ways = {way: nodes.cold_seconds(graph) for way, graph in graphs.items()}
    times = bench.in_turns(ways, min(bench.runs, nodes.turns))
    ways["ours"]()
    bench.add(
        f"gather of {count} cold rows of memory, {array.explain().path}, in a graph",
        times["ours"],
        "torch.index_select of the same memory, in a graph" if mapped is not None else "",
        times.get("other", 0.0),
        nodes.right(data),
        data.nbytes,
    )
    _drop(list(graphs.values()))


def _drop(graphs: list[Any]) -> None:
    """Give up graphs, which keep the array open that they read."""
    for graph in graphs:
        graph.reset()


class _Nodes:
    """The operands of a graph's gathers."""

    def __init__(self, bench: CallsBench, rows: int, count: int, nodes: int | None = None) -> None:
        self.bench = bench
        self.torch = bench.torch
        self.nodes = nodes or max(1, min(_ROWS_OF_A_GRAPH // count, rows // (4 * count)))
        self.index = bench.index(rows, self.nodes * count).view(self.nodes, count)
        self.out = bench.torch.stack([bench.out(count).view(self.torch.int32)] * self.nodes)
        # No row twice, in all turns of all ways.
        self.draws = iter(bench.rng.permutation(rows).astype(np.int64))
        self.turns = max(1, rows // self.index.numel() // 2 - 2)

    def gathers(self, array: fw.Array) -> Any:
        """Capture a gather for each node."""
        out = self.out.view(self.torch.uint32)
        return self._captured(
            lambda k: array.gather(self.index[k], out[k], stream=self.torch.cuda.current_stream())
        )

    def selects(self, table: Any) -> Any:
        """Capture the same by torch."""
        return self._captured(lambda k: self.select(table, k))

    def select(self, table: Any, k: int) -> Any:
        """Do by torch what a node does."""
        return self.torch.index_select(table, 0, self.index[k], out=self.out[k])

    def _captured(self, node: Callable[[int], object]) -> Any:
        cuda = self.torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):  # what must be compiled or loaded
            node(0)
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            for k in range(self.nodes):
                node(k)
        return graph

    def cold_seconds(self, graph: Any) -> Callable[[], float]:
        """Time a replay with rows that no node has read."""

        def measure() -> float:
            numbers = np.fromiter(self.draws, np.int64, self.index.numel())
            self.index.copy_(self.torch.from_numpy(numbers).view_as(self.index))
            return self.seconds(graph)

        return measure

    def seconds(self, graph: Any) -> float:
        """Replay, and return what a node takes."""
        self.torch.cuda.synchronize()
        stream = self.torch.cuda.current_stream()
        return device_seconds(self.bench.device, graph.replay, stream) / self.nodes

    def right(self, data: np.ndarray[Any, Any]) -> bool:
        """Return whether all nodes have read their rows."""
        self.torch.cuda.synchronize()
        places: Sequence[int] = range(self.nodes)
        return all(self.bench.right(self.out[k], data, self.index[k]) for k in places)
