"""A cache on a GPU that processes share.

What does not depend on the device is in `tests/sharing/`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.device import resolve
from flashwarp.errors import BoundsError, OwnerLostError, SharedCacheError
from support.client_kernels import KERNELS
from support.program import Program, ProgramError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROWS = np.arange(4000 * 128, dtype="i4").reshape(4000, 128)
CLIENT = "cache = fw.Cache(shared='rows')"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHWARP_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", ROWS)
    return tmp_path / "rows.npy"


@pytest.fixture
def owner(folder: Path) -> Iterator[Program]:
    with Program(folder) as made:
        made.run("cache = fw.Cache('4 MiB', shared='rows', device='cuda:0')")
        yield made


@pytest.fixture
def client(owner: Program) -> Iterator[fw.Cache]:
    with fw.Cache(shared="rows") as cache:
        yield cache


def opens(path: Path, mode: str = "r") -> str:
    return f"x = fw.open({str(path)!r}, {mode!r}, cache=cache)"


# Maps the memory whose descriptor comes over a socket, as the first thing that its context does.
MAP = """
import socket
from flashwarp.device import resolve
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as meeting:
    meeting.connect({place!r})
    _, (descriptor,), _, _ = socket.recv_fds(meeting, 1, 1)
device = resolve("cuda:0")
memory = device.map_exported(descriptor, {nbytes})
os.close(descriptor)
result = [memory.writable, memory.nbytes]
"""


def map_there(other: Program, descriptor: int, nbytes: int) -> bool:
    """Let another process map exported memory; return whether it could write it."""
    place = f"\0flashwarp-test-{os.getpid()}"  # of no file: paths of sockets are short
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(place)
        server.listen()
        server.settimeout(60)
        other.start(MAP.format(place=place, nbytes=nbytes))
        meeting, _ = server.accept()
        with meeting:
            socket.send_fds(meeting, [b"x"], [descriptor])
        writable, mapped = other.finish()
    assert mapped == nbytes
    print(f"the driver maps it {'writable' if writable else 'read-only'}")
    return bool(writable)


@pytest.mark.parametrize("nbytes", [1, 2 << 20, (2 << 20) + 1, (1 << 30) + 512])
def test_memory_is_mapped_by_another_process(nbytes: int, folder: Path) -> None:
    device = resolve("cuda:0")
    made = device.allocate_exported(nbytes)
    pattern = bytes(range(1, 256))[:nbytes]
    end = nbytes - len(pattern)
    with Program(folder) as other:
        map_there(other, made.descriptor, nbytes)
        read = f"result = list(device.download(memory.address + {end}, {len(pattern)}))"
        assert not any(other.run(read))

        device.upload(made.memory.address + end, pattern)

        assert bytes(other.run(read)) == pattern
        os.close(made.descriptor)
        made.memory.close()
        assert bytes(other.run(read)) == pattern  # that mapping keeps the memory
        other.run("memory.close()")


def test_a_client_cannot_write(folder: Path) -> None:
    device = resolve("cuda:0")
    made = device.allocate_exported(4096)
    with Program(folder) as other:
        if map_there(other, made.descriptor, 4096):
            pytest.skip("this driver maps the memory of another process writable only")

        with pytest.raises((ProgramError, AssertionError)):  # the process may end, too
            other.run("device.upload(memory.address, bytes([7]) * 4096)")

        assert device.download(made.memory.address, 4096) == bytes(4096)
    os.close(made.descriptor)
    made.memory.close()


def test_client_reads_and_stores(client: fw.Cache, path: Path) -> None:
    index = np.random.default_rng(1).integers(-4000, 4000, 3000)
    rows = ROWS.copy()

    with fw.open(path, "r+", cache=client) as x:
        assert client.device is resolve("cuda:0")
        for _ in range(2):
            np.testing.assert_array_equal(x.gather(index), rows[index])
            np.testing.assert_array_equal(x[17:3999], rows[17:3999])
        assert x.stats.hits > 0
        x[100:200] = rows[100:200] = 7
        x.scatter([5, 3], rows[:2])
        rows[[5, 3]] = ROWS[:2]
        np.testing.assert_array_equal(x[...], rows)
        print(x.explain())  # whether the driver maps read-only
    np.testing.assert_array_equal(np.load(path), rows)


@pytest.mark.parametrize("width", [1, 3, 16, 1024, 5000])
def test_rows_of_any_width(tmp_path: Path, folder: Path, width: int) -> None:
    rows = np.random.default_rng(2).integers(0, 255, (3000, width), dtype="u1")
    np.save(tmp_path / "x.npy", rows)
    index = np.random.default_rng(3).integers(0, 3000, 2000)

    with Program(folder) as owner:
        owner.run("cache = fw.Cache('256 KiB', line=512, shared='rows', device='cuda:0')")
        with fw.Cache(shared="rows") as client, fw.open(tmp_path / "x.npy", cache=client) as x:
            for _ in range(2):
                np.testing.assert_array_equal(x.gather(index), rows[index])
                np.testing.assert_array_equal(x[...], rows)


def test_tensors_of_torch(client: fw.Cache, path: Path) -> None:
    torch = pytest.importorskip("torch")
    index = torch.randint(0, 4000, (500,), device="cuda:0")

    with fw.open(path, cache=client) as x:
        rows = x.gather(index)
        assert rows.device == index.device
        np.testing.assert_array_equal(rows.cpu().numpy(), ROWS[index.cpu().numpy()])
        index[7] = 4000
        with pytest.raises(BoundsError, match="index 4000 is out of bounds"):
            x.gather(index)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        rows = x.gather(index[:5], stream=stream)
        stream.synchronize()
        np.testing.assert_array_equal(rows.cpu().numpy(), ROWS[index[:5].cpu().numpy()])


@pytest.mark.parametrize("capacity", ["4 MiB", "256 KiB"])
def test_kernels(path: Path, folder: Path, capacity: str) -> None:
    torch = pytest.importorskip("torch")
    program = fw.compile(KERNELS, "cuda:0")
    with Program(folder) as owner:
        owner.run(f"cache = fw.Cache({capacity!r}, shared='rows', device='cuda:0')")
        with fw.Cache(shared="rows") as client, fw.open(path, "r+", cache=client) as x:
            for _ in range(2):
                total = torch.zeros(1, dtype=torch.int64, device="cuda:0")
                program["total"](x, total)
                x.wait()
                assert total.item() == ROWS.sum()
            stream = torch.cuda.Stream()
            program["negate"](x, 100 * 128, stream=stream)
            x.wait(stream)
            np.testing.assert_array_equal(x[:100], -ROWS[:100])
            np.testing.assert_array_equal(x[100:], ROWS[100:])
            program["count"](x)
            with pytest.raises(SharedCacheError, match="only kernels in the process"):
                x.wait()
    np.testing.assert_array_equal(np.load(path)[:100], -ROWS[:100])


def test_kernel_of_numba(client: fw.Cache, path: Path) -> None:
    pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
    from gpu.test_numba import cuda, gather

    index = np.random.default_rng(5).integers(0, ROWS.size, 2000)
    with fw.open(path, dtype="i4", shape=(ROWS.size,), offset=128, cache=client) as x:
        out = cuda.to_device(np.zeros(2000, "i4"))
        gather[64, 128](out, x, cuda.to_device(index))
        x.wait()
        np.testing.assert_array_equal(out.copy_to_host(), ROWS.reshape(-1)[index])


def test_futures_and_pipeline(client: fw.Cache, path: Path) -> None:
    with fw.open(path, "r+", cache=client) as x:
        reads = [x.gather_async(np.arange(i, 4000, 10)) for i in range(10)]
        for i, read in enumerate(reads):
            np.testing.assert_array_equal(read.result(), ROWS[i::10])
        x.scatter_async(np.arange(100), np.full((100, 128), -1, "i4")).result()
        assert (x[:100] == -1).all()
        x.prefetch(range(1000, 3000))
        batches = [np.arange(100 + i, 4000, 40) for i in range(40)]
        with fw.Pipeline(x, 100) as pipeline:
            for rows, ids in pipeline.iterate(batches):
                np.testing.assert_array_equal(rows.copy_to_host(), ROWS[ids])


def test_modules_of_torch(client: fw.Cache, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import flashwarp.torch as modules

    rows = np.random.default_rng(3).random((4000, 16), "f4")
    np.save(tmp_path / "x.npy", rows)
    ids = torch.randint(0, 4000, (20, 5), device="cuda:0")
    with fw.open(tmp_path / "x.npy", cache=client) as x:
        for _ in range(2):
            found = modules.Embedding(x)(ids).detach().cpu().numpy()
            np.testing.assert_array_equal(found, rows[ids.cpu().numpy()])
            sums = modules.EmbeddingBag(x, mode="sum")(ids).detach().cpu().numpy()
            np.testing.assert_allclose(sums, rows[ids.cpu().numpy()].sum(1), rtol=1e-5)


def test_graph_of_a_client(client: fw.Cache, owner: Program, path: Path) -> None:
    torch = pytest.importorskip("torch")
    from gpu.captures import captured

    index = torch.zeros(1000, dtype=torch.int64, device="cuda:0")
    out = torch.zeros((1000, 128), dtype=torch.int32, device="cuda:0")
    x = fw.open(path, cache=client)
    graph = captured(lambda: x.gather(index, out=out, stream=torch.cuda.current_stream()))
    for step in 1, 3:
        index.copy_(torch.arange(0, 1000 * step, step))
        graph.replay()
        x.wait(torch.cuda.current_stream())
        np.testing.assert_array_equal(out.cpu().numpy(), ROWS[: 1000 * step : step])
    owner.kill()

    index.copy_(torch.arange(2000, 3000))
    begun = time.monotonic()
    with pytest.raises(OwnerLostError, match="has gone"):  # noqa: PT012
        graph.replay()
        x.wait(torch.cuda.current_stream())

    assert time.monotonic() - begun < 20
    graph.reset()
    x.close()


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_owner_that_ends_while_kernels_wait(path: Path, folder: Path, killed: bool) -> None:
    with Program(folder) as owner, Program(folder, FLASHWARP_TIMEOUT_S="8") as client:
        owner.run("cache = fw.Cache('256 KiB', shared='rows', device='cuda:0')")
        client.run(f"{CLIENT}\n{opens(path)}\nprogram = fw.compile({KERNELS!r}, 'cuda:0')")
        client.run("total = x.device.empty_array((1,), 'i8'); program['total'](x, total); x.wait()")
        client.start("while True: program['total'](x, total); x.wait()")
        time.sleep(0.7)
        owner.kill() if killed else owner.stop()

        begun = time.monotonic()
        with pytest.raises(ProgramError) as error:
            client.finish()

        assert error.value.name == "OwnerLostError"
        assert time.monotonic() - begun < 30
        client.run("x.close(); cache.close()")


def test_rates(tmp_path: Path, folder: Path) -> None:
    """Prints what a client reaches beside the owner, of resident rows and of absent ones."""
    pytest.importorskip("torch")
    for row_bytes in (512, 4096, 65536):
        count = (256 << 20) // row_bytes
        path = tmp_path / f"{row_bytes}.npy"
        np.save(path, np.random.default_rng(1).integers(0, 1 << 62, (count, row_bytes // 8)))
        rate = f"""
import torch
def rate(x, order):
    index = torch.tensor(order, device='cuda:0')
    out = torch.empty((len(order), {row_bytes // 8}), dtype=torch.int64, device='cuda:0')
    torch.cuda.synchronize()
    begin = time.monotonic()
    x.gather(index, out=out)
    return len(order) * {row_bytes} / (time.monotonic() - begin) / 1e9
cold = np.random.default_rng(2).permutation({count})
def rates(x):
    first = rate(x, cold)
    for _ in range(3):
        rate(x, cold)
    return first, max(rate(x, cold) for _ in range(5))
"""
        with Program(folder) as owner, Program(folder) as client:
            owner.run("cache = fw.Cache('1 GiB', shared='rows', device='cuda:0')")
            # By host threads, as for clients: in place a GPU would need none.
            owner.run(
                f"{rate}\nbounce = fw.nvme.SoftwareController(route='bounce')\n"
                f"x = fw.open({str(path)!r}, cache=cache, controller=bounce)"
            )
            client.run(f"{CLIENT}\n{opens(path)}\n{rate}\nresult = rate(x, cold[:10])")
            owner.run("rate(x, cold[:10]); x.drop_cache()")
            absent, _ = client.run("result = rates(x)")
            owner.run("x.drop_cache()")
            own_absent, own = owner.run("result = rates(x)")
            _, resident = client.run("result = rates(x)")
            print(
                f"rows of {row_bytes} bytes: a client reads resident ones at {resident:.1f} GB/s, "
                f"{resident / own:.2f} of the owner; absent ones at {absent:.2f} GB/s, "
                f"{absent / own_absent:.2f} of the owner"
            )
            client.run("x.close(); cache.close()")


def test_two_processes_share_lines_and_memory(tmp_path: Path, folder: Path, path: Path) -> None:
    device = resolve("cuda:0")
    large = 8 << 30
    if device.memory_info().free_bytes < 3 * large:
        pytest.skip("a GPU with less than 24 GiB free")
    free = device.memory_info().free_bytes
    with (
        fw.Cache(large, shared="rows", device="cuda:0"),
        Program(folder) as one,
        Program(folder) as two,
    ):
        for each in one, two:
            each.run(f"{CLIENT}\n{opens(path)}")
        read = "x.gather(np.arange(0, 4000, 2)); result = [x.stats.hits, x.stats.misses]"
        assert one.run(read) == [0, 2000]
        # The lines enter the cache behind the answers.
        end = time.monotonic() + 30
        while two.run(f"hits = x.stats.hits; {read}; result = x.stats.hits - hits") != 2000:
            assert time.monotonic() < end, "the lines have not come into the cache"
        assert two.run("result = int(x[...].sum())") == ROWS.sum()

        # Less than a second copy: each client has a context, and tests beside this one have more.
        assert free - device.memory_info().free_bytes < 2 * large


def test_rows_are_right_while_lines_are_evicted(tmp_path: Path, folder: Path) -> None:
    rows = np.repeat(np.arange(4000, dtype="i4"), 128).reshape(4000, 128)
    np.save(tmp_path / "x.npy", rows)
    read = """
random, end, calls = np.random.default_rng(os.getpid()), time.monotonic() + 3.0, 0
while time.monotonic() < end:
    index = random.integers(0, 4000, 300) // random.integers(1, 100)
    assert (x.gather(index) == index[:, None]).all()
    calls += 1
result = [calls, x.stats.hits, x.stats.misses]
"""
    with (
        fw.Cache("128 KiB", shared="rows", device="cuda:0"),
        Program(folder) as one,
        Program(folder) as two,
    ):
        for each in one, two:
            each.run(f"{CLIENT}\n{opens(tmp_path / 'x.npy')}")
            each.start(read)
        for each in one, two:
            calls, hits, misses = each.finish()
            assert min(calls, hits, misses) > 0


def test_killed_client_and_killed_owner(path: Path, folder: Path) -> None:
    with Program(folder) as owner, Program(folder) as client:
        owner.run("cache = fw.Cache('4 MiB', shared='rows', device='cuda:0')")
        with Program(folder) as victim:
            victim.run(f"{CLIENT}\n{opens(path)}")
            victim.start("while True: x.gather(np.random.randint(0, 4000, 500)); x.drop_cache()")
            time.sleep(0.5)
            victim.kill()
        client.run(f"{CLIENT}\n{opens(path, 'r+')}")
        assert client.run("result = int(x[...].sum())") == ROWS.sum()
        client.run("x[3] = -3; x.flush()")
        owner.kill()

        with pytest.raises(ProgramError, match="has gone") as error:
            client.run("x[5]")

        assert error.value.name == "OwnerLostError"
        client.run("x.close(); cache.close()")
    assert np.load(path)[3, 0] == -3
    assert os.listdir(folder)  # the name's lock stays, and is free
    with fw.Cache("4 MiB", shared="rows", device="cuda:0") as cache:
        assert cache.owned
