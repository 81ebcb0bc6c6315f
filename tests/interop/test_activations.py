"""`offload_activations` on the CPU device: the same gradients, bounded memory, and what fails."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref

import pytest

from flashwarp.errors import (
    ArgumentError,
    ChangedTensorError,
    ClosedError,
    PathError,
    StorageError,
)

torch = pytest.importorskip("torch")

from flashwarp.interop.torch import activation_store  # noqa: E402
from flashwarp.torch import offload_activations  # noqa: E402

KIB = 1 << 10
MIB = 1 << 20


class Block(torch.nn.Module):
    """Attention and a perceptron, as in GPT-2; the parts of the projection are views."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.project, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.project(self.norm(x)).split(width, 2)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        gate = torch.nn.functional.gelu(self.up(self.norm2(x)))
        return x + self.down(torch.nn.functional.dropout(gate, 0.1, training=True))


def model(layers=6):
    torch.manual_seed(1)
    return torch.nn.Sequential(*[Block() for _ in range(layers)])


def gradients(made, x, steps=1):
    torch.manual_seed(2)
    made.zero_grad()
    for _ in range(steps):
        made(x).square().mean().backward()
    return [each.grad.clone() for each in made.parameters()]


def offloading(folder, **options):
    options = {"host": "2 MiB", "ahead": "512 KiB", "least": "4 KiB", "device": "cpu", **options}
    return offload_activations(folder, **options)


@pytest.fixture
def x():
    torch.manual_seed(3)
    return torch.randn(8, 64, 64)


@pytest.mark.parametrize("host", ["2 MiB", "4 MiB", "64 MiB"])
@pytest.mark.parametrize("ahead", [0, "512 KiB", "64 MiB"])
def test_gradients_are_the_same_bit_by_bit(tmp_path, x, host, ahead):
    made = model()
    expected = gradients(made, x)

    with offloading(tmp_path, host=host, ahead=ahead) as offloaded:
        found = gradients(made, x)

    assert all(map(torch.equal, found, expected))
    stats = offloaded.stats()
    assert stats.saved > 60
    if host == "64 MiB":
        assert stats.written_bytes == stats.read_bytes == 0
    else:
        assert stats.written_bytes >= stats.read_bytes > 4 * MIB


def test_several_steps_use_the_same_part_of_the_file(tmp_path, x):
    made = model(3)
    expected = gradients(made, x, steps=5)

    with offloading(tmp_path) as offloaded:
        found = gradients(made, x, steps=5)
        size = os.fstat(offloaded._store._fd).st_size
        saved = offloaded.stats().saved_bytes

    assert all(map(torch.equal, found, expected))
    assert size < saved / 3


def test_host_memory_is_bounded(tmp_path, x):
    with offloading(tmp_path) as offloaded:
        loss = model()(x).square().mean()
        ring = offloaded._store._pinned
        assert ring.allocated_bytes <= 2 * MIB
        assert offloaded.stats().saved_bytes > 8 * MIB
        loss.backward()


def test_a_storage_that_several_nodes_save_is_saved_once(tmp_path):
    x = torch.randn(100, 100, requires_grad=True)
    with offloading(tmp_path) as offloaded:
        y = x * 2
        z = (y.square() + y.exp() + y.view(50, 200).sin().view(100, 100)).sum()
        saved = offloaded.stats().saved
        z.backward()
    # y, and the result of exp.
    assert saved == 2


def test_strides_of_a_view_come_back(tmp_path):
    made = torch.randn(64, 3, 64, requires_grad=True)
    seen = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(context, tensor):
            context.save_for_backward(tensor)
            return tensor.sum()

        @staticmethod
        def backward(context, gradient):
            (tensor,) = context.saved_tensors
            seen.append((tensor.stride(), tensor.storage_offset(), tensor.clone()))
            return gradient.expand(tensor.shape)

    with offloading(tmp_path) as offloaded:
        part = (made * 2)[:, 1].T
        Keep.apply(part).backward()
        assert offloaded.stats().saved == 1

    assert seen[0][:2] == (part.stride(), part.storage_offset())
    assert torch.equal(seen[0][2], part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_dtypes_come_back(tmp_path, dtype):
    x = torch.randn(200, 100).to(dtype).requires_grad_()

    with offloading(tmp_path, host="512 KiB") as offloaded:
        (x * 1).square().abs().sum().backward()
        assert offloaded.stats().saved >= 1
    found, x.grad = x.grad, None
    (x * 1).square().abs().sum().backward()

    assert torch.equal(found, x.grad)


def test_parameters_and_small_tensors_stay(tmp_path):
    layer = torch.nn.Linear(200, 200)
    x = torch.randn(10, 200, requires_grad=True)

    with offloading(tmp_path, least=8001) as offloaded:
        layer(x).sum().backward()

    assert offloaded.stats().saved == 0


def test_a_change_in_place_is_saved_anew(tmp_path):
    x = torch.randn(100, 100, requires_grad=True)
    with offloading(tmp_path) as offloaded:
        y = x * 2
        first = y.detach().clone().requires_grad_()
        a = first.square()
        with torch.no_grad():
            held = first.detach()
            kept = held.clone()
        (a.sum()).backward()
        assert torch.equal(first.grad, 2 * kept)
        buffer = torch.zeros(100, 100)
        for _ in range(3):
            buffer.add_(1)
            (x.square() * buffer.clone()).sum().backward()
        assert offloaded.stats().saved > 3
    assert torch.allclose(x.grad, 2 * x * 6)


def change_a_weight():
    first, second = torch.nn.Linear(40, 40), torch.nn.Linear(40, 1)
    optimizer = torch.optim.SGD(second.parameters(), lr=100.0)
    loss = second(first(torch.ones(1, 40))).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    return loss


def change_a_small_result():
    loss = (torch.zeros(4, requires_grad=True) * 1).exp()
    loss.mul_(3)
    return loss.sum()


def change_a_view_of_a_large_input():
    x = torch.ones(300, 200)
    loss = torch.nn.Linear(200, 8)(x).sum()
    x[7].add_(1)
    return loss


@pytest.mark.parametrize(
    "forward", [change_a_weight, change_a_small_result, change_a_view_of_a_large_input]
)
def test_a_tensor_that_was_changed_in_place_is_an_error_as_with_torch(tmp_path, forward):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward().backward()

    with offloading(tmp_path), pytest.raises(ChangedTensorError, match=r"inplace .*version 1"):
        forward().backward()


def test_changes_that_backward_does_not_see_are_allowed(tmp_path):
    x, weight = torch.ones(300, 200), torch.ones(200, 8, requires_grad=True)
    with offloading(tmp_path) as offloaded:
        first = x @ weight
        first.sum().backward()
        x.add_(1)
        (x @ weight).sum().backward()
        assert offloaded.stats().saved == 2
    assert torch.equal(weight.grad, torch.full((200, 8), 300.0 * 3))


def test_results_are_free_when_nobody_runs_backward(tmp_path):
    with offloading(tmp_path):
        for size in (4, 200):
            result = torch.ones(size, size, requires_grad=True).exp()
            seen = weakref.ref(result)
            del result
            assert seen() is None


def test_retained_and_interleaved_graphs(tmp_path, x):
    made = model(2)
    torch.manual_seed(5)
    expected = gradients(made, x, steps=2)

    with offloading(tmp_path):
        torch.manual_seed(2)
        made.zero_grad()
        first, second = made(x).square().mean(), made(x).square().mean()
        first.backward(retain_graph=True)
        made.zero_grad()
        first.backward()
        second.backward()

    assert all(map(torch.equal, [each.grad for each in made.parameters()], expected))


def test_memory_and_file_are_free_afterwards(tmp_path, x):
    with offloading(tmp_path) as offloaded:
        gradients(model(), x)
        assert os.listdir(tmp_path) == []
        store = offloaded._store
        gc.collect()
        store._sweep()
        assert store._entries == {}

    assert store._pinned.allocated_bytes == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(store._fd)
    assert not [each for each in threading.enumerate() if "activations" in each.name]


# What fails.


def test_backward_after_the_end_is_refused(tmp_path, x):
    with offloading(tmp_path):
        loss = model(1)(x).sum()

    with pytest.raises(ClosedError, match="inside of the with"):
        loss.backward()


def test_a_tensor_larger_than_the_host_memory_is_refused(tmp_path):
    with offloading(tmp_path, host="64 KiB"), pytest.raises(ArgumentError, match="raise host="):
        (torch.randn(200, 200, requires_grad=True) * 1).square()


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(PathError, match="no folder"):
        offloading(tmp_path / "none")


def test_a_full_disk_is_an_error_of_forward_and_loses_nothing(tmp_path, x, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    made = model()
    expected = gradients(made[0], x)
    with offloading(tmp_path):
        torch.manual_seed(2)
        made.zero_grad()
        loss = made[0](x).square().mean()
        monkeypatch.setattr(activation_store._native, "write_file", full)
        with pytest.raises(StorageError, match="make room") as caught:
            made(x)
        assert caught.value.errno == errno.ENOSPC
        # The error's traceback holds the graph of the call that failed, and so its buffers.
        del caught
        gc.collect()
        loss.backward()

    found = [each.grad for each in made[0].parameters()]
    assert all(map(torch.equal, found, expected))


def test_a_read_that_fails_is_an_error_of_backward(tmp_path, x, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    with offloading(tmp_path):
        loss = model()(x).square().mean()
        monkeypatch.setattr(activation_store._native, "read_file", broken)
        with pytest.raises(StorageError, match="Input/output") as caught:
            loss.backward()

    assert caught.value.errno == errno.EIO


def test_a_file_system_without_nameless_files_takes_a_removed_one(tmp_path, x, monkeypatch):
    opened = os.open

    def without(path, flags, *mode):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return opened(path, flags, *mode)

    made = model()
    expected = gradients(made, x)
    monkeypatch.setattr(activation_store.os, "open", without)

    with offloading(tmp_path) as offloaded:
        assert os.listdir(tmp_path) == []
        found = gradients(made, x)

    assert not offloaded.stats().o_direct
    assert all(map(torch.equal, found, expected))
