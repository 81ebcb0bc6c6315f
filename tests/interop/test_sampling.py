"""Samples of neighbours: real, different, uniform, numbered as PyG does, and misused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
import flashwarp.torch
from flashwarp import graphs
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    DtypeError,
    IndexDtypeError,
)

FANOUTS = (7, 4, 2)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return graphs.load("kron:10", tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="module")
def sampler(graph):
    with fw.torch.NeighborSampler(
        graph, FANOUTS, seed=5, device="cpu", cache="64 KiB", line=512
    ) as made:
        yield made


@pytest.fixture
def sampler_of(tmp_path):
    """Samplers of arrays, which are closed at the end."""
    opened = []

    def make(offsets, neighbours, *fanouts, seed=0):
        np.save(tmp_path / "offsets.npy", offsets)
        np.save(tmp_path / "neighbours.npy", neighbours)
        arrays = [
            fw.open(tmp_path / name, device="cpu") for name in ("offsets.npy", "neighbours.npy")
        ]
        opened.extend(arrays)
        return fw.torch.NeighborSampler(tuple(arrays), fanouts, seed=seed)

    yield make
    for array in opened:
        array.close()


def regular(vertices, degree):
    """Every vertex has the first `degree` vertices as its neighbours."""
    offsets = np.arange(vertices + 1, dtype=np.int64) * degree
    return offsets, np.tile(np.arange(degree, dtype=np.uint32), vertices)


def star(degree):
    """Vertex 0 has all others as its neighbours, and they have none."""
    offsets = np.full(degree + 2, degree, np.int64)
    offsets[0] = 0
    return offsets, np.arange(1, degree + 1, dtype=np.uint32)


def reference(graph, sample, fanouts):
    """What must hold of every sample, in numpy."""
    lists = graph.in_memory()
    nodes, (sources, targets) = sample.nodes.numpy(), sample.edge_index.numpy()
    ends = np.cumsum(sample.num_sampled_nodes)
    assert ends[-1] == len(nodes)
    assert sum(sample.num_sampled_edges) == len(sources)
    # Hop h reads the lists of what hop h - 1 has found, whole if they are short.
    asked = np.zeros(len(nodes), np.int64)
    for hop, fanout in enumerate(fanouts):
        begin = 0 if hop == 0 else ends[hop - 1]
        asked[begin : ends[hop]] = np.minimum(graph.degrees[nodes[begin : ends[hop]]], fanout)
    np.testing.assert_array_equal(np.bincount(targets, minlength=len(nodes)), asked)
    assert (np.diff(targets) >= 0).all()
    edge_ends = np.cumsum((0, *sample.num_sampled_edges))
    for hop in range(len(fanouts)):
        part = sources[edge_ends[hop] : edge_ends[hop + 1]]
        assert (part < ends[hop + 1]).all()
        # New vertices have numbers in the order in which slots name them.
        new = part[part >= ends[hop]]
        _, first = np.unique(new, return_index=True)
        np.testing.assert_array_equal(new[np.sort(first)], np.arange(ends[hop], ends[hop + 1]))
    for place in np.unique(targets):
        own = lists[graph.offsets[nodes[place]] : graph.offsets[nodes[place] + 1]]
        got = nodes[sources[targets == place]]
        assert len(np.unique(got)) == len(got), "without replacement"
        assert np.isin(got, own).all(), "real neighbours"


@pytest.mark.parametrize("count", [1, 33, 500])
def test_sample_holds_what_a_sample_promises(graph, sampler, count):
    seeds = torch.randperm(graph.vertices, generator=torch.Generator().manual_seed(1))[:count]

    sample = sampler.sample(seeds)

    assert torch.equal(sample.nodes[: sample.batch_size], seeds)
    assert len(torch.unique(sample.nodes)) == len(sample.nodes)
    reference(graph, sample, FANOUTS)


def test_repeated_seeds_get_the_same_neighbours(graph, sampler):
    hub = int(graph.degrees.argmax())

    sample = sampler.sample([hub, 3, hub])

    of = [sample.nodes[sample.edge_index[0][sample.edge_index[1] == at]] for at in (0, 2)]
    assert torch.equal(*of)
    assert len(of[0]) == FANOUTS[0]
    assert sample.nodes[:3].tolist() == [hub, 3, hub]
    assert (sample.nodes[3:] != hub).all()
    reference(graph, sample, FANOUTS)


def test_short_lists_are_taken_whole_and_in_order(sampler_of):
    sample = sampler_of(*star(12), 12).sample(np.array([0]))

    assert sample.nodes.tolist() == list(range(13))
    assert sample.edge_index.tolist() == [list(range(1, 13)), [0] * 12]


def test_vertices_without_neighbours_end_there(sampler_of):
    sample = sampler_of(*star(12), 3, 5).sample([7])

    assert sample.nodes.tolist() == [7]
    assert sample.num_sampled_nodes == (1, 0, 0)
    assert sample.num_sampled_edges == (0, 0)
    assert sample.edge_index.shape == (2, 0)


def test_no_seeds_give_an_empty_sample(sampler):
    sample = sampler.sample(torch.empty(0, dtype=torch.int64))

    assert sample.num_sampled_nodes == (0, 0, 0, 0)
    assert sample.nodes.shape == (0,)
    assert sample.edge_index.shape == (2, 0)


@pytest.mark.parametrize("count", [1, 20, 1000])
def test_samples_fit_what_they_may_have_at_most(graph, sampler, count):
    seeds = np.arange(count)
    most = sampler.nodes_max(count)

    assert len(sampler.sample(seeds).nodes) <= most
    assert most <= count + graph.vertices
    assert sampler.nodes_max(1) == 1 + 7 + 28 + 56


def test_features_of_samples_come_by_a_pipeline(graph, sampler, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(graph.vertices) * 2)
    with (
        fw.open(tmp_path / "x.npy", device="cpu", cache="4 KiB", line=512) as x,
        fw.Pipeline(x, sampler.nodes_max(64)) as pipeline,
    ):
        samples = sampler.iterate(torch.arange(512).split(64))
        nodes = (sample.nodes for sample in samples)
        for rows, ids in pipeline.iterate(nodes):
            assert torch.equal(rows, ids * 2)


# Chances. The seeds are fixed, so these tests give one answer for ever.


def check_uniform(counts, outcomes):
    """Chi-square, within four standard deviations of its mean: neither skewed nor too even."""
    counts = np.bincount(counts, minlength=outcomes)
    assert len(counts) == outcomes
    expected = counts.sum() / outcomes
    free = outcomes - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - free) < 4 * np.sqrt(2 * free)


def numbers_of(sets, degree):
    """Number the sets in each row, from the smallest on."""
    bits = (1 << np.sort(sets, axis=1)).sum(axis=1)
    known = sorted(bit for bit in range(1 << degree) if bin(bit).count("1") == sets.shape[1])
    return np.searchsorted(known, bits), len(known)


@pytest.mark.parametrize(("degree", "fanout"), [(12, 3), (6, 5), (9, 1)])
def test_every_set_has_the_same_chance_over_vertices(sampler_of, degree, fanout):
    vertices = 60_000
    sample = sampler_of(*regular(vertices, degree), fanout, seed=3).sample(np.arange(vertices))

    sets = sample.nodes[sample.edge_index[0]].numpy().reshape(vertices, fanout)

    check_uniform(*numbers_of(sets, degree))


def test_every_set_has_the_same_chance_over_draws(sampler_of):
    sampler = sampler_of(*regular(8, 6), 2, seed=9)

    sets = [sampler.sample([7]).nodes[1:].numpy() for _ in range(3000)]

    check_uniform(*numbers_of(np.array(sets), 6))


def test_lists_are_sampled_independently(sampler_of):
    sampler = sampler_of(*regular(20_000, 4), 1, seed=1)
    sample = sampler.sample(np.arange(20_000))

    one = sample.nodes[sample.edge_index[0]].numpy()

    check_uniform(one[::2] * 4 + one[1::2], 16)


def test_hubs_are_sampled_over_their_whole_list(sampler_of):
    sampler = sampler_of(*star(1_000_000), 1000, seed=2)

    drawn = np.concatenate([sampler.sample([0]).nodes[1:].numpy() for _ in range(20)])

    check_uniform((drawn - 1) // 10_000, 100)


# The same sample, and another.


def test_seed_and_number_decide_the_sample(graph):
    def sample(seed, number):
        with fw.torch.NeighborSampler(graph, FANOUTS, seed=seed, device="cpu") as made:
            return made.sample(np.arange(100), number=number).nodes

    assert torch.equal(sample(5, 2), sample(5, 2))
    assert not torch.equal(sample(5, 2), sample(5, 3))
    assert not torch.equal(sample(5, 2), sample(6, 2))


def test_samples_differ_from_call_to_call_and_repeat_from_the_start(graph):
    def three():
        with fw.torch.NeighborSampler(graph, FANOUTS, seed=5, device="cpu") as made:
            return [each.nodes for each in made.iterate([np.arange(100)] * 3)]

    first, again = three(), three()

    assert not torch.equal(first[0], first[1])
    assert all(map(torch.equal, first, again))


def test_sample_does_not_depend_on_threads_and_cache(graph):
    def sample(device, **options):
        with fw.torch.NeighborSampler(graph, FANOUTS, device=device, **options) as made:
            return made.sample(np.arange(300))

    one = sample(fw.device.CpuDevice(1), cache="16 KiB", line=512)
    many = sample(fw.device.CpuDevice(8), cache="1 MiB")

    assert torch.equal(one.nodes, many.nodes)
    assert torch.equal(one.edge_index, many.edge_index)


def test_pickled_sampler_goes_on_with_the_same_samples(graph):
    with fw.torch.NeighborSampler(graph, FANOUTS, seed=1, device="cpu") as made:
        made.sample([1])
        with pickle.loads(pickle.dumps(made)) as other:
            assert torch.equal(made.sample([2]).nodes, other.sample([2]).nodes)
        assert other.neighbours.closed


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_arrays_of_other_integers(sampler_of, dtype):
    offsets, neighbours = star(12)

    sample = sampler_of(offsets.astype(np.uint64), neighbours.astype(dtype), 12).sample([0])

    assert sample.nodes.tolist() == list(range(13))


# Misuse.


@pytest.mark.parametrize("seed", [-1, 1024, 1 << 40])
def test_seed_that_is_no_vertex(sampler, seed):
    with pytest.raises(BoundsError, match=f"seed {seed} is no vertex: the graph has 1024"):
        sampler.sample([3, seed])

    assert sampler.sample([3]).batch_size == 1


@pytest.mark.parametrize("seeds", [[1.5], [True], ["a"], np.zeros(2, complex)])
def test_seeds_that_are_no_integers(sampler, seeds):
    with pytest.raises(IndexDtypeError):
        sampler.sample(seeds)


@pytest.mark.parametrize("seeds", [3, [[1, 2]]])
def test_seeds_of_other_shapes(sampler, seeds):
    with pytest.raises(ArgumentError, match="one axis"):
        sampler.sample(seeds)


@pytest.mark.parametrize(
    ("fanouts", "message"),
    [
        ((), "empty"), (5, "no sequence"), ((0,), "between 1 and 1024, nor -1"), ((-2,), "=-2"),
        ((1025,), "between 1 and 1024"), ((2.5,), "not an integer"), ("no", "not an integer"),
    ],
)  # fmt: skip
def test_fanouts_that_make_no_sense(graph, fanouts, message):
    with pytest.raises(ArgumentError, match=message):
        fw.torch.NeighborSampler(graph, fanouts, device="cpu")


def test_samples_that_are_too_large(sampler_of):
    sampler = sampler_of(*star(10), 1024, 1024, 1024, 1024)

    with pytest.raises(ArgumentError, match="fewer seeds"):
        sampler.sample(np.zeros(1 << 21, np.int64))


def test_what_is_no_graph(graph, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(4))
    with fw.open(tmp_path / "x.npy", device="cpu") as x, graph.neighbours(device="cpu") as lists:
        with pytest.raises(DtypeError):
            fw.torch.NeighborSampler((x, lists), (3,))
        with pytest.raises(ArgumentError, match="two"):
            fw.torch.NeighborSampler((lists,), (3,))
        with pytest.raises(ArgumentError, match="cache"):
            fw.torch.NeighborSampler((lists, lists), (3,), cache="1 MiB")
    with pytest.raises(ArgumentError, match="no graph"):
        fw.torch.NeighborSampler(graph.folder, (3,))


def test_arrays_of_two_graphs_and_in_the_other_order_are_refused(tmp_path):
    for name, values in (("offsets", [0, 2, 3]), ("ids", [1, 0, 1]), ("others", [1, 0])):
        np.save(tmp_path / f"{name}.npy", np.array(values, np.int64))
    offsets, ids, others = (
        fw.open(tmp_path / f"{name}.npy", device="cpu") for name in ("offsets", "ids", "others")
    )
    with offsets, ids, others:
        for graph in ((offsets, others), (ids, offsets)):
            with pytest.raises(ArgumentError, match=r"offsets run from \d to \d"):
                fw.torch.NeighborSampler(graph, (3,))
        sample = fw.torch.NeighborSampler((offsets, ids), (3,)).sample([0])

    assert sample.nodes.tolist() == [0, 1]


def test_arrays_on_two_devices(graph):
    one, other = fw.device.CpuDevice(1), fw.device.CpuDevice(2)
    with (
        graph.list_offsets(device=one) as offsets,
        graph.neighbours(device=other) as lists,
        pytest.raises(ArgumentError, match="one device"),
    ):
        fw.torch.NeighborSampler((offsets, lists), (3,))


def test_graph_by_degree_is_sampled_by_number_only_if_asked(tmp_path):
    ordered = graphs.load("kron:8", tmp_path, by_degree=True)

    with pytest.raises(ArgumentError, match="list_offsets"):
        fw.torch.NeighborSampler(ordered, (3,), device="cpu")
    with ordered.list_offsets(device="cpu") as offsets, ordered.neighbours(device="cpu") as lists:
        reference(ordered, fw.torch.NeighborSampler((offsets, lists), (3,)).sample([0]), (3,))


def test_damaged_lists_give_no_vertex_that_is_none(sampler_of):
    offsets, neighbours = star(12)
    neighbours[3:7] = 1 << 20

    sample = sampler_of(offsets, neighbours, 12).sample([0])

    assert sample.nodes.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("offset", [-5, 1 << 40])
def test_damaged_offsets_are_an_error(sampler_of, offset):
    offsets, neighbours = star(12)
    offsets[1] = offset
    sampler = sampler_of(offsets, neighbours, 3)

    with pytest.raises(BoundsError):
        sampler.sample([0])


def test_closed_sampler(graph):
    sampler = fw.torch.NeighborSampler(graph, (3,), device="cpu")
    sampler.close()
    sampler.close()

    with pytest.raises(ClosedError):
        sampler.sample([1])


@pytest.mark.parametrize("fanouts", [(-1,), (-1, 2), (3, -1)])
def test_all_neighbours_and_which_edges_they_are(graph, fanouts):
    offsets, neighbours = graph.offsets, graph.in_memory()
    seeds = torch.tensor([5, 0, 77])
    with fw.torch.NeighborSampler(graph, fanouts, device="cpu", edge_ids=True) as sampler:
        sample = sampler.sample(seeds)
        with pickle.loads(pickle.dumps(sampler)) as other:
            assert torch.equal(other.sample(seeds, number=0).edge_ids, sample.edge_ids)
        assert sampler.sample([]).edge_ids.shape == (0,)
    sources, targets = sample.nodes[sample.edge_index]

    assert np.array_equal(neighbours[sample.edge_ids], sources)
    ends = np.searchsorted(offsets, sample.edge_ids.numpy(), side="right") - 1
    assert np.array_equal(ends, targets)
    assert len(sample.edge_ids.unique()) == len(sample.edge_ids)
    begin = 0 if fanouts[0] == -1 else sample.num_sampled_edges[0]
    whole = targets[begin:] if fanouts[-1] == -1 else targets[: sample.num_sampled_edges[0]]
    for vertex in whole.unique():
        assert (whole == vertex).sum() == graph.degrees[vertex]
