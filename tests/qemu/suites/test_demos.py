"""The graph example as it stands, on neighbours that lie on a drive without a file system."""

from __future__ import annotations

import runpy

import numpy as np
import pytest

from benchmarks.graphs.reference import reference_distances
from flashwarp import graphs
from qemu.image import ROOT
from qemu.suites.machines import HOLDING, ROUGH
from qemu.suites.ways import array, each_way

MACHINE = ROUGH

EXAMPLE = str(ROOT / "examples" / "bfs.py")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> graphs.CsrGraph:
    return graphs.load("kron:10", tmp_path_factory.mktemp("graph"))


@each_way
def test_search_finds_all_distances(way: str, graph: graphs.CsrGraph) -> None:
    search = runpy.run_path(EXAMPLE)["search"]
    neighbours = graph.in_memory()
    source = graph.pick_sources(1, seed=1)[0]
    with array(
        way, HOLDING, nbytes=4 * neighbours.size, dtype="u4", line=4096, cache="64 KiB"
    ) as x:
        x[:] = neighbours
        x.flush()
        x.drop_cache()

        distances = search(graph, x, source)

        assert x.stats.commands > 4 * neighbours.size // 4096
    np.testing.assert_array_equal(distances, reference_distances(graph.matrix(), source))
