"""`offload_activations` on a GPU: the same gradients on every stream, and less device memory."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

MIB = 1 << 20


def model(layers=12, width=1024):
    torch.manual_seed(1)
    parts = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width)]
    return torch.nn.Sequential(*parts).cuda()


def gradients(made, x, steps=1):
    made.zero_grad()
    for _ in range(steps):
        made(x).square().mean().backward()
    return [each.grad.clone() for each in made.parameters()]


@pytest.fixture
def x():
    torch.manual_seed(2)
    return torch.randn(8192, 1024, device="cuda")


@pytest.mark.parametrize("host", ["160 MiB", "4 GiB"])
@pytest.mark.parametrize("ahead", [0, "128 MiB", "4 GiB"])
def test_gradients_are_the_same_bit_by_bit(tmp_path, x, host, ahead):
    from flashwarp.torch import offload_activations

    made = model()
    expected = gradients(made, x, steps=3)

    with offload_activations(tmp_path, host_memory=host, ahead=ahead, device="cuda") as offloaded:
        found = gradients(made, x, steps=3)

    assert all(map(torch.equal, found, expected))
    stats = offloaded.stats
    assert stats.saved_bytes > 1 << 30
    assert (stats.read_bytes > 0) == (host != "4 GiB")


def test_work_on_another_stream_sees_the_same_bytes(tmp_path, x):
    from flashwarp.torch import offload_activations

    made = model()
    expected = gradients(made, x, steps=2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    with (
        offload_activations(tmp_path, host_memory="200 MiB", device="cuda"),
        torch.cuda.stream(stream),
    ):
        found = gradients(made, x, steps=2)

    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))


def test_device_memory_after_forward_is_less(tmp_path, x):
    from flashwarp.torch import offload_activations

    made = model()
    before = torch.cuda.memory_allocated()
    loss = made(x).square().mean()
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated() - before
    del loss

    with offload_activations(tmp_path, host_memory="4 GiB", device="cuda") as offloaded:
        loss = made(x).square().mean()
        torch.cuda.synchronize()
        offloaded._store._engine.wait()
        offloading = torch.cuda.memory_allocated() - before
        loss.backward()

    assert offloading < resident / 4
