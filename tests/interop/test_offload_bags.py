"""Bags of offloaded tables: `torch.nn.EmbeddingBag`, and `embedding_bag` of any module."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import nn

from flashwarp.errors import ArgumentError, BoundsError, CacheError, ClosedError
from flashwarp.torch import offload
from support.safetensors_files import save

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

ROWS, DIM = 300, 12


class Functional(nn.Module):
    """No subclass of torch's module, but a table whose rows it pools."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, DIM))

    def forward(self, ids, offsets):
        return nn.functional.embedding_bag(ids, self.weight, offsets, mode="sum", padding_idx=4)


@pytest.fixture
def offloaded(tmp_path):
    """Returns how to offload the table of a module; closes it afterwards."""
    opened = []

    def act(table, **options):
        model = nn.ModuleDict({"table": table}).eval()
        path = save(tmp_path / "x.safetensors", {"table.weight": table.weight})
        options = {"host_memory": "64 KiB", "gpu_memory": "64 KiB", "device": "cpu", **options}
        opened.append(offload(model, "table", path, **options))
        return table, opened[-1]

    yield act
    for each in opened:
        each.close()


def ids(*shape):
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("padding", [None, 4, -1])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_those_of_torch(offloaded, mode, last, padding):
    table = nn.EmbeddingBag(ROWS, DIM, mode=mode, include_last_offset=last, padding_idx=padding)
    wide, flat = ids(7, 5), ids(40)
    wide[::2, 0] = 4
    offsets = torch.tensor([0, 3, 3, 20, 40] if last else [0, 3, 3, 20])
    expected = [table(wide), table(flat, offsets)]

    offloaded(table)

    assert type(table) is nn.EmbeddingBag
    for ours, theirs in zip([table(wide), table(flat, offsets)], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_weights_of_ids_get_their_gradient(offloaded):
    table = nn.EmbeddingBag(ROWS, DIM, mode="sum").requires_grad_(False)
    factors = torch.rand(7, 5, requires_grad=True)
    table(ids(7, 5), per_sample_weights=factors).square().sum().backward()
    expected, factors.grad = factors.grad, None

    offloaded(table)
    table(ids(7, 5), per_sample_weights=factors).square().sum().backward()

    torch.testing.assert_close(factors.grad, expected)


def test_other_modules_pool_rows(offloaded):
    table = Functional()
    flat, offsets = ids(40), torch.tensor([0, 9])
    expected = table(flat, offsets)

    offloaded(table)

    torch.testing.assert_close(table(flat, offsets), expected, rtol=1e-6, atol=1e-6)
    rows = nn.functional.embedding(flat, table.weight)
    assert rows.shape == (40, DIM)


def test_bags_are_reported(offloaded):
    table, tables = offloaded(nn.EmbeddingBag(ROWS, DIM, mode="sum"))

    table(ids(7, 5))

    (report,) = tables.stats.tables
    assert report.bytes_looked_up == 35 * DIM * 4
    assert report.seconds_per_lookup > 0


def test_compiled_bags_look_rows_up(offloaded):
    table = nn.EmbeddingBag(ROWS, DIM, mode="mean")
    expected = table(ids(7, 5))
    offloaded(table, rows_per_step=35)

    compiled = torch.compile(lambda idx: table(idx) * 2, backend="aot_eager", fullgraph=True)

    torch.testing.assert_close(compiled(ids(7, 5)), expected * 2)


@pytest.mark.parametrize(
    "options", [{"mode": "median"}, {"padding_idx": ROWS}, {"include_last_offset": 3}, {"mode": []}]
)
def test_ways_of_pooling_that_are_none_are_refused(offloaded, options):
    table, _ = offloaded(nn.EmbeddingBag(ROWS, DIM))

    with pytest.raises(ArgumentError, match=next(iter(options))):
        table.weight.look_up_bags(ids(2, 2), **options)


def test_bags_keep_to_the_limits_of_their_table(offloaded):
    table, tables = offloaded(nn.EmbeddingBag(ROWS, DIM, mode="sum"), gpu_memory="8 KiB")

    with pytest.raises(CacheError, match="a step of 4000 rows"):
        table(ids(400, 10))
    with pytest.raises(BoundsError, match=str(ROWS)):
        table(torch.tensor([[0, ROWS]]))
    with pytest.raises(ArgumentError, match="max_norm"):
        nn.functional.embedding_bag(ids(2, 2), table.weight, max_norm=1.0)
    weight = table.weight
    tables.close()
    with pytest.raises(ClosedError):
        nn.functional.embedding_bag(ids(2, 2), weight)
    assert table.weight.is_meta
