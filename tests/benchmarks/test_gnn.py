"""Models of graph networks compute their definitions, and graphs have the degrees they should."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.pipelines import models  # noqa: E402 (needs torch)

# Two seeds, two vertices found by the first hop, one by the second; (neighbour, vertex) pairs.
HOP_1 = [(2, 0), (3, 0), (3, 1)]
HOP_2 = [(0, 2), (4, 2), (1, 3)]
EDGES = np.array(HOP_1 + HOP_2).T


def sample():
    return SimpleNamespace(
        edge_index=torch.from_numpy(EDGES),
        num_sampled_nodes=(2, 2, 1),
        num_sampled_edges=(3, 3),
    )


def neighbours(vertex, edges):
    return [source for source, target in edges if target == vertex]


def sage(layer, rows, edges, targets):
    made = []
    for vertex in range(targets):
        near = [rows[k] for k in neighbours(vertex, edges)]
        mean = torch.stack(near).mean(0) if near else torch.zeros_like(rows[0])
        made.append(layer.own(rows[vertex]) + layer.others(mean))
    return torch.stack(made)


def gcn(layer, rows, edges, targets):
    hidden = layer.through(rows)
    degree = [1 + len(neighbours(vertex, edges)) for vertex in range(len(rows))]
    return torch.stack(
        [
            sum(
                hidden[k] / (degree[k] * degree[vertex]) ** 0.5
                for k in [vertex, *neighbours(vertex, edges)]
            )
            for vertex in range(targets)
        ]
    )


def gat(layer, rows, edges, targets):
    hidden = layer.through(rows).view(len(rows), 4, -1)
    made = []
    for vertex in range(targets):
        heads = []
        for head in range(4):
            near = [vertex, *neighbours(vertex, edges)]
            scores = torch.stack(
                [
                    torch.nn.functional.leaky_relu(
                        hidden[k, head] @ layer.tells[head]
                        + hidden[vertex, head] @ layer.asks[head],
                        0.2,
                    )
                    for k in near
                ]
            )
            weights = scores.softmax(0)
            heads.append(sum(w * hidden[k, head] for w, k in zip(weights, near, strict=True)))
        made.append(torch.cat(heads))
    return torch.stack(made)[:, : layer.outputs]


@pytest.mark.parametrize(("name", "layer"), [("GraphSAGE", sage), ("GCN", gcn), ("GAT", gat)])
def test_model_computes_its_definition(name, layer):
    torch.manual_seed(1)
    model, rows = models.make(name, 6, 8, 3), torch.randn(5, 6)

    found = model(rows, sample())

    middle = layer(model.first, rows, HOP_1 + HOP_2, 4).relu()
    torch.testing.assert_close(found, layer(model.second, middle, HOP_1, 2))
