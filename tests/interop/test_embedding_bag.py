"""`flashwarp.torch.EmbeddingBag` and `EmbeddingGroup` on the CPU device, beside torch's."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
import flashwarp.torch
from flashwarp.errors import ArgumentError, BoundsError, ClosedError, DtypeError

# Inductor starts processes and warns of what it lacks here.
pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

ROWS, WIDTH, PADDING = 500, 40, 7
MODES = ["sum", "mean", "max"]
# Where bags begin among 60 ids: the second and the fifth are empty.
OFFSETS = [0, 9, 9, 30, 50, 50]


@pytest.fixture
def weights():
    return torch.from_numpy(np.random.default_rng(2).normal(size=(ROWS, WIDTH)).astype("f4"))


@pytest.fixture
def x(tmp_path, weights):
    np.save(tmp_path / "x.npy", weights.numpy())
    with fw.open(tmp_path / "x.npy", "r+", device="cpu", cache="64 KiB", line=512) as opened:
        yield opened


def ids(*shape, seed=0):
    made = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))
    made.view(-1)[::5] = PADDING
    return made


def offsets_of(count, last):
    return torch.tensor([*OFFSETS, count] if last else OFFSETS)


def beside(weights, **options):
    """Torch's module with these weights."""
    return torch.nn.EmbeddingBag(*weights.shape, _weight=weights.clone(), **options)


def dense(pending, like):
    """What torch's backward would have made of what ours has left."""
    ((kept, gradients),) = pending
    pending.clear()
    return torch.zeros_like(like).index_add(0, kept, gradients.to(like.dtype))


# What it returns.


def test_sums_have_the_bits_of_sums_in_the_order_of_ids(x, weights):
    index = ids(40, 33)
    expected = torch.zeros(40, WIDTH)
    for k in range(33):
        expected += weights[index[:, k]]

    assert torch.equal(fw.torch.EmbeddingBag(x, mode="sum")(index), expected)


def test_ids_behind_the_last_offset_are_in_no_bag(x, weights):
    """Torch counts them or not, depending on the padding, and gives them undefined gradients."""
    table = fw.torch.EmbeddingBag(x, mode="sum", include_last_offset=True)
    index = torch.arange(8)

    pooled = table(index, torch.tensor([0, 2, 5]))
    pooled.sum().backward()

    torch.testing.assert_close(pooled, torch.stack([weights[:2].sum(0), weights[2:5].sum(0)]))
    assert dense(table.pending, weights).sum(1)[:8].tolist() == [WIDTH] * 5 + [0] * 3


def test_no_bags_and_no_ids(x):
    table = fw.torch.EmbeddingBag(x)
    none = torch.zeros(0, dtype=torch.int64)

    assert table(none, none).shape == (0, WIDTH)
    assert torch.equal(table(none, torch.zeros(3, dtype=torch.int64)), torch.zeros(3, WIDTH))
    assert torch.equal(table(torch.zeros(3, 0, dtype=torch.int64)), torch.zeros(3, WIDTH))


def test_infinities_and_what_is_no_number(tmp_path):
    weights = torch.tensor([[float("-inf"), float("nan")], [-1.0, 2.0], [float("inf"), 3.0]])
    np.save(tmp_path / "w.npy", weights.numpy())
    index = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 2]])
    for mode in MODES:
        with fw.torch.EmbeddingBag(tmp_path / "w.npy", mode=mode, device="cpu") as table:
            pooled = table(index)
        expected = beside(weights, mode=mode)(index)
        torch.testing.assert_close(pooled, expected, equal_nan=True)


# Training.


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_each_row_of_a_bag_gets_its_gradient(x, weights, mode, last):
    index, offsets = ids(60), offsets_of(60, last)
    options = {"mode": mode, "include_last_offset": last, "padding_idx": PADDING}
    table, other = fw.torch.EmbeddingBag(x, **options), beside(weights, **options)
    pooled, expected = table(index, offsets), other(index, offsets)
    factors = torch.rand_like(pooled)

    pooled.backward(factors)
    expected.backward(factors)

    torch.testing.assert_close(dense(table.pending, weights), other.weight.grad)


@pytest.mark.parametrize("trains", [False, True])
def test_weights_of_ids_get_their_gradient(x, weights, trains):
    index, offsets = ids(60), torch.tensor(OFFSETS)
    own, others = (torch.linspace(0, 1, 60).requires_grad_() for _ in range(2))
    table = fw.torch.EmbeddingBag(x, mode="sum", padding_idx=PADDING).requires_grad_(trains)
    other = beside(weights, mode="sum", padding_idx=PADDING)
    factors = torch.rand(len(OFFSETS), WIDTH)

    table(index, offsets, own).backward(factors)
    other(index, offsets, others).backward(factors)

    torch.testing.assert_close(own.grad, others.grad)
    assert len(table.pending) == trains
    if trains:
        torch.testing.assert_close(dense(table.pending, weights), other.weight.grad)


# Compiled.


def test_compiled_bags(x, weights):
    torch.compiler.reset()
    index, offsets, factors = ids(60), torch.tensor(OFFSETS), torch.rand(60)
    table = fw.torch.EmbeddingBag(x, mode="sum")
    layer = torch.compile(lambda i, o, f: table(i, o, f) * 2, fullgraph=True)

    pooled = layer(index, offsets, factors.requires_grad_())
    pooled.sum().backward()

    expected = beside(weights, mode="sum")(index, offsets, factors.detach()) * 2
    torch.testing.assert_close(pooled, expected)
    assert len(table.pending) == 1
    assert factors.grad is not None


# Misuse.


@pytest.mark.parametrize(
    ("index", "offsets", "factors", "match"),
    [
        (ids(6, 2), torch.tensor([0]), None, "with offsets both have one axis"),
        (ids(6), None, None, "without offsets they have 2 axes"),
        (ids(6), torch.tensor([[0]]), None, "with offsets both have one axis"),
        (ids(2, 2, 2), None, None, "without offsets they have 2 axes"),
        (ids(6), torch.tensor([0]), torch.rand(5), "give each id its weight"),
    ],
)
def test_operands_that_do_not_fit_are_refused(x, index, offsets, factors, match):
    with pytest.raises(ArgumentError, match=match):
        fw.torch.EmbeddingBag(x, mode="sum")(index, offsets, factors)


def test_weights_are_for_sums_of_floats(x):
    with pytest.raises(ArgumentError, match="are for mode=\"sum\", not 'mean'"):
        fw.torch.EmbeddingBag(x, mode="mean")(ids(3, 2), None, torch.rand(3, 2))
    with pytest.raises(DtypeError, match="weights has dtype"):
        fw.torch.EmbeddingBag(x, mode="sum")(ids(3, 2), None, torch.rand(3, 2).double())
    with pytest.raises(ArgumentError, match="mode='min'"):
        fw.torch.EmbeddingBag(x, mode="min")


@pytest.mark.parametrize("offsets", [[0, 4, 3], [0, 61]])
def test_offsets_that_are_wrong_raise(x, offsets):
    with pytest.raises(BoundsError):
        fw.torch.EmbeddingBag(x)(ids(60), torch.tensor(offsets))


# Groups.

DIMS = (16, 32, 7, 130)


@pytest.fixture
def tables(tmp_path):
    """Weights of tables of several widths, and files that have them."""
    made = []
    for place, dim in enumerate(DIMS):
        path = tmp_path / f"{place}.npy"
        np.save(path, np.random.default_rng(place).random((100 + place, dim), np.float32))
        made.append(path)
    return made


@pytest.fixture
def open_as(tables):
    """Open all tables as modules of one kind."""
    opened = []

    def open_all(kind, **options):
        opened.extend(kind(path, device="cpu", **options) for path in tables)
        return opened

    yield open_all
    for each in opened:
        each.close()


def weights_of(tables):
    return [torch.from_numpy(np.load(path)) for path in tables]


def test_rows_of_several_tables_lie_side_by_side(open_as, tables):
    group = fw.torch.EmbeddingGroup(open_as(fw.torch.Embedding))
    index = torch.randint(0, 100, (len(DIMS), 9, 2))

    rows = group(index)

    own = [weights[each] for weights, each in zip(weights_of(tables), index, strict=True)]
    assert torch.equal(rows, torch.cat(own, -1))
    assert torch.equal(group(list(index)), rows)
    for part, expected in zip(rows.split(group.dims, -1), own, strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_bags_of_several_tables_with_offsets_train(tables, mode, last):
    bags, options = 6, {"padding_idx": 5, "include_last_offset": last, "mode": mode}
    arrays = [fw.open(path, "r+", device="cpu", cache="64 KiB") for path in tables]
    modules = [fw.torch.EmbeddingBag(each, **options) for each in arrays]
    group = fw.torch.EmbeddingGroup(modules)
    others = [beside(each, **options) for each in weights_of(tables)]
    lengths = torch.randint(0, 4, (len(DIMS) * bags,))
    ends = [0, *lengths.cumsum(0).tolist()]
    index = torch.randint(0, 100, (ends[-1],))
    own, theirs = (torch.linspace(1, 2, ends[-1]).requires_grad_() for _ in range(2))
    weighted = mode == "sum"

    offsets = torch.tensor(ends if last else ends[:-1])
    pooled = group(index, offsets, own if weighted else None)
    expected = []
    for place, other in enumerate(others):
        begin, end = ends[place * bags], ends[(place + 1) * bags]
        of_table = torch.tensor(ends[place * bags : (place + 1) * bags + last]) - begin
        factors = theirs[begin:end] if weighted else None
        expected.append(other(index[begin:end], of_table, factors))
    torch.testing.assert_close(pooled, torch.cat(expected, -1))

    factors = torch.rand_like(pooled)
    pooled.backward(factors)
    torch.cat(expected, -1).backward(factors)
    for module, other in zip(modules, others, strict=True):
        torch.testing.assert_close(dense(module.pending, other.weight), other.weight.grad)
    if weighted:
        torch.testing.assert_close(own.grad, theirs.grad)
    for array in arrays:
        array.close()


def test_tables_that_are_rows_of_one_array(x, weights):
    tables = [fw.torch.Embedding(x, rows=range(start, start + 100)) for start in (0, 100, 300)]
    index = torch.randint(0, 100, (3, 8))

    rows = fw.torch.EmbeddingGroup(tables)(index)

    assert torch.equal(
        rows, torch.cat([weights[index[k] + s] for k, s in enumerate((0, 100, 300))], -1)
    )


@pytest.mark.parametrize(
    ("tables", "shown"),
    [
        ((1000, 32), "EmbeddingGroup(1000, 32): "),
        ((), "EmbeddingGroup(): "),
        (("x.npy",), "EmbeddingGroup('x.npy'): "),
        (([torch.nn.EmbeddingBag(3, 4)],), "EmbeddingGroup([EmbeddingBag(3, 4, mode='mean')]): "),
    ],
)
def test_group_of_what_torch_takes_is_answered_by_how_to_make_one(tables, shown):
    for named in ({}, {"mode": "sum"}):
        with pytest.raises(ArgumentError) as raised:
            fw.torch.EmbeddingGroup(*tables, **named)

        assert "EmbeddingGroup([EmbeddingBag(path, dim=dim), ...])" in str(raised.value)
        assert shown.removesuffix("): ") in str(raised.value)


def test_mode_of_a_file_given_to_a_bag_is_answered_by_how_to_open_it():
    with pytest.raises(ArgumentError, match=r"from_pretrained\(path, freeze=False\)"):
        fw.torch.EmbeddingBag("x.npy", mode="r+")


def test_group_prefetches_what_it_will_read(open_as, tables):
    modules = open_as(fw.torch.EmbeddingBag, mode="sum", cache="64 KiB")
    group = fw.torch.EmbeddingGroup(modules)
    index = torch.randint(0, 100, (40,))
    offsets = torch.arange(0, 40, 5)  # two bags of each table

    group.prefetch(index, offsets)
    before = [module.array.stats.bytes_read for module in modules]
    group(index, offsets)

    assert all(before)
    assert [module.array.stats.bytes_read for module in modules] == before


def test_group_of_one_table(x, weights):
    group = fw.torch.EmbeddingGroup([fw.torch.EmbeddingBag(x, mode="sum")])
    index = ids(1, 4, 3)

    torch.testing.assert_close(group(index), beside(weights, mode="sum")(index[0]))


def test_groups_compile(open_as, tables):
    torch.compiler.reset()
    group = fw.torch.EmbeddingGroup(open_as(fw.torch.Embedding))
    index = torch.randint(0, 100, (len(DIMS), 9))

    rows = torch.compile(lambda i: group(i) + 1, fullgraph=True)(index)

    assert torch.equal(rows, group(index) + 1)


def test_tables_of_a_group_are_of_one_kind(x):
    one, other = fw.torch.EmbeddingBag(x, mode="sum"), fw.torch.EmbeddingBag(x, mode="max")

    with pytest.raises(ArgumentError, match="have one kind, mode, include_last_offset and dtype"):
        fw.torch.EmbeddingGroup([one, other])
    with pytest.raises(ArgumentError, match="sequence of Embedding"):
        fw.torch.EmbeddingGroup([])


def test_ids_of_a_group_that_do_not_fit_are_refused(open_as):
    group = fw.torch.EmbeddingGroup(open_as(fw.torch.Embedding))

    with pytest.raises(ArgumentError, match="the first axis counts the tables"):
        group(torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="give all tables one shape"):
        group([torch.zeros(k, dtype=torch.int64) for k in range(len(DIMS))])
    with pytest.raises(ArgumentError, match="are for tables of EmbeddingBag"):
        group(torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("mode", MODES)
def test_ids_before_the_first_bag_are_refused(x, mode):
    ours = fw.torch.EmbeddingBag(x, mode=mode)

    with pytest.raises(BoundsError, match=r"offset 1 of a bag .*first and not 0"):
        ours(torch.tensor([5, 6, 8]), torch.tensor([1, 2]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tables", [1, 2])
def test_ids_without_bags_have_a_backward(x, mode, tables):
    modules = [fw.torch.EmbeddingBag(x, mode=mode) for _ in range(tables)]
    ours = fw.torch.EmbeddingGroup(modules)
    none = torch.tensor([], dtype=torch.int64)
    factors = torch.rand(3, requires_grad=True) if mode == "sum" else None

    pooled = ours(torch.tensor([5, 6, 8]), none, factors)
    pooled.sum().backward()

    assert pooled.shape == (0, tables * WIDTH)
    assert factors is None or not factors.grad.any()


def test_a_group_closes_while_threads_look_up(tmp_path):
    """Close once freed the tables of the group beneath a kernel, which crashed."""
    np.save(tmp_path / "ones.npy", np.ones((5000, 64), "f4"))
    with fw.open(tmp_path / "ones.npy", device="cpu", cache="64 KiB") as ones:
        for _ in range(10):
            group = fw.torch.EmbeddingGroup([fw.torch.Embedding(ones) for _ in range(2)])
            begun, wrong = threading.Barrier(5), []
            threads = [
                threading.Thread(target=look_up_until_closed, args=(group, begun, wrong))
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            begun.wait(60)
            group.close()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
            assert not wrong


def look_up_until_closed(group, begun, wrong):
    """Look ones up; note what is none."""
    try:
        for turn in range(10_000):
            if not (group(torch.randint(0, 5000, (2, 500))) == 1).all():
                wrong.append(turn)
            if turn == 0:
                begun.wait(60)
    except ClosedError:
        return
    wrong.append("not closed")
