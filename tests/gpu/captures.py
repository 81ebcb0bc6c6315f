"""Work of torch in CUDA graphs, and marks of tests whose torch warns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

MARKS = [
    pytest.mark.gpu,
    *(
        pytest.mark.filterwarnings(f"default::{name}Warning")
        for name in ("User", "Future", "Deprecation")
    ),
]


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Record what a function queues in a graph, after one run outside of it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@contextlib.contextmanager
def new_graph() -> Iterator[torch.cuda.CUDAGraph]:
    """Yield a graph that is gone before its table is closed, even if a test fails."""
    graph = torch.cuda.CUDAGraph()
    try:
        yield graph
    finally:
        graph.reset()
