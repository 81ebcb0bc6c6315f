"""What the interface costs on a graph: AGILE's Figure 11.

The paper's three steps, with one kernel text: on plain memory of the device; through the array with
all in the cache; through the array with nothing in it, over modelled drives. What the second takes
beyond the first is the cache's interface; what the third takes beyond the second is the storage,
which includes the time of the drives.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.graphs.base import GraphBench, cache_bytes
from benchmarks.graphs.drives import most_queue_pairs, open_drives
from benchmarks.graphs.solve import Algorithm
from flashwarp import graphs

__all__ = ["interface"]

_DRIVE, _DRIVES = "AGILE", 3
_PLAIN, _RESIDENT, _COLD = "kernel on device memory", "all resident", "nothing resident"


def interface(bench: GraphBench, graph: graphs.CsrGraph, what: str) -> None:
    """The kernel's time, the cache's and the storage's, on the graph that `what` names."""
    lists = graph.in_memory()
    with ExitStack() as stack:
        algorithm = bench.algorithm(stack, graph)
        copy = stack.enter_context(bench.device.allocate(lists.nbytes))
        bench.device.upload(copy.address, lists)
        array, values = _open(bench, stack, algorithm, lists)
        reader = bench.reader(stack, graph, array, copy.address, values)
        solve = partial(reader.solve, algorithm)
        # In this order: what a cold turn brings in is resident in the one behind it.
        speed, right = bench.turns(
            algorithm,
            {
                _PLAIN: partial(solve, "plain", cold=False),
                _COLD: partial(solve, "cached", each=True),
                _RESIDENT: partial(solve, "cached", cold=False),
            },
        )
    kernel = speed[_PLAIN]
    cache = kernel / speed[_RESIDENT] - 1
    storage = kernel / speed[_COLD] - 1 - cache
    name = f"interface, {what}"
    paper = dict(bench.papers.interface).get(what.partition(":")[0], "")
    footprint = 4 * graph.entries
    bench.add(f"{name}: {_PLAIN}", kernel, right[_PLAIN], footprint)
    bench.add(
        f"{name}: {_RESIDENT}",
        speed[_RESIDENT],
        right[_RESIDENT],
        footprint,
        _PLAIN,
        kernel,
        paper=paper,
        note=f"the cache's interface takes {cache:.2f} times the kernel",
    )
    bench.add(
        f"{name}: {_COLD}",
        speed[_COLD],
        right[_COLD],
        footprint,
        _PLAIN,
        kernel,
        note=f"{_DRIVES} modelled drives {_DRIVE} take {storage:.2f} times the kernel",
    )


def _open(
    bench: GraphBench, stack: ExitStack, algorithm: Algorithm, lists: NDArray[np.uint32]
) -> tuple[fw.Array, fw.Array | None]:
    """Open the lists, and the values of an algorithm that has some, on a cache for all of it."""
    beside = algorithm.values
    nbytes = lists.nbytes + (0 if beside is None else beside.nbytes)
    cache = fw.Cache(cache_bytes(1.05 * nbytes), device=bench.device, line=bench.options.line)
    stack.callback(cache.close)
    opened = [
        stack.enter_context(
            open_drives(bench, data, cache, _DRIVE, _DRIVES, most_queue_pairs(bench))
        )
        for data in (lists, beside)
        if data is not None
    ]
    return opened[0], opened[1] if beside is not None else None
