"""`flashwarp.torch.Embedding` on the CPU device, beside torch's."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
import flashwarp.torch
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    CaptureError,
    ClosedError,
    CopyError,
    DtypeError,
    IndexDtypeError,
    MissingFileError,
    ReadOnlyError,
)

# Inductor starts processes and warns of what it lacks here.
pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

ROWS, WIDTH = 1000, 24

# How numpy holds what torch names.
HELD = {
    torch.float32: "f4",
    torch.float16: "f2",
    torch.bfloat16: "u2",
    torch.float8_e4m3fn: "u1",
    torch.float8_e5m2: "u1",
    torch.int8: "i1",
}


def stored_as(tmp_path, weights, mode="r", **options):
    """Open a file that has these weights, as numpy can."""
    held = np.dtype(HELD[weights.dtype])
    (tmp_path / "table").write_bytes(weights.contiguous().view(torch.uint8).numpy().tobytes())
    options = {"device": "cpu", "cache": "64 KiB", "line": 512, **options}
    return fw.open(tmp_path / "table", mode, held, tuple(weights.shape), **options)


def numbers(rows, width, dtype, seed=0):
    made = torch.Generator().manual_seed(seed)
    if dtype is torch.int8:
        return torch.randint(-128, 128, (rows, width), generator=made).to(dtype)
    return (3 * torch.randn(rows, width, generator=made)).to(dtype)


def ids(*shape, rows=ROWS, seed=0, dtype=torch.int64):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, shape, generator=made).to(dtype)


def same_bits(a, b):
    """Whether numbers are the same, up to which of the bits say that one is no number."""
    kind = {4: torch.int32, 2: torch.int16}[a.dtype.itemsize]
    known = ~b.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.view(kind)[known], b.view(kind)[known]
    )


@pytest.fixture
def weights():
    return numbers(ROWS, WIDTH, torch.float32)


@pytest.fixture
def x(tmp_path, weights):
    with stored_as(tmp_path, weights, "r+") as opened:
        yield opened


# What it returns.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 0, 4)])
def test_rows_are_those_of_torch(x, weights, shape, dtype):
    index = ids(*shape, dtype=dtype)

    rows = fw.torch.Embedding(x)(index)

    assert rows.shape == (*shape, WIDTH)
    assert torch.equal(rows, torch.nn.Embedding.from_pretrained(weights)(index))


@pytest.mark.parametrize(
    "stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float16, torch.bfloat16]
)
def test_every_code_is_converted_as_torch_converts_it(tmp_path, stored):
    count = 1 << 8 * stored.itemsize
    kind = torch.uint8 if stored.itemsize == 1 else torch.uint16
    codes = torch.arange(count, dtype=torch.int32).to(kind).view(stored).reshape(-1, 16)
    with stored_as(tmp_path, codes) as x:
        rows = fw.torch.Embedding(x, stored=stored, dtype=torch.float32)(torch.arange(count // 16))

        assert same_bits(rows, codes.float())


def test_table_is_a_tensor_of_a_checkpoint(tmp_path: Path) -> None:
    rows = torch.randn(5, 8).bfloat16()
    entry = {"dtype": "BF16", "shape": [5, 8], "data_offsets": [0, rows.nbytes]}
    head = json.dumps({"embed.weight": entry}).encode()
    data = rows.view(torch.uint16).numpy().tobytes()
    (tmp_path / "m").write_bytes(len(head).to_bytes(8, "little") + head + data)

    with fw.torch.Embedding(tmp_path / "m", tensor="embed.weight", device="cpu") as table:
        assert (table.stored, table.dtype) == (torch.bfloat16, torch.bfloat16)
        assert torch.equal(table(torch.tensor([4, 1])), rows[[4, 1]])


@pytest.mark.parametrize("out", [torch.float16, torch.bfloat16])
def test_floats_are_rounded_as_torch_rounds_them(tmp_path, out):
    bits = np.random.default_rng(0).integers(0, 1 << 32, (4096, 64), np.uint64).astype(np.uint32)
    weights = torch.from_numpy(bits.view(np.float32).copy())
    edges = [65519.9, 65520, 2**-24, 2**-25, 1.0001 * 2**-25, 2**-14, -0.0, float("inf"), 3.39e38]
    weights[0, : len(edges)] = torch.tensor(edges)
    with stored_as(tmp_path, weights) as x:
        rows = fw.torch.Embedding(x, dtype=out)(torch.arange(4096))

        assert same_bits(rows, weights.to(out))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "dim"), [(None, None), (range(100, 900), None), (None, 13)])
def test_rows_of_the_same_type_keep_their_bits(tmp_path, stored, rows, dim):
    """Quiet and signalling NaNs have their bits, too, which arithmetic would change."""
    kind = {4: torch.int32, 2: torch.int16}[stored.itemsize]
    bits = torch.from_numpy(
        np.random.default_rng(0).integers(0, 1 << 16, (ROWS, 24 * stored.itemsize // 2), np.uint16)
    ).view(kind)
    signalling = {torch.float32: 0x7F800001, torch.float16: 0x7C01, torch.bfloat16: 0x7F81}
    bits[::3] = signalling[stored]
    with stored_as(tmp_path, bits.view(stored)) as x:
        options = {"stored": stored, "rows": rows, "dim": dim}
        table = fw.torch.Embedding(x, **options)
        index = ids(3000, rows=table.num_embeddings)

        found = table(index)

        both = fw.torch.EmbeddingGroup([table, table])(torch.stack([index, index]))
    expected = bits[(0 if rows is None else rows.start) + index, : table.embedding_dim]
    assert found.dtype == stored
    assert torch.equal(found.view(kind), expected)
    assert torch.equal(both.view(kind), torch.cat([expected, expected], -1))


SCALES = {
    "one": lambda rows, dim: torch.tensor(0.37),
    "row": lambda rows, dim: torch.rand(rows),
    "column": lambda rows, dim: torch.rand(rows, 1),
    "blocks": lambda rows, dim: torch.rand(rows, dim // 32),
    "narrow": lambda rows, dim: torch.rand(rows, dim // 4),
}


def scaled(weights, scales, index):
    rows, factors = weights.float()[index], scales.float()
    if factors.ndim == 0:
        return rows * factors
    factors = factors.reshape(len(weights), -1)
    return rows * factors[index].repeat_interleave(rows.shape[-1] // factors.shape[1], -1)


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("how", ["array", "path"])
def test_scales_are_read_through_a_cache(tmp_path, kind, how):
    weights, index = numbers(4000, 96, torch.int8), ids(300, rows=4000)
    scales = SCALES[kind](4000, 96)
    np.save(tmp_path / "scales.npy", scales.numpy())
    with (
        stored_as(tmp_path, weights, cache="32 KiB") as x,
        fw.open(tmp_path / "scales.npy", cache="16 KiB", line=512, device=x.device) as s,
    ):
        given = s if how == "array" else tmp_path / "scales.npy"
        with fw.torch.Embedding(x, scales=given) as table:
            assert torch.equal(table(index), scaled(weights, scales, index))
        if how == "array":
            assert s.stats.bytes_read > 0
            assert not s.closed


def test_some_rows_of_an_array_are_a_table(x, weights):
    scales = torch.rand(300)
    table = fw.torch.Embedding(x, rows=range(200, 500), scales=scales)
    index = ids(40, rows=300)

    assert table.num_embeddings == 300
    assert torch.equal(table(index), weights[200:500][index] * scales[index, None])
    with pytest.raises(BoundsError, match="index 300 is out of bounds"):
        table(torch.tensor([300]))


def test_a_path_is_opened_and_closed_with_the_module(tmp_path, weights):
    np.save(tmp_path / "t.npy", weights.numpy())

    with fw.torch.Embedding(tmp_path / "t.npy", device="cpu", cache="64 KiB") as table:
        assert torch.equal(table(torch.tensor([5])), weights[[5]])
        array = table.array

    assert array.closed
    with pytest.raises(ClosedError, match="is closed"):
        table(torch.tensor([5]))


def test_a_path_may_be_bytes_as_everywhere(tmp_path, weights):
    np.save(tmp_path / "t.npy", weights.numpy())
    np.save(tmp_path / "s.npy", np.full(ROWS, 2, "f4"))
    table, scales = os.fsencode(tmp_path / "t.npy"), os.fsencode(tmp_path / "s.npy")

    with fw.torch.Embedding(table, scales=scales, device="cpu", cache="64 KiB") as module:
        assert torch.equal(module(torch.tensor([5])), 2 * weights[[5]])


def test_an_array_stays_open_after_its_module(x):
    with fw.torch.Embedding(x):
        pass

    assert not x.closed


def test_a_module_shows_its_table_and_has_no_parameters(x):
    table = fw.torch.Embedding(x, padding_idx=-1)

    assert table.padding_idx == ROWS - 1
    assert repr(table).startswith("Embedding(1000, 24, padding_idx=999, dtype=torch.float32")
    assert list(table.parameters()) == []
    assert table.state_dict() == {}


def test_ids_may_have_strides(x, weights):
    index = ids(20, 2)[:, 0]

    assert torch.equal(fw.torch.Embedding(x)(index), weights[index])


# Rows that exist.


@pytest.mark.parametrize("stored", HELD)
def test_rows_of_a_tensor_stay_in_its_memory(stored):
    held = numbers(ROWS, WIDTH, torch.float32).to(stored)
    index = ids(50)

    with fw.torch.Embedding.from_pretrained(held, padding_idx=-1, cache="16 KiB") as table:
        rows = table(index)
        assert (table.stored, table.padding_idx) == (stored, ROWS - 1)
        assert table.array._attachment.storage.address == held.data_ptr()

    expected = torch.nn.Embedding.from_pretrained(held.to(rows.dtype))(index)
    assert torch.equal(rows, expected)
    assert not rows.requires_grad


def test_rows_of_numpy_and_of_views_are_those_of_torch(weights):
    index = ids(50)

    for given in (weights.numpy(), weights.numpy()[::2, ::3], weights[:, ::2], -weights.T):
        beside = torch.nn.Embedding.from_pretrained(torch.as_tensor(given))
        few = index % beside.num_embeddings
        with fw.torch.Embedding.from_pretrained(given) as table:
            assert torch.equal(table(few), beside(few))


@pytest.mark.parametrize("kind", [fw.torch.Embedding, fw.torch.EmbeddingBag])
def test_freeze_says_how_a_path_is_opened(tmp_path, weights, kind):
    np.save(tmp_path / "x.npy", weights.numpy())

    for freeze in (True, False):
        with kind.from_pretrained(tmp_path / "x.npy", freeze) as table:
            assert (table.array.writable, table._trains) == (not freeze, not freeze)


def test_freeze_of_an_open_array(x):
    assert not fw.torch.Embedding.from_pretrained(x)(ids(3)).requires_grad
    assert fw.torch.Embedding.from_pretrained(x, freeze=False)(ids(3)).requires_grad


def test_weights_that_are_trained_go_to_a_file_first(tmp_path, weights):
    path = tmp_path / "x.npy"
    with pytest.raises(ReadOnlyError, match=r"create_table\(path, \*weights.shape, init=weights"):
        fw.torch.Embedding.from_pretrained(weights, freeze=False)

    for given in (weights, torch.nn.Parameter(weights.bfloat16()), weights.numpy()):
        fw.torch.create_table(path, *given.shape, init=given, overwrite=True)
        with fw.torch.Embedding.from_pretrained(path, False, dim=WIDTH) as table:
            rows = table(torch.arange(ROWS))
            rows.sum().backward()
            fw.torch.RowWiseAdagrad(table, lr=0.1).step()
        assert torch.equal(rows.detach(), torch.as_tensor(given).detach().float())


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (torch.ones(3), {}, "two axes"),
        (torch.ones(3, 0), {}, "two axes"),
        (torch.ones(3, 4, device="meta"), {}, "cpu"),
        (torch.eye(3).to_sparse(), {}, "sparse"),
        (torch.ones(3, 4, dtype=torch.float64), {}, "float64"),
        (np.ones((3, 4), ">f4"), {}, ">f4"),
        (np.ones((3, 4), object), {}, "objects"),
        ([[1.0]], {}, "from_pretrained"),
        (torch.ones(3, 4), {"max_norm": 1.0}, "max_norm"),
        (torch.ones(3, 4), {"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        (torch.ones(3, 4), {"sparse": False}, "sparse"),
        (torch.ones(3, 4), {"freeze": "no"}, "freeze"),
        (torch.ones(3, 4), {"mode": "r+"}, "takes no writes"),
    ],
)
def test_what_cannot_be_had_of_from_pretrained_is_refused_by_name(given, options, said):
    with pytest.raises(fw.errors.FlashwarpError, match=said):
        fw.torch.Embedding.from_pretrained(given, **options)


def test_weights_of_a_new_table_that_do_not_fit_leave_no_file(tmp_path, weights):
    for given in (weights[:5], weights.to("meta"), np.empty((ROWS, WIDTH), object)):
        with pytest.raises(ArgumentError, match="init"):
            fw.torch.create_table(tmp_path / "x.npy", ROWS, WIDTH, init=given)

    assert not os.listdir(tmp_path)


# Ahead.


def test_prefetched_rows_are_there(x, weights):
    table, index = fw.torch.Embedding(x), torch.arange(0, 50, 5).reshape(2, 5)

    table.prefetch(index)
    before = x.stats
    rows = table(index)

    assert before.bytes_read > 0
    assert x.stats.bytes_read == before.bytes_read
    assert torch.equal(rows, weights[index])


# Training.


def test_backward_leaves_the_gradients_of_rows(x, weights):
    table, index = fw.torch.Embedding(x, padding_idx=3), ids(40, 5)
    index[0] = 3
    beside = torch.nn.Embedding(ROWS, WIDTH, padding_idx=3, _weight=weights.clone())
    factors = torch.rand(40, 5, WIDTH)

    (table(index) * factors).sum().backward()
    (beside(index) * factors).sum().backward()

    ((kept, gradients),) = table.pending
    assert (kept.dtype, kept.shape, gradients.shape) == (torch.int64, (200,), (200, WIDTH))
    assert torch.equal(kept, index.reshape(-1))
    dense = torch.zeros(ROWS, WIDTH).index_add(0, kept, gradients)
    torch.testing.assert_close(dense, beside.weight.grad)


def test_each_backward_appends(x):
    table = fw.torch.Embedding(x)

    for _ in range(3):
        table(ids(4)).sum().backward()

    assert len(table.pending) == 3


def test_rows_need_no_gradient_where_none_is_recorded(x):
    table = fw.torch.Embedding(x)

    with torch.no_grad():
        assert not table(ids(4)).requires_grad
    assert table(ids(4)).requires_grad
    table.requires_grad_(False)
    assert not table(ids(4)).requires_grad
    assert not table.pending


def test_a_read_only_table_is_not_trained(tmp_path, weights):
    with stored_as(tmp_path, weights) as x:
        table = fw.torch.Embedding(x)

        assert not table(ids(4)).requires_grad
        with pytest.raises(ReadOnlyError, match='open it with mode="r\\+"'):
            table.requires_grad_()


# Compiled.


@pytest.fixture
def compiled():
    """Compile as users are told to; each test compiles anew."""
    torch.compiler.reset()
    return lambda function, **how: torch.compile(function, fullgraph=True, **how)


def test_compiled_model_reads_rows(tmp_path, weights, compiled):
    with stored_as(tmp_path, weights) as x:
        table, other = fw.torch.Embedding(x), torch.rand(WIDTH, 8)
        layer = compiled(lambda i: torch.relu(table(i // 2) @ other), mode="reduce-overhead")

        for length in (6, 6, 9):
            index = ids(length, seed=length)
            torch.testing.assert_close(layer(index), torch.relu(weights[index // 2] @ other))


def test_compiled_training_leaves_the_same_gradients(x, compiled):
    table = fw.torch.Embedding(x)
    model = torch.nn.Sequential(table, torch.nn.Linear(WIDTH, 3))
    index = ids(8, 5)

    compiled(model)(index).square().sum().backward()
    model(index).square().sum().backward()

    (first, second), table.pending = table.pending, []
    torch.testing.assert_close(first, second)


# Misuse.


@pytest.mark.parametrize("stray", [-1, ROWS, 1 << 40])
def test_an_id_out_of_bounds_raises(x, stray):
    table = fw.torch.Embedding(x)

    with pytest.raises(BoundsError, match=f"index {stray} is out of bounds .* 1000"):
        table(torch.tensor([0, stray]))
    table(torch.tensor([0]))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.bool])
def test_ids_are_integers_of_32_or_64_bits(x, dtype):
    with pytest.raises(IndexDtypeError, match="use int64 or int32"):
        fw.torch.Embedding(x)(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"dim": 0}, ArgumentError, "dim"),
        ({"dim": WIDTH + 1}, ArgumentError, "dim"),
        ({"dtype": torch.float64}, DtypeError, "converted to float32, float16 or bfloat16"),
        ({"stored": torch.float16}, DtypeError, "stored=torch.float16 for an array of float32"),
        ({"stored": torch.int64}, DtypeError, "a table stores float32"),
        ({"padding_idx": ROWS}, ArgumentError, "padding_idx"),
        ({"rows": range(ROWS + 1)}, ArgumentError, "of an array of 1000 rows"),
        ({"rows": range(0, ROWS, 2)}, ArgumentError, "without gaps"),
        ({"scales": torch.rand(ROWS + 1)}, ArgumentError, "scales of shape .1001"),
        ({"scales": torch.rand(ROWS, 5)}, ArgumentError, "blocks divides 24"),
        ({"scales": torch.rand(ROWS).double()}, DtypeError, "scales of dtype torch.float64"),
        ({"scales": [1.0]}, ArgumentError, "not list"),
        ({"max_norm": 1.0}, ArgumentError, "never stores them"),
        ({"scale_grad_by_freq": True}, ArgumentError, "your own counts"),
        ({"sparse": False}, ArgumentError, "never dense"),
        ({"cache": "1 MiB"}, ArgumentError, "cache: the array is open"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(x, options, error, match):
    with pytest.raises(error, match=match):
        fw.torch.Embedding(x, **options)


@pytest.mark.parametrize("module", [fw.torch.Embedding, fw.torch.EmbeddingBag])
@pytest.mark.parametrize(
    ("sizes", "named", "match"),
    [
        (
            (1000, 32),
            {},
            r"\(1000, 32\): .* flashwarp.torch.create_table\(path, 1000, 32\), .*path, dim=32\)",
        ),
        ((1000,), {}, r"create_table\(path, 1000, dim\)"),
        ((), {"num_embeddings": 9, "embedding_dim": 4}, r"create_table\(path, 9, 4\)"),
        ((1000, 32, 0), {}, r"\(1000, 32, 0\): .*\(path, 1000, 32\)"),
        ((), {}, r"\(\): .*create_table\(path, rows, dim\)"),
        ((torch.nn.Embedding(4, 2),), {}, r"\(Embedding\): .*from_pretrained"),
        (([[1.0]],), {}, r"\(list\): .*from_pretrained"),
        (("rows.npy", 32), {}, "32 after the table: .*dim="),
        (("rows.npy",), {"embedding_dim": 32}, "32 after the table: .*dim="),
    ],
)
def test_what_torch_makes_a_table_from_is_answered_by_how_to_make_its_file(
    module, sizes, named, match
):
    with pytest.raises(ArgumentError, match=match) as raised:
        module(*sizes, **named)

    assert "\n" not in str(raised.value)


def test_what_changes_nothing_in_torch_is_accepted(x):
    fw.torch.Embedding(x, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=True)


@pytest.mark.parametrize("shape", [(ROWS * WIDTH,), (10, 100, WIDTH)])
def test_an_array_of_other_axes_is_no_table(tmp_path, weights, shape):
    np.save(tmp_path / "t.npy", weights.numpy().reshape(shape))

    with pytest.raises(ArgumentError, match="is no table, which has two axes"):
        fw.torch.Embedding(tmp_path / "t.npy", device="cpu")


@pytest.mark.parametrize("dtype", ["f8", "i8", "u1", ">f4"])
def test_elements_without_a_conversion_are_refused(tmp_path, dtype):
    np.save(tmp_path / "t.npy", np.zeros((4, 4), dtype))

    with pytest.raises(DtypeError, match="cannot be converted"):
        fw.torch.Embedding(tmp_path / "t.npy", device="cpu")


def test_absent_table_is_refused(tmp_path):
    with pytest.raises(MissingFileError):
        fw.torch.Embedding(tmp_path / "absent.npy", device="cpu")


@pytest.mark.parametrize("act", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_read_only_table_is_copied_as_how_to_open_it(tmp_path: Path, act: Any) -> None:
    np.save(tmp_path / "t.npy", np.arange(12, dtype="f4").reshape(6, 2))
    np.save(tmp_path / "scales.npy", np.full((6, 1), 2, "f4"))
    ids = torch.tensor([3, 0])
    with (
        fw.torch.Embedding(
            tmp_path / "t.npy", scales=tmp_path / "scales.npy", padding_idx=1, device="cpu"
        ) as rows,
        fw.torch.EmbeddingBag(tmp_path / "t.npy", mode="sum", device="cpu") as bags,
    ):
        expected = rows(ids), bags(ids[None])
        copied = act(torch.nn.ModuleList([rows, bags]).eval())

    assert not copied[0].training
    assert (copied[0].padding_idx, copied[1].mode) == (1, "sum")
    assert torch.equal(copied[0](ids), expected[0])
    assert torch.equal(copied[1](ids[None]), expected[1])
    for each in copied:
        each.close()
        assert each.array.closed


@pytest.mark.parametrize("act", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_module_is_not_copied(x, act):
    module = fw.torch.Embedding(x)

    for each in (module, fw.torch.EmbeddingGroup([module])):
        with pytest.raises(CopyError, match="save the state_dict"):
            act(each if act is not copy.copy else module)


def test_close_that_was_refused_can_be_repeated(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.ones((4, 4), "f4"))
    module = fw.torch.Embedding(tmp_path / "x.npy", device="cpu")
    close = fw.Array.close
    monkeypatch.setattr(fw.Array, "close", refuse)
    with pytest.raises(CaptureError):
        module.close()
    monkeypatch.setattr(fw.Array, "close", close)
    assert module(torch.tensor([1])).shape == (1, 4)

    module.close()

    assert module.array.closed


def test_close_of_a_group_is_refused_while_a_graph_reads_its_tables(x, monkeypatch):
    group = fw.torch.EmbeddingGroup([fw.torch.Embedding(x), fw.torch.Embedding(x)])
    ids = torch.tensor([[1], [2]])
    with monkeypatch.context() as patch:
        patch.setattr(type(x._attachment), "refuse_graphs", refuse)
        with pytest.raises(CaptureError):
            group.close()
    assert group(ids).shape == (1, 2 * x.shape[1])

    group.close()

    with pytest.raises(ClosedError):
        group(ids)


def refuse(_array):
    """Do as `Array.close` while a CUDA graph uses it."""
    raise CaptureError("1 CUDA graphs with calls of the array exist")


def _looked_up(path):
    table = fw.torch.Embedding(path, mode="r+", device="cpu")
    table(torch.tensor([1, 2])).sum().backward()
    return table


def _trained(path):
    table = _looked_up(path)
    fw.torch.SGD(table, lr=0.1).step()
    return table


def _grouped(path):
    group = fw.torch.EmbeddingGroup([_looked_up(path)])
    group(torch.tensor([[1, 2]])).sum().backward()
    return group


@pytest.mark.parametrize(
    "make",
    [
        lambda path: fw.open(path, "r+", device="cpu"),
        lambda path: fw.torch.Embedding(path, mode="r+", device="cpu"),
        lambda path: fw.torch.EmbeddingBag(path, mode="max", device="cpu"),
        _looked_up,
        _trained,
        _grouped,
        lambda path: torch.nn.Sequential(_looked_up(path), torch.nn.Linear(WIDTH, 2)),
    ],
)
def test_dropped_module_unlocks_its_file_without_the_garbage_collector(tmp_path, make):
    path = tmp_path / "table.npy"
    np.save(path, np.ones((ROWS, WIDTH), "f4"))
    gc.collect()
    gc.disable()
    try:
        made = make(path)
        del made
        fw.open(path, "r+", device="cpu").close()
    finally:
        gc.enable()
