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
from flashwarp.errors import BoundsError, SharedCacheError
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
def owner() -> Iterator[fw.Cache]:
    with fw.Cache("4 MiB", shared="rows", device="cuda:0") as cache:
        yield cache


@pytest.fixture
def client(owner: fw.Cache) -> Iterator[fw.Cache]:
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
def test_rows_of_any_width(tmp_path: Path, width: int) -> None:
    rows = np.random.default_rng(2).integers(0, 255, (3000, width), dtype="u1")
    np.save(tmp_path / "x.npy", rows)
    index = np.random.default_rng(3).integers(0, 3000, 2000)

    with (
        fw.Cache("256 KiB", line=512, shared="rows", device="cuda:0"),
        fw.Cache(shared="rows") as client,
        fw.open(tmp_path / "x.npy", cache=client) as x,
    ):
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
        with pytest.raises(BoundsError, match=r"1 indices are out of bounds.*such as 4000"):
            x.gather(index)
        with pytest.raises(SharedCacheError, match=r"one on a stream"):
            x.gather(index[:5], stream=torch.cuda.current_stream())


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
        assert two.run(read) == [2000, 0]
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
