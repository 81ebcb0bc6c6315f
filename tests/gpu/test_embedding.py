"""Lookups in tables on a GPU: beside torch's modules, in CUDA graphs, compiled, and misused."""

from __future__ import annotations

import gc
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
import flashwarp.torch
from flashwarp.errors import BoundsError
from flashwarp.testing import Faulty
from gpu.captures import MARKS, captured

pytestmark = MARKS

ROWS = 20000
HELD = {
    torch.float32: "f4",
    torch.float16: "f2",
    torch.bfloat16: "u2",
    torch.float8_e4m3fn: "u1",
    torch.float8_e5m2: "u1",
    torch.int8: "i1",
}
PATHS = {
    "in_place": {},
    "rings": {"controller": fw.nvme.SoftwareController(commands=True)},
    "o_direct": {"o_direct": True},
}


def numbers(rows, width, dtype, seed=0):
    made = torch.Generator().manual_seed(seed)
    if dtype is torch.int8:
        return torch.randint(-128, 128, (rows, width), generator=made).to(dtype)
    return (3 * torch.randn(rows, width, generator=made)).to(dtype)


@pytest.fixture
def stored_as(tmp_path, device):
    opened = []

    def open_file(weights, mode="r", **options):
        path = tmp_path / f"table{len(opened)}"
        path.write_bytes(weights.contiguous().view(torch.uint8).numpy().tobytes())
        options = {"device": device, "cache": "1 MiB", **options}
        held = np.dtype(HELD[weights.dtype])
        opened.append(fw.open(path, mode, held, tuple(weights.shape), **options))
        return opened[-1]

    yield open_file
    gc.collect()  # of graphs that read them
    for each in opened:
        each.close()


def ids(*shape, rows=ROWS, seed=0, dtype=torch.int64):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, shape, generator=made).to(dtype).cuda()


# Rows.


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_every_code_is_converted_as_torch_converts_it(stored_as, stored):
    kind = torch.uint8 if stored.itemsize == 1 else torch.uint16
    codes = torch.arange(1 << 8 * stored.itemsize, dtype=torch.int32).to(kind).view(stored)
    codes = codes.reshape(-1, 16)
    table = fw.torch.Embedding(stored_as(codes), stored=stored, dtype=torch.float32)

    rows = table(torch.arange(len(codes)).cuda()).cpu()

    known = ~codes.float().isnan()
    assert torch.equal(rows.isnan(), ~known)
    assert torch.equal(rows.view(torch.int32)[known], codes.float().view(torch.int32)[known])


def test_repeated_ids_fetch_their_lines_once(stored_as):
    weights = numbers(ROWS, 256, torch.float32)
    x = stored_as(weights, cache="64 MiB")
    index = ids(50000, rows=300)

    rows = fw.torch.Embedding(x)(index)

    assert torch.equal(rows, weights.cuda()[index])
    assert x.stats.bytes_read == len(set(torch.unique(index // 4).tolist())) * 4096


# Bags.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", [16, 64, 100, 200, 1000])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(stored_as, mode, width, path):
    weights = numbers(ROWS, width, torch.float32)
    x = stored_as(weights, cache="512 KiB", **PATHS[path])
    table = fw.torch.EmbeddingBag(x, mode=mode, padding_idx=5)
    other = torch.nn.EmbeddingBag.from_pretrained(weights.cuda(), mode=mode, padding_idx=5)
    index = ids(4000, rows=3000)
    lengths = torch.randint(0, 60, (200,), generator=torch.Generator().manual_seed(1))
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)])[:-1].long().clamp(max=4000).cuda()

    torch.testing.assert_close(table(index, offsets), other(index, offsets))
    square = index.reshape(100, 40)
    torch.testing.assert_close(table(square), other(square))


def test_sums_have_the_bits_of_torchs(stored_as):
    weights = numbers(ROWS, 128, torch.float32)
    table = fw.torch.EmbeddingBag(stored_as(weights, cache="512 KiB"), mode="sum")
    other = torch.nn.EmbeddingBag.from_pretrained(weights.cuda(), mode="sum")
    index = ids(3000, 50)

    assert torch.equal(table(index), other(index))


def test_a_cache_of_few_lines_serves_bags_of_many(stored_as):
    """Lines leave the cache between the two looks, so rows are loaded again."""
    weights = numbers(ROWS, 1000, torch.float32)
    x = stored_as(weights, cache="64 KiB")
    index = ids(600, 100)

    pooled = fw.torch.EmbeddingBag(x, mode="sum")(index)

    expected = torch.nn.functional.embedding_bag(index, weights.cuda(), mode="sum")
    torch.testing.assert_close(pooled, expected, rtol=1e-4, atol=1e-3)


# Groups.


@pytest.mark.parametrize("one_array", [True, False])
def test_groups_of_26_tables(stored_as, one_array):
    weights = [numbers(700 + place, 32, torch.float32, place) for place in range(26)]
    if one_array:
        x = stored_as(torch.cat(weights))
        starts = np.cumsum([0, *(len(each) for each in weights)]).tolist()
        tables = [fw.torch.Embedding(x, rows=range(a, b)) for a, b in pairwise(starts)]
    else:
        tables = [fw.torch.Embedding(stored_as(each, cache="64 KiB")) for each in weights]
    group = fw.torch.EmbeddingGroup(tables)
    index = ids(26, 2048, rows=700)

    rows = group(index)

    own = [each.cuda()[i] for each, i in zip(weights, index, strict=True)]
    assert torch.equal(rows, torch.cat(own, -1))
    group._lookup.close()


# Captured and compiled.


def test_replays_read_the_present_ids(stored_as):
    weights = numbers(ROWS, 40, torch.float8_e4m3fn)
    x = stored_as(weights, controller=fw.nvme.SoftwareController(commands=True))
    table = fw.torch.Embedding(x, stored=torch.float8_e4m3fn, scales=torch.tensor(0.5).cuda())
    index, found = ids(300), torch.empty(300, 40, device="cuda")
    graph = captured(lambda: found.copy_(table((index * 7 + 1) % ROWS)))

    for seed in range(5):
        index.copy_(ids(300, seed=seed))
        graph.replay()
        expected = weights.float().cuda()[(index * 7 + 1) % ROWS] * 0.5
        assert torch.equal(found, expected)
    x.check()
    graph.reset()


def test_bags_in_graphs(stored_as):
    weights = numbers(ROWS, 64, torch.float32)
    table = fw.torch.EmbeddingBag(stored_as(weights), mode="sum")
    index, found = ids(100, 8), torch.empty(100, 64, device="cuda")
    graph = captured(lambda: found.copy_(table(index)))

    for seed in range(5):
        index.copy_(ids(100, 8, seed=seed))
        graph.replay()
        expected = torch.nn.functional.embedding_bag(index, weights.cuda(), mode="sum")
        torch.testing.assert_close(found, expected)
    graph.reset()


def test_compiled_with_reduce_overhead(stored_as):
    torch.compiler.reset()
    weights = numbers(ROWS, 64, torch.float32)
    table, other = fw.torch.Embedding(stored_as(weights)), torch.rand(64, 8, device="cuda")
    layer = torch.compile(
        lambda i: torch.relu(table(i // 2) @ other), fullgraph=True, mode="reduce-overhead"
    )
    for seed in range(6):
        index = ids(32, seed=seed)
        expected = torch.relu(weights.cuda()[index // 2] @ other)
        torch.testing.assert_close(layer(index), expected, rtol=1e-3, atol=1e-3)
    torch.compiler.reset()


# Ahead.


def test_prefetch_on_a_side_stream_brings_the_rows(stored_as):
    weights = numbers(ROWS, 256, torch.float32)
    # So large that no set gets more lines than it has frames: those would be skipped, or evicted.
    x = stored_as(weights, cache="64 MiB", controller=fw.nvme.SoftwareController(commands=True))
    table, index, side = fw.torch.Embedding(x), ids(2000), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    table.prefetch(index, stream=side)
    side.synchronize()
    fetched = x.stats.misses
    rows = table(index)
    torch.cuda.synchronize()

    line = x.cache.line_bytes
    lines = len(
        {byte // line for row in index.tolist() for byte in (row * 1024, row * 1024 + 1023)}
    )
    # A prefetch skips a line whose set other warps lock again and again.
    assert 0.98 * lines <= fetched <= lines
    assert x.stats.misses == lines, "each line is fetched once"
    assert x.stats.bytes_read == lines * line
    assert x.stats.evictions == 0
    assert torch.equal(rows, weights.cuda()[index])


# Training.


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_backward_leaves_the_gradients_of_rows(stored_as, mode):
    weights = numbers(ROWS, 32, torch.float32)
    x = stored_as(weights, "r+")
    table = fw.torch.EmbeddingBag(x, mode=mode)
    other = torch.nn.EmbeddingBag(ROWS, 32, mode=mode, _weight=weights.clone()).cuda()
    index, factors = ids(50, 6), torch.rand(50, 32, device="cuda")

    (table(index) * factors).sum().backward()
    (other(index) * factors).sum().backward()

    ((kept, gradients),) = table.pending
    dense = torch.zeros(ROWS, 32, device="cuda").index_add(0, kept, gradients)
    torch.testing.assert_close(dense, other.weight.grad)


def test_replays_of_a_backward_store_the_gradients(stored_as):
    x = stored_as(numbers(ROWS, 32, torch.float32), "r+")
    table, index, factors = fw.torch.Embedding(x), ids(50), torch.ones(50, 32, device="cuda")

    graph = captured(lambda: (table(index) * factors).sum().backward())
    outside, inside = table.pending
    factors.fill_(3)
    graph.replay()
    torch.cuda.synchronize()

    assert outside.capture is None
    assert inside.capture is not None
    assert torch.equal(outside[1], torch.ones_like(factors))
    assert torch.equal(inside[0], index)
    assert torch.equal(inside[1], factors)
    graph.reset()


# Misuse.


@pytest.mark.parametrize("stray", [-1, ROWS])
def test_an_id_out_of_bounds_is_raised_by_the_next_call(stored_as, stray):
    weights = numbers(ROWS, 64, torch.float32)
    x = stored_as(weights)
    table, index = fw.torch.Embedding(x), ids(100)
    index[7] = stray

    rows = table(index)
    torch.cuda.synchronize()

    with pytest.raises(BoundsError, match=f"index {stray} is out of bounds"):
        x.check()
    assert not rows[7].any()
    index[7] = 3
    assert torch.equal(table(index)[8:], rows[8:])


def test_a_failed_read_is_raised_and_gives_zeros(tmp_path, device):
    weights = numbers(ROWS, 256, torch.float32)
    weights.numpy().tofile(tmp_path / "f")
    with (
        fw.storage.File(tmp_path / "f") as file,
        Faulty(file, "read eio") as faulty,
        fw.open(faulty, dtype="f4", shape=(ROWS, 256), device=device, cache="1 MiB") as x,
    ):
        rows = fw.torch.EmbeddingBag(x, mode="sum")(ids(20, 5))
        torch.cuda.synchronize()
        with pytest.raises(fw.errors.StorageError):
            x.check()
        assert not rows.isnan().any()
