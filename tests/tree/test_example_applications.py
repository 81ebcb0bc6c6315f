"""The examples of applications run as they stand, and what they compute is right."""

import importlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from benchmarks.graphs.reference import reference_components, reference_distances
from flashwarp import graphs

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=[False, True], ids=["as given", "by degree"])
def graph(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("graph")
    return graphs.load("kron:11", folder, by_degree=request.param)


def test_every_program_is_in_the_list_of_examples():
    page = (EXAMPLES / "README.md").read_text()

    assert all(f"[{path.name}]({path.name})" in page for path in EXAMPLES.glob("*.py"))


def test_search_finds_the_distances_of_scipy(graph):
    source = graph.pick_sources(1, seed=1)[0]
    with graph.neighbours(device="cpu", cache="32 KiB") as neighbours:
        found = example("bfs").search(graph, neighbours, source)

    np.testing.assert_array_equal(found, reference_distances(graph.matrix(), source))


def test_components_are_those_of_scipy(graph):
    with graph.neighbours(device="cpu", cache="32 KiB") as neighbours:
        found = example("connected_components").components(graph, neighbours)

    np.testing.assert_array_equal(found, reference_components(graph.matrix()))


@pytest.mark.parametrize("by_degree", [False, True])
def test_product_is_that_of_scipy(tmp_path, by_degree):
    spmv = example("spmv")
    matrix = spmv.with_weights(graphs.load("kron:10", tmp_path, by_degree=by_degree))
    x = np.random.default_rng(2).random(matrix.vertices).astype(np.float32)
    with (
        fw.Cache("64 KiB", line=512, device="cpu") as cache,
        matrix.neighbours(cache=cache) as columns,
        matrix.weights(cache=cache) as values,
    ):
        y = spmv.multiply(matrix, columns, values, x)

    np.testing.assert_allclose(y, matrix.matrix() @ x.astype(np.float64), rtol=1e-5)


def test_search_in_python_finds_the_distances_of_scipy(graph, monkeypatch):
    pytest.importorskip("numba.cuda")
    host_numba = importlib.import_module("support.host_numba")

    program = example("bfs_numba")
    monkeypatch.setattr(program, "LANES", 1)  # the host runs one thread
    source = graph.pick_sources(1, seed=1)[0]
    distances = np.full(graph.vertices, program.UNREACHED, np.uint32)
    distances[graph.vertex_of(source)] = 0
    device = fw.device.CpuDevice(1)
    host_numba.link_headers(device)
    with graph.neighbours(device=device, cache="32 KiB") as neighbours:
        for level in range(graph.vertices):
            found = np.zeros(1, np.uint32)
            host_numba.run(
                program.search_level.py_func, neighbours, graph.offsets, distances, found, level
            )
            if found[0] == 0:
                break

    found = graph.by_label(distances)
    np.testing.assert_array_equal(found, reference_distances(graph.matrix(), source))
