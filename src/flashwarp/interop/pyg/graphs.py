"""`GraphStore` and `NeighborSampler`: PyG's graph store and sampler over graphs in files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch_geometric.data import EdgeAttr
from torch_geometric.data import GraphStore as _GraphStore
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.index import index2ptr, ptr2index
from torch_geometric.sampler import (
    BaseSampler,
    HeteroSamplerOutput,
    NodeSamplerInput,
    SamplerOutput,
)

from flashwarp.array.array import Array
from flashwarp.array.opening import open as open_array
from flashwarp.config import choice
from flashwarp.endings import Closing
from flashwarp.errors import ArgumentError, BoundsError, FileFormatError
from flashwarp.interop.torch import sampling
from flashwarp.storage import files, npy

_OFFSETS, _NEIGHBOURS = "offsets.npy", "neighbours.npy"


@dataclass(frozen=True)
class _Edges:
    """Edges of one type: a graph, or the files of one; and what its lists are."""

    graph: Any
    layout: EdgeLayout
    size: tuple[int, int]

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read offsets and neighbours whole."""
        with contextlib.ExitStack() as opened:
            if isinstance(self.graph, tuple):
                offsets, neighbours = self.graph
            elif isinstance(self.graph, Path):
                offsets, neighbours = (
                    opened.enter_context(open_array(self.graph / name, device="cpu"))
                    for name in (_OFFSETS, _NEIGHBOURS)
                )
            else:
                offsets = opened.enter_context(self.graph.list_offsets(device="cpu"))
                neighbours = opened.enter_context(self.graph.neighbours(device="cpu"))
            return (
                torch.from_numpy(np.asarray(offsets).astype(np.int64, copy=False)),
                torch.from_numpy(np.asarray(neighbours).astype(np.int64, copy=False)),
            )


def _look_at_written(folder: Path) -> None:
    """Raise what is wrong with files that a store would have written."""
    offsets, lists = (npy.read_layout(str(folder / name)) for name in (_OFFSETS, _NEIGHBOURS))
    for found in (offsets, lists):
        if found.dtype != np.int64 or len(found.shape) != 1:
            raise FileFormatError(f"{folder} has {found.dtype} of shape {found.shape}")
    if not offsets.nbytes or np.load(folder / _OFFSETS, mmap_mode="r")[-1] != lists.shape[0]:
        raise FileFormatError(f"{folder / _NEIGHBOURS} has no entry for each place of the offsets")


class GraphStore(_GraphStore):  # type: ignore[misc]
    """Graphs that stay in their files, for PyG's loaders.

    Parameters
    ----------
    graphs : CsrGraph, (Array, Array), or mapping, optional
        A graph of `flashwarp.graphs`, or your arrays of offsets and neighbours; or, for a
        graph of several types, such a graph for each edge type of PyG. They stay the caller's.
    layout : {"csc", "csr"}
        What the list of a vertex holds: the sources of the edges that end there ("csc"), from which
        messages come and which a sampler samples, or the targets of those that begin there ("csr").
        For graphs stored in both directions both are right.
    folder : path-like, optional
        Where `put_edge_index` writes tensors, in a folder for each edge type. Files there that no
        store has written stay, and raise ExistingFileError.

    Notes
    -----
    PyG's loaders ask the store which edges there are. `flashwarp.pyg.NeighborSampler` reads the
    lists itself, as far as it needs them. Only PyG's own samplers, which work in memory, read all
    edges by ``get_edge_index``: up to `config.asarray_bytes` of each file, else ArgumentError.

    Tensors that are put come back by "csc" or "coo" sorted by the edges' targets.

    Examples
    --------
    >>> import tempfile, flashwarp as fw, flashwarp.pyg
    >>> from flashwarp import graphs
    >>> store = fw.pyg.GraphStore(graphs.load("kron:6", tempfile.mkdtemp()))
    >>> store.get_all_edge_attrs()[0].size
    (64, 64)
    """

    def __init__(
        self,
        graphs: Any = None,
        *,
        layout: Literal["csc", "csr"] = "csc",
        folder: files.PathLike | None = None,
    ) -> None:
        super().__init__()
        choice("layout", layout, ("csc", "csr"))
        self._layout = EdgeLayout(layout)
        self._folder = None if folder is None else Path(files.check_name(folder))
        self._edges: dict[Any, _Edges] = {}
        self._named: dict[str, Any] = {}
        if graphs is not None:
            for edge_type, graph in (
                graphs if isinstance(graphs, Mapping) else {None: graphs}
            ).items():
                self._edges[edge_type] = self._given(graph, self._layout, None)

    def __repr__(self) -> str:
        edges = ", ".join(
            f"{'' if kind is None else f'{kind}: '}{list(each.size)} {each.layout.value}"
            for kind, each in self._edges.items()
        )
        return f"{type(self).__name__}({edges})"

    def _given(self, graph: Any, layout: EdgeLayout, size: tuple[int, int] | None) -> _Edges:
        sampling.check_graph(graph)
        vertices = len(graph[0]) - 1 if isinstance(graph, tuple) else graph.vertices
        return _Edges(graph, layout, (vertices, vertices) if size is None else size)

    # What PyG asks of a store.

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        layout, size = edge_attr.layout, edge_attr.size
        parts = edge_index if isinstance(edge_index, tuple | list) else None
        if isinstance(edge_index, torch.Tensor | np.ndarray) and edge_index.shape[:1] == (2,):
            parts = (edge_index[0], edge_index[1])
        if parts is None or isinstance(parts[0], Array):
            if layout is EdgeLayout.COO:
                raise ArgumentError("a graph in files has layout 'csc' or 'csr', not 'coo'")
            self._edges[edge_attr.edge_type] = self._given(edge_index, layout, size)
            return True
        if self._folder is None:
            raise ArgumentError(
                "put a graph of flashwarp.graphs; or make the store with folder=, which is "
                "where it writes tensors"
            )
        first, second = (torch.as_tensor(each).cpu().to(torch.int64) for each in parts)
        if layout is EdgeLayout.COO:
            columns = size[1] if size is not None else int(second.max()) + 1 if len(second) else 0
            rows = size[0] if size is not None else int(first.max()) + 1 if len(first) else 0
            _check_ids(first, rows)
            _check_ids(second, columns)
            order = torch.argsort(second, stable=True)
            first, second = first[order], index2ptr(second[order], columns)
            layout, size = EdgeLayout.CSC, (rows, columns)
        offsets, neighbours = (second, first) if layout is EdgeLayout.CSC else (first, second)
        if size is None:
            most = int(neighbours.max()) + 1 if len(neighbours) else 0
            lists = len(offsets) - 1
            size = (most, lists) if layout is EdgeLayout.CSC else (lists, most)
        _check_ids(neighbours, size[layout is EdgeLayout.CSR])
        self._edges[edge_attr.edge_type] = _Edges(
            self._write(edge_attr.edge_type, offsets, neighbours), layout, size
        )
        return True

    def _write(self, edge_type: Any, offsets: torch.Tensor, neighbours: torch.Tensor) -> Path:
        assert self._folder is not None
        name = "edges" if edge_type is None else "__".join(edge_type)
        if "/" in name:
            raise ArgumentError(f"{edge_type} would be a folder elsewhere: use names without '/'")
        other = self._named.setdefault(name, edge_type)
        if other != edge_type:
            raise ArgumentError(f"{edge_type} would have the folder {name!r} of {other}: rename it")
        folder = self._folder / name
        files.check_replaceable(folder, (_OFFSETS, _NEIGHBOURS), _look_at_written)
        folder.mkdir(parents=True, exist_ok=True)
        with (
            files.replacing(folder / _OFFSETS) as begins,
            files.replacing(folder / _NEIGHBOURS) as lists,
        ):
            np.save(begins, offsets.numpy())
            np.save(lists, neighbours.numpy())
        return folder

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[torch.Tensor, torch.Tensor] | None:
        edges = self._edges.get(edge_attr.edge_type)
        if edges is None or edge_attr.layout not in (edges.layout, EdgeLayout.COO):
            return None  # PyG converts, or raises
        offsets, neighbours = edges.tensors()
        if edge_attr.layout is EdgeLayout.COO:
            offsets = ptr2index(offsets)
        return (neighbours, offsets) if edges.layout is EdgeLayout.CSC else (offsets, neighbours)

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        return self._edges.pop(edge_attr.edge_type, None) is not None

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """Return type, layout and size of all edges; PyG calls this."""
        return [
            self._edge_attr_cls(edge_type, edges.layout, size=edges.size)
            for edge_type, edges in self._edges.items()
        ]


class NeighborSampler(BaseSampler, Closing):  # type: ignore[misc]
    """A sampler for PyG's `NodeLoader` that reads a graph in files, on its device.

    It needs neither pyg-lib nor torch-sparse.

    Parameters
    ----------
    graph : CsrGraph, or (Array, Array)
        As for `flashwarp.torch.NeighborSampler`, which does the work.
    num_neighbors : sequence of int
        For each hop, how many neighbours of a vertex are sampled; -1: all.
    edge_type : (str, str, str), optional
        In stores of several types: the type of the graph's edges, from nodes of a type to nodes of
        the same. Seeds are then of this type of nodes, and batches are `HeteroData`.
    seed : int
        Of the random numbers.
    **options
        ``edge_ids=True`` gives batches `e_id`, the places of their edges among the neighbours of
        the graph. For a graph: options of `flashwarp.open` for its lists, such as ``device=`` and
        ``cache=``.

    Notes
    -----
    Seeds of another type than the graph's vertices raise ArgumentError: their ids mean others.

    In workers of a loader, open graph and features with ``device="cpu"``. With ``device="cuda"``
    and without workers, batches are made on the GPU.

    Examples
    --------
    >>> import tempfile, torch, flashwarp as fw, flashwarp.pyg
    >>> from flashwarp import graphs
    >>> from torch_geometric.loader import NodeLoader
    >>> graph = graphs.load("kron:8", tempfile.mkdtemp())
    >>> stores = fw.pyg.FeatureStore(), fw.pyg.GraphStore(graph)
    >>> with fw.pyg.NeighborSampler(graph, (5, 3), device="cpu") as sampler:
    ...     loader = NodeLoader(stores, sampler, torch.arange(256), batch_size=64)
    ...     len(loader), next(iter(loader)).batch_size
    (4, 64)
    """

    def __init__(
        self,
        graph: Any,
        num_neighbors: Iterable[int],
        *,
        edge_type: tuple[str, str, str] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if edge_type is not None:
            named = isinstance(edge_type, tuple) and [type(part) for part in edge_type] == [str] * 3
            if not named or edge_type[0] != edge_type[2]:
                raise ArgumentError(
                    f"edge_type={edge_type!r}: name the type of the nodes, the relation, and the "
                    "same type again, because the sampler's graph has ids of one kind"
                )
        self._edge_type = edge_type
        self._sampler = sampling.NeighborSampler(graph, num_neighbors, seed=seed, **options)

    def sample_from_nodes(
        self, index: NodeSamplerInput, **_: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """Sample neighbourhoods; a loader of PyG calls this."""
        if index.time is not None:
            raise ArgumentError("the sampler knows no times of edges: leave input_time= out")
        edge_type = self._edge_type
        own = None if edge_type is None else edge_type[2]
        if index.input_type != own:
            raise ArgumentError(
                f"seeds of type {index.input_type!r}, and the sampler's vertices are of type "
                f"{own!r}: give both edge_type= of the sampler and input_nodes=(type, ids) of the "
                "loader, or neither if all nodes are of one type"
            )
        sample = self._sampler.sample(index.node)
        row, col = sample.edge_index
        nodes, edges = list(sample.num_sampled_nodes), list(sample.num_sampled_edges)
        metadata = (index.input_id, index.time)
        if edge_type is None:
            return SamplerOutput(
                sample.nodes, row, col, sample.edge_ids,
                num_sampled_nodes=nodes, num_sampled_edges=edges, metadata=metadata,
            )  # fmt: skip
        return HeteroSamplerOutput(
            {own: sample.nodes}, {edge_type: row}, {edge_type: col}, {edge_type: sample.edge_ids},
            num_sampled_nodes={own: nodes}, num_sampled_edges={edge_type: edges}, metadata=metadata,
        )  # fmt: skip

    def sample_from_edges(self, *_: Any, **__: Any) -> Any:
        """Raise ArgumentError: only neighbourhoods of nodes are sampled."""
        raise ArgumentError("the sampler samples from nodes, for NodeLoader; it knows no links")

    def __repr__(self) -> str:
        kind = "" if self._edge_type is None else f", edge_type={self._edge_type}"
        return f"pyg.{self._sampler!r}"[:-1] + f"{kind})"

    def close(self) -> None:
        """Close what the sampler has opened. May be called twice."""
        self._sampler.close()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _with, (self._sampler, self._edge_type)


def _with(
    sampler: sampling.NeighborSampler, edge_type: tuple[str, str, str] | None
) -> NeighborSampler:
    made = NeighborSampler.__new__(NeighborSampler)
    made._sampler, made._edge_type = sampler, edge_type
    return made


def _check_ids(ids: torch.Tensor, count: int) -> None:
    """Raise BoundsError for an id that no node has; torch would write past its memory."""
    wrong = ids[(ids < 0) | (ids >= count)]
    if len(wrong):
        raise BoundsError(f"an edge has the node {int(wrong[0])}, and there are {count}")
