"""Training of tables on a GPU: against torch, on streams, in CUDA graphs, and with errors."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
import flashwarp.torch
from flashwarp import errors
from flashwarp.table.record import Record
from flashwarp.torch import SGD, Adagrad, Adam, RowWiseAdagrad
from gpu.captures import MARKS, new_graph

pytestmark = MARKS

ROWS = 20_000
OPTIMIZERS = {
    "sgd": (SGD, torch.optim.SGD),
    "adagrad": (Adagrad, torch.optim.Adagrad),
    "adam": (Adam, torch.optim.SparseAdam),
}
PATHS = {
    "default": {},
    "rings": {"controller": fw.nvme.SoftwareController(commands=True)},
    "o_direct": {"o_direct": True},
}


def table(path, dim, device, optimizer, cache="1 MiB", **options):
    fw.torch.create_table(path, ROWS, dim, optimizer=optimizer)
    return fw.torch.Embedding(path, mode="r+", device=device, cache=cache, dim=dim, **options)


def weights(module):
    return module.array[...][:, : module.embedding_dim]


@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dim", [3, 64, 200])
def test_training_equals_torch(tmp_path, device, name, dim, way):
    """The table is larger than its cache, and a third of the ids are one row."""
    ours, theirs = OPTIMIZERS[name]
    with table(tmp_path / "t.npy", dim, device, name, cache="128 KiB", **PATHS[way]) as module:
        reference = torch.nn.Embedding(ROWS, dim, sparse=True, device="cuda")
        with torch.no_grad():
            reference.weight.copy_(torch.from_numpy(weights(module)))
        pairs = [
            (module, ours(module, lr=0.1)),
            (reference, theirs(reference.parameters(), lr=0.1)),
        ]
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            ids = torch.randint(0, ROWS, (3000,), generator=generator)
            ids[::3] = 9
            ids = ids.cuda()
            slope = torch.randn(3000, dim, generator=generator).cuda() / 50
            for each, optimizer in pairs:
                optimizer.zero_grad()
                (each(ids) * slope).sum().backward()
                optimizer.step()
        module.array.wait()

        np.testing.assert_allclose(
            weights(module), reference.weight.detach().cpu().numpy(), rtol=1e-4, atol=1e-4
        )


def test_many_rows_of_few_lines_lose_no_update(tmp_path, device):
    """Every row in each step: warps store to lines that other warps update and write back."""
    with table(tmp_path / "t.npy", 4, device, "sgd", cache="64 KiB", line=512) as module:
        before = weights(module)
        optimizer = SGD(module, lr=1.0)
        for _ in range(20):
            module.pending.append(
                (torch.randperm(4 * ROWS, device="cuda") % ROWS, torch.ones(4 * ROWS, 4).cuda())
            )
            optimizer.step()
            optimizer.zero_grad()
        module.array.wait()

        np.testing.assert_allclose(weights(module), before - 80, rtol=1e-5)


def test_the_same_step_gives_the_same_bits(tmp_path, device):
    results = []
    for turn in range(3):
        with table(tmp_path / f"{turn}.npy", 64, device, "rowwise_adagrad") as module:
            generator = torch.Generator().manual_seed(2)
            ids = torch.randint(0, 50, (20_000,), generator=generator).cuda()
            module.pending.append((ids, torch.randn(20_000, 64, generator=generator).cuda()))
            RowWiseAdagrad(module, lr=0.1).step()
            module.array.wait()
            results.append(module.array[:50].tobytes())

    assert len(set(results)) == 1


def step(module, optimizer, ids):
    optimizer.zero_grad()
    module(ids).pow(2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_a_graph_equal_steps_outside(tmp_path, device, name):
    """Lookup, backward and step in one graph; the learning rate and the ids change in between."""
    make = OPTIMIZERS[name][0]
    batches = torch.randint(0, ROWS, (6, 512), generator=torch.Generator().manual_seed(3)).cuda()
    rates = [0.1, 0.1, 0.1, 0.05, 0.05, 0.025]
    results = []
    for graphed in (False, True):
        path = tmp_path / f"{graphed}.npy"
        with table(path, 32, device, name) as module, new_graph() as graph:
            rate = torch.tensor(0.1, device="cuda")
            optimizer = make(module, lr=rate)
            ids = batches[0].clone()

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step(module, optimizer, ids)  # loads the kernels
            side.synchronize()
            if graphed:
                with torch.cuda.graph(graph, stream=side):
                    step(module, optimizer, ids)
            for batch, value in zip(batches, rates, strict=True):
                with torch.cuda.stream(side):
                    ids.copy_(batch)
                    rate.fill_(value)
                    graph.replay() if graphed else step(module, optimizer, ids)
            side.synchronize()
            module.array.check()
            assert next(iter(optimizer.state.values()))["step"].item() == 7
            optimizer.checkpoint()
            assert Record.read(path).changing == graphed
            optimizer.checkpoint(last=True)
            assert Record.read(path) == Record(name, ROWS, 32, module.array.shape[1], 7, False)
            results.append(weights(module))
            gc.collect()

    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_ids_out_of_bounds_are_raised_by_the_next_call(tmp_path, device):
    with table(tmp_path / "t.npy", 4, device, "sgd") as module:
        before = weights(module)
        module.pending.append((torch.tensor([ROWS, 3, -1]).cuda(), torch.ones(3, 4).cuda()))
        SGD(module, lr=1.0).step()
        with pytest.raises(errors.BoundsError):
            module.array.wait()
        before[3] -= 1
        np.testing.assert_array_equal(weights(module), before)


def test_checkpoint_waits_for_steps_on_streams(tmp_path, device):
    with table(tmp_path / "t.npy", 8, device, "adagrad") as module:
        optimizer = Adagrad(module, lr=0.1)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                module.pending.append(
                    (torch.randint(0, ROWS, (4096,)).cuda(), torch.randn(4096, 8).cuda())
                )
                optimizer.step()
                optimizer.zero_grad()
            made = optimizer.checkpoint(tmp_path / "c")

        np.testing.assert_array_equal(np.load(made / "0-t.npy"), module.array[...])


def test_gradients_on_the_host_are_refused(tmp_path, device):
    with table(tmp_path / "t.npy", 8, device, "sgd") as module:
        module.pending.append((torch.tensor([1]), torch.ones(1, 8)))
        with pytest.raises(errors.ArgumentError, match="gradients on cpu"):
            SGD(module).step()


def test_a_captured_rate_on_the_host_is_refused(tmp_path, device):
    with table(tmp_path / "t.npy", 8, device, "sgd") as module, new_graph() as graph:
        optimizer = SGD(module, lr=torch.tensor(0.1))
        ids = torch.tensor([1]).cuda()
        step(module, optimizer, ids)
        with torch.cuda.graph(graph), pytest.raises(errors.CaptureError, match="lr"):
            step(module, optimizer, ids)


def test_captured_gradients_are_for_a_step_in_the_same_capture(tmp_path, device):
    """A step elsewhere would use the gradients once, and replays would lose theirs."""
    with contextlib.ExitStack() as stack:
        module = stack.enter_context(table(tmp_path / "t.npy", 8, device, "sgd"))
        first, second = stack.enter_context(new_graph()), stack.enter_context(new_graph())
        optimizer = SGD(module, lr=1.0)
        ids = torch.tensor([1, 2]).cuda()
        step(module, optimizer, ids)
        module.array.wait()
        before = weights(module)

        optimizer.zero_grad()
        with torch.cuda.graph(first):
            module(ids).sum().backward()
        with pytest.raises(errors.CaptureError, match="capture the step behind the backward"):
            optimizer.step()
        with (
            torch.cuda.graph(second),
            pytest.raises(errors.CaptureError, match="capture the step behind the backward"),
        ):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        module.array.wait()
        np.testing.assert_array_equal(weights(module), before)


def test_a_captured_step_takes_no_gradients_from_outside(tmp_path, device):
    """Replays would read their memory after `zero_grad` has freed it."""
    with table(tmp_path / "t.npy", 8, device, "sgd") as module, new_graph() as graph:
        optimizer = SGD(module, lr=1.0)
        ids = torch.tensor([1]).cuda()
        step(module, optimizer, ids)
        with torch.cuda.graph(graph):
            module(ids).sum().backward()
            with pytest.raises(errors.CaptureError, match="outside of the capture"):
                optimizer.step()


def test_checkpoint_in_a_capture_is_refused(tmp_path, device):
    with table(tmp_path / "t.npy", 8, device, "sgd") as module, new_graph() as graph:
        optimizer = SGD(module)
        with torch.cuda.graph(graph), pytest.raises(errors.CaptureError):
            optimizer.checkpoint()
