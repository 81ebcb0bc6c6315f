"""GraphSAGE, GCN and GAT in plain torch, for samples of `flashwarp.torch.NeighborSampler`.

Two layers: the first one reads all edges of a sample, the second those into its seeds. Matrices
come before sums over neighbours, since a sum of products is the product of the sum, and hidden rows
are shorter than features.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["MODELS", "make"]

MODELS = ("GraphSAGE", "GCN", "GAT")
_HEADS = 4
_SLOPE = 0.2


def make(model: str, inputs: int, hidden: int, outputs: int) -> Any:
    """Make a model: a `torch.nn.Module` that is called with the rows of a sample, and the sample.

    `model` is one of `MODELS`. It returns a row of `outputs` for each seed.
    """
    torch: Any = importlib.import_module("torch")
    nn, functional = torch.nn, torch.nn.functional

    class Sage(nn.Module):  # type: ignore[misc, name-defined]
        """A vertex's own row, and the mean of its neighbours' rows, each through a matrix."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.own = nn.Linear(inputs, outputs)
            self.others = nn.Linear(inputs, outputs, bias=False)

        def forward(self, rows: Any, edges: Any, targets: int) -> Any:
            source, target = edges
            return self.own(rows[:targets]) + _mean(self.others(rows), source, target, targets)

    class Gcn(nn.Module):  # type: ignore[misc, name-defined]
        """Rows of a vertex and its neighbours, divided by the roots of both degrees."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.through = nn.Linear(inputs, outputs)

        def forward(self, rows: Any, edges: Any, targets: int) -> Any:
            source, target = edges
            hidden = self.through(rows)
            ones = hidden.new_ones(len(source))
            degree = hidden.new_ones(len(rows)).index_add_(0, target, ones)
            weight = (degree[source] * degree[target]).rsqrt()[:, None]
            own = hidden[:targets] / degree[:targets, None]
            return own.index_add(0, target, hidden[source] * weight)

    class Gat(nn.Module):  # type: ignore[misc, name-defined]
        """Neighbours weighed by attention, a vertex being its own neighbour; some heads."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.width = -(-outputs // _HEADS)
            self.outputs = outputs
            self.through = nn.Linear(inputs, _HEADS * self.width, bias=False)
            self.asks = nn.Parameter(torch.randn(_HEADS, self.width) / self.width**0.5)
            self.tells = nn.Parameter(torch.randn(_HEADS, self.width) / self.width**0.5)

        def forward(self, rows: Any, edges: Any, targets: int) -> Any:
            source, target = edges
            hidden = self.through(rows).view(-1, _HEADS, self.width)
            told, asked = (hidden * self.tells).sum(2), (hidden[:targets] * self.asks).sum(2)
            of_edges = functional.leaky_relu(told[source] + asked[target], _SLOPE)
            of_self = functional.leaky_relu(told[:targets] + asked, _SLOPE)
            index = target[:, None].expand_as(of_edges)
            most = of_self.detach().scatter_reduce(0, index, of_edges.detach(), "amax")
            strength, own = (of_edges - most[target]).exp(), (of_self - most).exp()
            total = own.index_add(0, target, strength)
            sums = (hidden[:targets] * own[:, :, None]).index_add(
                0, target, hidden[source] * strength[:, :, None]
            )
            return (sums / total[:, :, None]).flatten(1)[:, : self.outputs]

    layer: Any = {"GraphSAGE": Sage, "GCN": Gcn, "GAT": Gat}[model]

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        """Two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layer(inputs, hidden), layer(hidden, outputs)

        def forward(self, rows: Any, sample: Any) -> Any:
            seeds, hop, *_ = sample.num_sampled_nodes
            middle = self.first(rows, sample.edge_index, seeds + hop).relu()
            return self.second(middle, sample.edge_index[:, : sample.num_sampled_edges[0]], seeds)

    return Model()


def _mean(rows: Any, source: Any, target: Any, targets: int) -> Any:
    sums = rows.new_zeros(targets, rows.shape[1]).index_add(0, target, rows[source])
    counts = rows.new_zeros(targets).index_add_(0, target, rows.new_ones(len(target)))
    return sums / counts.clamp(min=1)[:, None]
