"""Vertices numbered by falling degree, and the way back to the user's labels."""

import numpy as np
import pytest

from flashwarp import graphs
from flashwarp.errors import ArgumentError
from flashwarp.graphs import Edges, EdgeSource
from flashwarp.graphs.inputs import load
from support.small_graphs import rows_of, text_graph


def equal(a, b):
    """Whether two graphs are the same to the user."""
    return (a.matrix() != b.matrix()).nnz == 0


@pytest.mark.parametrize("memory_bytes", [1 << 30, 10_000])
@pytest.mark.parametrize("kind", ["kron", "urand"])
def test_graph_by_degree_is_the_same_graph(tmp_path, monkeypatch, kind, memory_bytes):
    monkeypatch.setattr("flashwarp.graphs.order._PART_ENTRIES", 777)
    given = load(f"{kind}:9", tmp_path / "given")

    ordered = load(f"{kind}:9", tmp_path / "ordered", by_degree=True, memory_bytes=memory_bytes)

    assert (np.diff(ordered.degrees) <= 0).all()
    assert all(row == sorted(row) for row in rows_of(ordered))
    np.testing.assert_array_equal(ordered.by_label(ordered.degrees), given.degrees)
    assert equal(ordered, given)
    assert {path.name for path in ordered.folder.iterdir()} == {
        "graph.json",
        "labels.npy",
        "neighbours.npy",
        "offsets.npy",
    }


def test_vertices_of_one_degree_stay_in_their_order(tmp_path):
    ordered = load("urand:8", tmp_path, by_degree=True)

    key = -ordered.degrees * ordered.vertices + ordered.labels
    assert (np.diff(key) > 0).all()


def test_hub_with_most_edges_and_vertices_without_any(tmp_path):
    """More buckets than vertices that have edges: some buckets are empty."""
    leaves = np.arange(100, 300, dtype=np.uint32)
    edges = Edges(np.full(len(leaves), 70, np.uint32), leaves)
    star = graphs.write_csr(EdgeSource(400, [edges], symmetric=True), tmp_path / "a")

    ordered = graphs.by_degree(star, tmp_path / "b")

    assert ordered.degrees.tolist() == [200] + [1] * 200 + [0] * 199
    assert equal(ordered, star)


def test_weights_go_with_their_entries(tmp_path):
    given = text_graph(tmp_path, "0 3 0.5\n1 3 2\n2 3 4\n4 1 8\n", symmetric=False)

    ordered = graphs.by_degree(given, tmp_path / "ordered")

    assert ordered.weighted
    assert equal(ordered, given)


def test_labels_lead_to_vertices_and_back(tmp_path):
    load("kron:8", tmp_path / "ordered", by_degree=True)
    ordered = graphs.CsrGraph.open(tmp_path / "ordered")
    values = np.random.default_rng(1).random(ordered.vertices)

    assert [int(ordered.labels[ordered.vertex_of(label)]) for label in (0, 7, 255)] == [0, 7, 255]
    np.testing.assert_array_equal(ordered.by_vertex(ordered.by_label(values)), values)
    assert ordered.by_label(values)[7] == values[ordered.vertex_of(7)]
    assert ordered.labels_of(np.array([ordered.vertex_of(7)])).tolist() == [7]
    for label in (-1, 256):
        with pytest.raises(ArgumentError, match="256 vertices"):
            ordered.vertex_of(label)


def test_graph_without_labels_has_its_numbers(tmp_path):
    given = load("kron:4", tmp_path)
    values = np.arange(16.0)

    assert given.labels is None
    assert given.vertex_of(5) == 5
    assert given.labels_of(np.array([3, 4])).tolist() == [3, 4]
    np.testing.assert_array_equal(given.by_label(values), values)
    np.testing.assert_array_equal(given.by_vertex(values), values)


def test_sources_are_the_same_in_any_order(tmp_path):
    given, ordered = (
        load("kron:10", tmp_path / str(by_degree), by_degree=by_degree)
        for by_degree in (False, True)
    )

    assert given.pick_sources(20, seed=3) == ordered.pick_sources(20, seed=3)


def test_order_of_an_ordered_graph_keeps_the_labels(tmp_path):
    given = load("kron:8", tmp_path / "a")
    ordered = graphs.by_degree(given, tmp_path / "b")

    assert equal(graphs.by_degree(ordered, tmp_path / "c"), given)
    assert load(tmp_path / "b", tmp_path / "d", by_degree=True).folder == tmp_path / "b"
    assert equal(load(tmp_path / "a", tmp_path / "e", by_degree=True), given)


def test_folder_of_the_graph_itself_is_refused(tmp_path):
    given = load("kron:4", tmp_path)

    with pytest.raises(ArgumentError, match="another folder"):
        graphs.by_degree(given, tmp_path / ".." / tmp_path.name)
    assert graphs.CsrGraph.open(tmp_path).entries == given.entries


def test_graph_that_replaces_an_ordered_one_has_no_labels(tmp_path):
    load("kron:5", tmp_path, by_degree=True)

    load("kron:5", tmp_path)

    assert graphs.CsrGraph.open(tmp_path).labels is None


def test_graph_stays_where_its_successor_fails(tmp_path):
    given = load("kron:5", tmp_path)

    def broken():
        raise OSError("disk full")
        yield

    labels = np.arange(32, dtype=np.uint32)
    with pytest.raises(OSError, match="disk full"):
        graphs.write_csr(EdgeSource(32, broken(), symmetric=False, labels=labels), tmp_path)

    assert equal(graphs.CsrGraph.open(tmp_path), given)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["neighbours.npy", "offsets.npy"]
