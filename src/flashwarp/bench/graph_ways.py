"""Ways to reach the lists of a graph: BaM's Figures 7, 8 and 10.

The lists lie in pinned host memory or in a file; ours stand beside the same kernel reading the
memory in place, beside a warp a vertex as EMOGI reads it, and, for a file, beside the disk.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import flashwarp as fw
from flashwarp.apps import graphs
from flashwarp.bench.graph_bench import GraphBench, cache_bytes
from flashwarp.probe.disk import direct_reads_work, drop_page_cache, measure_ceiling
from flashwarp.probe.report import Row

__all__ = ["figure8", "figure10", "file", "memory"]


def memory(bench: GraphBench, graph: graphs.CsrGraph, order: str = "") -> None:
    """Lists in pinned host memory, read on demand and in place; rows begin with `order`."""
    held = graph.in_memory()
    with ExitStack() as stack:
        storage = fw.storage.Memory(held, writable=False)
        array = stack.enter_context(bench.open_memory(storage, held.nbytes * bench.options.share))
        pinned = bench.reader(stack, graph, array, held.ctypes.data)
        copy = stack.enter_context(bench.device.allocate(held.nbytes))
        bench.device.upload(copy.address, held)
        inside = bench.reader(stack, graph, array, copy.address)
        # Memory of its own: a GPU pins each page once.
        again = fw.storage.Memory(held.copy())
        whole = stack.enter_context(bench.open_memory(again, held.nbytes * 1.05))
        resident = bench.reader(stack, graph, whole)
        algorithm = bench.algorithm(stack, graph)
        line = array.cache.line_bytes // 4
        solve = partial(pinned.solve, algorithm)
        speed, right = bench.turns(
            algorithm,
            {
                "zero-copy, a warp a vertex (EMOGI)": partial(solve, "by_warp"),
                "zero-copy, chunks": partial(solve, "plain"),
                "cached": partial(solve, "cached"),
                "cached, short lists in place": partial(solve, "in_place", fill_from=line // 8),
                "cached, half a line in place": partial(solve, "in_place"),
                "device memory": partial(inside.solve, algorithm, "plain"),
                "resident": partial(resident.solve, algorithm, "cached", cold=False),
            },
        )
    base = "zero-copy, a warp a vertex (EMOGI)"
    for name, rate in speed.items():
        against = "device memory" if name == "resident" else base
        ours = name.startswith("cached")
        bench.add(
            f"{order}pinned memory: {name}",
            rate,
            right[name],
            against if name not in (base, "device memory") else "",
            speed[against],
            target=1.0 if ours else 0.0,
        )


def file(bench: GraphBench, graph: graphs.CsrGraph, order: str = "") -> None:
    """Lists in a file that is read past the page cache, with a cache for part and for all."""
    for share in (bench.options.share, 1.05):
        _file(bench, graph, share, order)


def _file(bench: GraphBench, graph: graphs.CsrGraph, share: float, order: str) -> None:
    path = graph.neighbours_path
    drop_page_cache(path)
    with ExitStack() as stack:
        array = stack.enter_context(
            graph.neighbours(
                device=bench.device,
                cache=cache_bytes(4 * graph.entries * share),
                line=bench.options.file_line,
                o_direct=direct_reads_work(path),
            )
        )
        reader = bench.reader(stack, graph, array)
        algorithm = bench.algorithm(stack, graph)
        ceiling = measure_ceiling(path, array.cache.line_bytes)
        before = array.stats.bytes_read
        seconds = reader.solve(algorithm, "cached", weigh=True)
        read = array.stats.bytes_read - before
        right = algorithm.right()
    name = f"{order}file, cache of {share:g} of the lists"
    disk = (f"disk itself, random reads of {bench.options.file_line}", ceiling.random_gb_per_s)
    needed = 4 * algorithm.entries
    bench.report.add(
        Row(
            f"{name}: bytes needed",
            needed / seconds / 1e9,
            "GB/s",
            *disk,
            0.9,
            right,
            note=f"read {read / needed:.2f} bytes for each byte needed",
        )
    )
    bench.report.add(Row(f"{name}: bytes read", read / seconds / 1e9, "GB/s", *disk))


def figure8(bench: GraphBench, graph: graphs.CsrGraph) -> None:
    """No cache, a naive one, coalescing and reuse."""
    held = graph.in_memory()
    with ExitStack() as stack:
        storage = fw.storage.Memory(held)
        array = stack.enter_context(bench.open_memory(storage, held.nbytes * bench.options.share))
        reader = bench.reader(stack, graph, array)
        algorithm = bench.algorithm(stack, graph)
        solve = partial(reader.solve, algorithm)
        speed, right = bench.turns(
            algorithm, {way: partial(solve, way) for way in ("uncached", "naive", "cached")}
        )
    place = "figure 8"
    bench.add(f"{place}: a command for each entry", speed["uncached"], right["uncached"])
    bench.add(
        f"{place}: naive cache",
        speed["naive"],
        right["naive"],
        "a command for each entry",
        speed["uncached"],
        paper=bench.papers.cached_over_none,
    )
    bench.add(
        f"{place}: coalescing and reuse",
        speed["cached"],
        right["cached"],
        "naive cache",
        speed["naive"],
        paper=bench.papers.reuse_over_naive,
    )


def figure10(bench: GraphBench, graph: graphs.CsrGraph) -> None:
    """Caches of several sizes, in pinned host memory."""
    held = graph.in_memory()
    storage = fw.storage.Memory(held)
    shares = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.05)
    rates: dict[float, float] = {}
    rights: dict[float, bool] = {}
    for share in shares:
        with ExitStack() as stack:
            array = stack.enter_context(bench.open_memory(storage, held.nbytes * share))
            reader = bench.reader(stack, graph, array)
            algorithm = bench.algorithm(stack, graph)
            speed, right = bench.turns(
                algorithm, {"cached": partial(reader.solve, algorithm, "cached")}
            )
            rates[share], rights[share] = speed["cached"], right["cached"]
    for share in shares:
        bench.add(
            f"figure 10: cache of {share:.3g} of the lists",
            rates[share],
            rights[share],
            "cache of 0.25",
            rates[1 / 4],
            paper="1.0 from 1 GB to 8 GB of 32 GB (BaM Fig. 10)" if share < 0.25 else "",
        )
