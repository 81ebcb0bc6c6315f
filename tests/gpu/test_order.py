"""Loads and stores of one array on many streams, in the order of the calls; see docs/kernels.md."""

from __future__ import annotations

import pytest

import flashwarp as fw

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 512, 1024


@pytest.fixture(params=[False, True], ids=["page cache", "o_direct"])
def array(request, tmp_path, device):
    path = tmp_path / "rows.npy"
    with fw.create(path, "int32", (ROWS, WIDTH), device=device) as x:
        x[...] = 0
    with fw.open(path, "r+", device=device, cache="256 KiB", o_direct=request.param) as x:
        yield x, path


def rows_of(value: int, count: int):
    return torch.full((count, WIDTH), value, dtype=torch.int32, device="cuda")


def test_streams_that_are_gone_leave_their_marks(array):
    x, _path = array
    ids = torch.arange(0, 64, device="cuda")
    for step in range(1, 30):
        values = rows_of(step, 64)
        torch.cuda.synchronize()
        stream = x.device.create_stream()
        x.scatter(ids, values, stream=stream)
        x._attachment.end_stream(stream)
        other = x.device.create_stream()  # perhaps with the same handle
        out = rows_of(0, 64)
        torch.cuda.current_stream().synchronize()
        x.gather(ids, out, stream=other)
        x.wait(other)
        assert (out == step).all()
        x._attachment.end_stream(other)


def test_captured_calls_come_behind_each_other(array):
    x, _ = array
    ids = torch.arange(0, 64, device="cuda")
    values, out = rows_of(1, 64), rows_of(0, 64)
    side = torch.cuda.Stream()
    x.scatter(ids, values, stream=side)
    x.gather(ids, out, stream=side)
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream()
        fork = torch.cuda.Stream()
        fork.wait_stream(stream)
        x.scatter(ids, values, stream=fork)
        x.gather(ids, out, stream=stream)  # waits for the fork's store
        stream.wait_stream(fork)
    values.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 7).all()
    graph.reset()
    del graph
