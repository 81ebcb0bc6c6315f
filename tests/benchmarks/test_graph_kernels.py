"""Search and components on the CPU device, over every way to read the lists, against scipy."""

import ctypes
from contextlib import ExitStack

import numpy as np
import pytest

import flashwarp as fw
from benchmarks.graphs.reference import (
    UNREACHED,
    check_components,
    check_distances,
    reference_components,
    reference_distances,
)
from benchmarks.graphs.solve import KERNELS, Components, Product, Reader, Search
from flashwarp import graphs
from flashwarp.device import resolve
from flashwarp.errors import ArgumentError, ClosedError
from flashwarp.graphs import Edges, EdgeSource, Rows
from support.small_graphs import rows_of, text_graph

WAYS = ["cached", "in_place", "plain", "by_warp", "naive", "uncached"]


@pytest.fixture(scope="module")
def program():
    return fw.compile(KERNELS, "cpu", debug=True)


@pytest.fixture(scope="module")
def alone():
    """One thread: of several, one that is kept waiting finds lines gone that it asked for ahead."""
    device = fw.device.CpuDevice(1)
    return device, fw.compile(KERNELS, device, debug=True)


@pytest.fixture(scope="module")
def kron(tmp_path_factory):
    return graphs.load("kron:11", tmp_path_factory.mktemp("kron"))


@pytest.fixture(scope="module")
def ordered(tmp_path_factory, kron):
    return graphs.by_degree(kron, tmp_path_factory.mktemp("ordered"))


def star(tmp_path):
    """A hub whose list spans many chunks, behind vertices without neighbours."""
    leaves = np.arange(100, 9000, dtype=np.uint32)
    edges = Edges(np.full(len(leaves), 7, np.uint32), leaves)
    return graphs.write_csr(EdgeSource(9100, [edges], symmetric=True), tmp_path)


def solve(program, graph, algorithm, way, *, line=512, cache="64 KiB", ahead=None):
    """The answer over an array in memory, whose cache is small."""
    held = np.load(graph.neighbours_path)  # not `in_memory`, which refuses what is no vertex
    with ExitStack() as stack:
        array = stack.enter_context(
            fw.open(fw.storage.Memory(held), "r+", "uint32", device="cpu", cache=cache, line=line)
        )
        reader = Reader(program, graph, array, held.ctypes.data, ahead)
        stack.callback(reader.close)
        reader.solve(algorithm, way, fill_from=line // 16)


def distances_of(program, graph, way, **options):
    search = Search(resolve("cpu"), graph, [graph.pick_sources(1, seed=1)[0]])
    try:
        solve(program, graph, search, way, **options)
        assert search.right()
        return search.answers[0]
    finally:
        search.close()


def labels_of(program, graph, way, **options):
    components = Components(resolve("cpu"), graph)
    try:
        solve(program, graph, components, way, **options)
        assert components.right()
        return components.labels()
    finally:
        components.close()


@pytest.mark.parametrize("way", WAYS)
def test_search_finds_the_distances_of_scipy(program, kron, way):
    expected = reference_distances(kron.matrix(), kron.pick_sources(1, seed=1)[0])

    np.testing.assert_array_equal(distances_of(program, kron, way), expected)


@pytest.mark.parametrize("way", WAYS)
def test_components_are_those_of_scipy(program, kron, way):
    np.testing.assert_array_equal(
        labels_of(program, kron, way), reference_components(kron.matrix())
    )


def test_lists_in_memory_that_nobody_writes_are_read_in_place_by_default(alone, ordered):
    (device, program), read = alone, {}
    held = ordered.in_memory()
    search = Search(device, ordered, ordered.pick_sources(1, seed=1))
    for way in ("cached", "in_place"):
        with ExitStack() as stack:
            storage = fw.storage.Memory(held, writable=False)
            array = stack.enter_context(
                fw.open(storage, "r", "uint32", device=device, cache="64 KiB", line=4096)
            )
            reader = Reader(program, ordered, array)
            stack.callback(reader.close)
            reader.solve(search, way)
            assert array.in_place == held.ctypes.data
            assert search.right()
            read[way] = array.stats.bytes_read
    search.close()

    assert 0 < read["in_place"] < 0.9 * read["cached"]


def test_nothing_is_in_place_where_it_may_be_written_or_a_drive_is_modelled(kron):
    held = kron.in_memory()
    model = fw.nvme.SoftwareController(model="P5800X")
    for writable, controller in ((True, None), (False, model)):
        storage = fw.storage.Memory(held, writable=writable)
        with (
            fw.open(
                storage, "r", "uint32", device="cpu", cache="64 KiB", controller=controller
            ) as array,
            Rows(kron, array) as rows,
        ):
            assert array.in_place is None
            assert not rows.handle.in_place
    storages = [fw.storage.Memory(half, writable=False) for half in held[: 2**13].reshape(2, -1)]
    with (
        kron.neighbours(device="cpu", cache="64 KiB", o_direct=True) as file,
        fw.open(fw.storage.Striped(storages, 4096), "r", "uint32", device="cpu") as several,
    ):
        assert file.in_place is None
        assert several.in_place is None
    with pytest.raises(ClosedError):
        _ = file.in_place


def test_search_from_a_file_reads_less_by_degree(alone, tmp_path):
    (device, program), read = alone, {}
    for by_degree in (False, True):
        graph = graphs.load("kron:14", tmp_path / str(by_degree), by_degree=by_degree)
        search = Search(device, graph, graph.pick_sources(2, seed=1))
        with ExitStack() as stack:
            stack.callback(search.close)
            # Half of the lists, and a hundred of them share a line, as in larger graphs.
            array = stack.enter_context(
                graph.neighbours(
                    device=device, cache=2 * graph.entries, line="16 KiB", o_direct=True
                )
            )
            reader = Reader(program, graph, array)
            stack.callback(reader.close)
            reader.solve(search, "cached", weigh=True)
            assert search.right()
            read[by_degree] = array.stats.bytes_read / (4 * search.entries)

    assert read[True] < 1.3 < 1.7 < read[False]


def test_direction_turns_only_after_passes_that_read_much(kron):
    with (
        kron.neighbours(device="cpu", cache="64 KiB", line=512) as array,
        Rows(kron, array) as rows,
    ):
        directions = []
        for elements in (100, 8000, 0, 8000):
            array.drop_cache()
            array.gather(np.arange(elements))
            rows.turn()
            directions.append(rows.handle.backwards)

    assert directions == [0, 1, 1, 0]


def test_product_is_that_of_scipy_and_a_wrong_one_is_told(program, kron):
    product = Product(resolve("cpu"), kron)
    held = kron.in_memory()
    with ExitStack() as stack:
        stack.callback(product.close)
        cache = stack.enter_context(fw.Cache("64 KiB", device="cpu", line=512))
        columns, values = (
            stack.enter_context(fw.open(fw.storage.Memory(x), "r+", x.dtype, cache=cache))
            for x in (held, product.values)
        )
        reader = Reader(program, kron, columns, held.ctypes.data, values=values)
        stack.callback(reader.close)
        for way in ("cached", "plain"):
            reader.solve(product, way)
            assert product.right()
        product.values[5] += 1  # in the storage

        reader.solve(product, "cached")

        assert not product.right()


@pytest.mark.parametrize("way", ["cached", "in_place", "plain"])
def test_hub_is_split_and_vertices_without_neighbours_are_passed_over(program, tmp_path, way):
    graph = star(tmp_path)
    search = Search(resolve("cpu"), graph, [100])
    solve(program, graph, search, way)
    (found,) = search.answers
    search.close()

    expected = np.full(graph.vertices, 0xFFFFFFFF, np.uint32)
    expected[100:9000] = 2
    expected[7], expected[100] = 1, 0
    np.testing.assert_array_equal(found, expected)


def test_lists_from_a_file_are_read_once_by_components(alone, tmp_path):
    device, program = alone
    graph = graphs.load("urand:12", tmp_path)
    components = Components(device, graph)
    with ExitStack() as stack:
        stack.callback(components.close)
        array = stack.enter_context(graph.neighbours(device=device, cache="128 KiB", o_direct=True))
        reader = Reader(program, graph, array)
        stack.callback(reader.close)

        reader.solve(components, "cached")

        assert components.right()
        whole = -(-4 * graph.entries // 4096) * 4096
        assert array.stats.bytes_read == whole


def test_neighbour_that_is_no_vertex_is_passed_over(program, tmp_path):
    np.save(tmp_path / "offsets.npy", np.array([0, 2, 3], np.int64))
    np.save(tmp_path / "neighbours.npy", np.array([1, 2_000_000_000, 0], np.uint32))
    graph = graphs.CsrGraph.open(tmp_path)
    search = Search(resolve("cpu"), graph, [0])

    solve(program, graph, search, "cached")

    assert search.answers[0].tolist() == [0, 1]
    search.close()


def test_chunks_begin_in_the_list_that_has_their_first_entry(tmp_path):
    graph = star(tmp_path)
    with (
        graph.neighbours(device="cpu", cache="64 KiB", line=512) as array,
        Rows(graph, array) as rows,
    ):
        handle = rows.handle
        first = np.ctypeslib.as_array(
            ctypes.cast(handle.first, ctypes.POINTER(ctypes.c_uint32)), (handle.chunks + 1,)
        )
        entry = np.append(np.arange(handle.chunks) * 128, graph.entries - 1)
        assert (graph.offsets[first] <= entry).all()
        assert (entry < graph.offsets[first.astype(np.int64) + 1]).all()


def test_array_that_is_not_the_lists_of_the_graph_is_refused(tmp_path, kron):
    with (
        fw.create(tmp_path / "x.npy", "uint32", 4, device="cpu", cache="64 KiB") as other,
        pytest.raises(ArgumentError, match="4 elements"),
    ):
        Rows(kron, other)


# References.


def test_reference_of_scipy_agrees_with_a_plain_search(tmp_path):
    graph = graphs.load("kron:9", tmp_path, seed=8)
    source = graph.pick_sources(1, seed=1)[0]
    rows = rows_of(graph)
    expected = np.full(graph.vertices, UNREACHED, dtype=np.uint32)
    expected[source] = 0
    queue = [source]
    for vertex in queue:
        for other in rows[vertex]:
            if expected[other] == UNREACHED:
                expected[other] = expected[vertex] + 1
                queue.append(other)

    distances = reference_distances(graph.matrix(), source)

    np.testing.assert_array_equal(distances, expected)


def test_reference_component_is_the_smallest_vertex(tmp_path):
    graph = text_graph(tmp_path, "5 1\n3 4\n2 5\n")

    assert reference_components(graph.matrix()).tolist() == [0, 1, 1, 3, 3, 1]


@pytest.mark.parametrize("kind", ["kron", "urand"])
@pytest.mark.parametrize("by_degree", [False, True])
def test_rules_hold_for_the_right_distances_and_for_no_others(
    tmp_path, monkeypatch, kind, by_degree
):
    monkeypatch.setattr("benchmarks.graphs.reference._PART_ENTRIES", 1000)
    graph = graphs.load(f"{kind}:9", tmp_path, by_degree=by_degree)
    source = graph.pick_sources(1, seed=1)[0]
    right = reference_distances(graph.matrix(), source)
    random = np.random.default_rng(3)

    assert check_distances(graph, source, right)
    for _ in range(50):
        wrong = right.copy()
        vertex = random.choice(np.flatnonzero(graph.by_label(graph.degrees) > 0))
        wrong[vertex] = random.choice([d for d in range(6) if d != right[vertex]])
        assert not check_distances(graph, source, wrong)
    farther = np.where(right == UNREACHED, right, right * 2).astype(np.uint32)
    assert not check_distances(graph, source, farther)
    lost = np.full_like(right, UNREACHED)
    lost[source] = 0
    assert not check_distances(graph, source, lost)


def test_rules_for_components_find_edges_between_them(tmp_path):
    graph = text_graph(tmp_path, "0 1\n1 2\n3 4\n")

    for one in (graph, graphs.by_degree(graph, tmp_path / "ordered")):
        assert check_components(one, np.array([0, 0, 0, 3, 3], np.uint32))
        for wrong in ([0, 0, 2, 3, 3], [0, 0, 0, 4, 4], [1, 1, 1, 3, 3], [0, 0, 1, 3, 3]):
            assert not check_components(one, np.array(wrong, np.uint32))
