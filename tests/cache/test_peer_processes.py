"""A cache that GPUs of several processes share: ranks with a GPU each, of `support.fake_cuda`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp.device import CudaDevice
from flashwarp.errors import CacheError, ControllerTimeout, OwnerLostError, SharedCacheError
from support import fake_cuda, host_kernels
from support.fake_cuda import fake

ROWS, WIDTH = 600, 256
NAMES = ["cuda:0", "cuda:1", "cuda:2"]
LIMIT_S = 60.0


def content() -> np.ndarray:
    return np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)


def folder() -> Path:
    return Path(os.environ["RANKS"])


def rank() -> int:
    return int(os.environ["RANK"])


def meet(what: str, count: int | None = None) -> None:
    """Wait until so many ranks, by default all, have come to this place."""
    count = count or int(os.environ["COUNT"])
    (folder() / f"{what} {rank()}").touch()
    end = time.monotonic() + LIMIT_S
    while len(list(folder().glob(f"{what} *"))) < count:
        assert time.monotonic() < end, f"no other rank has come to {what}"
        time.sleep(0.01)


def cache(name: str = "ranks", capacity: str = "1 MiB", **how: object) -> fw.Cache:
    """Open the cache on this rank's GPU; one GPU for all ranks has the memory of three."""
    fake().fake_devices(3, 1)
    device = host_kernels.gpu()
    if "ONE_GPU" in os.environ:
        return fw.Cache("3 MiB", peers=NAMES[:1], shared=name, device=device, **how)
    return fw.Cache(capacity, peers=NAMES, shared=name, device=CudaDevice(rank()), **how)


def opened(on: fw.Cache, name: str = "a.npy") -> fw.Array:
    device = on._peers.devices[0]
    return fw.open(folder() / name, device=device, cache=on)


def refusal(on: fw.Cache, kind: type[Exception]) -> str:
    """Open arrays until this is refused, because a rank has died; returns what is said."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            opened(on).close()
        except kind as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("nobody has seen that a rank died")


def each_line_is_read_once() -> None:
    with cache() as mine:
        x = opened(mine)
        meet("open")
        rng = np.random.default_rng(rank())
        for _ in range(5):
            index = rng.integers(0, ROWS, 400)
            assert (x.gather(index) == content()[index]).all()
        assert (x[:] == content()).all()
        (folder() / f"misses.{rank()}").write_text(str(x.stats.misses))
        meet("read")
        misses = [int(each.read_text()) for each in folder().glob("misses.*")]
        assert sum(misses) == 150, f"no line is read twice: {misses}"
        assert x.stats.evictions == 0
        # Whoever made the cache leaves first. The others keep the memory, and what they have open.
        made = mine._peers._listener is not None
        if not made:
            meet("others", 2)
            while not (folder() / "left").exists():
                time.sleep(0.01)
            assert (x.gather(np.arange(100)) == content()[:100]).all()
            with pytest.raises(OwnerLostError):
                opened(mine)
        x.close()
    if made:
        (folder() / "left").touch()
    meet("closed")
    with cache() as again:  # one of them makes it anew
        with opened(again) as x:
            assert (x[10:20] == content()[10:20]).all()
        meet("again")


def more_lines_than_the_cache_holds() -> None:
    with cache(capacity="64 KiB", line=512, policy="sieve") as mine, opened(mine) as x:
        meet("open")
        rng = np.random.default_rng(rank())
        for _ in range(40):
            index = rng.integers(0, ROWS, 60)
            assert (x.gather(index) == content()[index]).all()
        assert x.stats.evictions > 0
        meet("read")


def files_have_their_own_lines() -> None:
    """Lines of a file are forgotten when its last array closes, whichever process has it."""
    with cache() as mine:
        for turn in range(3):
            if rank() == 0:
                np.save(folder() / "next.npy", content() + turn)
                os.replace(folder() / "next.npy", folder() / "b.npy")
            meet(f"written {turn}")
            with opened(mine, "b.npy") as x, opened(mine) as y:
                assert (x[:] == content() + turn).all()
                assert (y[::7] == content()[::7]).all()
            meet(f"closed {turn}")
        if mine._peers._listener is not None:
            assert not mine._peers._lines._taken
        meet("end")


def differences_are_said() -> None:
    if rank() == 0:
        with cache(), fw.Cache("1 MiB", shared="plain", device=CudaDevice(0)):
            meet("made")
            meet("tried")
        return
    meet("made")
    for how, match in (
        ({"policy": "lru"}, "policy is clock .* there and lru .* here"),
        ({"line": 512}, "line is 4096 there and 512 here"),
        ({"ways": 8}, "ways is 4 there and 8 here"),
        ({"capacity": "2 MiB"}, "sets is .* there and .* here"),
        ({"name": "plain"}, "is none of several GPUs"),
    ):
        with pytest.raises(SharedCacheError, match=match):
            cache(**how)
    with pytest.raises(SharedCacheError, match="gpus is"):
        fw.Cache("1 MiB", peers=NAMES[:2], shared="ranks", device=CudaDevice(rank()))
    with pytest.raises(SharedCacheError, match="several GPUs, which share it: give peers="):
        fw.Cache(shared="ranks", device=CudaDevice(rank()))
    with pytest.raises(CacheError, match="none of the peers"):
        fw.Cache("1 MiB", peers=NAMES[:2], shared="other", device=CudaDevice(2))
    meet("tried")


def a_rank_that_dies_is_said() -> None:
    if rank() == 2:  # the last that comes, so it has not made the cache
        meet("made")
    mine = cache()
    if rank() != 2:
        meet("made")
    x = opened(mine)
    assert (x[:50] == content()[:50]).all()
    meet("open")
    if rank() == 2:
        (folder() / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    said = refusal(mine, SharedCacheError)
    assert f"process {(folder() / 'pid').read_text()} ended" in said
    assert (x.gather(np.arange(ROWS)) == content()).all()
    meet("said", 2)
    x.close()
    mine.close()


def the_others_outlive_who_made_it() -> None:
    if rank() != 0:
        meet("made")
    mine = cache()
    if rank() == 0:
        meet("made")
    x = opened(mine)
    assert (x[:50] == content()[:50]).all()
    meet("open")
    if rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    assert "has gone" in refusal(mine, OwnerLostError)
    assert (x.gather(np.arange(ROWS)) == content()).all()
    x.close()
    mine.close()
    meet("closed", 2)
    with cache() as again, opened(again) as x:
        assert (x[:] == content()).all()
        meet("again", 2)


@contextlib.contextmanager
def or_another_process_is_named() -> Iterator[None]:
    try:
        yield
    except ControllerTimeout as error:
        if "another process of the cache " not in str(error):
            raise


def kills_leave_nothing_wrong() -> None:
    """What a killed rank was fetching may stay locked: who needs it gets an error in time."""
    seed = int(os.environ["SEED"])
    if rank() != 0:
        meet("made")
    mine = cache(capacity="16 KiB", line=512)
    if rank() == 0:
        meet("made")
    x = opened(mine)
    rng = np.random.default_rng(2 * seed + rank())
    meet("open")
    if rank() != 0:
        after = rng.uniform(0.001, 0.05)
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            x.gather(rng.integers(0, ROWS, 100))
    end = time.monotonic() + LIMIT_S
    while not mine._peers._lines._died:
        index = rng.integers(0, ROWS, 100)
        with or_another_process_is_named():
            assert (x.gather(index) == content()[index]).all()
        assert time.monotonic() < end, "nobody has said that a rank died"
    for _ in range(3):
        index = rng.integers(0, ROWS, 100)
        with or_another_process_is_named():
            assert (x.gather(index) == content()[index]).all()
    with or_another_process_is_named():
        x.close()
    mine.close()


def a_lost_cache_gives_its_name_back() -> None:
    """Also in a cycle; a child of its process, however it ends, takes nothing away."""
    mine = cache()
    x = opened(mine)
    for at_exit in (False, True):
        child = os.fork()
        if child == 0:
            mine.close()
            if at_exit:
                atexit._run_exitfuncs()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    with cache() as other, opened(other) as y:
        assert other._peers._listener is None, "the name has gone"
        assert (y[:] == content()).all()
        assert y.stats.misses == 150
        assert (x[:] == content()).all()
        assert x.stats.misses == 0
    x.close()
    mine.itself = mine
    del x, mine
    gc.collect()
    with cache() as again:
        assert again._peers._listener is not None, "the lost cache has kept its name"


@pytest.mark.parametrize(
    ("check", "count", "dies"),
    [
        (each_line_is_read_once, 3, None),
        (more_lines_than_the_cache_holds, 3, None),
        (files_have_their_own_lines, 3, None),
        (differences_are_said, 2, None),
        (a_lost_cache_gives_its_name_back, 1, None),
        (a_rank_that_dies_is_said, 3, 2),
        (the_others_outlive_who_made_it, 3, 0),
    ],
)
def test_ranks(check: Callable[[], None], count: int, dies: int | None, tmp_path: Path) -> None:
    _run(check, count, dies, tmp_path)


def test_processes_of_one_gpu(tmp_path: Path) -> None:
    _run(each_line_is_read_once, 3, None, tmp_path, ONE_GPU="1")


KILLS = int(os.environ.get("FLASHWARP_PEER_KILLS", "4"))


@pytest.mark.parametrize("seed", range(KILLS))
def test_kills(seed: int, tmp_path: Path) -> None:
    _run(kills_leave_nothing_wrong, 2, 1, tmp_path, SEED=str(seed), FLASHWARP_TIMEOUT_S="4")


def _run(
    check: Callable[[], None], count: int, dies: int | None, tmp_path: Path, **more: str
) -> None:
    np.save(tmp_path / "a.npy", content())
    environment = (
        fake_cuda.build(tmp_path)
        | more
        | {
            "FLASHWARP_RUNTIME_DIR": str(tmp_path / "names"),
            "RANKS": str(tmp_path),
            "COUNT": str(count),
        }
    )
    problems: dict[int, str] = {}

    def run(number: int) -> None:
        try:
            fake_cuda.run(check, environment | {"RANK": str(number)})
        except AssertionError as error:
            problems[number] = str(error)

    ranks = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if dies is not None:
        assert "the process died" in problems.pop(dies)
    assert not problems, "\n".join(f"rank {number}: {text}" for number, text in problems.items())
