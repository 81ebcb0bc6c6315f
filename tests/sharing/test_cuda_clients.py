"""Clients of a cache on a GPU that processes share; each has `support.fake_cuda` for its GPU.

What does not depend on the device is in `test_shared_caches`. Kernels run on the host here, as late
as the fake is told, and each as one warp.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

from support.client_kernels import KERNELS
from support.program import Program, ProgramError

ROWS = np.arange(1000 * 128, dtype="i4").reshape(1000, 128)  # 1000 lines of 512 bytes
LIMIT_S = 20.0

PRELUDE = """
import ctypes
ctypes.CDLL(os.environ["FAKE_CUDA"], ctypes.RTLD_GLOBAL)
from support import host_kernels
from support.fake_cuda import fake
gpu = host_kernels.gpu({delay_us}, os.getpid())
rows = np.arange(1000 * 128, dtype="i4").reshape(1000, 128)

def numbers(count, kind="i8"):
    return gpu.empty_array((count,), kind)

def values(memory):
    return memory.copy_to_host()
"""

PROGRAM = f"program = fw.compile({KERNELS!r}, gpu)"


class Gpu(Program):
    """A process with a GPU of its own, which is the same one for all."""

    def __init__(self, environment: dict[str, str], delay_us: int = 0, **more: str) -> None:
        tests = str(Path(__file__).parents[1])
        found = {**environment, "PYTHONPATH": tests, **more}
        super().__init__(Path(environment["NAMES"]), **found)
        self.run(PRELUDE.format(delay_us=delay_us))

    def owns(self, capacity: str = "64 KiB", **how: Any) -> None:
        settings = {"line": 512, "shared": "rows", **how}
        self.run(f"cache = fw.Cache({capacity!r}, device=gpu, **{settings})")

    def joins(self) -> None:
        self.run("cache = fw.Cache(shared='rows', device=gpu)")

    def opens(self, path: Path, mode: str = "r", name: str = "x") -> None:
        self.run(f"{name} = fw.open({str(path)!r}, {mode!r}, cache=cache)")


@pytest.fixture
def places(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**environment, "NAMES": str(tmp_path / "run")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", ROWS)
    return tmp_path / "rows.npy"


@pytest.fixture
def owner(places: dict[str, str]) -> Iterator[Gpu]:
    with Gpu(places, 50) as made:
        made.owns()
        yield made


@pytest.fixture
def client(owner: Gpu, places: dict[str, str]) -> Iterator[Gpu]:
    with Gpu(places, 50) as made:
        made.joins()
        yield made


def test_client_reads_and_stores(client: Gpu, path: Path) -> None:
    client.opens(path, "r+")
    client.run("""
index = np.random.default_rng(1).integers(-1000, 1000, 700)
for _ in range(2):
    np.testing.assert_array_equal(x.gather(index), rows[index])
    np.testing.assert_array_equal(x[17:999], rows[17:999])
np.testing.assert_array_equal(x[::-7, 3], rows[::-7, 3])
assert x[5, 6] == rows[5, 6]
x[100:200] = rows[100:200] = 7
x.scatter([5, 3], rows[:2])
rows[[5, 3]] = np.arange(256).reshape(2, 128)
np.testing.assert_array_equal(x[...], rows)
x.flush()
assert "route       shared" in str(x.explain())
assert x.stats.hits + x.stats.misses > 4000 and x.stats.misses > 1000
""")
    client.run("x.close(); cache.close()")
    assert (np.load(path)[100:200] == 7).all()


def test_kernels(client: Gpu, path: Path) -> None:
    client.opens(path, "r+")
    client.run(PROGRAM)
    client.run("""
total = numbers(1)
program["total"](x, total)
x.wait()
assert values(total)[0] == rows.sum()
stream = gpu.create_stream()
program["negate"](x, 10 * 128, stream=stream)
x.wait(stream)
np.testing.assert_array_equal(x[:10], -rows[:10])
np.testing.assert_array_equal(x[10:], rows[10:])
assert x.stats.bytes_written == 10 * 128 * 4
""")
    with pytest.raises(ProgramError, match="only kernels in the process of the cache's owner can"):
        client.run("program['count'](x); x.wait()")
    assert client.run("result = int(x[0, 1])") == -1


def test_kernel_on_arrays_of_this_process_and_of_a_client(
    client: Gpu, path: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "to.npy", np.zeros_like(ROWS))
    client.opens(path)
    client.run(PROGRAM)
    client.run(f"""
with fw.open({str(tmp_path / "to.npy")!r}, "r+", cache="64 KiB", device=gpu) as y:
    program["copy"](x, y)
    y.wait()
    x.wait()
    np.testing.assert_array_equal(y[...], rows)
""")


def test_futures_and_streams(client: Gpu, path: Path) -> None:
    client.opens(path, "r+")
    client.run("""
reads = [x.gather_async(np.arange(i, 1000, 10)) for i in range(10)]
for i, read in enumerate(reads):
    np.testing.assert_array_equal(read.result(), rows[i::10])
stored = x.scatter_async(np.arange(100), np.full((100, 128), -1, "i4"))
assert (x.gather_async(slice(0, 100)).result() == -1).all()
stored.result()
x.prefetch(range(200, 900))
streams = [gpu.create_stream() for _ in range(2)]
index, out = numbers(300), gpu.empty_array((300, 128), "i4")
gpu.upload(index.address, np.arange(600, 900))
x.gather(index, out=out, stream=streams[0])
gpu.order(streams[0], streams[1])
x.scatter(np.arange(300), out, stream=streams[1])
x.wait()
np.testing.assert_array_equal(x[:300], rows[600:900])
""")
    with pytest.raises(ProgramError, match="out of bounds"):
        client.run("index = numbers(3); gpu.upload(index.address, np.array([1, 1000, 2]));x[index]")


def test_pipeline(client: Gpu, path: Path) -> None:
    client.opens(path)
    client.run("""
batches = [np.arange(i, 1000, 20) for i in range(20)]
with fw.Pipeline(x, 50) as pipeline:
    for found, ids in pipeline.iterate(batches):
        np.testing.assert_array_equal(found.copy_to_host(), rows[ids])
""")


def test_lookup_in_a_table(client: Gpu, path: Path) -> None:
    client.opens(path)
    client.run("""
from flashwarp.table.lookup import Ids, Lookup, Number, Table
ids, stream = np.random.default_rng(3).integers(0, 1000, 400), gpu.create_stream()
index, out = numbers(400), gpu.empty_array((400, 128), "f4")
gpu.upload(index.address, ids)
lookup = Lookup([Table(x, Number.FLOAT32, 128, range(1000))])
for _ in range(2):
    lookup.rows(Ids(index.address, 400, 8), out.address, Number.FLOAT32, stream.handle)
    x.wait(stream)
    np.testing.assert_array_equal(values(out).view("i4"), rows[ids])
lookup.close()
""")


def test_graph(client: Gpu, owner: Gpu, path: Path) -> None:
    client.opens(path)
    client.run(PROGRAM)
    client.run("""
total, stream = numbers(1), gpu.create_stream()
program["total"](x, total)
x.wait()
fake().fake_capture_begin(stream.handle)
program["total"](x, total, stream=stream)
index, out = numbers(5), gpu.empty_array((5, 128), "i4")
x.gather(index, out=out, stream=stream)
assert fake().fake_capture_end()
assert values(total)[0] == rows.sum()
fake().fake_replay()
x.wait(stream)
assert values(total)[0] == 2 * rows.sum()
""")
    owner.kill()

    begun = time.monotonic()
    with pytest.raises(ProgramError, match="has gone") as error:
        client.run("fake().fake_replay(); x.wait(stream)")

    assert error.value.name == "OwnerLostError"
    assert time.monotonic() - begun < LIMIT_S
    client.run("fake().fake_destroy_graphs(); x.close(); cache.close()")


def test_client_finds_the_owners_gpu(owner: Gpu, client: Gpu) -> None:
    facts = "result = [cache.device.identity, cache.lines, cache.device.kind]"
    assert client.run(facts) == owner.run(facts) == ["40" * 16, 124, "cuda"]


def test_kernels_of_other_compilers(client: Gpu, path: Path) -> None:
    client.opens(path)
    with pytest.raises(ProgramError, match="compiled elsewhere"):
        client.run("x.kernel_handle")
    client.run("""
from flashwarp.interop import c_abi
words = c_abi.array_words(x)  # for what is compiled for clients, as numba's kernels are
assert words[-2:] == (1000, 128)
assert cache.kernel_policy.asks_owner and "-DFW_ASKS_OWNER=1" in cache.kernel_policy.options
""")


USES = [
    "x.gather(np.random.randint(0, 1000, 300))",
    "program['total'](x, total); x.wait()",
    "program['negate'](x, 5000); x.wait()",
    "x.scatter(np.arange(300), rows[:300])",
]


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
@pytest.mark.parametrize("use", USES)
def test_owner_that_ends(places: dict[str, str], path: Path, use: str, killed: bool) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    random = np.random.default_rng(seed)
    with Gpu(places, 50) as owner, Gpu(places, 50, FLASHWARP_TIMEOUT_S="4") as client:
        owner.owns()
        client.joins()
        client.opens(path, "r+")
        client.run(f"{PROGRAM}; total = numbers(1)")
        client.start(f"while True: {use}")
        time.sleep(random.random() / 3)
        owner.kill() if killed else owner.stop()

        begun = time.monotonic()
        with pytest.raises(ProgramError) as error:
            client.finish()

        assert error.value.name == "OwnerLostError", f"seed {seed}: {error.value}"
        assert time.monotonic() - begun < LIMIT_S
        with contextlib.suppress(ProgramError):  # what was stored and not flushed is lost
            client.run("x.close()")
        client.run("cache.close()")


@pytest.mark.parametrize("use", USES)
def test_client_that_is_killed(
    owner: Gpu, client: Gpu, places: dict[str, str], path: Path, use: str
) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    random = np.random.default_rng(seed)
    np.save(path.with_name("other.npy"), ROWS)
    client.opens(path)
    for _ in range(2):
        with Gpu(places, 50) as victim:
            victim.joins()
            victim.opens(path.with_name("other.npy"), "r+")
            victim.run(f"{PROGRAM}; total = numbers(1)")
            victim.start(f"while True: {use}")
            time.sleep(random.random() / 3)
            victim.kill()

    client.run("np.testing.assert_array_equal(x[...], rows)")
    owner.opens(path)
    owner.run("np.testing.assert_array_equal(x[...], rows)")


def test_rows_are_right_while_lines_are_evicted(places: dict[str, str], path: Path) -> None:
    read = """
random, end, calls = np.random.default_rng(os.getpid()), time.monotonic() + 2.0, 0
while time.monotonic() < end:
    index = random.integers(0, 1000, 100) // random.integers(1, 100)
    np.testing.assert_array_equal(x.gather(index), rows[index])
    calls += 1
result = [calls, x.stats.hits, x.stats.misses]
"""
    with Gpu(places, 20) as owner, Gpu(places, 20) as one, Gpu(places, 20) as two:
        owner.owns("24 KiB")
        for each in one, two:
            each.joins()
            each.opens(path)
            each.start(read)
        owner.opens(path)
        owner.start(read)
        for each in owner, one, two:
            calls, hits, misses = each.finish()
            assert min(calls, hits, misses) > 0


def test_rows_of_a_reader_wait_for_no_launch_of_the_owner(
    client: Gpu, owner: Gpu, path: Path
) -> None:
    owner.run("""
from flashwarp.array.filling import Filling
add, Filling.add = Filling.add, lambda *_: None
""")
    client.opens(path)
    before = owner.run("result = fake().fake_count(b'cuLaunchKernel')")
    client.run("np.testing.assert_array_equal(x[::-1], rows[::-1])")
    assert client.run("result = [x.stats.misses, x.stats.hits]") == [1000, 0]
    assert owner.run("result = fake().fake_count(b'cuLaunchKernel')") == before

    client.run("x.prefetch(range(100, 700))")
    assert owner.run("result = fake().fake_count(b'cuLaunchKernel')") == before

    owner.run("Filling.add = add")
    client.run("""
x[:50]
x.prefetch(range(100, 130))
end = time.monotonic() + 20
while True:
    hits = x.stats.hits
    x[:49]
    if x.stats.hits == hits + 49:
        break
    assert time.monotonic() < end, "the lines have not come into the cache"
    time.sleep(0.01)
""")
    assert owner.run("result = fake().fake_count(b'cuLaunchKernel')") > before


def test_file_that_was_cut(client: Gpu, path: Path) -> None:
    client.opens(path)
    client.run("x[:10]")
    os.truncate(path, 128 + 500 * 512)

    with pytest.raises(ProgramError) as error:
        client.run("x[900:910]")

    assert error.value.name == "StorageError", str(error.value)


def test_writer_behind_a_reader(client: Gpu, path: Path, places: dict[str, str]) -> None:
    client.opens(path)
    client.run("x[:500]; x.close()")
    with Gpu(places) as other:
        other.joins()
        other.opens(path, "r+")
        other.run("x[100:200] = 7")
        client.opens(path, "r+")
        client.run("rows[100:200] = 7; np.testing.assert_array_equal(x[...], rows)")


def test_programs_that_close_nothing_end(client: Gpu, owner: Gpu, path: Path) -> None:
    client.opens(path, "r+")
    client.run("import gc; x[3] = 5; read = x.gather_async(range(100))")
    client.run("other = fw.Cache(shared='rows', device=gpu); del other; gc.collect()")
    client.end()
    owner.end()
    assert (np.load(path)[3] == 5).all()


def test_memory_is_given_back(client: Gpu, path: Path) -> None:
    client.run("cache.close()")
    client.run(f"""
def use():
    with fw.Cache(shared='rows', device=gpu) as cache, fw.open({str(path)!r}, cache=cache) as x:
        assert (x[:50] == rows[:50]).all()

use()
before = fake().fake_live_allocations()
for _ in range(3):
    use()
assert fake().fake_live_allocations() == before
""")
