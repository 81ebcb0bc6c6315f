"""Kernels that use arrays in divergent code, on caches too small for them, against scipy and numpy.

Lanes of a warp part here: some miss while others hit, some prefetch, some have no work. Each test
has its own time limit in `fw.config`, because a mistake in a collective hangs.
"""

from __future__ import annotations

import numpy as np
import pytest

import flashwarp as fw
from benchmarks.arrays.arrays import ReduceParams, load_kernels
from benchmarks.graphs.reference import reference_distances
from demo.graph import BreadthFirstSearch
from demo.table import filtered_sums, reference_sums
from flashwarp import graphs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[12, 17])
def graph(request, tmp_path_factory):
    pytest.importorskip("scipy")
    made = graphs.load(f"kron:{request.param}", tmp_path_factory.mktemp("graph"), seed=1)
    source = made.pick_sources(1, seed=2)[0]
    expected = reference_distances(made.matrix(), source)
    return made, source, expected


@pytest.mark.parametrize("o_direct", [True, False])
@pytest.mark.parametrize("line", [512, 4096])
def test_a_search_from_a_file_finds_the_distances(graph, device, o_direct, line):
    """Lanes once loaded the ring's state each for itself, parted at a collective, and hung."""
    made, source, expected = graph

    with (
        made.neighbours(device=device, cache="256 KiB", o_direct=o_direct, line=line) as array,
        BreadthFirstSearch(made, array) as search,
    ):
        for _ in search.levels(source):
            pass
        assert (search.distances() == expected).all()


@pytest.mark.parametrize("shared", [True, False])
def test_a_query_reads_the_lines_that_it_needs(tmp_path, device, shared):
    rng = np.random.default_rng(3)
    columns = [rng.integers(0, 1000, 100_000).astype(np.float32) for _ in range(4)]
    columns[1][rng.integers(0, 100_000, 500)] = np.nan
    for number, column in enumerate(columns):
        np.save(tmp_path / f"{number}.npy", column)
    cache = fw.Cache("64 KiB", line=512, device=device) if shared else "64 KiB"
    arrays = [
        fw.open(tmp_path / f"{n}.npy", device=device, cache=cache, o_direct=True, line=512)
        for n in range(4)
    ]

    got = filtered_sums(arrays[0], arrays[1:], 900.0)
    for array in arrays:
        array.close()

    assert got == reference_sums(columns[0], columns[1:], 900.0)


@pytest.mark.parametrize("random", [0, 1])
@pytest.mark.parametrize("o_direct", [True, False])
@pytest.mark.parametrize("line", [512, 4096])
def test_elements_of_a_cold_cache_add_up(tmp_path, device, random, o_direct, line):
    content = np.arange(300_001, dtype=np.uint32)
    np.save(tmp_path / "a.npy", content)
    with (
        fw.open(
            tmp_path / "a.npy", device=device, cache="128 KiB", o_direct=o_direct, line=line
        ) as array,
        device.allocate(8) as total,
        device.allocate(content.nbytes) as plain,
    ):
        device.upload(plain.address, content.tobytes())
        sums = []
        for kernel in ("reduce_array", "reduce_plain"):
            device.fill(total.address, 0, 8)
            params = ReduceParams(
                array=array.kernel_handle,
                plain=plain.address,
                sum=total.address,
                count=content.size,
                span=1000,
                seed=5,
                random=random,
            )
            array.service.wake()
            device.run_kernel(load_kernels(device)[kernel], [bytes(params)], warps=300)
            array.wait()
            sums.append(int.from_bytes(device.download(total.address, 8), "little"))

    assert sums[0] == sums[1]
    assert random or sums[0] == int(content.sum(dtype=np.uint64))
