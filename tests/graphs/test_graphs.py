"""Graphs from generators and files: their properties, and what damaged input gets."""

import gzip

import numpy as np
import pytest
from scipy import io, sparse

from flashwarp import graphs
from flashwarp.cli.main import main
from flashwarp.errors import (
    ArgumentError,
    FileFormatError,
    FlashwarpError,
    MissingFileError,
)
from flashwarp.graphs import Edges, EdgeSource
from flashwarp.graphs.generate import rmat_chunk
from flashwarp.graphs.inputs import load
from support.small_graphs import rows_of, text_graph

# Graphs in memory.

# A directed graph with a loop, an edge twice, and a last vertex without edges.
ENDS = np.array([[0, 0, 2, 2, 1, 3], [1, 2, 0, 0, 1, 0]])
ROWS = [[1, 2], [], [0], [0], []]
REVERSED = [[2, 3], [0], [0], [], []]


def matrix(kind):
    values = np.ones(ENDS.shape[1])
    return kind((values[[0, 1, 2, 4, 5]], ENDS[:, [0, 1, 2, 4, 5]]), shape=(5, 5))


class Data:
    """What PyG's has of these."""

    edge_index = ENDS
    num_nodes = 5


@pytest.mark.parametrize(
    ("what", "options"),
    [
        (ENDS, {"vertices": 5}),
        (tuple(ENDS.astype("u2")), {"vertices": 5}),
        (ENDS.tolist(), {"vertices": 5}),
        (matrix(sparse.coo_matrix), {}),
        (matrix(sparse.coo_array).tocsr(), {}),
        (Data(), {}),
    ],
)
def test_graph_in_memory_goes_in_by_one_call(tmp_path, what, options):
    graph = load(what, tmp_path / "there", **options)
    assert [list(row) for row in rows_of(graph)] == ROWS
    back = load(what, tmp_path / "back", reverse=True, **options)
    assert [list(row) for row in rows_of(back)] == REVERSED
    both = load(what, tmp_path / "both", symmetric=True, **options)
    assert both.entries == 6
    assert repr(graph) == f"CsrGraph({str(tmp_path / 'there')!r}, 5 vertices, 4 entries)"


def test_reversed_edges_of_a_file_have_a_direction(tmp_path):
    path = tmp_path / "edges.txt"
    np.savetxt(path, ENDS.T, fmt="%d")

    assert load(path, tmp_path / "both").entries == 6
    back = load(path, tmp_path / "back", reverse=True)
    assert back.entries == 4
    assert [list(row) for row in rows_of(back)] == REVERSED[: back.vertices]
    assert load(path, tmp_path / "all", reverse=True, symmetric=True).entries == 6


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        (np.zeros((3, 4), "i8"), {}, "is no graph"),
        (np.zeros((3, 2), "i8"), {}, r"\(2, count\) \(these are pairs: numpy.transpose"),
        ([(0, 1), (1, 2), (2, 0)], {}, "these are pairs: numpy.transpose"),
        (3 * [np.zeros(2, "i8"), 4], {}, "is no graph"),
        (7, {}, "is no graph"),
        ({"a": 1}, {}, "is no graph"),
        (ENDS / 2, {}, "dtype float64: give integers"),
        (-ENDS, {}, "an edge has vertex -3"),
        (ENDS + (1 << 40), {}, r"numbered from 0 to 4294967295; .*numpy.unique\(edges"),
        (ENDS, {"vertices": 3}, "an edge has vertex 3, and there are 3"),
        ([[0, 1], [1]], {}, "have shapes"),
        (sparse.coo_array(np.ones((2, 3))), {}, "is no graph"),
        ("kron:4", {"vertices": 3}, "those that it names"),
    ],
)
def test_what_is_no_graph_in_memory(tmp_path, what, options, words):
    with pytest.raises(FlashwarpError, match=words):
        load(what, tmp_path, **options)


# Generators.


def test_rmat_bits_have_the_quadrant_chances_of_the_gap_suite():
    scale, edges = 12, 200_000

    source, target = rmat_chunk(np.random.default_rng(3), scale, edges)

    for level in range(scale):
        quadrant = 2 * ((source >> level) & 1) + ((target >> level) & 1)
        share = np.bincount(quadrant, minlength=4) / edges
        # Four standard deviations of 200,000 draws are below 0.005.
        np.testing.assert_allclose(share, [0.57, 0.19, 0.19, 0.05], atol=0.005)


def test_rmat_levels_are_independent():
    source, _ = rmat_chunk(np.random.default_rng(4), 2, 200_000)

    high, low = source >> 1, source & 1

    both = (high & low).mean()
    assert both == pytest.approx(high.mean() * low.mean(), abs=0.005)


@pytest.mark.parametrize("kind", ["kron", "urand"])
def test_generated_graph_repeats_with_its_seed_and_not_with_another(tmp_path, kind):
    first, again, other = (
        load(f"{kind}:10", tmp_path / name, seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )

    np.testing.assert_array_equal(first.in_memory(), again.in_memory())
    assert rows_of(first) != rows_of(other)


def test_degrees_of_the_kronecker_graph_are_skewed_and_a_third_of_vertices_isolated(tmp_path):
    graph = load("kron:16", tmp_path)

    # Known of Graph500 graphs at this scale: about 29 % isolated, hubs a thousand times the mean
    # at large scale, and a fifth of the 2 x 16 entries a vertex lost to duplicates.
    assert 0.24 < (graph.degrees == 0).mean() < 0.34
    assert graph.degrees.max() > 100 * graph.degrees.mean()
    assert 0.7 < graph.entries / (2 * 16 * 65536) < 0.95


def test_degrees_of_the_uniform_graph_are_those_of_random_ends(tmp_path):
    graph = load("urand:14", tmp_path)

    # Ends fall on vertices independently: Poisson with mean 32, deviation 5.7, few duplicates.
    assert graph.degrees.mean() == pytest.approx(32, rel=0.01)
    assert graph.degrees.std() == pytest.approx(32**0.5, rel=0.05)


def test_vertex_names_are_permuted(tmp_path):
    degrees = load("kron:12", tmp_path, seed=6).degrees

    # Without the permutation the first quarter of the names would hold most of the edges.
    assert degrees[:1024].sum() / degrees.sum() == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize("what", ["kron:0", "kron:33", "kron:-4", "kron:x", "urand:"])
def test_scale_that_cannot_be(tmp_path, what):
    with pytest.raises(ArgumentError, match="scale"):
        load(what, tmp_path)


# Building.


@pytest.mark.parametrize("memory_bytes", [1 << 30, 10_000])
@pytest.mark.parametrize("kind", ["kron", "urand"])
def test_csr_is_symmetric_sorted_and_without_loops_or_duplicates(tmp_path, kind, memory_bytes):
    graph = load(f"{kind}:10", tmp_path, seed=5, memory_bytes=memory_bytes)
    neighbours = graph.in_memory().astype(np.int64)

    owner = np.repeat(np.arange(graph.vertices), graph.degrees)
    pairs = owner * graph.vertices + neighbours
    reverse = neighbours * graph.vertices + owner

    assert neighbours.max() < graph.vertices
    assert (np.diff(pairs) > 0).all()
    np.testing.assert_array_equal(np.sort(reverse), pairs)
    assert (owner != neighbours).all()
    assert {path.name for path in tmp_path.iterdir()} == {"offsets.npy", "neighbours.npy"}


@pytest.mark.parametrize("memory_bytes", [1 << 30, 1000])
def test_first_weight_of_a_duplicate_counts(tmp_path, memory_bytes):
    random = np.random.default_rng(1)
    ends = random.integers(0, 20, (2, 500)).astype(np.uint32)
    weight = np.arange(500, dtype=np.float32)
    chunks = [Edges(*ends[:, i : i + 50], weight[i : i + 50]) for i in range(0, 500, 50)]

    graph = graphs.write_csr(
        EdgeSource(20, chunks, symmetric=False, weighted=True), tmp_path, memory_bytes
    )

    expected = {}
    for a, b, w in zip(*ends.tolist(), weight.tolist(), strict=True):
        if a != b:
            expected.setdefault((a, b), w)
    keys = sorted(expected)
    assert graph.in_memory().tolist() == [b for _, b in keys]
    assert np.load(graph.weights_path).tolist() == [expected[key] for key in keys]


def test_data_begins_on_a_page_and_numpy_reads_it(tmp_path):
    graph = load("urand:5", tmp_path)

    assert graph.neighbours_path.stat().st_size == 4096 + 4 * graph.entries
    assert np.load(graph.neighbours_path).dtype == np.uint32


def test_sources_have_more_than_two_neighbours(tmp_path):
    graph = load("kron:10", tmp_path, seed=7)

    sources = graph.pick_sources(32, seed=1)

    assert len(set(sources)) == 32
    assert (graph.degrees[sources] > 2).all()
    with pytest.raises(ArgumentError, match="vertices have"):
        graph.pick_sources(1000, seed=1)


# Opening.


def test_folder_is_opened_as_it_is(tmp_path):
    made = load("kron:8", tmp_path)

    opened = load(tmp_path, "not used")

    np.testing.assert_array_equal(opened.offsets, made.offsets)
    assert not opened.weighted


def test_folder_without_a_graph(tmp_path):
    with pytest.raises(MissingFileError, match=r"offsets\.npy"):
        load(tmp_path, "not used")


def test_weights_of_a_graph_without(tmp_path):
    with pytest.raises(ArgumentError, match="no weights"):
        load("kron:4", tmp_path).weights()


# Files.


@pytest.mark.parametrize("packed", [False, True])
def test_edge_list_with_comments_and_blank_lines(tmp_path, packed):
    text = b"# a path\n0 1\n\n% and on\n 1\t2 \r\n2 3"
    name = "edges.txt.gz" if packed else "edges.txt"

    graph = text_graph(tmp_path, gzip.compress(text) if packed else text, name)

    assert rows_of(graph) == [[1], [0, 2], [1, 3], [2]]
    assert not graph.weighted


def test_edge_list_with_weights_one_way(tmp_path):
    graph = text_graph(tmp_path, "0 2 0.5\n2 1 1e3\n", symmetric=False)

    assert rows_of(graph) == [[2], [], [1]]
    assert np.load(graph.weights_path).tolist() == [0.5, 1000.0]


def test_edge_list_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr("flashwarp.graphs.inputs._TEXT_BYTES", 64)
    n = 300

    graph = text_graph(tmp_path, "".join(f"{i} {i + 1}\n" for i in range(n)))

    assert graph.vertices == n + 1
    assert graph.entries == 2 * n


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n1\n", "line 2: 1 numbers"),
        ("0 1\n\n1 2 3\n", "line 3: 3 numbers"),
        ("0 1 2 3\n", "line 1: 4 numbers"),
        ("0 x\n", "not numbers"),
        ("0 1\n-1 2\n", "vertex -1"),
        ("0 4294967296\n", "vertex 4294967296, and .* number them, as numpy.unique"),
        ("0.5 1 1\n", "whole number"),
        ("0 nan 1\n", "whole number"),
        ("0 1.5\n", "not numbers"),
        ("# nothing\n", "no edges"),
        ("", "no edges"),
        ("1 " * 100_000, "no edge list"),
        (b"\xff\xfe 1\n", "not numbers"),
    ],
)
def test_edge_list_that_is_none(tmp_path, text, message):
    with pytest.raises(FileFormatError, match=message):
        text_graph(tmp_path, text)


@pytest.mark.parametrize("keep", [5, 30])
def test_compressed_edge_list_cut_short(tmp_path, keep):
    packed = gzip.compress(b"".join(b"%d %d\n" % (i, i * 7 % 31) for i in range(30)))

    with pytest.raises(FileFormatError):
        text_graph(tmp_path, packed[:keep], "edges.gz")


def some_matrix():
    return sparse.random(30, 30, 0.1, random_state=1, format="coo")


def expected_lists(matrix, symmetric):
    dense = matrix.toarray() != 0
    np.fill_diagonal(dense, False)
    if symmetric:
        dense |= dense.T
    return [np.flatnonzero(row).tolist() for row in dense]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_npz_of_scipy(tmp_path, kind, symmetric):
    matrix = some_matrix()
    sparse.save_npz(tmp_path / "m.npz", matrix.asformat(kind))

    graph = load(tmp_path / "m.npz", tmp_path / "graph", symmetric=symmetric)

    assert rows_of(graph) == expected_lists(matrix, symmetric)
    assert graph.weighted


def both_ways(matrix):
    return (matrix + matrix.T).tocoo()


@pytest.mark.parametrize("suffix", ["npz", "mtx"])
@pytest.mark.parametrize(
    "one_way", [some_matrix(), sparse.coo_matrix(([1.0, 2.0], ([0, 1], [1, 0])), (30, 30))]
)
def test_a_matrix_with_edges_in_one_direction_says_what_becomes_of_them(tmp_path, suffix, one_way):
    write = {"npz": sparse.save_npz, "mtx": io.mmwrite}[suffix]
    path = tmp_path / f"m.{suffix}"

    write(path, one_way)
    with pytest.raises(ArgumentError, match=r"give symmetric=False .* symmetric=True"):
        load(path, tmp_path / "graph")
    assert not (tmp_path / "graph").exists()

    write(path, both_ways(one_way))
    assert rows_of(load(path, tmp_path / "graph")) == expected_lists(one_way, True)


def test_matrix_market_with_weights_and_as_a_pattern(tmp_path):
    matrix = some_matrix()
    io.mmwrite(tmp_path / "m.mtx", matrix)
    pattern = matrix.astype(bool).astype(np.int32)
    io.mmwrite(tmp_path / "p.mtx", pattern, field="pattern")

    graph = load(tmp_path / "m.mtx", tmp_path / "a", symmetric=False)
    plain = load(tmp_path / "p.mtx", tmp_path / "b", symmetric=False)

    assert rows_of(graph) == rows_of(plain) == expected_lists(matrix, False)
    without_loops = matrix.tocsr()
    without_loops.setdiag(0)
    without_loops.eliminate_zeros()
    np.testing.assert_allclose(np.load(graph.weights_path), without_loops.data, rtol=1e-6)
    assert not plain.weighted


def damaged_npz(tmp_path, **changed):
    matrix = some_matrix().tocsr()
    parts = {
        "format": "csr",
        "shape": matrix.shape,
        "data": matrix.data,
        "indices": matrix.indices,
        "indptr": matrix.indptr,
    }
    np.savez(tmp_path / "m.npz", **{k: v for k, v in (parts | changed).items() if v is not None})
    return tmp_path / "m.npz"


@pytest.mark.parametrize("name", ["m.npz", "m.mtx"])
@pytest.mark.parametrize("content", [b"", b"PK nonsense", b"%%MatrixMarket matrix coordinate"])
def test_file_of_nonsense(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)

    with pytest.raises(FileFormatError):
        load(tmp_path / name, tmp_path / "graph")


def test_npz_cut_short_anywhere_or_with_a_flipped_byte_raises_or_is_whole(tmp_path):
    whole = damaged_npz(tmp_path).read_bytes()
    expected = rows_of(load(tmp_path / "m.npz", tmp_path / "graph", symmetric=True))
    random = np.random.default_rng(2)
    for _ in range(60):
        data = bytearray(whole[: random.integers(len(whole))] if random.random() < 0.3 else whole)
        if len(data) == len(whole):
            data[random.integers(len(data))] ^= 1 << random.integers(8)
        (tmp_path / "d.npz").write_bytes(data)

        try:
            graph = load(tmp_path / "d.npz", tmp_path / "other", symmetric=True)
        except FileFormatError:
            continue
        assert rows_of(graph) == expected


@pytest.mark.parametrize(
    "text",
    [
        "%%MatrixMarket matrix array real general\n2 2\n1\n2\n3\n4\n",
        "%%MatrixMarket matrix coordinate real general\n2 3 1\n1 1 1.0\n",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n3 1 1.0\n",
        "%%MatrixMarket matrix coordinate complex general\n2 2 1\n2 1 1.0 2.0\n",
    ],
)
def test_matrix_market_that_is_no_graph(tmp_path, text):
    with pytest.raises(FileFormatError):
        text_graph(tmp_path, text, "m.mtx")


# The command.


def test_command_makes_a_graph_and_tells_of_it(monkeypatch, tmp_path, capsys):
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n3 3\n")
    told = []
    for arguments in (["make", str(tmp_path / "edges.txt")], ["info"]):
        monkeypatch.setattr("sys.argv", ["flashwarp", "graph", *arguments, str(tmp_path / "g")])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        told.append(capsys.readouterr().out)

    assert told[0] == told[1]
    assert "vertices   4, 1 without neighbours\nentries    4\n" in told[0]


@pytest.mark.parametrize(("option", "entries"), [("--directed", 2), ("--undirected", 4)])
def test_command_asks_which_way_edges_of_a_matrix_go(
    monkeypatch, tmp_path, capsys, option, entries
):
    lines = "%%MatrixMarket matrix coordinate pattern general\n3 3 2\n1 2\n2 3\n"
    (tmp_path / "m.mtx").write_text(lines)
    command = ["flashwarp", "graph", "make", str(tmp_path / "m.mtx"), str(tmp_path / "g")]
    for more, code, says in (([], 1, "not symmetric"), ([option], 0, f"entries    {entries}\n")):
        monkeypatch.setattr("sys.argv", command + more)
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        assert ended.value.code == code
        assert says in shown.out + shown.err


def test_command_orders_a_graph(monkeypatch, tmp_path, capsys):
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n3 3\n")
    monkeypatch.setattr(
        "sys.argv",
        [
            *("flashwarp", "graph", "make", "--by-degree"),
            *(str(tmp_path / "edges.txt"), str(tmp_path / "g")),
        ],
    )

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 0
    assert "by falling degree" in capsys.readouterr().out
    assert graphs.CsrGraph.open(tmp_path / "g").labels.tolist() == [1, 0, 2, 3]


def test_command_says_what_is_wrong_with_a_graph(monkeypatch, tmp_path, capsys):
    np.save(tmp_path / "offsets.npy", np.array([0, 1], np.int64))
    np.save(tmp_path / "neighbours.npy", np.array([7], np.uint32))
    monkeypatch.setattr("sys.argv", ["flashwarp", "graph", "info", str(tmp_path)])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 1
    assert "entry 0 is 7" in capsys.readouterr().err
