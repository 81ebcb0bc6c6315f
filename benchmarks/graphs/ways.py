"""Ways to reach the lists of a graph: BaM's Figures 7, 8 and 10.

The lists lie in pinned host memory or in a file. Reads through the cache stand beside the same
kernel that reads the memory in place, beside a warp for each vertex as in EMOGI, and, for a file,
beside the disk.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import flashwarp as fw
from benchmarks.graphs.base import GraphBench, cache_bytes
from flashwarp import graphs
from flashwarp.probe.disk import direct_reads_work, drop_page_cache, measure_ceiling

__all__ = ["cache_sizes", "file", "memory", "reuse"]


def memory(bench: GraphBench, graph: graphs.CsrGraph, order: str = "") -> None:
    """Lists in pinned host memory, read on demand and in place; rows begin with `order`.

    Ways through the cache stand against the best way without one, and a cache that holds all lists
    against the best way in device memory.
    """
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
        eighth = array.cache.line_bytes // 4 // 8
        there = "GPU memory" if bench.device.kind == "cuda" else "memory of the CPU device"
        read: dict[str, int] = {}

        def cached(name: str, way: str, fill_from: int = 0) -> float:
            seconds = pinned.solve(algorithm, way, fill_from=fill_from)
            read[name] = pinned.bytes_read
            return seconds

        every, most, best = (
            f"host memory: cache{what}"
            for what in (
                " for every list",
                ", less than an eighth of a line in place",
                ", less than half a line in place",
            )
        )
        filled = f"{there}: cache of all lists, filled before"
        ways = {
            "host memory: zero-copy, a warp for each vertex (EMOGI)": ("by_warp", pinned),
            "host memory: zero-copy, chunks": ("plain", pinned),
            f"{there}: chunks": ("plain", inside),
            f"{there}: a warp for each vertex": ("by_warp", inside),
        }
        speed, right = bench.turns(
            algorithm,
            {
                **{
                    name: partial(from_.solve, algorithm, way)
                    for name, (way, from_) in ways.items()
                },
                every: partial(cached, every, "cached"),
                most: partial(cached, most, "in_place", eighth),
                best: partial(cached, best, "in_place"),
                filled: partial(resident.solve, algorithm, "cached", cold=False),
            },
        )
    alternative, ceiling = (
        max((name for name in ways if name.startswith(place)), key=lambda name: speed[name])
        for place in ("host memory", there)
    )
    for name, rate in speed.items():
        against, note = "", ""
        if name in read:
            against = alternative
            note = (
                f"the cache reads {read[name] / (4 * algorithm.entries):.2f} bytes for each byte "
                f"needed; {rate / speed[ceiling]:.2f} of {ceiling}"
            )
        elif name == filled:
            against = ceiling
        bench.add(
            f"{order}{name}",
            rate,
            right[name],
            held.nbytes,
            against,
            speed.get(against, 0.0),
            target=1.0 if name == best else 0.0,
            note=note,
        )


def file(bench: GraphBench, graph: graphs.CsrGraph, order: str = "") -> None:
    """Lists in a file, read with O_DIRECT, with a cache for a part of the lists and for all."""
    for share in (bench.options.share, 1.05):
        _file(bench, graph, share, order)


def _file(bench: GraphBench, graph: graphs.CsrGraph, share: float, order: str) -> None:
    path = graph.neighbours_path
    drop_page_cache(path)
    o_direct = direct_reads_work(path)
    with ExitStack() as stack:
        array = stack.enter_context(
            graph.neighbours(
                device=bench.device,
                cache=cache_bytes(4 * graph.entries * share),
                line=bench.options.file_line,
                o_direct=o_direct,
            )
        )
        reader = bench.reader(stack, graph, array)
        algorithm = bench.algorithm(stack, graph)
        ceiling = measure_ceiling(path, array.cache.line_bytes)
        before = array.stats.bytes_read
        seconds = reader.solve(algorithm, "cached", weigh=True)
        read = array.stats.bytes_read - before
        right = algorithm.right()
    kind = "flash" if o_direct else "page cache"
    name = f"{order}{kind}: cache of {share:g} of the lists"
    disk = (f"disk itself, random reads of {bench.options.file_line}", ceiling.random_gb_per_s)
    needed = 4 * algorithm.entries
    bench.report.row(
        f"{name}, bytes needed",
        needed / seconds / 1e9,
        "GB/s",
        *disk,
        0.9,
        right,
        note=f"read {read / needed:.2f} bytes for each byte needed",
        footprint=4 * graph.entries,
    )
    bench.report.row(
        f"{name}, bytes read", read / seconds / 1e9, "GB/s", *disk, footprint=4 * graph.entries
    )


def reuse(bench: GraphBench, graph: graphs.CsrGraph) -> None:
    """No cache, a naive one, coalescing and reuse: BaM's Figure 8."""
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
    steps = (
        ("uncached", "a command for each entry", ""),
        ("naive", "naive cache", bench.papers.cached_over_none),
        ("cached", "coalescing and reuse", bench.papers.reuse_over_naive),
    )
    against, reference = "", 0.0
    for way, name, paper in steps:
        bench.add(
            f"reuse: {name}", speed[way], right[way], held.nbytes, against, reference, paper=paper
        )
        against, reference = name, speed[way]


def cache_sizes(bench: GraphBench, graph: graphs.CsrGraph) -> None:
    """Caches of several sizes, before pinned host memory: BaM's Figure 10."""
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
            f"cache of {share:.3g} of the lists",
            rates[share],
            rights[share],
            held.nbytes,
            "cache of 0.25",
            rates[1 / 4],
            paper="1.0 from 1 GB to 8 GB of 32 GB (BaM Fig. 10)" if share < 0.25 else "",
        )
