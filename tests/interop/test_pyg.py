"""PyG's own loaders, stores and models over features and graphs in files."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")

import torch
from torch_geometric.data import Data, EdgeAttr, TensorAttr
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import flashwarp as fw
import flashwarp.pyg
from flashwarp import graphs
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    CopyError,
    DtypeError,
    ExistingFileError,
    ReadOnlyError,
)

# Of a fork beside threads, and of more workers than cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

WIDTH = 12
FANOUTS = (6, 4)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return graphs.load("kron:9", tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="module")
def content(graph):
    random = np.random.default_rng(3)
    return random.random((graph.vertices, WIDTH), np.float32), np.arange(graph.vertices)


@pytest.fixture
def arrays(tmp_path, content):
    for name, values in zip("xy", content, strict=True):
        np.save(tmp_path / f"{name}.npy", values)
    with (
        fw.open(tmp_path / "x.npy", device="cpu", cache="8 KiB", line=512) as x,
        fw.open(tmp_path / "y.npy", device="cpu") as y,
    ):
        yield {"x": x, "y": y}


@pytest.fixture
def sampler(graph):
    with fw.pyg.NeighborSampler(graph, FANOUTS, seed=1, device="cpu", cache="64 KiB") as made:
        yield made


def loader_of(arrays, graph, sampler, **options):
    stores = fw.pyg.FeatureStore(arrays), fw.pyg.GraphStore(graph)
    options = {"batch_size": 50, **options}
    return NodeLoader(stores, sampler, input_nodes=torch.arange(0, graph.vertices, 3), **options)


# Loaders.


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_gives_features_of_real_neighbourhoods(arrays, graph, content, sampler, workers):
    seen, lists = [], graph.in_memory()
    for data in loader_of(arrays, graph, sampler, num_workers=workers):
        nodes = data.n_id.numpy()
        np.testing.assert_array_equal(data.x.numpy(), content[0][nodes])
        np.testing.assert_array_equal(data.y.numpy(), nodes)
        assert data.num_nodes == len(nodes) == sum(data.num_sampled_nodes)
        assert data.edge_index.shape[1] == sum(data.num_sampled_edges)
        for source, target in data.edge_index.T.tolist():
            own = lists[graph.offsets[nodes[target]] : graph.offsets[nodes[target] + 1]]
            assert nodes[source] in own
        seen += nodes[: data.batch_size].tolist()

    assert seen == list(range(0, graph.vertices, 3))


def test_model_of_pyg_trains(arrays, graph, sampler):
    torch.manual_seed(0)
    model = GraphSAGE(WIDTH, 16, 2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(6):
        total = 0.0
        for data in loader_of(arrays, graph, sampler, shuffle=True):
            # The mean of a vertex's own features: learned soon.
            wanted = data.x[: data.batch_size].mean(1)
            loss = (model(data.x, data.edge_index)[: data.batch_size, 0] - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total)

    assert losses[-1] < losses[0] / 4


def test_workers_sample_anew_in_each_epoch(arrays, graph, sampler):
    def nodes(loader):
        return [data.n_id.tolist() for data in loader]

    loader = loader_of(arrays, graph, sampler, num_workers=2)
    torch.manual_seed(4)
    first, second = nodes(loader), nodes(loader)
    torch.manual_seed(4)

    assert first != second
    assert nodes(loader) == first


def test_sampler_and_stores_can_be_pickled(arrays, graph, sampler):
    features, store, same = pickle.loads(
        pickle.dumps((fw.pyg.FeatureStore(arrays), fw.pyg.GraphStore(graph), sampler))
    )

    with same:
        data = next(iter(NodeLoader((features, store), same, torch.arange(9), batch_size=9)))
    assert torch.equal(data.y, data.n_id)
    for name in "xy":
        features._arrays[None, name].close()


def test_times_and_links_are_refused(graph, sampler):
    with pytest.raises(ArgumentError, match="times"):
        list(
            NodeLoader(
                (fw.pyg.FeatureStore(), fw.pyg.GraphStore(graph)),
                sampler,
                torch.arange(4),
                input_time=torch.arange(4),
            )
        )
    with pytest.raises(ArgumentError, match="links"):
        sampler.sample_from_edges(None)


# Features, beside PyG's own example of a store.


def both(arrays, content):
    ours, theirs = fw.pyg.FeatureStore(arrays), MyFeatureStore()
    for name, values in zip("xy", content, strict=True):
        theirs.put_tensor(torch.from_numpy(values), None, name, None)
    return ours, theirs


@pytest.mark.parametrize(
    "index", [None, slice(None), torch.tensor([5, 0, 511]), torch.tensor([], dtype=torch.int64)]
)
@pytest.mark.parametrize("name", ["x", "y"])
def test_tensors_are_those_of_pygs_example(arrays, content, name, index):
    ours, theirs = both(arrays, content)

    assert torch.equal(ours[None, name, index], theirs[None, name, index])
    assert ours.get_tensor_size(None, name) == tuple(theirs.get_tensor_size(None, name))
    attr = TensorAttr(None, name, index)
    assert ours.get_tensor_size(attr) == tuple(theirs.get_tensor_size(attr))


def test_other_indices_that_pyg_allows(arrays, content):
    store, values = fw.pyg.FeatureStore(arrays), content[0]

    np.testing.assert_array_equal(store[None, "x", slice(3, 9, 2)].numpy(), values[3:9:2])
    np.testing.assert_array_equal(store[None, "x", 7].numpy(), values[7:8])
    # PyG 2.8 cannot ask for more than one row by an array of numpy.
    got = store._get_tensor(TensorAttr(None, "x", np.array([7, 1])))
    np.testing.assert_array_equal(got, values[[7, 1]])
    chosen = torch.zeros(len(values), dtype=torch.bool)
    chosen[4] = True
    np.testing.assert_array_equal(store[None, "x", chosen].numpy(), values[4:5])
    assert store.get_tensor_size(TensorAttr(None, "x", slice(3, 9, 2))) == (3, WIDTH)
    assert torch.equal(
        store.view(group_name=None).x[torch.tensor([2])], torch.from_numpy(values[2:3])
    )
    assert [(a.group_name, a.attr_name) for a in store.get_all_tensor_attrs()] == [
        (None, "x"),
        (None, "y"),
    ]


def test_groups_of_nodes(arrays):
    store = fw.pyg.FeatureStore({("paper", "x"): arrays["x"], ("author", "x"): arrays["y"]})

    assert store["author", "x", torch.tensor([3])].tolist() == [3]
    assert store.get_tensor_size("paper", "x") == arrays["x"].shape


CITES = ("paper", "cites", "paper")


def two_types(arrays, graph, sampler, **options):
    """A loader over papers with their numbers as features, and authors with others."""
    features = {("author", "x"): arrays["x"], ("paper", "x"): arrays["y"]}
    stores = fw.pyg.FeatureStore(features), fw.pyg.GraphStore({CITES: graph})
    return NodeLoader(stores, sampler, batch_size=50, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_seeds_of_a_type_get_the_features_of_their_type(arrays, graph, workers):
    seeds = torch.arange(0, graph.vertices, 3)
    with fw.pyg.NeighborSampler(graph, FANOUTS, edge_type=CITES, device="cpu") as sampler:
        loader = two_types(
            arrays, graph, sampler, input_nodes=("paper", seeds), num_workers=workers
        )
        for batch in loader:
            papers = batch["paper"]
            assert torch.equal(papers.x, papers.n_id)
            assert torch.equal(papers.x[: papers.batch_size], seeds[papers.input_id])
            row, column = papers.x[batch[CITES].edge_index]
            lists = graph.in_memory()
            for neighbour, vertex in zip(row.tolist(), column.tolist(), strict=True):
                mine = slice(graph.offsets[vertex], graph.offsets[vertex + 1])
                assert neighbour in lists[mine]


@pytest.mark.parametrize("seeds", [("paper", torch.arange(9)), torch.arange(9)])
def test_a_sampler_without_types_is_refused_where_there_are_several(arrays, graph, sampler, seeds):
    with pytest.raises(ArgumentError, match="edge_type="):
        next(iter(two_types(arrays, graph, sampler, input_nodes=seeds)))


@pytest.mark.parametrize("seeds", [("author", torch.arange(9)), torch.arange(9)])
def test_seeds_of_another_type_are_refused(arrays, graph, seeds):
    with (
        fw.pyg.NeighborSampler(graph, FANOUTS, edge_type=CITES, device="cpu") as sampler,
        pytest.raises(ArgumentError, match="vertices are of type 'paper'"),
    ):
        next(iter(two_types(arrays, graph, sampler, input_nodes=seeds)))


@pytest.mark.parametrize("edge_type", ["paper", ("paper", "by", "author"), ("a", "b"), (1, 2, 1)])
def test_edges_between_two_types_are_refused(graph, edge_type):
    with pytest.raises(ArgumentError, match="ids of one kind"):
        fw.pyg.NeighborSampler(graph, FANOUTS, edge_type=edge_type, device="cpu")


@pytest.mark.parametrize("name", ["edge_attr", "weight"])
def test_features_of_edges_are_not_read_by_ids_of_nodes(tmp_path, arrays, graph, sampler, name):
    rows = graph.vertices if "edge" in name else graph.entries
    np.save(tmp_path / "edges.npy", np.arange(rows))
    with fw.open(tmp_path / "edges.npy", device="cpu") as edges:
        stores = {"x": arrays["x"], name: edges}
        with pytest.raises(ArgumentError, match="features of edges"):
            next(iter(loader_of(stores, graph, sampler)))

        assert fw.pyg.FeatureStore(stores)[None, name, torch.tensor([5])].tolist() == [5]


def test_a_mask_of_other_rows_is_refused(arrays):
    store = fw.pyg.FeatureStore(arrays)
    mask = torch.zeros(len(arrays["x"]), dtype=torch.bool)
    mask[3] = True

    assert store[None, "y", mask].tolist() == [3]
    with pytest.raises(ArgumentError, match="a mask of shape"):
        store[None, "y", mask[:-1]]


@pytest.mark.parametrize("layout", ["coo", "csc", "csr"])
def test_edges_of_nodes_that_are_not_there_are_refused(tmp_path, layout):
    store = fw.pyg.GraphStore(folder=tmp_path)
    edges = {
        "coo": (torch.tensor([0, 5]), torch.tensor([1, 1])),
        "csc": (torch.tensor([0, 5]), torch.tensor([0, 0, 2])),
        "csr": (torch.tensor([0, 0, 2]), torch.tensor([-1, 1])),
    }[layout]

    with pytest.raises(BoundsError, match=r"an edge has the node (5|-1), and there are 2"):
        store.put_edge_index(edges, edge_type=CITES, layout=layout, size=(2, 2))


def test_two_types_of_edges_never_share_a_folder(tmp_path):
    store = fw.pyg.GraphStore(folder=tmp_path)
    edges = torch.tensor([0]), torch.tensor([1])
    store.put_edge_index(edges, edge_type=("a__b", "c", "d"), layout="coo", size=(2, 2))

    with pytest.raises(ArgumentError, match="rename"):
        store.put_edge_index(edges, edge_type=("a", "b__c", "d"), layout="coo", size=(2, 2))


def test_tensors_are_put_into_files(tmp_path):
    store = fw.pyg.FeatureStore(folder=tmp_path, device="cpu")
    values = torch.arange(12.0).reshape(6, 2)

    assert store.put_tensor(values, "paper", "x", None)

    assert torch.equal(store["paper", "x", None], values)
    np.testing.assert_array_equal(np.load(tmp_path / "paper.x.npy"), values.numpy())
    assert store.update_tensor(values + 1, "paper", "x", None)
    assert torch.equal(store["paper", "x", torch.tensor([1])], values[1:2] + 1)
    with pytest.raises(ReadOnlyError):
        store.put_tensor(values[:1], "paper", "x", torch.tensor([1]))
    store.close()
    other = fw.pyg.FeatureStore(folder=tmp_path)
    with pytest.raises(ExistingFileError):
        other.put_tensor(values, "paper", "x", None)


@pytest.mark.parametrize("index", [torch.tensor([4, 1]), slice(1, 3)])
def test_rows_are_put_into_a_writable_array(tmp_path, index):
    with fw.create(tmp_path / "x.npy", "f4", (6, 2), device="cpu") as x:
        store = fw.pyg.FeatureStore({"x": x})
        store.put_tensor(torch.ones(2, 2), None, "x", index)
        expected = np.zeros((6, 2), "f4")
        expected[index] = 1
        np.testing.assert_array_equal(x[...], expected)
        store[None, "x", None] = np.full((6, 2), 3, "f4")
        assert (x[...] == 3).all()
        with pytest.raises(ArgumentError, match="shape"):
            store.put_tensor(torch.ones(5, 2), None, "x", None)
        with pytest.raises(CopyError):
            pickle.dumps(store)


def test_arrays_are_put_and_removed(arrays):
    store = fw.pyg.FeatureStore()

    store[None, "x", None] = arrays["x"]
    assert store.get_tensor_size(None, "x") == arrays["x"].shape
    assert store.remove_tensor(None, "x", None)
    assert not store.remove_tensor(None, "x", None)
    assert store.get_tensor_size(None, "x") is None
    assert not arrays["x"].closed


def test_what_a_feature_store_refuses(arrays, tmp_path):
    store = fw.pyg.FeatureStore(arrays)

    with pytest.raises(KeyError, match="'z'"):
        store[None, "z", None]
    with pytest.raises(BoundsError):
        store[None, "x", torch.tensor([1 << 20])]
    with pytest.raises(ArgumentError, match="folder"):
        store.put_tensor(torch.ones(3), None, "z", None)
    with pytest.raises(ArgumentError, match="whole"):
        store.put_tensor(arrays["x"], None, "z", torch.tensor([1]))
    with pytest.raises(ArgumentError, match="no flashwarp"):
        fw.pyg.FeatureStore({"x": np.zeros(3)})
    for name in (3, ("a", "b", "c"), ("a", 1)):
        with pytest.raises(ArgumentError, match="name an array"):
            fw.pyg.FeatureStore({name: arrays["x"]})
    with pytest.raises(ArgumentError, match="another folder"):
        fw.pyg.FeatureStore(folder=tmp_path).put_tensor(torch.ones(3), "../a", "z", None)


# Graphs.


def edges_of(row, column):
    return set(zip(row.tolist(), column.tolist(), strict=True))


@pytest.mark.parametrize("layout", ["csc", "csr"])
def test_edges_in_every_layout_of_pyg(graph, layout):
    store = fw.pyg.GraphStore(graph, layout=layout)
    lists = graph.in_memory()
    vertex = np.repeat(np.arange(graph.vertices), graph.degrees)
    expected = edges_of(lists, vertex) if layout == "csc" else edges_of(vertex, lists)

    row, column, _ = store.coo()
    assert edges_of(row, column) == expected
    row, pointers, _ = store.csc()
    assert (
        edges_of(row, torch.arange(graph.vertices).repeat_interleave(pointers.diff())) == expected
    )
    pointers, column, _ = store.csr()
    assert edges_of(torch.arange(graph.vertices).repeat_interleave(pointers.diff()), column) == (
        expected
    )
    assert [attr.size for attr in store.get_all_edge_attrs()] == [(graph.vertices,) * 2]


@pytest.mark.parametrize("layout", ["coo", "csc", "csr"])
def test_edges_are_put_into_files(tmp_path, layout):
    kind = ("paper", "cites", "author")
    row, column = torch.tensor([3, 0, 3, 1]), torch.tensor([1, 1, 0, 2])
    parts = {
        "coo": (row, column),
        "csc": (torch.tensor([3, 3, 0, 1]), torch.tensor([0, 1, 3, 4])),
        "csr": (torch.tensor([0, 1, 2, 2, 4]), torch.tensor([1, 2, 1, 0])),
    }[layout]
    ours, theirs = fw.pyg.GraphStore(folder=tmp_path), MyGraphStore()
    for store in (ours, theirs):
        assert store.put_edge_index(parts, kind, layout, size=(4, 3))

    for convert in ("coo", "csc", "csr"):
        got, want = (getattr(store, convert)()[:2] for store in (ours, theirs))
        for mine, other in zip(got, want, strict=True):
            assert sorted(mine[kind].tolist()) == sorted(other[kind].tolist())
    got = ours.coo()
    assert edges_of(got[0][kind], got[1][kind]) == edges_of(row, column)
    assert (tmp_path / "paper__cites__author" / "offsets.npy").exists()
    stored = ours.get_all_edge_attrs()[0]
    assert ours.remove_edge_index(stored)
    assert not ours.remove_edge_index(stored)
    with pytest.raises(KeyError):
        ours.get_edge_index(stored)


def test_put_arrays_can_be_sampled(graph, arrays):
    with graph.list_offsets(device="cpu") as offsets, graph.neighbours(device="cpu") as lists:
        store = fw.pyg.GraphStore()
        store[EdgeAttr(None, "csc")] = (offsets, lists)
        with fw.pyg.NeighborSampler((offsets, lists), FANOUTS) as sampler:
            data = next(iter(loader_of(arrays, graph, sampler)))
        assert store.get_all_edge_attrs()[0].size == (graph.vertices,) * 2

    assert torch.equal(data.y, data.n_id)


def test_what_a_graph_store_refuses(graph, tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match="layout"):
        fw.pyg.GraphStore(graph, layout="coo")
    with pytest.raises(ArgumentError, match="no graph"):
        fw.pyg.GraphStore(np.zeros(3))
    with pytest.raises(ArgumentError, match="labels"):
        fw.pyg.GraphStore(graphs.load("kron:6", tmp_path, by_degree=True))
    edges = torch.tensor([[0, 1], [1, 0]])
    with pytest.raises(ArgumentError, match="folder"):
        fw.pyg.GraphStore().put_edge_index(tuple(edges), None, "coo")
    with pytest.raises(ArgumentError, match="'coo'"):
        fw.pyg.GraphStore().put_edge_index(graph, None, "coo")
    with pytest.raises(ArgumentError, match="'/'"):
        fw.pyg.GraphStore(folder=tmp_path).put_edge_index(tuple(edges), ("a/b", "c", "d"), "coo")
    monkeypatch.setenv("FLASHWARP_ASARRAY_BYTES", "1000")
    with pytest.raises(ArgumentError, match="FLASHWARP_ASARRAY_BYTES"):
        fw.pyg.GraphStore(graph).coo()


@pytest.mark.parametrize("mine", [np.arange(9.0), np.zeros(0, np.int64), np.arange(9)])
def test_a_store_replaces_what_a_store_has_written_alone(tmp_path, mine):
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    for _ in range(2):  # as a program that is run again
        fw.pyg.GraphStore(folder=tmp_path).put_edge_index(
            edges, edge_type=None, layout="coo", size=(3, 3)
        )
    np.save(tmp_path / "edges" / "offsets.npy", mine)

    with pytest.raises(ExistingFileError, match="name another folder, or remove these"):
        fw.pyg.GraphStore(folder=tmp_path).put_edge_index(
            edges, edge_type=None, layout="coo", size=(3, 3)
        )

    assert np.array_equal(np.load(tmp_path / "edges" / "offsets.npy"), mine)


ABSENT = """
import sys
sys.modules["torch_geometric"] = None  # as if it were not installed
try:
    import flashwarp.pyg
except ImportError as error:
    assert "pip install 'flashwarp[pyg]'" in str(error), error
else:
    sys.exit("no error")
"""


def test_import_says_what_to_install():
    subprocess.run([sys.executable, "-c", ABSENT], check=True, timeout=60)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_features_that_numpy_lacks_are_stored_as_integers(tmp_path, dtype):
    x = torch.randn(6, 4).to(dtype)
    key = {"group_name": None, "attr_name": "x"}
    store = fw.pyg.FeatureStore(folder=tmp_path, device="cpu")
    store.put_tensor(x, **key, index=None)

    for index in (None, slice(1, 3), torch.tensor([5, 0])):
        got = store.get_tensor(**key, index=index)
        assert got.dtype is dtype
        assert torch.equal(got.float(), x[slice(None) if index is None else index].float())
    assert repr(store) == f"FeatureStore(x: [6, 4] {dtype})"
    store.close()
    repr(store)
    with fw.open(tmp_path / "x.npy", "r+", device="cpu") as array:
        again = fw.pyg.FeatureStore({"x": array}, stored={"x": dtype})
        again.put_tensor(torch.ones(2, 4), **key, index=torch.tensor([1, 2]))
        assert again[None, "x", torch.tensor([2])].float().tolist() == [[1] * 4]
        with pytest.raises(DtypeError, match="holds no elements"):
            fw.pyg.FeatureStore({"x": array}, stored={"x": torch.float64})


def test_edges_of_pyg_go_in_by_one_call(tmp_path):
    edges = torch.tensor([[0, 0, 2, 3], [1, 2, 0, 0]])
    store = fw.pyg.GraphStore(folder=tmp_path / "put")
    store.put_edge_index(edges, None, "coo", size=(4, 4))
    made = graphs.load(Data(edge_index=edges, num_nodes=4), tmp_path / "made", reverse=True)

    for each in (store, fw.pyg.GraphStore(made)):
        row, column, _ = each.coo()
        assert edges_of(row, column) == edges_of(*edges)
        assert repr(each) == "GraphStore([4, 4] csc)"
    with fw.pyg.NeighborSampler(made, (2,), device="cpu") as sampler:
        assert repr(sampler) == "pyg.NeighborSampler(4 vertices, 4 edges, (2,))"
        row, _ = sampler._sampler.sample([0]).edge_index
        assert len(row) == 2
    repr(sampler)


def test_batches_know_which_edges_they_have(arrays, graph):
    with fw.pyg.NeighborSampler(graph, (-1, 4), device="cpu", edge_ids=True) as sampler:
        for data in loader_of(arrays, graph, sampler):
            found = graph.in_memory()[data.e_id]
            assert np.array_equal(found, data.n_id[data.edge_index[0]])
