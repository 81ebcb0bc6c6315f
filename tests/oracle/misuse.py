"""Wrong calls and ends in any order: typed errors or right results, and right files afterwards."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import gc
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import flashwarp as fw
from flashwarp.errors import ControllerTimeout, DeviceTimeout, FlashwarpError
from oracle.arrays import choose
from oracle.model import Wrong
from oracle.steps import step
from oracle.world import Hand

Call = Callable[[], Any]

_WAIT_S = 30.0


class _Rude:
    """Raises whatever is asked of it."""

    def __index__(self) -> int:
        raise TypeError("no index")

    def __len__(self) -> int:
        raise TypeError("no length")

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        raise TypeError("no array")


# A driver reads at the address that it is given as a stream.
_WILD_ADDRESS = 1 << 31

_NASTY: list[Any] = [
    None, True, False, -1, 0, 1, 7, _WILD_ADDRESS, -(1 << 31), (1 << 63) - 1, 1 << 63, 1 << 70,
    -(1 << 70), 0.5, float("nan"), float("inf"), 1e300, 3 + 4j, "", "x", "4 KiB", "-4 KiB", "0",
    "cuda:99", "a\0b", "\ud800", b"", b"x", "x" * 5000, (), [], {}, [[]], [0], [[0, 1], [1, 2]],
    [1.0], ["a"], [None], (0, 0), (-1, 4), (1 << 40, 1 << 40), (0.5, 2), ("a", 2), [True, False],
    {0}, range(3), slice(None), slice(0, 1 << 70), slice("a", "b"), slice(None, None, 0), ...,
    object, object(), _Rude(), int, print, np.zeros(0), np.zeros((0, 4), "i8"), np.zeros(3, bool),
    np.ones(64, bool), np.array(3), np.array([1.5]), np.array(["a"]), np.array([None]),
    np.array([1 << 40]), np.array([-(1 << 62)]), np.array([-1]), np.zeros(4, ">i4"),
    np.arange(8)[::2], np.zeros((64, 16), "i4").T, np.zeros(1, "S7"),
    np.array(["2026-11-28"], "M8[s]"), np.array([3], "m8[D]"),
    np.zeros(4, [("a", "i4")]), np.ma.masked_array([1, 2], [True, False]), np.float64("nan"),
    np.int8(-1), np.zeros((1,) * 32, "i1"), memoryview(b"abcd"), bytearray(9), np.dtype("i4"),
    np.dtype("O"), np.dtype("V0"), np.dtype(("i4", (2,))), Path("/"), Path("/dev/null"),
    Path("/dev/zero"), Path("/absent/file"), fw.errors,
]  # fmt: skip


def _nasty(hand: Hand) -> Any:
    value = hand.random.choice(_NASTY)
    return value.copy() if isinstance(value, np.ndarray) else value


def _refused(hand: Hand, what: str, value: Any, call: Call) -> Any:
    """Call with nonsense; return the typed error, or what the call gives."""
    hand.say("{}  # n = {}", what, f"{type(value).__name__} {value!r:.60}".encode(errors="replace"))
    try:
        return call()
    except (DeviceTimeout, ControllerTimeout):
        raise
    except (FlashwarpError, TypeError, concurrent.futures.CancelledError, TimeoutError) as error:
        return error


@step(4, alone=True)
def call_wrongly(hand: Hand) -> None:
    """Call an array with nonsense. If it took it as rows to store, all rows are stored anew."""
    held = choose(hand)
    if held is None:
        return
    x, n, rows = held.array, _nasty(hand), hand.ids(held)
    stream = None if n is _WILD_ADDRESS else n
    values = hand.values(held, len(rows))
    reads: dict[str, Call] = {
        "gather(n)": lambda: x.gather(n),
        "gather(rows, out=n)": lambda: x.gather(rows, out=n),
        "gather(rows, stream=n)": lambda: x.gather(rows, stream=stream),
        "x[n]": lambda: x[n],
        "x[n, n]": lambda: x[n, n],
        "prefetch(n)": lambda: x.prefetch(n),
        "gather_async(n)": lambda: x.gather_async(n).result(),
        "gather_async(rows, n)": lambda: x.gather_async(rows, n).result(),
        "gather()": lambda: x.gather(),
        "gather(n, n, n, n)": lambda: x.gather(n, n, n, n),
        "ShareTable(x, n)": lambda: fw.array.ShareTable(x, n).close(),
    }
    stores: dict[str, Call] = {
        "scatter(n, values)": lambda: x.scatter(n, values),
        "scatter(rows, n)": lambda: x.scatter(rows, n),
        "x[n] = 0": lambda: x.__setitem__(n, 0),
        "x[rows] = n": lambda: x.__setitem__(rows, n),
        "scatter_async(n, values)": lambda: x.scatter_async(n, values).result(),
        "scatter_async(rows, n)": lambda: x.scatter_async(rows, n).result(),
    }
    # What a read without an order may see of such a store, nobody knows.
    name = hand.random.choice([*reads, *(() if held.model.loose else stores)])
    found = _refused(hand, name, n, (reads | stores)[name])
    everything = np.arange(held.count)
    if name in stores and not isinstance(found, BaseException):
        hand.settle_all(held)
        anew = hand.values(held, held.count)
        line = hand.say("{}[:] = values", held)
        x[:] = anew
        hand.stores(held, line, everything, anew)
    hand.check(held, held.model.read(everything), x[:])


_MAKERS: dict[str, Callable[[Any, Path], Any]] = {
    **{
        f"open({name}=n)": lambda n, path, name=name: fw.open(
            path, **{"device": "cpu", "cache": "16 KiB", name: n}
        )
        for name in ("mode", "dtype", "shape", "device", "cache", "line", "controller", "strict",
                     "o_direct")
    },
    **{
        f"Cache({name}=n)": lambda n, _, name=name: fw.Cache(
            **{"capacity": "64 KiB", "device": "cpu", name: n}
        )
        for name in ("capacity", "line", "ways", "policy", "device", "host_memory")
    },
    **{
        f"SoftwareController({name}=n)": lambda n, _, name=name: fw.nvme.SoftwareController(
            **{name: n}
        )
        for name in ("queue_pairs", "depth", "threads", "route", "model")
    },
    "Memory(n)": lambda n, _: fw.storage.Memory(n),
    "Memory(64, n)": lambda n, _: fw.storage.Memory(64, n),
    "File(n)": lambda n, _: fw.storage.File(n),
    "File(path, n)": lambda n, path: fw.storage.File(path, n),
    "File(path, 0, n)": lambda n, path: fw.storage.File(path, 0, n),
    "BlockDevice(n)": lambda n, _: fw.storage.BlockDevice(n),
    "Striped(n)": lambda n, _: fw.storage.Striped(n),
    "Striped([memory, n])": lambda n, _: fw.storage.Striped([fw.storage.Memory(8192), n]),
    "Striped([memory], n)": lambda n, _: fw.storage.Striped([fw.storage.Memory(8192)], n),
    "Replicated(n)": lambda n, _: fw.storage.Replicated(n),
    "Replicated([memory, n])": lambda n, _: fw.storage.Replicated([fw.storage.Memory(8192), n]),
    "CpuDevice(n)": lambda n, _: fw.device.CpuDevice(n),
    "Policy(n)": lambda n, _: fw.policy.Policy(n),
    "SSDModel(n)": lambda n, _: fw.nvme.SSDModel(n),
    "ShareTable(n)": lambda n, _: fw.array.ShareTable(n),
    "Array(n)": lambda n, _: fw.Array(n),
    "open(n)": lambda n, _: fw.open(n, device="cpu"),
    "open(memory, dtype=n)": lambda n, _: fw.open(
        fw.storage.Memory(8192), "r+", n, device="cpu"
    ),
    "create(path, 'i4', n)": lambda n, path: fw.create(
        path.with_name("made.npy"), "i4", n, device="cpu", cache="16 KiB"
    ),
}  # fmt: skip


@step(6, alone=True)
def make_wrongly(hand: Hand) -> None:
    """Make something of nonsense; a call that is refused leaves no file."""
    folder = hand.world.folders["memory"] / "wrong"
    folder.mkdir(exist_ok=True)
    np.save(folder / "rows.npy", np.arange(640).reshape(64, 10))
    name, n = hand.random.choice(list(_MAKERS)), _nasty(hand)
    made = _refused(hand, name, n, lambda: _MAKERS[name](n, folder / "rows.npy"))
    if hasattr(made, "close"):
        made.close()
    elif (folder / "made.npy").exists():
        raise Wrong(f"{name} was refused, and left a file")
    (folder / "made.npy").unlink(missing_ok=True)
    hand.world.checks += 1
    if (np.load(folder / "rows.npy") != np.arange(640).reshape(64, 10)).any():
        raise Wrong(f"{name} has changed a file")


class _Things:
    """Arrays on one cache, what they stand on and what stands on them, beside the right rows."""

    def __init__(self, hand: Hand, folder: Path) -> None:
        draw = hand.random
        self.device = fw.device.CpuDevice(draw.choice((1, 2)))
        self.cache = fw.Cache("16 KiB", line=512, device=draw.choice((self.device, None)))
        self.rows = {name: np.arange(1200).reshape(300, 4) for name in "ab"}
        self.arrays: list[Any] = []
        self.futures: list[Any] = []
        for name, rows in self.rows.items():
            np.save(folder / f"{name}.npy", rows)
            cache = self.cache if name == "a" or hand.odds(0.5) else "16 KiB"
            x = fw.open(folder / f"{name}.npy", "r+", device=self.device, line=512, cache=cache)
            self.arrays.append(x)
            ids = np.array(draw.sample(range(300), 40))
            values = draw.randrange(99) + np.arange(160).reshape(40, 4)
            self.futures += [x.scatter_async(ids, values), x.gather_async(ids)]
            rows[ids] = values
        self.table = fw.array.ShareTable(self.arrays[0], 64)
        self.storage = fw.storage.File(folder / "b.npy", lock=False)

    def close(self) -> None:
        """Close what holds stores, as a program does that is right."""
        for each in (*self.arrays, self.table, self.cache, self.device, self.storage):
            each.close()

    def lose(self) -> None:
        """Forget all of it, the arrays as parts of cycles, and wait for their ends."""
        for x in self.arrays:
            x.itself = x
        del x, self.arrays, self.cache, self.device, self.table, self.storage
        gc.collect()
        concurrent.futures.wait(self.futures, _WAIT_S)
        self.futures.clear()
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "flashwarp closing":
                thread.join(_WAIT_S)


def _use_closed(hand: Hand, thing: Any) -> None:
    """Close a thing twice, unless others stand on it, and use it; closed arrays do nothing."""
    kind = type(thing).__name__
    for name in ("close", "close", "__repr__"):
        _refused(hand, f"{kind}.{name}()", thing, getattr(thing, name))
    if not isinstance(thing, fw.Array):
        for name in ("describe", "native", "capacity", "memory_info"):
            look = functools.partial(getattr, thing, name, None)
            _refused(hand, f"{kind}.{name}", thing, look)
        return
    uses: dict[str, Call] = {
        "gather": lambda: thing.gather([0]), "flush": thing.flush, "stats": lambda: thing.stats
    }  # fmt: skip
    for name, use in uses.items():
        if not isinstance(_refused(hand, f"{kind}.{name}", thing, use), FlashwarpError):
            raise Wrong(f"{name} of a closed array works")


@step(3, alone=True)
def end_in_any_order(hand: Hand) -> None:
    """Close things in any order, twice or never, with calls in flight; and use what is closed."""
    folder = Path(tempfile.mkdtemp(prefix="ends-", dir=hand.world.folders["memory"]))
    things = _Things(hand, folder)
    every = [*things.arrays, things.cache, things.device, things.table, things.storage]
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        thing = hand.random.choice(every)
        _refused(hand, duplicate.__name__, thing, functools.partial(duplicate, thing))
    for thing in hand.random.sample(every, hand.random.choice((0, 3, len(every)))):
        _use_closed(hand, thing)
    if hand.odds(0.5):
        things.close()
    del every, thing
    things.lose()
    hand.world.checks += 1
    for name, rows in things.rows.items():
        if (np.load(folder / f"{name}.npy") != rows).any():
            raise Wrong(f"{name}.npy does not hold what was stored")
    left = [path for path in _open_files() if path.startswith(str(folder))]
    if left:
        raise Wrong(f"still open: {left}")
    shutil.rmtree(folder)


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            yield os.readlink(f"/proc/self/fd/{number}")
