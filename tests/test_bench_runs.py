"""Benchmarks of applications, small and on the CPU device: what they check is right."""

import pytest

from flashwarp._jit.compiler import Source, compile_source
from flashwarp.bench import bfs, cc, ctc, registers, tiers, vectoradd


def right(report):
    assert report.rows
    assert report.wrong == []
    return {row.name: row for row in report.rows}


@pytest.mark.parametrize("bench", [bfs, cc])
def test_every_part_of_the_graph_benchmarks(tmp_path, bench):
    rows = right(bench.run("cpu", tmp_path, graph="kron:10", small="kron:8", runs=1))

    assert all(
        any(name.startswith(part) for name in rows)
        for part in ("pinned memory", "file", "figure 8", "figure 10")
    )


@pytest.mark.parametrize("gib", [1 / 1024, 1.3 / 1000])
def test_vectors_of_whole_lines_and_of_others(gib):
    rows = right(vectoradd.run("cpu", gib=gib, cache="256 KiB", runs=1))

    assert all(row.checked for row in rows.values())


@pytest.mark.parametrize("ahead", [1, 3])
def test_sums_of_loads_that_run_ahead(ahead):
    right(ctc.run("cpu", threads=3, blocks=5, ahead=ahead, model="none", runs=1))


@pytest.mark.parametrize("kernels", [vectoradd.KERNELS, ctc.KERNELS], ids=lambda path: path.stem)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile_for_gpus(kernels, arch):
    assert len(compile_source(arch, Source.read(kernels)).kernels) == 2


def test_kernels_take_at_most_20_registers_more_than_on_plain_memory():
    rows = right(registers.run("sm_90"))

    least = {}
    for name, row in rows.items():
        kernel = name.split(",")[0]
        assert " 0 bytes of spills" in row.note
        least[kernel] = min(least.get(kernel, 1e9), row.value - row.reference)
    assert len(least) == 3
    assert max(least.values()) <= 20


def test_tiers_and_drives_give_the_right_rows():
    rows = right(tiers.run("cpu", mib=2, rows=300, runs=1))

    assert all(row.checked for row in rows.values())
    assert [name for name in rows if "drives" in name] == [
        f"stripes over {n} drives" for n in (1, 2, 4, 8)
    ]
