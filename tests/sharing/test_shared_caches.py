"""Caches that processes share: what each finds there, and what the death of each leaves."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.array.serving import Serving
from flashwarp.cache.volume_table import TableEntry
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    CacheError,
    ClosedError,
    LockedError,
    OwnerLostError,
    ReadOnlyError,
    RouteError,
    SharedCacheError,
)
from flashwarp.sharing.messages import Message
from flashwarp.trace import record
from support.client_kernels import KERNELS
from support.program import Program, ProgramError

ROWS = np.arange(4000 * 128, dtype="i4").reshape(4000, 128)  # 500 lines of 4 KiB


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Names of this test alone."""
    monkeypatch.setenv("FLASHWARP_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", ROWS)
    return tmp_path / "rows.npy"


@pytest.fixture
def owner() -> Iterator[fw.Cache]:
    with fw.Cache("4 MiB", shared="rows", device="cpu") as cache:
        yield cache


@pytest.fixture
def client(owner: fw.Cache) -> Iterator[fw.Cache]:
    with fw.Cache(shared="rows") as cache:
        yield cache


# What an owner's end is told in, on a machine that does other things too. Nothing else would end.
BOUNDED_S = 20

OWNER = "cache = fw.Cache('4 MiB', shared='rows', device='cpu')"
CLIENT = "cache = fw.Cache(shared='rows')"


def opens(path: Path, mode: str = "r") -> str:
    return f"x = fw.open({str(path)!r}, {mode!r}, cache=cache)"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


# What a client sees.


def test_client_reads_what_numpy_reads(client: fw.Cache, path: Path) -> None:
    index = np.random.default_rng(1).integers(-4000, 4000, 3000)

    with fw.open(path, cache=client) as x:
        np.testing.assert_array_equal(x.gather(index), ROWS[index])
        np.testing.assert_array_equal(x[index.reshape(30, 100)], ROWS[index.reshape(30, 100)])
        np.testing.assert_array_equal(x[17:3999], ROWS[17:3999])
        np.testing.assert_array_equal(x[::-7, 3], ROWS[::-7, 3])
        np.testing.assert_array_equal(x[...], ROWS)
        assert x[5, 6] == ROWS[5, 6]
        assert np.asarray(x).sum() == ROWS.sum()
        assert [row[0] for row in x][:3] == [0, 128, 256]
        out = np.empty((2, 128), "i4")
        assert x.gather([3, 1], out=out) is out
        np.testing.assert_array_equal(out, ROWS[[3, 1]])
        assert "route       shared: lines are read in the owner's memory" in str(x.explain())
        assert "shared=" in x._repr_html_()


def test_every_access_is_a_hit_or_a_miss(client: fw.Cache, path: Path) -> None:
    with fw.open(path, cache=client) as x:
        np.testing.assert_array_equal(x[:100], ROWS[:100])
        first = x.stats
        np.testing.assert_array_equal(x[:100], ROWS[:100])
        again = x.stats

    assert first.hits + first.misses == 13
    assert first.misses > 0
    assert (again.hits, again.misses) == (first.hits + 13, first.misses)


def test_rows_that_straddle_more_lines_than_one_launch_takes(tmp_path: Path) -> None:
    nbytes = (1 << 25) + 4096
    rows = np.random.default_rng(2).integers(0, 255, (2, nbytes), dtype="u1")
    np.save(tmp_path / "x.npy", rows)

    with (
        fw.Cache("4 MiB", shared="rows", device="cpu", line=512),
        fw.Cache(shared="rows") as client,
        fw.open(tmp_path / "x.npy", "r+", cache=client) as x,
    ):
        assert np.array_equal(x.gather([1, 0]), rows[[1, 0]])
        x.scatter([0], rows[1:])
        assert np.array_equal(x[0], rows[1])


def test_second_client_finds_the_lines_of_the_first(
    owner: fw.Cache, path: Path, folder: Path
) -> None:
    read = "x.gather(np.arange(0, 4000, 2)); result = [x.stats.hits, x.stats.misses]"
    with Program(folder) as one, Program(folder) as two:
        one.run(CLIENT)
        one.run(opens(path))
        hits, misses = one.run(read)
        told = one.run("result = x._attachment.asking.stats()['bytes_read']")
        two.run(CLIENT)
        two.run(opens(path))

        assert hits + misses == 2000
        assert misses > 0
        assert told == 500 * 4096
        assert two.run(read) == [2000, 0]
        assert two.run("result = x._attachment.asking.stats()['bytes_read']") == told
        assert two.run("result = int(x[...].sum())") == ROWS.sum()


def test_second_run_is_warm(path: Path, folder: Path, owner: fw.Cache) -> None:
    run = f"{CLIENT}\n{opens(path)}\nx[...]\nresult = x.stats.misses\nx.close()\ncache.close()"
    with Program(folder) as first:
        assert first.run(run) > 100
        first.end()

    with Program(folder) as second:
        assert second.run(run) == 0
        second.end()


def test_owners_own_arrays_are_shared(owner: fw.Cache, client: fw.Cache, path: Path) -> None:
    with fw.open(path, "r+", cache=owner) as mine, fw.open(path, cache=client) as theirs:
        mine[7] = -1
        reads = mine.stats.bytes_read

        np.testing.assert_array_equal(theirs[7], mine[7])
        assert theirs.stats.misses == 0
        assert mine.stats.bytes_read == reads
        with pytest.raises(ReadOnlyError, match="read-only"):
            theirs[7] = 0


def test_clients_read_right_while_lines_are_evicted(tmp_path: Path, folder: Path) -> None:
    """Each element of a row is the row's number: a torn or another line's row would show."""
    rows = np.repeat(np.arange(4000, dtype="i4"), 128).reshape(4000, 128)
    np.save(tmp_path / "x.npy", rows)
    read = """
random, end, calls = np.random.default_rng(os.getpid()), time.monotonic() + 0.5, 0
while time.monotonic() < end or calls < 6:
    index = random.integers(0, 4000, 300) // random.integers(1, 100)
    assert (x.gather(index) == index[:, None]).all()
    calls += 1
result = [calls, x.stats.hits, x.stats.misses]
"""
    with (
        fw.Cache("128 KiB", shared="rows", device="cpu"),
        Program(folder) as one,
        Program(folder) as two,
    ):
        for each in one, two:
            each.run(CLIENT)
            each.run(opens(tmp_path / "x.npy"))
            each.start(read)
        for each in one, two:
            calls, hits, misses = each.finish()
            assert calls > 5
            assert hits > 0
            assert misses > 0


# Death.


def test_killed_client_leaves_nothing(owner: fw.Cache, path: Path, folder: Path) -> None:
    for _ in range(2):
        with Program(folder) as victim:
            victim.run(CLIENT)
            victim.run(opens(path))
            victim.start("while True: x.gather(np.random.randint(0, 4000, 500)); x.drop_cache()")
            time.sleep(0.05)
            victim.kill()

    assert owner._owner is not None
    sharing = owner._owner
    wait_until(lambda: sharing.clients == 0, "a session is left")
    with fw.Cache(shared="rows") as client, fw.open(path, cache=client) as x:
        np.testing.assert_array_equal(x[...], ROWS)


def test_stores_of_a_killed_client_are_flushed_by_the_owner(
    owner: fw.Cache, path: Path, folder: Path
) -> None:
    with Program(folder) as victim:
        victim.run(CLIENT)
        victim.run(opens(path, "r+"))
        victim.run("x[10:20] = -5")
        victim.kill()

    wait_until(lambda: bool((np.load(path)[10:20] == -5).all()), "the stores are lost")

    def opens_for_storing() -> bool:
        try:
            fw.open(path, "r+", device="cpu").close()
        except LockedError:
            return False
        return True

    wait_until(opens_for_storing, "the owner still holds the file's lock")


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "reading"])
def test_killed_owner_is_an_error_in_bounded_time(path: Path, folder: Path, busy: bool) -> None:
    with Program(folder) as owner, Program(folder) as client:
        owner.run(OWNER)
        client.run(CLIENT)
        client.run(opens(path, "r+"))
        client.run("x[...]; x[3] = -3; x.flush(); x[4] = -4")
        if busy:
            client.start("while True: x.gather(np.random.randint(0, 4000, 500)); x.drop_cache()")
            time.sleep(0.1)
        owner.kill()
        begin = time.monotonic()

        wait = client.finish if busy else partial(client.run, "x[3]")
        with pytest.raises(ProgramError, match=f"process {owner.pid}.*rows") as error:
            wait()
        assert error.value.name == "OwnerLostError"
        assert time.monotonic() - begin < BOUNDED_S
        # What was not flushed is lost with the owner, and closing says so.
        with pytest.raises(ProgramError, match="has gone") as error:
            client.run("x.close()")
        assert error.value.name == "OwnerLostError"
        client.run("cache.close(); x.close()")

        assert np.load(path)[3, 0] == -3
        with Program(folder) as next_owner:
            next_owner.run(OWNER)
            client.run(f"{CLIENT}\n{opens(path)}\nassert x[3, 5] == -3")


USES = {
    "gather": "x.gather(np.random.randint(0, 4000, 500)); x.drop_cache()",
    "scatter": "x.scatter(np.arange(100), np.ones((100, 128), 'i4'))",
    "future": "x.gather_async(np.arange(0, 4000, 3)).result(); x.drop_cache()",
    "kernel": "program['total'](x, np.zeros(1, 'i8')); x.wait(); x.drop_cache()",
    "prefetch": "x.prefetch(range(4000)); x[::40]; x.drop_cache()",
}


@pytest.mark.parametrize("use", USES)
def test_kills_at_drawn_times(path: Path, folder: Path, use: str) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    random = np.random.default_rng(seed)
    prepare = f"program = fw.compile({KERNELS!r}, 'cpu')\n{CLIENT}\n{opens(path, 'r+')}\n"
    # The use too: its first call compiles, which takes as long as the machine is busy.
    prepare += USES[use]
    work = f"while True: {USES[use]}"
    with Program(folder) as owner, Program(folder) as survivor:
        owner.run(OWNER)
        survivor.run(prepare)
        for _ in range(3):
            with Program(folder) as victim:
                victim.run(prepare)
                victim.start(work)
                time.sleep(random.uniform(0, 0.1))
                victim.kill()
            expected = ROWS[100:4000:50].sum()
            assert survivor.run("result = int(x[100:4000:50].sum())") == expected, f"seed {seed}"

        survivor.start(work)
        time.sleep(random.uniform(0, 0.1))
        owner.kill()
        begin = time.monotonic()

        with pytest.raises(ProgramError) as error:
            survivor.finish()
        assert error.value.name == "OwnerLostError", f"seed {seed}"
        assert time.monotonic() - begin < BOUNDED_S, f"seed {seed}"


def test_stopped_owner_is_an_error_in_bounded_time(path: Path, folder: Path) -> None:
    with Program(folder) as owner, Program(folder, FLASHWARP_TIMEOUT_S="1.6") as client:
        owner.run(OWNER)
        client.run(CLIENT)
        client.run(f"{opens(path)}; x[400]")
        owner.stop()

        with pytest.raises(ProgramError, match=r"has not answered for 2 s") as error:
            client.run("x[0]")
        assert error.value.name == "OwnerLostError"
        owner.signal(signal.SIGCONT)
        # A late answer is no answer, and a hit is none of an owner that was given up.
        for row in (0, 400):
            with pytest.raises(ProgramError, match="has not answered"):
                client.run(f"x[{row}]")
        client.run(f"{CLIENT}\n{opens(path)}\nassert x[0, 1] == 1")


def test_a_reader_closes_in_silence_after_the_owners_death(path: Path, folder: Path) -> None:
    with Program(folder) as owner, Program(folder) as client:
        owner.run(OWNER)
        client.run(f"{CLIENT}\n{opens(path)}\nx[0]")
        owner.kill()

        client.run("x.close(); cache.close()")
        client.end()


def test_programs_that_close_nothing_end(path: Path, folder: Path) -> None:
    with Program(folder) as owner, Program(folder) as client:
        owner.run(OWNER)
        owner.run(opens(path, "r+"))
        client.run(f"{CLIENT}\n{opens(path, 'r+')}\nx[5] = 55")
        client.end()

        assert owner.run("result = int(x[5, 0])") == 55
        owner.end()
    assert np.load(path)[5, 0] == 55


def test_fork_of_the_owner_does_not_hide_its_death(path: Path, folder: Path) -> None:
    with Program(folder) as owner, Program(folder) as client:
        owner.run(OWNER)
        client.run(f"{CLIENT}\n{opens(path)}\nx[0]")
        child = owner.run(
            "import warnings; warnings.simplefilter('ignore')\nresult = os.fork()\n"
            "if result == 0: time.sleep(60); os._exit(0)"
        )
        try:
            owner.kill()
            with pytest.raises(ProgramError, match="has gone"):
                client.run("x[0]")
            with fw.Cache("1 MiB", shared="rows", device="cpu") as cache:
                assert cache.owned
        finally:
            os.kill(child, signal.SIGKILL)


def test_forked_child_of_the_owner_ends_nothing(path: Path, folder: Path) -> None:
    with Program(folder) as owner, Program(folder) as client:
        owner.run(OWNER)
        owner.run("child = os.fork()\nif child == 0: cache.close(); os._exit(0)\nos.wait()")

        client.run(f"{CLIENT}\n{opens(path)}")

        assert client.run("result = int(x[5, 0])") == 5 * 128


def test_forked_child_of_a_client_opens_the_cache_itself(
    owner: fw.Cache, path: Path, folder: Path
) -> None:
    with Program(folder) as client:
        client.run(f"{CLIENT}\n{opens(path)}\nx[...]")
        child = """
import warnings; warnings.simplefilter('ignore')
read, write = os.pipe()
if os.fork() == 0:
    try: said = f"{int(x[7, 0])} {x.cache.shared} {x.stats.misses}"
    except BaseException as error: said = repr(error)
    os.write(write, said.encode()); os._exit(0)
os.close(write); result = os.read(read, 999).decode(); os.wait()
"""
        assert client.run(child) == f"{7 * 128} rows 0"
        assert client.run("result = int(x[8, 0])") == 8 * 128


# Memory.


def test_memory_is_counted_once(path: Path, folder: Path, tmp_path: Path) -> None:
    rows = np.ones((16 << 20,), "u1")
    np.save(tmp_path / "large.npy", rows)
    with Program(folder) as owner, Program(folder) as one, Program(folder) as two:
        owner.run("cache = fw.Cache('20 MiB', shared='rows', device='cpu')")
        for each in one, two:
            each.run(f"{CLIENT}\n{opens(tmp_path / 'large.npy')}\nx[...]\nx[...]")
        shares = [mapped_kib(each.pid) for each in (owner, one, two)]

    resident, proportional = (sum(column) for column in zip(*shares, strict=True))
    held = (rows.nbytes + 2 * (4 << 20) + (1 << 20)) / 1024  # frames, two stages, tags
    assert rows.nbytes / 1024 < proportional < held
    assert resident > 2.5 * rows.nbytes / 1024  # each maps all of it


def test_memory_has_huge_pages(folder: Path) -> None:
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1):
        pytest.skip("Linux has MADV_COLLAPSE from 6.1 on")
    with fw.Cache("20 MiB", shared="rows", device="cpu") as cache:

        def huge_kib() -> int:
            smaps = Path("/proc/self/smaps").read_text()
            return sum(map(int, re.findall(r"ShmemPmdMapped: +(\d+)", smaps)))

        wait_until(lambda: huge_kib() >= 10 << 10, "half of the pages are huge")
        assert cache.owned


def mapped_kib(pid: int) -> tuple[int, int]:
    """KiB of shared memory of a process: resident, and its share of them."""
    resident = proportional = 0
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "/memfd:flashwarp" in line
        elif ours and line.startswith("Rss:"):
            resident += int(line.split()[1])
        elif ours and line.startswith("Pss:"):
            proportional += int(line.split()[1])
    return resident, proportional


# What is refused.


def test_without_an_owner(folder: Path) -> None:
    with pytest.raises(SharedCacheError, match=r"no process owns a shared cache 'rows'.*serve"):
        fw.Cache(shared="rows")

    assert not (folder / "rows.sock").exists()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "x" * 65, "ü", 5])
def test_wrong_name(name: object) -> None:
    with pytest.raises(SharedCacheError, match="is no name"):
        fw.Cache("1 MiB", shared=name)  # type: ignore[arg-type]


def test_capacity_is_needed() -> None:
    with pytest.raises(CacheError, match="needs a capacity"):
        fw.Cache()
    with pytest.raises(CacheError, match=r"auto.*depends on the first array"):
        fw.Cache("auto", shared="rows")


def test_second_opener_with_the_same_arguments_is_a_client(owner: fw.Cache) -> None:
    with fw.Cache("4 MiB", shared="rows") as again:
        assert owner.owned
        assert not again.owned
        assert again.capacity == owner.capacity
        assert again.lines == owner.lines
        assert "owner=" in repr(again)


@pytest.mark.parametrize(
    "settings", [{"capacity": "2 MiB"}, {"line": 512}, {"ways": 8}, {"policy": "lru"}]
)
def test_other_settings_than_the_owners(owner: fw.Cache, settings: dict[str, object]) -> None:
    with pytest.raises(SharedCacheError, match=r"has 10.. lines of 4096 bytes in sets"):
        fw.Cache(**{"capacity": "4 MiB", "shared": "rows", **settings})  # type: ignore[arg-type]


def test_folder_that_others_may_enter(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)

    with pytest.raises(SharedCacheError, match=r"others have access to it.*FLASHWARP_RUNTIME_DIR"):
        fw.Cache("1 MiB", shared="rows", device="cpu")


def test_names_are_free_again(folder: Path) -> None:
    for _ in range(2):
        cache = fw.Cache("1 MiB", shared="rows", device="cpu")
        assert cache.owned
        assert (folder.stat().st_mode & 0o777) == 0o700
        cache.close()
        cache.close()


def test_folder_with_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHWARP_RUNTIME_DIR", str(tmp_path / ("x" * 120)))

    with fw.Cache("1 MiB", shared="rows", device="cpu"), fw.Cache(shared="rows") as client:
        assert not client.owned


def test_clients_open_files_alone(client: fw.Cache, path: Path, tmp_path: Path) -> None:
    with pytest.raises(SharedCacheError, match="one file by its path"):
        fw.open(fw.storage.Memory("1 MiB"), dtype="u1", cache=client)
    with pytest.raises(SharedCacheError, match="one file by its path"):
        fw.open(fw.storage.Concatenated([(path, 128, 4096)]), dtype="u1", cache=client)
    with pytest.raises(SharedCacheError, match="creates no files"):
        fw.create(tmp_path / "new.npy", "u1", 9, cache=client)
    for settings in ({"strict": "direct"}, {"o_direct": True}, {"lock": False}):
        with pytest.raises(SharedCacheError, match="the owner of a shared cache chooses"):
            fw.open(path, cache=client, **settings)  # type: ignore[arg-type]
    np.save(tmp_path / "empty.npy", np.empty(0))
    with pytest.raises(SharedCacheError, match="nothing to share"):
        fw.open(tmp_path / "empty.npy", cache=client)
    assert not (tmp_path / "new.npy").exists()
    with pytest.raises(CacheError, match="only the owner"):
        client.refusals  # noqa: B018


# Kernels, futures, and what stands on arrays.


@pytest.mark.parametrize("policy", ["clock", "sieve", "s3_fifo"])
def test_kernels_of_a_client(path: Path, policy: str) -> None:
    program = fw.compile(KERNELS, "cpu", policy=policy)
    with (
        fw.Cache("256 KiB", shared="rows", device="cpu", policy=policy) as owner,
        fw.Cache(shared="rows") as client,
        fw.open(path, "r+", cache=client) as x,
    ):
        total = np.zeros(1, "i8")
        program["total"](x, total)
        x.wait()
        assert total[0] == ROWS.sum()

        program["negate"](x, 10 * 128)
        x.wait()
        np.testing.assert_array_equal(x[:10], -ROWS[:10])
        np.testing.assert_array_equal(x[10:], ROWS[10:])
        assert x.stats.bytes_written == 10 * 128 * 4
        assert owner.refusals == 0


def test_kernel_on_arrays_of_the_owner_and_of_a_client(
    owner: fw.Cache, client: fw.Cache, path: Path, tmp_path: Path
) -> None:
    program = fw.compile(KERNELS, "cpu")
    np.save(tmp_path / "to.npy", np.zeros_like(ROWS))
    with fw.open(path, cache=client) as x, fw.open(tmp_path / "to.npy", "r+", cache=owner) as y:
        program["copy"](x, y)
        y.wait()
        np.testing.assert_array_equal(y[...], ROWS)


@pytest.mark.parametrize("kernel", ["count", "write_back"])
def test_what_only_kernels_of_the_owner_can_do(client: fw.Cache, path: Path, kernel: str) -> None:
    with fw.open(path, "r+", cache=client) as x:
        fw.compile(KERNELS, "cpu")[kernel](x)
        with pytest.raises(SharedCacheError, match="only kernels in the process of the cache"):
            x.wait()
        assert x[0, 0] == ROWS[0, 0]
        with pytest.raises(SharedCacheError, match="no share tables"):
            fw.array.ShareTable(client, 8)
        assert x.in_place is None


def test_futures_of_a_client(client: fw.Cache, path: Path) -> None:
    with fw.open(path, "r+", cache=client) as x:
        reads = [x.gather_async(np.arange(i, 4000, 10)) for i in range(10)]
        for i, read in enumerate(reads):
            np.testing.assert_array_equal(read.result(), ROWS[i::10])

        stored = x.scatter_async(np.arange(100), np.full((100, 128), -1, "i4"))
        assert (x.gather_async(slice(0, 100)).result() == -1).all()
        stored.result()
        with pytest.raises(BoundsError):
            x.gather_async([4000])
        x.prefetch(range(1000, 3000))
        np.testing.assert_array_equal(x[1000:3000], ROWS[1000:3000])


def test_threads_of_a_client_look_at_the_owner_at_once(client: fw.Cache, path: Path) -> None:
    with fw.open(path, cache=client) as x, ThreadPoolExecutor(4) as threads:
        connection = x._attachment.asking.client.connection  # type: ignore[attr-defined]

        def look() -> None:
            for _ in range(5000):
                connection.check()

        for each in [threads.submit(look) for _ in range(4)]:
            each.result()


def test_small_calls_of_a_client_run_little_python(client: fw.Cache, path: Path) -> None:
    called: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    index = np.array([3, 1])
    with fw.open(path, cache=client) as x:
        x[1, 2], x.gather(index)
        sys.setprofile(note)
        try:
            x[1, 2], x.gather(index)
        finally:
            sys.setprofile(None)

    assert "check" not in called
    assert len(called) <= 20, called


def test_pipeline_of_a_client(client: fw.Cache, path: Path) -> None:
    batches = [np.arange(i, 4000, 40) for i in range(40)]
    with fw.open(path, cache=client) as x, fw.Pipeline(x, 100) as pipeline:
        for rows, ids in pipeline.iterate(batches):
            np.testing.assert_array_equal(rows, ROWS[ids])


def test_modules_of_torch_on_a_client(client: fw.Cache, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import flashwarp.torch as modules

    rows = np.random.default_rng(3).random((4000, 16), "f4")
    np.save(tmp_path / "x.npy", rows)
    ids = torch.randint(0, 4000, (20, 5))
    with fw.open(tmp_path / "x.npy", "r+", cache=client) as x:
        found = modules.Embedding(x)(ids).detach()
        np.testing.assert_array_equal(found, rows[ids.numpy()])
        sums = modules.EmbeddingBag(x, mode="sum")(ids).detach()
        np.testing.assert_allclose(sums, rows[ids.numpy()].sum(1), rtol=1e-5)
        batches = list(modules.Loader(x, 100))
        np.testing.assert_array_equal(torch.cat(batches), rows)
        with pytest.raises(SharedCacheError, match="train the table there"):
            modules.SGD(modules.Embedding(x))
        with pytest.raises(RouteError, match="the owner of the shared cache moves them"):
            fw.Pipeline(x, 100, workers=2)
        with pytest.raises(SharedCacheError, match="compiled elsewhere"):
            x.kernel_handle  # noqa: B018


def test_trace_of_a_client(client: fw.Cache, path: Path) -> None:
    with fw.open(path, cache=client) as x, record(x) as seen:
        x.gather([3, 1, 4])
    assert seen.trace().lines.tolist() == [0, 0, 0]


def test_bad_indices(client: fw.Cache, path: Path) -> None:
    with fw.open(path, "r+", cache=client) as x:
        with pytest.raises(BoundsError, match="4000"):
            x.gather([4000])
        with pytest.raises(BoundsError, match="-4001"):
            x.scatter([-4001], ROWS[:1])
        with pytest.raises(ArgumentError, match="broadcast"):
            x[5] = np.zeros(3)
        np.testing.assert_array_equal(x[...], ROWS)


def test_reader_in_the_way_of_a_writer(client: fw.Cache, path: Path) -> None:
    with fw.open(path, cache=client) as x:
        with pytest.raises(LockedError, match="open for reading in the shared cache"):
            fw.open(path, "r+", cache=client)
        np.testing.assert_array_equal(x[1], ROWS[1])
    with fw.open(path, "r+", cache=client) as x:
        x[1] = 5
    assert np.load(path)[1, 0] == 5


def test_owner_stores_to_what_clients_have_read(
    owner: fw.Cache, client: fw.Cache, path: Path
) -> None:
    with fw.open(path, cache=client) as x:
        assert x[0, 1] == 1
        with pytest.raises(LockedError):
            fw.open(path, "r+", cache=owner)

    with fw.open(path, "r+", cache=owner) as mine, fw.open(path, cache=client) as x:
        mine[0] = 4
        assert x[0, 1] == 4


def test_file_that_was_written_since(client: fw.Cache, path: Path) -> None:
    def write(value: int) -> None:
        np.lib.format.open_memmap(path, "r+")[0] = value
        os.utime(path)  # the time of a store to a mapping may show only when it is written back

    with fw.open(path, cache=client) as x:
        assert x[0, 1] == 1
    write(9)

    with fw.open(path, cache=client) as x:
        assert x[0, 1] == 9
        write(8)
        x.refresh()
        assert x[0, 1] == 8


def test_file_that_was_written_since_and_has_its_time_back(client: fw.Cache, path: Path) -> None:
    with fw.open(path, cache=client) as x:
        assert x[0, 1] == 1
    status = os.stat(path)
    with path.open("r+b") as file:
        np.lib.format.open_memmap(path, "r+")[0] = 9
        os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))

    with fw.open(path, cache=client) as x:
        assert x[0, 1] == 9


def test_array_that_the_owner_closes(owner: fw.Cache, client: fw.Cache, tmp_path: Path) -> None:
    """Another array gets no line numbers that a client reads by, or its rows would show there."""
    for name, value in (("a", 1), ("b", 2)):
        np.save(tmp_path / name, np.full((100, 1024), value, "i4"))
    mine = fw.open(tmp_path / "a.npy", cache=owner)
    theirs = fw.open(tmp_path / "a.npy", cache=client)
    assert (theirs[...] == 1).all()

    mine.close()
    with fw.open(tmp_path / "b.npy", cache=owner) as other:
        assert (other[...] == 2).all()
        begins = other._attachment.launcher.volume.line_begin
        with pytest.raises(ClosedError, match="is closed"):
            theirs[...]
    theirs.close()
    with fw.open(tmp_path / "b.npy", cache=owner) as other:  # the numbers are free again
        assert other._attachment.launcher.volume.line_begin < begins


def test_array_that_the_owner_closes_while_a_client_opens_it(
    owner: fw.Cache, client: fw.Cache, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = fw.open(path, cache=owner)
    take = Serving.take

    def take_and_close(serving: Serving, request: Message) -> object:
        export = take(serving, request)
        mine.close()
        return export

    monkeypatch.setattr(Serving, "take", take_and_close)
    with pytest.raises(ClosedError, match="has just closed its array"):
        fw.open(path, cache=client)


def test_closing_in_any_order(path: Path) -> None:
    owner = fw.Cache("1 MiB", shared="rows", device="cpu")
    client = fw.Cache(shared="rows")
    x = fw.open(path, cache=client)
    with pytest.raises(CacheError, match="1 arrays use the cache"):
        client.close()
    mine = fw.open(path, cache=owner)
    with pytest.raises(CacheError, match="1 arrays use the cache"):
        owner.close()
    np.testing.assert_array_equal(x[...], ROWS)
    mine.close()

    owner.close()
    with pytest.raises(OwnerLostError, match="has gone"):
        x.gather([1])
    x.close()
    x.close()
    client.close()
    client.close()
    with pytest.raises(ClosedError):
        fw.open(path, cache=client)


def test_owner_closes_while_the_array_of_a_client_is_being_closed(
    owner: fw.Cache, client: fw.Cache, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdraw, begun = TableEntry.withdraw, threading.Event()

    def slowly(*arguments: Any) -> None:
        begun.set()
        time.sleep(0.5)
        withdraw(*arguments)

    x = fw.open(path, "r+", cache=client)
    monkeypatch.setattr(TableEntry, "withdraw", slowly)
    closing = threading.Thread(target=x.close)
    closing.start()
    assert begun.wait(20)

    owner.close()

    closing.join(20)
    assert not closing.is_alive()
    assert owner.closed


def test_more_files_than_a_cache_carries(client: fw.Cache, tmp_path: Path) -> None:
    for i in range(70):
        np.save(tmp_path / f"{i}.npy", np.full(10, i))
        with fw.open(tmp_path / f"{i}.npy", cache=client) as x:
            assert x[3] == i


def test_strict_paths_are_the_owners(owner: fw.Cache, path: Path) -> None:
    with pytest.raises(RouteError), fw.open(path, cache=owner, strict="in_place"):
        pass
    with fw.open(path, cache=owner, strict="direct") as x:
        assert x[0, 1] == 1
