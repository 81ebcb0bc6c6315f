"""Loads and stores of one array on many streams, in the order of the calls; see docs/kernels.md."""

from __future__ import annotations

import numpy as np
import pytest

import flashwarp as fw

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 512, 1024


@pytest.fixture(scope="module")
def device():
    with fw.device.CudaDevice(0) as found:
        yield found


@pytest.fixture(params=[False, True], ids=["page cache", "o_direct"])
def array(request, tmp_path, device):
    path = tmp_path / "rows.npy"
    with fw.create(path, "int32", (ROWS, WIDTH), device=device) as x:
        x[...] = 0
    with fw.open(path, "r+", device=device, cache="256 KiB", o_direct=request.param) as x:
        yield x, path


def busy(stream) -> None:
    """Let a stream be late."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5_000_000)


def rows_of(value: int, count: int):
    return torch.full((count, WIDTH), value, dtype=torch.int32, device="cuda")


def test_calls_without_a_stream_see_those_with_one(array):
    x, path = array
    stream = torch.cuda.Stream()
    for step in range(1, 60):
        ids = torch.randperm(ROWS, device="cuda")[:64]
        torch.cuda.synchronize()
        values = rows_of(step, 64)
        torch.cuda.synchronize()
        busy(stream)
        x.scatter(ids, values, stream=stream)
        row = int(ids[0])
        if step % 3 == 0:
            assert (x[row] == step).all()
        elif step % 3 == 1:
            assert (x.gather(ids.cpu().numpy()) == step).all()
        else:
            x.flush()
            assert (np.load(path, mmap_mode="r")[row] == step).all()
        assert (x.gather(ids).cpu() == step).all()


def test_calls_on_many_streams_keep_their_order(array):
    x, _ = array
    streams = [torch.cuda.Stream() for _ in range(4)]
    ids = torch.arange(0, 128, device="cuda")
    outs, kept = [], []
    torch.cuda.synchronize()
    for step in range(1, 80):
        store, load = streams[step % 4], streams[(step * 7 + 1) % 4]
        values, out = rows_of(step, 128), rows_of(0, 128)
        torch.cuda.current_stream().synchronize()
        if step % 5 == 0:
            busy(store)
        x.scatter(ids, values, stream=store)
        x.gather(ids, out, stream=load)
        kept.append(values)
        outs.append(out)
    torch.cuda.synchronize()
    x.wait()
    for step, out in enumerate(outs, 1):
        assert (out == step).all(), step


def test_asynchronous_calls_keep_the_order_of_stores(array):
    x, _ = array
    ids = torch.arange(64, 192, device="cuda")
    pairs = []
    for step in range(1, 80):
        written = x.scatter_async(ids, rows_of(step, 128))
        pairs.append((step, written, x.gather_async(ids)))
    for step, written, read in pairs:
        written.result()
        assert (read.result() == step).all(), step
    assert (x[70] == 79).all()


def test_own_kernels_are_calls(array):
    x, _ = array
    program = fw.compile(
        """
        #include "flashwarp/array.cuh"
        FW_KERNEL put(fw::array<int32_t> x, int32_t value, uint64_t n) {
          const uint64_t step = fw::base::thread_count();
          for (uint64_t i = fw::base::thread_index(); i < n; i += step) x.store(i, value);
        }
        FW_KERNEL get(fw::array<const int32_t> x, int32_t* out, uint64_t n) {
          const uint64_t step = fw::base::thread_count();
          for (uint64_t i = fw::base::thread_index(); i < n; i += step) out[i] = x[i];
        }
        """,
        device=x.device,
    )
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    out = torch.zeros(4096, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    for step in range(1, 40):
        busy(one)
        program["put"](x, step, 4096, stream=one)
        program["get"](x, out, 4096, stream=other)
        other.synchronize()
        assert (out == step).all()
        program["put"](x, -step, 4096, stream=one)
        assert (x[3] == -step).all()


def test_streams_that_are_gone_leave_their_marks(array):
    x, _path = array
    ids = torch.arange(0, 64, device="cuda")
    for step in range(1, 30):
        values = rows_of(step, 64)
        torch.cuda.synchronize()
        stream = x.device.create_stream()
        x.scatter(ids, values, stream=stream)
        x._attachment.forget_stream(stream.handle)
        stream.close()
        other = x.device.create_stream()  # perhaps with the same handle
        out = rows_of(0, 64)
        torch.cuda.current_stream().synchronize()
        x.gather(ids, out, stream=other)
        x.wait(other)
        assert (out == step).all()
        x._attachment.forget_stream(other.handle)
        other.close()


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


def test_capture_that_would_wait_for_outside_work_is_refused(array):
    x, _ = array
    ids = torch.arange(0, 64, device="cuda")
    values, out = rows_of(1, 64), rows_of(0, 64)
    late, other = torch.cuda.Stream(), torch.cuda.Stream()
    x.gather(ids, out, stream=other)
    x.scatter(ids, values, stream=late)
    torch.cuda.synchronize()

    with torch.cuda.stream(late):
        torch.cuda._sleep(2_000_000_000)
    x.scatter(ids, values, stream=late)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(other):
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            with pytest.raises(fw.errors.CaptureError, match="outside of the capture"):
                x.gather(ids, out, stream=other)
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    graph.reset()
    x.wait()
