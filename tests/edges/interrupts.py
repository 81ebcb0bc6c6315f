"""Interrupt the calls of an array at any of their lines, or by a signal at any time.

What must hold afterwards: the array is usable or closed and never between, `close` works, twice, a
neighbour on a shared cache goes on in another thread, what was flushed is in the file, and no
thread, descriptor or mapping of the files stays. Runs in a child of the nursery.

`programs` interrupts whole programs, with checkpointers, pipelines, loaders, files, images and
shared caches, at random times. Their `with` statements must end, and what was durable must
be there still.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import flashwarp as fw
from flashwarp.checkpoint import straight
from flashwarp.file.gvdk import Gvdk

ROOT = str(Path(fw.__file__).parent)
LIMIT_S = 10.0
ROWS = np.arange(64 * 16, dtype="i4").reshape(64, 16)
INDEX = np.array([3, 50, 7, 40])


class Wrong(Exception):
    """What must hold does not."""


@dataclass
class Scene:
    """An array whose first rows are flushed, and a neighbour where it shares its cache."""

    array: fw.Array | None = None
    cache: fw.Cache | None = None
    neighbour: fw.Array | None = None
    made: Any = None


def scene(shared: bool, with_array: bool) -> Scene:
    for name in ("rows.npy", "other.npy"):
        np.save(name, ROWS)
    with contextlib.suppress(FileNotFoundError):
        os.unlink("made.npy")
    here = Scene()
    if shared:
        here.cache = fw.Cache("16 KiB", line=512, device="cpu")
        here.neighbour = fw.open("other.npy", "r+", cache=here.cache)
        here.neighbour[8:16] = -8
    if with_array:
        here.array = open_rows(here)
        here.array[60:] = -1
        here.array.flush()
        here.array[54:56] = -1
    return here


def open_rows(here: Scene) -> fw.Array:
    if here.cache is not None:
        return fw.open("rows.npy", "r+", cache=here.cache)
    return fw.open("rows.npy", "r+", device="cpu", cache="16 KiB", line=512)


def make(here: Scene, action: Callable[[], Any]) -> None:
    here.made = action()


def use(name: str, *arguments: Any) -> Callable[[Scene], object]:
    return lambda here: getattr(here.array, name)(*arguments)


def use_async(name: str, *arguments: Any) -> Callable[[Scene], object]:
    return lambda here: getattr(here.array, name)(*arguments).result()


# Whether it needs an array, and the call. Each is tried with a cache of its own and a shared one.
OPERATIONS: dict[str, tuple[bool, Callable[[Scene], object]]] = {
    "open": (False, lambda here: make(here, lambda: open_rows(here))),
    "create": (
        False,
        lambda here: make(
            here,
            lambda: fw.create("made.npy", "i4", (64, 16), device="cpu", cache="16 KiB"),
        ),
    ),
    "Cache": (False, lambda here: make(here, lambda: fw.Cache("16 KiB", device="cpu"))),
    "close": (True, use("close")),
    "gather": (True, use("gather", INDEX)),
    "scatter": (True, use("scatter", INDEX + 8, np.full((4, 16), -1, "i4"))),
    "flush": (True, use("flush")),
    "drop_cache": (True, use("drop_cache")),
    "__getitem__": (True, use("__getitem__", slice(10, 50, 3))),
    "__setitem__": (True, use("__setitem__", slice(20, 24), -1)),
    "gather_async": (True, use_async("gather_async", INDEX)),
    "scatter_async": (True, use_async("scatter_async", slice(20, 24), -1)),
}


class AtLine:
    """Raise KeyboardInterrupt at the n-th line that runs inside of flashwarp; 0: count them."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.count = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.place:
                name = Path(frame.f_code.co_filename).name
                self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self

    def run(self, action: Callable[[], object]) -> None:
        sys.settrace(self)
        try:
            action()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)


def check(here: Scene) -> None:
    """Raise Wrong unless all that must hold does; closes everything."""
    arrays = [x for x in (here.array, here.made) if isinstance(x, fw.Array)]
    for x in arrays:
        if not x.closed:
            try:
                got = x.gather(INDEX)
            except fw.errors.ClosedError:
                pass
            else:
                if x is here.array and not (got == ROWS[INDEX]).all():
                    raise Wrong(f"wrong rows: {got[:, 0]}")
    if here.neighbour is not None:
        in_thread(lambda: use_neighbour(here.neighbour))
    for x in arrays:
        x.close()
        x.close()
        if not x.closed:
            raise Wrong("not closed after close()")
    if here.neighbour is not None:
        here.neighbour.close()
    for cache in (here.cache, here.made):
        if isinstance(cache, fw.Cache):
            cache.close()
    rows, other = np.load("rows.npy"), np.load("other.npy")
    if here.array is not None:
        if (rows[60:] != -1).any():
            raise Wrong("what was flushed is lost")
        if (rows[54:56] != -1).any():
            raise Wrong("what was stored before is lost")
    if not ((rows == ROWS) | (rows == -1)).all():
        raise Wrong("the file is damaged")
    if here.neighbour is not None and (other[8:16] != -8).any():
        raise Wrong("the neighbour's stores are lost")


def use_neighbour(x: fw.Array | None) -> None:
    assert x is not None
    if not (x.gather(INDEX + 13) == ROWS[INDEX + 13]).all() or x[9, 0] != -8:
        raise Wrong("wrong rows of the neighbour")
    x.flush()


def in_thread(action: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if thread.is_alive():
        raise Wrong("what follows hangs")
    if failed:
        raise failed[0]


@dataclass(frozen=True)
class Left:
    """What a process holds that an interrupted call may have left behind."""

    threads: int
    descriptors: int
    mappings: int

    @classmethod
    def now(cls) -> Left:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return cls(
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            sum(".npy" in line or "io_uring" in line for line in maps.splitlines()),
        )

    @classmethod
    def settled(cls) -> Left:
        """Look once the closing of what is lost has ended."""
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "flashwarp closing":
                thread.join(LIMIT_S)
        return cls.now()

    def check(self) -> None:
        """Raise Wrong if more is left than before."""
        end = time.monotonic() + LIMIT_S
        while True:
            now = Left.now()
            within = (
                now.threads <= self.threads
                and now.descriptors <= self.descriptors
                and now.mappings <= self.mappings
            )
            if within:
                return
            if time.monotonic() > end:
                raise Wrong(f"left behind: {now}, before: {self}")
            time.sleep(0.02)


def attempt(name: str, shared: bool, interrupt: Callable[[Callable[[], object]], object]) -> None:
    """Interrupt one call, and check what must hold; KeyboardInterrupt comes from nowhere else."""
    with_array, action = OPERATIONS[name]
    here = scene(shared, with_array)
    interrupt(lambda: action(here))
    in_thread(lambda: check(here))


def steady(name: str, shared: bool) -> tuple[int, Left]:
    """Count the lines of a call, and what a process holds once it has been made."""
    tracer = AtLine(0)
    for _ in range(2):
        tracer = AtLine(0)
        attempt(name, shared, tracer.run)
    time.sleep(0.3)  # threads that linger for another call
    return tracer.count, Left.now()


def main(action: Callable[[], None]) -> None:
    """Run, and end without a look at what failures have left open."""
    code = 1
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def at_lines(name: str, shared: bool, seed: int, first: int, seconds: float) -> None:
    """Interrupt at lines in a drawn order, from the `first` of these on; print what fails."""
    lines, left = steady(name, shared)
    order = list(range(1, lines + 1))
    random.Random(seed).shuffle(order)
    end = time.monotonic() + seconds
    tried = 0
    for turn, place in enumerate(order[first:], first):
        tracer = AtLine(place)
        print(f"AT {turn} line {place}", flush=True)
        try:
            attempt(name, shared, tracer.run)
            left.check()
        except BaseException as error:
            print(f"WRONG {tracer.where}: {type(error).__name__}: {error}", flush=True)
            left = Left.now()
        tried += 1
        if time.monotonic() > end:
            break
    print(f"TRIED {tried} of {lines}", flush=True)


def at_times(seed: int, seconds: float) -> None:
    """Interrupt calls by a signal whose handler raises, at random times; print what fails."""
    draw = random.Random(seed)
    kinds = [(name, shared) for name in OPERATIONS for shared in (False, True)]
    known = {}
    tried = 0
    end = time.monotonic() + seconds

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupted)
    while time.monotonic() < end:
        name, shared = kind = draw.choice(kinds)
        if kind not in known:
            steady(name, shared)
            start = time.monotonic()
            attempt(name, shared, lambda action: action())
            known[kind] = (time.monotonic() - start) / 2, Left.now()
        took, left = known[kind]
        delay = max(1e-6, draw.uniform(0, took))
        print(f"AT {name} {shared} {delay}", flush=True)

        def interrupt(action: Callable[[], object], delay: float = delay) -> None:
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    action()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)

        try:
            attempt(name, shared, interrupt)
            left.check()
        except BaseException as error:
            print(f"WRONG {name} {shared} {delay}: {type(error).__name__}: {error}", flush=True)
            known.clear()
        tried += 1
    print(f"TRIED {tried}", flush=True)


# Whole programs.


def then(run: Callable[[], None], examine: Callable[[], None]) -> Callable[[], None]:
    """Make a program that examines, where no signal comes, what the run has left."""

    def whole() -> None:
        try:
            run()
        finally:
            in_thread(examine)

    return whole


def use_checkpointer(draw: random.Random) -> Callable[[], None]:
    """Save, restore and discard versions; each has its number as contents."""
    options: dict[str, Any] = {"timeout_s": LIMIT_S, "discard_consumed": draw.random() < 0.3}
    caches = draw.choice([("64 KiB", "256 KiB"), (0, "64 KiB"), (0, 0)])
    size = draw.choice([100, 3000, 300_000])
    straight.LEAST_BYTES = draw.choice([0, straight.LEAST_BYTES])
    durable: set[int] = set()
    gone: set[int] = set()

    def run() -> None:
        state = np.zeros(size)
        with fw.Checkpointer("versions", "cpu", *caches, "remote", config=options) as it:
            it.protect("state", state)
            for version in range(6):
                state[:] = version
                saved = it.checkpoint(version, overlap=draw.random() < 0.3)
                it.wait_staged()
                it.prefetch_enqueue(draw.randrange(version + 1))
                if draw.random() < 0.3:
                    durable.add(saved.result(LIMIT_S))
                if draw.random() < 0.3:
                    it.versions(), it.stats, it.explain()
                if draw.random() < 0.2:
                    gone.add(version)
                    it.discard(version)
            for version in it.versions():
                gone.update([version] if options["discard_consumed"] else [])
                it.restart(version)
            it.wait(tier=draw.choice(["ssd", "remote"]))

    def examine() -> None:
        with fw.Checkpointer("versions", "cpu", 0, 0, "remote", config=options) as it:
            there = set(it.versions())
            if not durable - gone <= there:
                raise Wrong(f"lost versions {durable - gone - there}")
            for version in there:
                if (it.restart(version)["state"] != version).any():
                    raise Wrong(f"version {version} is another one")

    return then(run, examine)


def use_pipeline(draw: random.Random) -> Callable[[], None]:
    np.save("rows.npy", ROWS)
    workers = draw.choice([None, 1])
    writes = draw.random() < 0.5

    def run() -> None:
        with (
            fw.open("rows.npy", "r+", device="cpu", cache="16 KiB", line=512) as x,
            fw.Pipeline(x, 8, workers=workers, library="numpy", timeout_s=LIMIT_S) as pipeline,
        ):
            for _ in range(6):
                ids = np.array(draw.sample(range(64), 8))
                pipeline.prefetch(ids)
                if not (pipeline.take() == ROWS[ids]).all():
                    raise Wrong("wrong rows of a pipeline")
                if writes:
                    pipeline.write_back(ids, ROWS[ids])
                    pipeline.reclaim()

    return run


def use_loader(draw: random.Random) -> Callable[[], None]:
    import flashwarp.torch  # an extra

    np.save("rows.npy", ROWS)

    def run() -> None:
        with fw.open("rows.npy", device="cpu", cache="16 KiB", line=512) as x:
            for _ in range(2):
                for batch in flashwarp.torch.Loader(x, 8, shuffle=True, seed=draw.randrange(9)):
                    rows = np.asarray(batch[0] if isinstance(batch, tuple) else batch)
                    if not (rows == ROWS[rows[:, 0] // 16]).all():
                        raise Wrong("wrong rows of a loader")

    return run


def use_file(draw: random.Random) -> Callable[[], None]:
    def run() -> None:
        with fw.File.create("log.bin", 0, capacity="64 KiB", device="cpu", overwrite=True) as file:
            for i in range(8):
                file.append(np.full(100, i, "u1"))
                if draw.random() < 0.5:
                    file.flush()
                at = 100 * draw.randrange(i + 1)
                if len(set(bytes(file.read(at, 100)))) != 1:
                    raise Wrong("wrong bytes of a file")

    return run


def use_image(draw: random.Random) -> Callable[[], None]:
    """Store to an image and sync it; block i has one byte, which only grows."""
    preallocate, blocks = draw.random() < 0.5, 16
    synced = np.zeros(blocks, "u1")

    def run() -> None:
        options: dict[str, Any] = {"format": "gvdk", "preallocate": preallocate, "overwrite": True}
        with fw.File.create("it.gvdk", blocks << 12, cache="16 KiB", device="cpu", **options) as it:
            now = synced.copy()
            for value in range(1, 12):
                block = draw.randrange(blocks)
                it.write_from(np.full(4096, value, "u1"), block << 12)
                now[block] = value
                if draw.random() < 0.5:
                    it.flush()
                    synced[:] = now

    def examine() -> None:
        if not Path("it.gvdk").exists():
            return
        with Gvdk("it.gvdk", writable=True) as image:
            named = image.recovered.ranges if image.recovered is not None else ()
            for block in range(blocks):
                begin, end = block << 12, (block + 1) << 12
                if any(first < end and last > begin for first, last in named):
                    continue
                content = image.read(begin, 4096)
                if content != content[:1] * 4096 or content[0] < synced[block]:
                    raise Wrong(f"block {block} has not the bytes of the last sync")

    return then(run, examine)


def use_shared(draw: random.Random) -> Callable[[], None]:
    np.save("rows.npy", ROWS)
    os.environ["FLASHWARP_RUNTIME_DIR"] = str(Path("run").absolute())

    def run() -> None:
        with (
            fw.Cache("64 KiB", shared="rows", device="cpu", line=512),
            fw.Cache(shared="rows") as client,
            fw.open("rows.npy", "r+", cache=client) as x,
        ):
            for _ in range(4):
                ids = np.array(draw.sample(range(64), 8))
                if not (x.gather(ids) == ROWS[ids]).all():
                    raise Wrong("wrong rows of a shared cache")
                x[ids] = ROWS[ids]
                x.flush()

    return run


PROGRAMS: dict[str, Callable[[random.Random], Callable[[], None]]] = {
    "checkpointer": use_checkpointer,
    "pipeline": use_pipeline,
    "loader": use_loader,
    "file": use_file,
    "image": use_image,
    "shared": use_shared,
}


def interrupted_at(delay: float, program: Callable[[], None]) -> float:
    """Run a program until it ends, or a signal comes; return the seconds that it took."""
    begin = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            program()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return time.monotonic() - begin


def programs(name: str, seed: int, first: int, count: int) -> None:
    """Interrupt programs of a kind, each at a time of its run that is drawn; print what fails."""

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupted)
    took = 0.0
    for number in range(-2, count):
        draw = random.Random(f"{seed} {name} {first + number}")
        folder = Path(f"{number + 2}").absolute()
        folder.mkdir()
        with contextlib.chdir(folder):
            delay = 1e-6 + draw.random() * took if number >= 0 else 0.0
            print(f"AT {first + number} {name} {delay}", flush=True)
            before, seconds = Left.now(), 0.0
            try:
                seconds = interrupted_at(delay, PROGRAMS[name](draw))
                if seconds > took + LIMIT_S / 2:
                    raise Wrong(f"it took {seconds:g} s to end")
                if number >= 0:
                    before.check()
            except BaseException as error:
                print(f"WRONG {first + number} {name} {delay}: {error!r}", flush=True)
            # The second run, without a signal, is warm.
            took = seconds if number == -1 else took
        shutil.rmtree(folder)
    print(f"TRIED {count}", flush=True)


warnings.simplefilter("ignore", ResourceWarning)
