"""Calls whose stream waits for the storage, against numpy; and what runs beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import errors
from flashwarp.testing import Faulty

pytestmark = pytest.mark.gpu

ROWS = 40_000


@pytest.fixture(scope="module")
def device():
    with fw.device.CudaDevice(0) as found:
        yield found


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> tuple[Path, np.ndarray]:
    path = tmp_path_factory.mktemp("split") / "a.npy"
    content = np.random.default_rng(7).integers(0, 1 << 30, (ROWS, 1024), np.int32)
    np.save(path, content)
    return path, content


@pytest.fixture(autouse=True)
def split(monkeypatch):
    monkeypatch.setenv("FLASHWARP_SPLIT_MISSES", "1")


@pytest.fixture
def bounce():
    return fw.nvme.SoftwareController(route="bounce")


def check_batches(x: fw.Array, some: bool = True) -> None:
    """Every batch has ended with all of its commands."""
    batches = x.service.batches
    records = [batches.read(batches._batch(i)) for i in range(batches.count)]
    assert all(r.done == 1 and r.completed == r.submitted for r in records)
    assert any(r.submitted for r in records) == some


@pytest.mark.parametrize("o_direct", [True, False])
@pytest.mark.parametrize("cache", ["4 MiB", "64 MiB"])
def test_rows_are_gathered(table, device, bounce, o_direct, cache):
    path, content = table
    rng = np.random.default_rng(1)
    with fw.open(path, device=device, cache=cache, o_direct=o_direct, controller=bounce) as x:
        assert x._attachment.launcher.splitting.on()
        for count in (1, 32, 1024, 5000, 60_000):
            index = rng.integers(0, ROWS, count)
            for _ in range(2):
                assert (x.gather(index) == content[index]).all()
        assert (x[17:9000] == content[17:9000]).all()
        check_batches(x)


@pytest.mark.parametrize("width", [1, 7, 100, 1025])
def test_rows_of_any_width_are_gathered(tmp_path, device, width):
    content = np.arange(3_000_000 // width * width, dtype=np.int32).reshape(-1, width)
    np.save(tmp_path / "a.npy", content)
    index = np.random.default_rng(1).integers(0, len(content), min(len(content), 50_000))
    settings = fw.nvme.SoftwareController(commands=True)
    with fw.open(
        tmp_path / "a.npy", device=device, cache="4 MiB", line=512, controller=settings
    ) as x:
        assert (x.gather(index) == content[index]).all()
        assert (x[17:-3] == content[17:-3]).all()


def test_rows_are_scattered(tmp_path, device):
    rng = np.random.default_rng(2)
    content = np.zeros((ROWS, 300), np.int32)
    with fw.create(tmp_path / "a.npy", "int32", content.shape, device=device, cache="4 MiB") as x:
        for _ in range(4):
            rows = rng.permutation(ROWS)[:10_000]
            content[rows] = rng.integers(0, 1 << 30, (10_000, 300))
            x.scatter(rows, content[rows])
            index = rng.integers(0, ROWS, 3000)
            assert (x.gather(index) == content[index]).all()
        x.flush()
        assert (np.load(tmp_path / "a.npy") == content).all()


def test_streams_and_futures_overlap(table, device, bounce):
    torch = pytest.importorskip("torch")
    path, content = table
    rng = np.random.default_rng(3)
    streams = [torch.cuda.Stream() for _ in range(4)]
    with fw.open(path, device=device, cache="16 MiB", controller=bounce) as x:
        for _ in range(10):
            index = [torch.from_numpy(rng.integers(0, ROWS, 3000)).cuda() for _ in streams]
            outs = [torch.empty(3000, 1024, dtype=torch.int32, device="cuda") for _ in streams]
            calls = [x.gather_async(rng.integers(0, ROWS, 500)) for _ in range(5)]
            for each, out, stream in zip(index, outs, streams, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                x.gather(each, out, stream=stream)
            torch.cuda.synchronize()
            x.check()
            for each, out in zip(index, outs, strict=True):
                assert (out.cpu().numpy() == content[each.cpu().numpy()]).all()
            assert all(call.result().shape == (500, 1024) for call in calls)
        check_batches(x)


@pytest.mark.parametrize("count", [32, 5000])
def test_graphs_are_replayed_with_new_indices(table, device, bounce, count):
    torch = pytest.importorskip("torch")
    path, content = table
    rng = np.random.default_rng(4)
    index = torch.zeros(count, dtype=torch.int64, device="cuda")
    out = torch.zeros(count, 1024, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with fw.open(path, device=device, cache="16 MiB", controller=bounce) as x:
        x.gather(index, out)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            x.gather(index, out, stream=torch.cuda.current_stream())
        for turn in range(20):
            chosen = rng.integers(0, ROWS, count)
            index.copy_(torch.from_numpy(chosen))
            if turn == 10:
                time.sleep(1)  # until the controller sleeps
            graph.replay()
            ours = rng.integers(0, ROWS, count)
            assert (x.gather(ours) == content[ours]).all()
            torch.cuda.synchronize()
            assert (out.cpu().numpy() == content[chosen]).all()
            x.check()
        check_batches(x)
        graph.reset()


def test_failures_and_bad_indices_are_raised(table, device):
    torch = pytest.importorskip("torch")
    path, content = table
    rng = np.random.default_rng(5)
    stream = torch.cuda.Stream()
    with (
        fw.storage.File(path, offset=128) as file,
        fw.open(
            storage := Faulty(file, "read eio p=0.02"), "r", "i4", (ROWS, 1024),
            device=device, cache="16 MiB",
        ) as x,
    ):  # fmt: skip
        index = rng.permutation(ROWS)[:5000]
        with pytest.raises(errors.StorageError):
            x.gather(index)
        storage.inject("")
        assert (x.gather(index) == content[index]).all()
        bad = index.copy()
        bad[7] = ROWS
        out = torch.full((bad.size, 1024), 7, dtype=torch.int32, device="cuda")
        x.gather(torch.from_numpy(bad).cuda(), out, stream=stream)
        with pytest.raises(errors.BoundsError, match="the first of 1 such"):
            x.wait(stream)
        assert not out[7].any()


def test_storage_that_hangs_is_an_error_in_time(table, device, monkeypatch):
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "2")
    path, _ = table
    with fw.storage.File(path, offset=128) as file:
        x = fw.open(
            Faulty(file, "read hang n=5"), "r", "i4", (ROWS, 1024), device=device, cache="16 MiB"
        )
        begin = time.monotonic()
        with pytest.raises((errors.ControllerTimeout, errors.StorageError)):
            x.gather(np.arange(64))
        assert time.monotonic() - begin < 30
        # The commands are lost until the controller stops.
        with pytest.raises(errors.ControllerTimeout, match="quiesce"):
            x.close()


MATMULS = """
import os, sys
import numpy as np, torch
import flashwarp as fw
path, split = sys.argv[1:]
os.environ["FLASHWARP_SPLIT_MISSES"] = split
rows = 40_000
content = np.load(path, mmap_mode="r")
order = np.random.default_rng(1).permutation(rows)
index = torch.from_numpy(order).cuda()
out = torch.empty(rows, 1024, dtype=torch.int32, device="cuda")
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
with torch.cuda.stream(theirs):
    a @ a
with fw.open(path, device="cuda:0", cache="64 MiB", o_direct=True,
             controller=fw.nvme.SoftwareController(route="bounce")) as x:
    x.gather(index, out)
    x.drop_cache()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(ours)
    x.gather(index, out, stream=ours)
    end.record(ours)
    done = []
    with torch.cuda.stream(theirs):
        for _ in range(20):
            a @ a
            done.append(torch.cuda.Event(enable_timing=True))
            done[-1].record(theirs)
    torch.cuda.synchronize()
    x.check()
    assert (out.cpu().numpy() == content[order]).all()
    print(sum(begin.elapsed_time(each) < begin.elapsed_time(end) for each in done))
"""


@pytest.mark.parametrize("connections", ["1", "8"])
def test_matmuls_run_beside_a_gather_and_one_connection_is_no_deadlock(table, connections):
    pytest.importorskip("torch")
    found = subprocess.run(
        [sys.executable, "-c", MATMULS, str(table[0]), "1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": connections},
    )
    assert found.returncode == 0, found.stderr
    # With one connection the matmuls may stand behind the waits; they must come all the same.
    if connections != "1":
        assert int(found.stdout) >= 15


def test_default_leaves_everything_as_it_was(table, device, bounce, monkeypatch):
    monkeypatch.delenv("FLASHWARP_SPLIT_MISSES")
    path, content = table
    with fw.open(path, device=device, cache="16 MiB", controller=bounce) as x:
        assert x.service.batches is None
        assert (x.gather([1, 2, 3]) == content[1:4]).all()
