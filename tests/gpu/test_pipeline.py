"""Pipelines on a GPU: order with torch's streams, graphs, each way of the rows, and errors."""

from __future__ import annotations

import gc

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
from flashwarp.errors import BoundsError, CaptureError
from flashwarp.storage import Memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::UserWarning"),  # of a capture that ends empty
]

ROWS, WORDS = 6000, 250  # a row has 1000 bytes, which are no whole blocks
BATCH = 500
WAIT_CYCLES = 1_000_000_000  # half a second

# How an array is opened, and how its pipeline is made.
WAYS = {
    "memory": ({}, {}),
    "in_place": ({"immutable": True}, {}),
    "leased": ({}, {}),
    "rings": ({"o_direct": True}, {"sms": 8}),
    "no_sms": ({}, {"sms": 0}),
    "o_direct": ({"o_direct": True}, {}),
}


@pytest.fixture(scope="module")
def content():
    return np.random.default_rng(7).integers(0, 1 << 30, (ROWS, WORDS), np.int32)


@pytest.fixture(params=WAYS)
def read(request, tmp_path, content, device):
    """An array that is only read, what its pipelines are made with, and their way."""
    options, pipeline = WAYS[request.param]
    content.tofile(tmp_path / "rows")
    source = Memory(content.copy(), writable=False) if request.param == "memory" else None
    with fw.open(
        source or tmp_path / "rows", "r", "i4", (ROWS, WORDS), device=device, cache="1 MiB",
        **options,
    ) as x:  # fmt: skip
        pulled = pipeline.get("sms", 8 if x.service.route == "in_place" else 0)
        yield x, pipeline, "pull" if pulled else "ring"
        gc.collect()  # of graphs that read it


def sample(count=BATCH):
    return torch.randint(0, ROWS, (count,), device="cuda")


def host(tensor):
    return tensor.cpu().numpy()


def test_one_stream_samples_prefetches_and_computes_without_a_wait_of_the_host(read, content):
    x, options, way = read
    with fw.Pipeline(x, BATCH, **options) as p:
        for _ in range(4):
            assert p.prefetch(sample()).route == way, p.explain()
            p.take().to(torch.int64).sum(dim=1)
        torch.cuda.synchronize()
        results = []

        torch.cuda._sleep(WAIT_CYCLES)
        for _ in range(6):
            ids = sample()
            p.prefetch(ids)
            results.append((ids, p.take().to(torch.int64).sum(dim=1)))
        end = torch.cuda.Event()
        end.record()
        assert not end.query(), "the host has waited for the GPU"

        for ids, sums in results:
            np.testing.assert_array_equal(host(sums), content[host(ids)].sum(axis=1))


def test_batches_of_all_sizes_arrive_ahead_of_their_use(read, content):
    x, options, _ = read
    sizes = np.random.default_rng(3).integers(0, BATCH + 1, 40)
    with fw.Pipeline(x, BATCH, depth=3, **options) as p:
        seen = 0
        for rows, ids in p.iterate(sample(int(count)) for count in sizes):
            np.testing.assert_array_equal(host(rows), content[host(ids)])
            seen += 1
        assert seen == len(sizes)


def test_a_loop_starts_batches_ahead_of_its_bodys_work(read):
    x, options, _ = read
    with fw.Pipeline(x, BATCH, **options) as p:
        for _ in p.iterate([sample(), sample()]):
            torch.cuda.synchronize()
        for _ in p.iterate([sample() for _ in range(3)]):
            torch.cuda._sleep(WAIT_CYCLES)
            end = torch.cuda.Event()
            end.record()
            for ticket in p._reads:
                ticket.wait(10)
            assert not end.query(), "a batch has waited for the body's work"
            break


def test_a_buffer_is_not_overwritten_while_a_slow_kernel_reads_it(read, content):
    x, options, _ = read
    with fw.Pipeline(x, BATCH, **options) as p:
        ids = sample()
        p.prefetch(ids)
        rows = p.take()
        torch.cuda._sleep(WAIT_CYCLES)
        late = rows.clone()
        for _ in range(7):
            p.prefetch(sample())
            p.take()
        np.testing.assert_array_equal(host(late), content[host(ids)])


def test_a_graph_samples_nothing_twice(read, content):
    x, options, way = read
    ids, out = sample(), torch.empty(BATCH, WORDS, dtype=torch.int32, device="cuda")
    with fw.Pipeline(x, BATCH, **options) as p:
        p.prefetch(ids)
        out.copy_(p.take())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if way != "pull":
            with pytest.raises(CaptureError, match="sms=4"), torch.cuda.graph(graph):
                p.prefetch(ids)
            return
        with torch.cuda.graph(graph):
            p.prefetch(ids)
            out.copy_(p.take())

        for _ in range(5):
            ids.copy_(sample())
            graph.replay()
            np.testing.assert_array_equal(host(out), content[host(ids)])
        x.check()
        graph.reset()


def test_rows_out_of_bounds_are_zero_and_raised(read, content):
    x, options, _ = read
    with fw.Pipeline(x, BATCH, **options) as p:
        with pytest.raises(BoundsError, match=str(ROWS)):
            p.prefetch([ROWS])
        ticket = p.prefetch(torch.tensor([5, ROWS, 7], device="cuda"))
        with pytest.raises(BoundsError):
            ticket.wait()
        try:
            rows = p.take()
        except BoundsError:
            rows = None
        if rows is not None:
            np.testing.assert_array_equal(host(rows)[[0, 2]], content[[5, 7]])
            assert not host(rows)[1].any()
        p.prefetch([8])
        np.testing.assert_array_equal(np.asarray(p.take()), content[8:9])


def test_long_rows_and_ranges_go_by_copy_engines(device):
    data = np.random.default_rng(5).integers(0, 1 << 30, (200, 1 << 15), np.int32)  # 128 KiB
    with (
        fw.open(Memory(data), "r", "i4", data.shape, device=device, cache="8 MiB") as x,
        fw.Pipeline(x, 100, depth=3, library="torch") as p,
    ):
        which = np.random.default_rng(6).integers(0, 200, 100)
        for ids in (which, slice(50, 150), range(199, 100, -1)):
            assert p.prefetch(ids).route == "copies"
        for want in (data[which], data[50:150], data[199:100:-1]):
            np.testing.assert_array_equal(host(p.take()), want)
        assert p.prefetch(torch.from_numpy(which).cuda()).route == "pull"
        np.testing.assert_array_equal(host(p.take()), data[which])


def test_the_end_with_batches_in_flight(read):
    x, options, _ = read
    p = fw.Pipeline(x, BATCH, **options)
    torch.cuda._sleep(WAIT_CYCLES)
    p.prefetch(sample())
    p.prefetch(sample())
    p.close()
    x.check()


def test_a_reversed_range_of_no_rows_is_a_batch(device):
    """It begins before the first row."""
    memory = np.arange(32, dtype=np.int32).reshape(8, 4)
    with (
        fw.open(Memory(memory), "r+", "i4", (8, 4), device=device, cache="1 MiB") as x,
        fw.Pipeline(x, 4) as p,
    ):
        p.write_back(range(0)[::-1], np.zeros((0, 4), np.int32))
        p.prefetch(range(0)[::-1])
        assert len(p.take()) == 0
        p.flush()
        assert (x[:] == np.arange(32).reshape(8, 4)).all()
