"""Operators of torch on the CPU device: eager, compiled, in their order, and misused."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import weakref

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
import flashwarp.torch
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    ClosedError,
    DtypeError,
    ForkError,
    IndexDtypeError,
    ReadOnlyError,
)
from flashwarp.interop.torch import operators

# Inductor starts processes and warns of what it lacks here.
pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

ROWS, WIDTH = 1000, 24


@pytest.fixture
def content():
    return np.random.default_rng(5).random((ROWS, WIDTH), np.float32)


@pytest.fixture
def x(tmp_path, content):
    np.save(tmp_path / "x.npy", content)
    with fw.open(tmp_path / "x.npy", "r+", device="cpu", cache="64 KiB", line=512) as opened:
        yield opened


@pytest.fixture
def compiled():
    """Compile as users are told to; each test compiles anew."""
    torch.compiler.reset()
    return lambda function: torch.compile(function, fullgraph=True, mode="reduce-overhead")


def ids(*shape, seed=0, dtype=torch.int64):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-ROWS, ROWS, shape, generator=made).to(dtype)


def without_repeats(count, seed=0):
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[:count]


# What they return and store.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_gather_is_indexing(x, content, shape, dtype):
    index = ids(*shape, dtype=dtype)

    rows = fw.torch.gather(x, index)

    assert rows.dtype == torch.float32
    assert not rows.requires_grad
    assert torch.equal(rows, torch.from_numpy(content)[index.long()])


def test_backward_of_what_a_gather_has_overwritten_raises(x):
    out = torch.zeros(2, *x.shape[1:], dtype=torch.float32)
    weight = torch.ones_like(out, requires_grad=True)
    loss = (out * weight).sum()

    fw.torch.gather(x, torch.tensor([1, 2]), out)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        fw.torch.gather(x, torch.tensor([1, 2]), torch.empty_like(out))


def test_gather_fills_out_and_returns_it(x, content):
    index, out = ids(9), torch.empty(9, WIDTH)

    assert fw.torch.gather(x, index, out) is out

    assert torch.equal(out, torch.from_numpy(content)[index])


def test_indices_and_values_may_have_strides(x, content):
    index, values = without_repeats(20)[::2], torch.rand(WIDTH, 10).T

    fw.torch.scatter(x, index, values)

    assert torch.equal(fw.torch.gather(x, index), values)
    content[index.numpy()] = values
    assert (x[...] == content).all()


def test_scatter_takes_values_that_need_a_gradient_where_none_is_recorded(x):
    values = torch.rand(2, WIDTH, requires_grad=True)

    with torch.no_grad():
        fw.torch.scatter(x, torch.tensor([3, 4]), values)

    assert torch.equal(torch.from_numpy(x[3:5]), values.detach())


# Compiled.


def test_compiled_gather_beside_a_model(x, content, compiled):
    weight = torch.rand(WIDTH, 8)
    layer = compiled(lambda index: torch.relu(fw.torch.gather(x, index * 2) @ weight) + 1)

    for seed in range(3):
        index = ids(6, seed=seed) // 2
        expected = torch.relu(torch.from_numpy(content)[index * 2] @ weight) + 1
        torch.testing.assert_close(layer(index), expected)


def test_compiled_code_serves_other_lengths_and_other_arrays(x, content, compiled, tmp_path):
    twice = compiled(lambda array, index: fw.torch.gather(array, index) * 2)

    for length in (5, 9, 17):
        index = ids(length)
        assert torch.equal(twice(x, index), torch.from_numpy(content)[index] * 2)
    with fw.create(tmp_path / "y.npy", "int16", (ROWS, 2, 3), device="cpu") as y:
        y[...] = 7
        assert torch.equal(twice(y, ids(5)), torch.full((5, 2, 3), 14, dtype=torch.int16))
        assert torch.equal(twice(x, ids(5)), torch.from_numpy(content)[ids(5)] * 2)


def test_compiled_stores_keep_their_places_between_reads(x, content, compiled):
    index, values = without_repeats(40), torch.rand(40, WIDTH)

    @compiled
    def step(index, values):
        first = fw.torch.gather(x, index)
        fw.torch.scatter(x, index, values)
        second = fw.torch.gather(x, index)
        fw.torch.scatter(x, index, values * 2)
        return first, second + 1, fw.torch.gather(x, index)

    found = step(index, values)

    assert torch.equal(found[0], torch.from_numpy(content)[index])
    assert torch.equal(found[1], values + 1)
    assert torch.equal(found[2], values * 2)


def test_compiled_stores_and_reads_without_a_use_are_not_dropped(x, compiled):
    index, values = without_repeats(10), torch.rand(10, WIDTH)

    def store(index, values):
        fw.torch.scatter(x, index, values)
        return index + 1

    compiled(store)(index, values)

    assert torch.equal(fw.torch.gather(x, index), values)


def test_compiled_gather_fills_out(x, content, compiled):
    index, out = ids(9), torch.empty(9, WIDTH)

    total = compiled(lambda index, out: fw.torch.gather(x, index, out).sum())(index, out)

    assert torch.equal(out, torch.from_numpy(content)[index])
    torch.testing.assert_close(total, out.sum())


def test_training_beside_rows(x, content, compiled):
    layer = torch.nn.Linear(WIDTH, 4)
    index = ids(6)

    compiled(lambda index: layer(fw.torch.gather(x, index)).square().sum())(index).backward()
    found = layer.weight.grad.clone()
    layer.zero_grad()
    layer(torch.from_numpy(content)[index]).square().sum().backward()

    torch.testing.assert_close(found, layer.weight.grad)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9),
    reason="torch before 2.9 takes no constant of a compiled function for one with a fixed address",
)
def test_what_operators_change_has_a_fixed_address_for_graphs(x):
    """Torch makes no CUDA graph of a function that changes tensors whose addresses may change."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    torch.compiler.reset()
    found = []

    def inner(module, inputs, **options):
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        changed = [
            places.index(node.args[0])
            for node in module.graph.nodes
            if node.target == torch.ops.aten.copy_.default and node.args[0] in places
        ]
        found.append((changed, list(options["static_input_idxs"])))
        return compile_fx_inner(module, inputs, **options)

    def step(index, values):
        rows = fw.torch.gather(x, index)
        fw.torch.scatter(x, index, values)
        return rows

    backend = lambda module, inputs: compile_fx(module, inputs, inner_compile=inner)  # noqa: E731
    torch.compile(step, fullgraph=True, backend=backend)(ids(4), torch.rand(4, WIDTH))

    ((changed, static),) = found
    assert len(changed) == 1
    assert set(changed) <= set(static)


@pytest.mark.parametrize("name", ["gather", "gather_into", "scatter"])
def test_operators_are_what_their_schemas_say(x, name):
    index, rows, order = ids(4), torch.rand(4, WIDTH), operators._order_of("cpu")
    given = {"gather": (index,), "gather_into": (index, rows), "scatter": (index, rows)}[name]
    operator = getattr(torch.ops.flashwarp, name).default

    torch.library.opcheck(operator, (*given, order, x._handle))


# Misuse.


def way(name, compiled):
    return compiled if name == "compiled" else lambda function: function


each_way = pytest.mark.parametrize("name", ["eager", "compiled"])


@each_way
@pytest.mark.parametrize("index", [ROWS, -ROWS - 1])
def test_index_out_of_bounds(x, content, compiled, name, index):
    gather = way(name, compiled)(lambda index: fw.torch.gather(x, index))

    with pytest.raises(BoundsError, match=str(index)):
        gather(torch.tensor([1, index]))

    assert torch.equal(gather(torch.tensor([1, 2])), torch.from_numpy(content[1:3]))


@each_way
def test_bad_index_of_a_store_stores_nothing(x, content, compiled, name):
    scatter = way(name, compiled)(lambda index, rows: fw.torch.scatter(x, index, rows))

    with pytest.raises(BoundsError):
        scatter(torch.tensor([1, ROWS]), torch.ones(2, WIDTH))

    assert (x[...] == content).all()


@each_way
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: fw.torch.gather(x, torch.rand(3)), IndexDtypeError, "float32"),
        (lambda x: fw.torch.gather(x, torch.zeros(3, dtype=torch.uint8)), IndexDtypeError, "uint8"),
        (
            lambda x: fw.torch.gather(x, torch.arange(3), torch.empty(3, WIDTH - 1)),
            ArgumentError,
            "the rows have",
        ),
        (
            lambda x: fw.torch.gather(x, torch.arange(3), torch.empty(3, WIDTH).double()),
            DtypeError,
            "float64",
        ),
        (
            lambda x: fw.torch.scatter(x, torch.arange(3), torch.empty(WIDTH)),
            ArgumentError,
            "the rows have",
        ),
        (
            lambda x: fw.torch.scatter(x, torch.arange(1), torch.empty(1, WIDTH).int()),
            DtypeError,
            "int32",
        ),
    ],
)
def test_operands_that_do_not_fit(x, content, compiled, name, call, error, text):
    # While torch compiles, it puts some errors into errors of its own.
    errors = (error, torch._dynamo.exc.TorchRuntimeError) if name == "compiled" else error

    with pytest.raises(errors, match=text):
        way(name, compiled)(call)(x)

    assert (x[...] == content).all()


def test_gradients_are_refused_not_dropped(x, compiled):
    rows = torch.rand(2, WIDTH, requires_grad=True)

    with pytest.raises(ArgumentError, match=r"detach\(\)"):
        fw.torch.scatter(x, torch.arange(2), rows)
    with pytest.raises(ArgumentError, match="does not require"):
        fw.torch.gather(x, torch.arange(2), rows)
    with pytest.raises(Exception, match="requires a gradient"):
        compiled(lambda: fw.torch.scatter(x, torch.arange(2), rows * 2))()


@each_way
def test_read_only_array(x, tmp_path, compiled, name):
    x.close()
    with fw.open(tmp_path / "x.npy", device="cpu") as y:
        scatter = way(name, compiled)(
            lambda: fw.torch.scatter(y, torch.arange(2), torch.ones(2, WIDTH))
        )
        with pytest.raises(ReadOnlyError):
            scatter()


@each_way
def test_closed_array(x, compiled, name):
    gather = way(name, compiled)(lambda index: fw.torch.gather(x, index))
    gather(torch.arange(2))
    x.close()

    with pytest.raises(ClosedError):
        gather(torch.arange(2))


def test_array_without_axes(tmp_path):
    np.save(tmp_path / "scalar.npy", np.float32(3))
    with (
        fw.open(tmp_path / "scalar.npy", device="cpu") as x,
        pytest.raises(ArgumentError, match="no rows"),
    ):
        fw.torch.gather(x, torch.tensor([0]))


def test_dtype_that_torch_does_not_have(tmp_path):
    with (
        fw.create(tmp_path / "x.npy", ">f4", (10, 2), device="cpu") as x,
        pytest.raises(DtypeError, match=">f4"),
    ):
        fw.torch.gather(x, torch.tensor([0]))


def test_operators_keep_no_array_alive(tmp_path, compiled):
    x = fw.create(tmp_path / "x.npy", "f4", (10, 2), device="cpu")
    compiled(lambda array, index: fw.torch.gather(array, index))(x, torch.tensor([1]))
    handle, gone = x._handle, weakref.ref(x)
    x.close()
    torch.compiler.reset()

    del x
    gc.collect()

    assert gone() is None
    with pytest.raises(ClosedError, match="does not exist"):
        torch.ops.flashwarp.gather.default(torch.tensor([1]), operators._order_of("cpu"), handle)


def test_array_from_a_pickle(x, content, tmp_path, compiled):
    x.close()
    with fw.open(tmp_path / "x.npy", device="cpu") as opened:
        text = pickle.dumps(opened)

    with pickle.loads(text) as y:
        assert torch.equal(
            fw.torch.gather(y, torch.arange(3)), torch.from_numpy(content)[torch.arange(3)]
        )
        gather = compiled(lambda index: fw.torch.gather(y, index))
        assert torch.equal(gather(torch.arange(3)), torch.from_numpy(content)[torch.arange(3)])


def test_forked_child_gets_an_error(x):
    fw.torch.gather(x, torch.arange(2))
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            fw.torch.gather(x, torch.arange(2))
        except ForkError:
            os._exit(7)
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
