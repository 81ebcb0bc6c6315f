"""Neighbourhoods sampled on a GPU: those of the CPU device, bit by bit; and batches of a loader."""

from __future__ import annotations

import importlib
import importlib.util

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
import flashwarp.torch
from flashwarp import graphs
from flashwarp.errors import ArgumentError, BoundsError, CaptureError, ForkError
from gpu.captures import MARKS

pytestmark = MARKS

FANOUTS = (25, 10, 3)
# Lists that fit the cache; that are read in place, past it; and that go through its few lines.
WAYS = {
    "cached": {},
    "in_place": {"cache": "256 KiB"},
    "rings": {"cache": "256 KiB", "controller": fw.nvme.SoftwareController(commands=True)},
    "o_direct": {"cache": "256 KiB", "o_direct": True, "line": 512},
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return graphs.load("kron:16", tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="module")
def expected(graph):
    """Samples of the CPU device."""
    with fw.torch.NeighborSampler(graph, FANOUTS, seed=7, device="cpu") as sampler:
        return [sampler.sample(seeds) for seeds in batches(graph)]


def batches(graph):
    made = torch.Generator().manual_seed(3)
    order = torch.randperm(graph.vertices, generator=made)
    # The last one has a vertex twice.
    return [order[:1000], order[1000:1001], torch.cat([order[:33], order[:33]])]


def check_equal(sample, other):
    assert sample.nodes.is_cuda
    assert sample.num_sampled_nodes == other.num_sampled_nodes
    assert sample.num_sampled_edges == other.num_sampled_edges
    assert torch.equal(sample.nodes.cpu(), other.nodes)
    assert torch.equal(sample.edge_index.cpu(), other.edge_index)


@pytest.mark.parametrize("blocks", ["-1", "0", "3"])
@pytest.mark.parametrize("way", WAYS)
def test_samples_are_those_of_the_cpu_device(graph, device, expected, way, blocks, monkeypatch):
    monkeypatch.setenv("FLASHWARP_DRAIN_BLOCKS", blocks)
    with fw.torch.NeighborSampler(graph, FANOUTS, seed=7, device=device, **WAYS[way]) as sampler:
        # Past the cache only if the lists exceed it, and then wherever that is possible.
        past = sampler.neighbours.in_place is not None and way != "cached"
        assert (sampler._in_place != 0) == past
        for seeds, sample in zip(batches(graph), expected, strict=True):
            check_equal(sampler.sample(seeds.cuda()), sample)
        for seeds, number in ((batches(graph)[0], 0), (batches(graph)[0].numpy(), 0)):
            check_equal(sampler.sample(seeds, number=number), expected[0])


def test_samples_on_a_side_stream_beside_work(graph, device, expected):
    busy = torch.randn(4096, 4096, device="cuda")
    sums = []
    with fw.torch.NeighborSampler(graph, FANOUTS, seed=7, device=device) as sampler:
        # Seeds are made on the caller's stream, just before they are asked for.
        seeds = (each.cuda(non_blocking=True) + 0 for each in batches(graph))
        for sample, other in zip(sampler.iterate(seeds), expected, strict=True):
            for _ in range(20):
                busy = (busy @ busy).clamp(-1, 1)
            sums.append((sample.nodes.sum() + sample.edge_index.sum(), other))
            check_equal(sample, other)
    for found, other in sums:
        assert int(found) == int(other.nodes.sum() + other.edge_index.sum())


def test_iteration_does_not_wait_for_the_callers_work(graph, device):
    seeds = [torch.arange(100, device="cuda")] * 4
    with fw.torch.NeighborSampler(graph, (5, 5), device=device) as sampler:
        list(sampler.iterate(seeds))  # compiles
        samples = sampler.iterate(seeds)
        next(samples)
        torch.cuda._sleep(2_000_000_000)  # a second or so
        still = torch.cuda.Event()
        still.record()
        next(samples)
        assert not still.query()
        torch.cuda.synchronize()


def test_seed_that_is_no_vertex(graph, device):
    with fw.torch.NeighborSampler(graph, FANOUTS, device=device) as sampler:
        for seed in (-1, graph.vertices, 1 << 40):
            with pytest.raises(BoundsError):
                sampler.sample(torch.tensor([3, seed], device="cuda"))
        assert sampler.sample(torch.tensor([3], device="cuda")).batch_size == 1


def test_capture_is_refused(graph, device):
    with fw.torch.NeighborSampler(graph, FANOUTS, device=device) as sampler:
        seeds = torch.arange(3, device="cuda")
        sampler.sample(seeds)
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(CaptureError):
            sampler.sample(seeds)
        sampler.sample(seeds)


def test_seeds_on_a_gpu_for_a_graph_on_the_cpu_device(graph):
    with (
        fw.torch.NeighborSampler(graph, FANOUTS, device="cpu") as sampler,
        pytest.raises(ArgumentError, match="seeds on cuda"),
    ):
        sampler.sample(torch.arange(3, device="cuda"))


# Loaders.


@pytest.fixture
def arrays(tmp_path, device):
    features = np.random.default_rng(1).random((5000, 96), np.float32)
    np.save(tmp_path / "x.npy", features)
    np.save(tmp_path / "y.npy", np.arange(5000))
    with (
        fw.open(tmp_path / "x.npy", device=device, cache="256 KiB") as x,
        fw.open(tmp_path / "y.npy", device=device, cache="256 KiB") as y,
    ):
        yield x, y, torch.from_numpy(features).cuda()


@pytest.mark.parametrize("shuffle", [False, True])
def test_loader_on_the_gpu(arrays, shuffle):
    x, y, features = arrays
    loader = fw.torch.Loader((x, y), 192, shuffle=shuffle, seed=2)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        batches = list(loader)
        labels = torch.cat([labels for _, labels in batches])
        assert labels.is_cuda
        assert torch.equal(labels.sort().values, torch.arange(5000, device="cuda"))
        for rows, labels in batches:
            assert torch.equal(rows, features[labels])


def test_loader_from_the_cpu_device_to_the_gpu(tmp_path, arrays):
    _, _, features = arrays
    with (
        fw.open(tmp_path / "x.npy", device="cpu", cache="256 KiB") as x,
        fw.open(tmp_path / "y.npy", device="cpu") as y,
    ):
        for rows, labels in fw.torch.Loader((x, y), 192, shuffle=True, device="cuda"):
            assert rows.is_cuda
            assert torch.equal(rows, features[labels])


def test_array_on_a_gpu_in_a_forked_worker(arrays):
    loader = torch.utils.data.DataLoader(
        fw.torch.Loader(arrays[0], 192), batch_size=None, num_workers=1,
        multiprocessing_context="fork",
    )  # fmt: skip

    with pytest.raises((ArgumentError, ForkError), match="device='cpu'"):
        next(iter(loader))


@pytest.mark.skipif(
    importlib.util.find_spec("torch_geometric") is None, reason="torch_geometric is not installed"
)
def test_loader_of_pyg_on_the_gpu(tmp_path, graph, device):
    from torch_geometric.loader import NodeLoader

    importlib.import_module("flashwarp.pyg")
    np.save(tmp_path / "v.npy", np.arange(graph.vertices))
    with (
        fw.open(tmp_path / "v.npy", device=device, cache="256 KiB") as vertices,
        fw.pyg.NeighborSampler(graph, (5, 5), device=device) as sampler,
    ):
        stores = fw.pyg.FeatureStore({"v": vertices}), fw.pyg.GraphStore(graph)
        for data in NodeLoader(stores, sampler, torch.arange(1000), batch_size=300):
            assert data.v.is_cuda
            assert torch.equal(data.v, data.n_id)
            assert data.num_nodes == sum(data.num_sampled_nodes)
