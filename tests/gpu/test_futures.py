"""Asynchronous calls on a GPU: results, order between streams, overlap, and what goes wrong."""

from __future__ import annotations

import time

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import errors
from flashwarp.storage import File
from flashwarp.testing import Faulty

pytestmark = pytest.mark.gpu

ROWS, WORDS = 4000, 256  # a row is a kilobyte


@pytest.fixture
def content():
    return np.random.default_rng(7).integers(0, 1 << 30, (ROWS, WORDS), np.int32)


@pytest.fixture
def storage(tmp_path, content):
    content.tofile(tmp_path / "f")
    return Faulty(File(tmp_path / "f", writable=True))


@pytest.fixture
def x(storage, device):
    with fw.open(storage, "r+", "i4", (ROWS, WORDS), device=device, cache="1 MiB") as opened:
        yield opened


def test_calls_are_in_flight_together(x, content, storage):
    storage.inject("read delay=300000us")

    reads = [x.gather_async([64 * k]) for k in range(8)]

    end = time.monotonic() + 20
    while storage.operations()["read"] < 8:
        assert time.monotonic() < end
        assert not reads[0].done(), "all were asked for before the first had come"
    assert all((r.result() == content[[64 * k]]).all() for k, r in enumerate(reads))


def test_failure_is_of_the_very_call(x, content, storage):
    storage.inject("read eio bytes=262144-266240")  # the line of rows 256 to 259

    reads = [x.gather_async([64 * k]) for k in range(8)]

    for k, read in enumerate(reads):
        if k != 4:
            assert (read.result() == content[[64 * k]]).all()
    with pytest.raises(errors.StorageError, match="gather_async: read of 4096 bytes") as caught:
        reads[4].result()
    assert caught.value.filename == storage.path
    assert caught.value.offset == 262144
    assert (x.gather([0]) == content[[0]]).all()
    storage.heal()
    assert (x.gather_async([256]).result() == content[[256]]).all()


# With a library of the caller's.


def test_read_waits_for_its_stream_only(x, content):
    torch = pytest.importorskip("torch")
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    out = torch.empty((100, WORDS), dtype=torch.int32, device="cuda")
    x.gather_async(slice(0, 1)).result()  # lanes are made
    torch.cuda.synchronize()

    with torch.cuda.stream(busy):
        torch.cuda._sleep(4_000_000_000)  # two seconds
    held = x.gather_async(slice(0, 100), out=torch.empty_like(out), stream=busy)
    read = x.gather_async(slice(0, 100), out=out, stream=free)

    assert (read.result().cpu().numpy() == content[:100]).all()
    assert not held.done()
    assert (held.result().cpu().numpy() == content[:100]).all()
