"""GraphSAGE in mini-batches, with the graph and its features in files that exceed their caches.

    python examples/graphsage.py --device cpu

Each step samples the neighbourhoods of some vertices, 10 neighbours of each and 5 of each of these,
reads the features of all vertices in them, and trains on the result. The next batch is sampled, and
its features are read, while the device trains on this one.

The graph is synthetic. Degrees follow a power law. Each vertex is of one of 8 groups, and most of
its neighbours are of its own group. Features are the group's centre with so much noise that the
best classifier of a vertex's own features is often wrong. The script fails unless the trained model
is right much more often, because it sees the neighbours.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

import flashwarp as fw
import flashwarp.torch
from flashwarp import graphs

VERTICES, DEGREE, GROUPS, WIDTH, LOYALTY, NOISE = 20_000, 12, 8, 64, 0.8, 6.0
FANOUTS, HIDDEN, BATCH, EPOCHS = (10, 5), 64, 512, 2
CACHE = "512 KiB"


def make(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write edges and features; return the group of each vertex, and the groups' centres."""
    random = np.random.default_rng(1)
    group = random.integers(0, GROUPS, VERTICES)
    members = [np.flatnonzero(group == each) for each in range(GROUPS)]
    # The chance to be an end of an edge falls by a power of the rank, which is random.
    chance = random.permutation(np.arange(1, VERTICES + 1) ** -0.6)
    count = VERTICES * DEGREE // 2
    one = random.choice(VERTICES, count, p=chance / chance.sum())
    other = random.choice(VERTICES, count, p=chance / chance.sum())
    loyal = random.random(count) < LOYALTY
    for each, own in enumerate(members):
        here = loyal & (group[one] == each)
        other[here] = random.choice(own, here.sum(), p=chance[own] / chance[own].sum())
    # Every vertex has an edge, so the list of edges names them all.
    ends = np.concatenate([np.column_stack([one, other]), np.arange(VERTICES).reshape(-1, 2)])
    np.savetxt(folder / "edges.txt", ends, fmt="%d")
    centres = random.standard_normal((GROUPS, WIDTH)) / WIDTH**0.5
    noise = random.standard_normal((VERTICES, WIDTH)) * NOISE / WIDTH**0.5
    np.save(folder / "features.npy", (centres[group] + noise).astype(np.float32))
    return group, centres


class Layer(nn.Module):
    """A vertex's own row and the mean of its neighbours' rows, each through a matrix."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, rows: torch.Tensor, edges: torch.Tensor, targets: int) -> torch.Tensor:
        source, target = edges
        sums = rows.new_zeros(targets, rows.shape[1]).index_add_(0, target, rows[source])
        counts = rows.new_zeros(targets).index_add_(0, target, rows.new_ones(len(target)))
        return self.own(rows[:targets]) + self.others(sums / counts.clamp(min=1)[:, None])


class GraphSage(nn.Module):
    """A layer for each hop: the first one reads all edges, the last one those of the seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(WIDTH, HIDDEN), Layer(HIDDEN, GROUPS)

    def forward(self, rows: torch.Tensor, sample: fw.torch.Sample) -> torch.Tensor:
        seeds, hop, _ = sample.num_sampled_nodes
        hidden = self.first(rows, sample.edge_index, seeds + hop).relu()
        return self.second(hidden, sample.edge_index[:, : sample.num_sampled_edges[0]], seeds)


def batches(vertices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut vertices into batches, in random order."""
    return vertices[torch.randperm(len(vertices), device=vertices.device)].split(BATCH)


def loaded(
    sampler: fw.torch.NeighborSampler, features: fw.Pipeline, seeds: Iterable[torch.Tensor]
) -> Iterator[tuple[fw.torch.Sample, torch.Tensor]]:
    """Yield samples with the features of their vertices, which arrive one batch ahead."""
    last = None
    for sample in sampler.iterate(seeds):
        features.prefetch(sample.nodes)
        if last is not None:
            yield last, features.take()
        last = sample
    if last is not None:
        yield last, features.take()


def main(device: str) -> None:
    """Train, and compare the model with the best classifier without neighbours."""
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        group, centres = make(folder)
        graph = graphs.load(folder / "edges.txt", folder / "graph")
        labels = torch.from_numpy(group).to(device)
        order = torch.randperm(VERTICES).to(device)
        train, test = order[: VERTICES * 3 // 4], order[VERTICES * 3 // 4 :]
        model = GraphSage().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        with (
            fw.torch.NeighborSampler(graph, FANOUTS, device=device, cache=CACHE) as sampler,
            fw.open(folder / "features.npy", device=device, cache=CACHE) as rows_on_disk,
            fw.Pipeline(rows_on_disk, sampler.nodes_max(BATCH)) as features,
        ):
            start, vertices = time.perf_counter(), 0
            for _ in range(EPOCHS):
                for sample, rows in loaded(sampler, features, batches(train)):
                    wanted = labels[sample.nodes[: sample.batch_size]]
                    loss = nn.functional.cross_entropy(model(rows, sample), wanted)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    vertices += len(sample.nodes)
            seconds = time.perf_counter() - start

            right = 0
            with torch.no_grad():
                for sample, rows in loaded(sampler, features, batches(test)):
                    found = model(rows, sample).argmax(1)
                    right += int((found == labels[sample.nodes[: sample.batch_size]]).sum())
            read = rows_on_disk.stats.bytes_read + sampler.neighbours.stats.bytes_read

        # Of equally frequent groups with the same noise, the nearest centre is the likeliest.
        alone = np.load(folder / "features.npy")[test.cpu().numpy()] @ centres.T
        best_alone = (alone - (centres**2).sum(1) / 2).argmax(1) == group[test.cpu().numpy()]
    accuracy = right / len(test)
    print(
        f"{device}: {accuracy:.1%} right on new vertices, {best_alone.mean():.1%} at best without "
        f"neighbours; {vertices / seconds:.0f} vertices a second, {read >> 20} MiB read"
    )
    if accuracy < best_alone.mean() + 0.2:
        raise SystemExit("the model has not learned from neighbours")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args().device)
