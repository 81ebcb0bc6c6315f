"""Calls in CUDA graphs: captured by torch, by its compiler and by the driver, and replayed."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from cuda.bindings import driver

import flashwarp as fw
import flashwarp.torch
from flashwarp import errors
from flashwarp.storage import File
from flashwarp.testing import Faulty
from gpu.captures import MARKS, captured

pytestmark = MARKS

ROWS, WORDS = 4000, 256  # a row is a kilobyte
PATHS = {
    "in_place": {},
    "rings": {"controller": fw.nvme.SoftwareController(commands=True)},
    "o_direct": {"o_direct": True},
}


@pytest.fixture
def content():
    return np.random.default_rng(7).integers(0, 1 << 30, (ROWS, WORDS), np.int32)


@pytest.fixture(params=PATHS)
def x(request, tmp_path, content, device):
    """An array that is read along each path, sixteen times its cache."""
    content.tofile(tmp_path / "f")
    with fw.open(
        tmp_path / "f", dtype="i4", shape=(ROWS, WORDS), device=device, cache="256 KiB",
        **PATHS[request.param],
    ) as opened:  # fmt: skip
        yield opened
        gc.collect()  # of graphs that read it


@pytest.fixture
def writable(tmp_path, content, device):
    content.tofile(tmp_path / "w")
    with fw.open(tmp_path / "w", "r+", "i4", (ROWS, WORDS), device=device, cache="8 MiB") as opened:
        yield opened
        gc.collect()


def here():
    return torch.cuda.current_stream()


def some(count, seed, low=-ROWS):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(low, ROWS, (count,), generator=made).cuda()


def rows_of(content, index):
    return torch.from_numpy(content[index.cpu().numpy()]).cuda()


# Captured by torch.


@pytest.mark.parametrize("count", [1, 32, 3000])
def test_replays_read_new_indices(x, content, count):
    index = some(count, 0)
    out = torch.empty((count, WORDS), dtype=torch.int32, device="cuda")
    graph = captured(lambda: x.gather(index, out, stream=here()))

    for seed in range(5):
        index.copy_(some(count, seed))
        out.zero_()
        graph.replay()
        assert torch.equal(out, rows_of(content, index))
    x.check()
    graph.reset()


def test_repeated_gathers_take_new_operands(x, content):
    stream = torch.cuda.current_stream()
    for turn in range(48):
        ids = torch.randint(-ROWS, ROWS, (32,), device="cuda")
        out = torch.empty((32, WORDS), dtype=torch.int32, device="cuda") if turn % 2 else None
        rows = x.gather(ids, out, stream=stream if turn % 3 else None)
        assert np.array_equal(rows.cpu().numpy(), content[ids.cpu().numpy()])
    x.wait()


def test_operator_is_captured_between_kernels(x, content):
    index, found = some(60, 0, low=0), torch.empty(60, WORDS, dtype=torch.int32, device="cuda")
    graph = captured(lambda: found.copy_(fw.torch.gather(x, (index + 1) % ROWS) + 1))

    for seed in range(5):
        index.copy_(some(60, seed, low=0))
        graph.replay()
        assert torch.equal(found, rows_of(content, (index + 1) % ROWS) + 1)
    graph.reset()


def test_replays_store_new_rows(writable, content, tmp_path):
    index = torch.zeros(50, dtype=torch.int64, device="cuda")
    values = torch.zeros((50, WORDS), dtype=torch.int32, device="cuda")
    index.copy_(torch.arange(50))
    values.copy_(rows_of(content, index))
    graph = captured(lambda: writable.scatter(index, values, stream=here()))

    for turn in range(5):
        mine = torch.arange(turn, ROWS, 80)[:50]
        index.copy_(mine)
        values.fill_(turn + 1)
        graph.replay()
        torch.cuda.synchronize()
        content[mine.numpy()] = turn + 1
    writable.flush()

    assert (np.fromfile(tmp_path / "w", np.int32).reshape(ROWS, WORDS) == content).all()
    graph.reset()


def test_replay_of_a_prefetch_brings_rows_into_the_cache(x):
    index = some(40, 0, low=0)
    graph = captured(lambda: x.prefetch(index, stream=here()))
    x.wait()
    x.drop_cache()
    index.copy_(torch.arange(0, 40))

    graph.replay()
    torch.cuda.synchronize()
    time.sleep(0.5)  # detached: no thread waits for a prefetch
    before = x.stats
    x.gather(index)

    assert x.stats.misses == before.misses
    assert x.stats.hits > before.hits
    graph.reset()


def test_a_replay_begins_although_the_process_has_been_idle(x, content):
    index = some(32, 0)
    out = torch.empty((32, WORDS), dtype=torch.int32, device="cuda")
    graph = captured(lambda: x.gather(index, out, stream=here()))

    for seed, idle_s in enumerate((0.0, 0.2, 1.5)):
        index.copy_(some(32, seed))
        torch.cuda.synchronize()
        time.sleep(idle_s)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, rows_of(content, index))
    graph.reset()


def test_the_host_queues_replays_without_a_wait(x, content):
    index = some(32, 3)
    out = torch.empty((32, WORDS), dtype=torch.int32, device="cuda")
    graph = captured(lambda: x.gather(index, out, stream=here()))
    begun = torch.cuda.Event()

    torch.cuda._sleep(1_000_000_000)
    begun.record()
    for _ in range(16):
        graph.replay()
    early = not begun.query()

    torch.cuda.synchronize()
    assert early
    assert torch.equal(out, rows_of(content, index))
    graph.reset()


# Captured by the driver.


def done(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
    return result[1] if len(result) == 2 else result[1:]


def test_capture_by_the_driver(x, content, device):
    index = some(64, 0)
    out = torch.empty((64, WORDS), dtype=torch.int32, device="cuda")
    x.gather(index, out)
    torch.cuda.synchronize()
    stream = device.create_stream()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    done(driver.cuStreamBeginCapture(stream.handle, mode))
    x.gather(index, out, stream=stream)
    graph = done(driver.cuStreamEndCapture(stream.handle))
    executable = done(driver.cuGraphInstantiate(graph, 0))

    for seed in range(3):
        index.copy_(some(64, seed))
        out.zero_()
        torch.cuda.synchronize()
        done(driver.cuGraphLaunch(executable, stream.handle))
        device.wait(stream)
        assert torch.equal(out, rows_of(content, index))
    done(driver.cuGraphExecDestroy(executable))
    done(driver.cuGraphDestroy(graph))
    stream.close()


# What goes wrong in graphs.


def test_bad_index_in_the_third_replay_of_five(x, content):
    index = some(32, 0)
    out = torch.empty((32, WORDS), dtype=torch.int32, device="cuda")
    graph = captured(lambda: x.gather(index, out, stream=here()))
    x.check()

    for turn in range(5):
        good = some(32, turn)
        index.copy_(good)
        if turn == 2:
            index[7] = ROWS + 5
        graph.replay()
        torch.cuda.synchronize()
        expected = rows_of(content, good)
        if turn == 2:
            expected[7] = 0
        assert torch.equal(out, expected)

    with pytest.raises(errors.BoundsError, match=str(ROWS + 5)):
        x.check()
    x.check()
    assert torch.equal(x.gather(index), rows_of(content, index))
    graph.reset()


def test_bad_index_of_a_replayed_store_stores_nothing(writable, content):
    index = torch.arange(20, device="cuda")
    values = rows_of(content, index)
    graph = captured(lambda: writable.scatter(index, values, stream=here()))
    values.fill_(-1)
    index[3] = -ROWS - 1

    graph.replay()
    torch.cuda.synchronize()

    with pytest.raises(errors.BoundsError, match=str(-ROWS - 1)):
        writable.check()
    assert (writable[:40] == content[:40]).all()
    index[3] = 3
    graph.replay()
    torch.cuda.synchronize()
    assert (writable[:20] == -1).all()
    graph.reset()


def test_storage_that_fails_during_a_replay(tmp_path, content, device):
    content.tofile(tmp_path / "f")
    storage = Faulty(File(tmp_path / "f", writable=True))
    index = some(32, 0, low=0)
    out = torch.empty((32, WORDS), dtype=torch.int32, device="cuda")
    with fw.open(storage, "r", "i4", (ROWS, WORDS), device=device, cache="256 KiB") as x:
        graph = captured(lambda: x.gather(index, out, stream=here()))
        x.drop_cache()
        storage.inject("read eio n=1")
        graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(errors.StorageError):
            x.check()

        storage.heal()
        graph.replay()
        torch.cuda.synchronize()
        x.check()
        assert torch.equal(out, rows_of(content, index))
        graph.reset()
        del graph
        gc.collect()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, index: x.gather(index),
        lambda x, index: x.gather(np.arange(3)),
        lambda x, index: x.gather(np.arange(3), stream=here()),
        lambda x, index: x.gather_async(index),
        lambda x, index: x.prefetch(np.arange(3), stream=here()),
        lambda x, index: x.wait(here()),
        lambda x, index: x.drop_cache(),
        lambda x, index: x[3:5],
    ],
    ids=["no stream", "host", "host indices", "async", "prefetch", "wait", "drop", "slice"],
)
def test_a_call_that_cannot_be_captured_leaves_the_capture_usable(x, content, call):
    index, a = some(32, 0), torch.zeros(8, device="cuda")
    out = torch.empty((32, WORDS), dtype=torch.int32, device="cuda")
    x.gather(index, out, stream=here())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph, capture_error_mode="global"):
        a += 1
        with pytest.raises(errors.CaptureError):
            call(x, index)
        x.gather(index, out, stream=here())
        a += 1

    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert (a == 2).all()
    assert torch.equal(out, rows_of(content, index))
    graph.reset()


# Compiled.


@pytest.fixture
def compiled():
    """Compile as users are told to, and give back the graphs at the end."""
    torch.compiler.reset()
    yield lambda work: torch.compile(work, fullgraph=True, mode="reduce-overhead")
    torch.compiler.reset()
    gc.collect()


def graphs_refused():
    return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def test_compiled_gather_is_one_graph(x, content, compiled):
    before = graphs_refused()
    layer = compiled(lambda index: torch.relu(fw.torch.gather(x, index + 1).float() / 7).sum(1))

    for seed in range(6):
        index = some(48, seed, low=0) - 1
        expected = torch.relu(rows_of(content, index + 1).float() / 7).sum(1)
        torch.testing.assert_close(layer(index), expected)

    assert graphs_refused() == before
    x.check()


def test_compiled_stores_and_reads_keep_their_order(writable, content, compiled):
    before = graphs_refused()

    def step(index, values):
        first = fw.torch.gather(writable, index)
        fw.torch.scatter(writable, index, values)
        second = fw.torch.gather(writable, index)
        fw.torch.scatter(writable, index, values * 2)
        return first.clone(), second + 1, fw.torch.gather(writable, index)

    work = compiled(step)
    for turn in range(6):
        index = torch.arange(turn, ROWS, 40, device="cuda")
        values = torch.full((len(index), WORDS), turn + 1, dtype=torch.int32, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        first, second, third = (each.clone() for each in work(index, values))
        assert torch.equal(first, rows_of(content, index))
        assert (second == turn + 2).all()
        assert (third == 2 * turn + 2).all()
        content[index.cpu().numpy()] = 2 * turn + 2

    assert graphs_refused() == before


def test_bad_index_of_a_compiled_gather(x, content, compiled):
    layer = compiled(lambda index: fw.torch.gather(x, index) + 0)
    index = some(16, 1)
    for _ in range(4):
        layer(index)
    index[5] = ROWS

    rows = layer(index).clone()

    torch.cuda.synchronize()
    with pytest.raises(errors.BoundsError, match=str(ROWS)):
        x.check()
    assert (rows[5] == 0).all()
    assert torch.equal(rows[:5], rows_of(content, index[:5]))


def test_operator_refuses_tensors_of_another_device(x):
    with pytest.raises(errors.ArgumentError, match="cpu"):
        fw.torch.gather(x, torch.arange(3))
