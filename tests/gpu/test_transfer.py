"""The copy engine on a GPU: bytes in all directions, order against kernels, and the words."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from flashwarp.errors import DeviceTimeout
from flashwarp.transfer import CopyEngine, Direction, TransferClient
from support.words import Word

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

MIB = 1 << 20


@pytest.fixture
def engine(device):
    with CopyEngine(device) as made:
        yield made


@pytest.fixture
def ring(device):
    with TransferClient(device, "tests", 256 * MIB, 16 * MIB) as made:
        yield made


def slow(stream) -> None:
    """Keep a stream busy for some milliseconds."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)


def test_bytes_arrive_in_all_directions(device, engine, ring):
    content = np.random.default_rng(0).integers(0, 256, 16 * MIB, np.uint8)
    there = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    beside = torch.zeros_like(there)
    first, last = ring.take(), ring.take()
    first.as_numpy()[:] = content

    up = engine.copy(there, first)
    across = engine.copy(beside, there, after=up)
    engine.copy(last, beside, after=across).wait(10)

    assert (last.as_numpy() == content).all()
    # One copy is measured at a time.
    for target, source in ((there, first), (beside, there), (last, beside)):
        engine.copy(target, source).wait(10)
    for direction in Direction:
        assert engine.bandwidth[direction].bytes_per_second > 10**9


def test_a_copy_sees_what_the_producing_stream_writes_last(device, engine, ring):
    stream = torch.cuda.Stream()
    tensor = torch.zeros(4 * MIB, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    for value in range(1, 20):
        slow(stream)
        with torch.cuda.stream(stream):
            tensor.fill_(value)
            buffer = ring.take()
            copy = engine.copy(buffer, tensor)  # after torch's current stream
            copy.before(stream)
            tensor.fill_(-1)  # must not be seen
        copy.wait(10)
        assert (buffer.as_numpy().view(np.float32) == value).all()
        buffer.release()


def test_a_copy_returns_at_once_and_words_hold_it(device, engine, ring):
    there = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    landed = Word(device)
    buffer = ring.take()
    landed.hold(engine, Direction.TO_DEVICE, 1)
    copy = engine.copy(there, buffer, after=())
    with pytest.raises(DeviceTimeout):
        copy.wait(0.05)

    def land() -> None:
        buffer.as_numpy()[:] = 7
        landed.store(1)

    thread = threading.Thread(target=land)
    thread.start()
    copy.wait(10)
    thread.join()
    assert bool((there == 7).all())


@pytest.mark.parametrize("piece", [4096, 65536])
def test_a_batch_arrives(device, engine, piece):
    count = 1000
    here = device.allocate_host(count * piece)
    here.as_numpy()[:] = np.random.default_rng(1).integers(0, 256, count * piece, np.uint8)
    there = torch.zeros(count * piece, dtype=torch.uint8, device="cuda")
    places = np.random.default_rng(2).permutation(count) * piece

    engine.copy_pieces(
        [there.data_ptr() + int(at) for at in places],
        [here.address + i * piece for i in range(count)],
        [piece] * count,
        after=torch.cuda.current_stream(),
    ).wait(10)

    got = there.cpu().numpy().reshape(count, piece)[places // piece].reshape(-1)
    assert (got == here.as_numpy()).all()
