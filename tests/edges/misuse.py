"""Use every public object in every order, wrongly as often as not, beside a model of the files.

    python tests/edges/misuse.py --sequences 100000 --workers 2
    python tests/edges/misuse.py --replay SEED

A sequence is some dozens of steps on arrays, caches, controllers, storages, devices, futures and
share tables: made, used, given nonsense, copied, pickled, forked under, closed in any order and
used afterwards. Each call must give the right result, or raise an error of the library, or
TypeError for an argument of a wrong type; what a time limit ended counts as a hang. In the end
everything is closed, or just lost, and the files must be what the model says.

A step draws from a stream of its own, seeded by sequence and step, so that steps can be left out
of a replay: a sequence that fails is shrunk that way. Sequences run in child processes, so that
one that crashes or hangs is found by its seed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import copy
import faulthandler
import gc
import itertools
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 24
HANG_S = 60.0
"""A child that ends no sequence for so long hangs. Commands end before, after `TIMEOUT_S`."""
TIMEOUT_S = 8
SHRINK_TRIES = 60
FAILURES_MAX = 5


class Broken(AssertionError):
    """Something that must not happen has happened."""


@dataclass
class Table:
    """What an array's storage must hold."""

    name: str
    rows: Any
    paths: list[Path]
    layout: str | None = None
    memory: Any = None
    unsure: Any = None  # rows that nobody can tell
    pending: list[tuple[Any, Any]] = field(default_factory=list)  # futures, and rows they store
    readers: list[Any] = field(default_factory=list)
    writers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unsure = np.zeros(len(self.rows), bool)

    def forget(self) -> None:
        self.unsure[:] = True

    def store(self, index: Any, values: Any) -> None:
        self.rows[index] = values
        self.unsure[index] = self.in_flight()[index]

    def in_flight(self) -> Any:
        mask = np.zeros(len(self.rows), bool)
        for _, index in self.pending:
            mask[index] = True
        return mask

    def checkable(self) -> Any:
        return ~(self.unsure | self.in_flight())


@dataclass(eq=False)
class Held:
    """An open array and its table; a stale one may show what was there before."""

    array: Any
    table: Table
    stale: bool = False


class Sequence:
    """One sequence of steps."""

    def __init__(self, seed: int, folder: Path, log: Callable[[str], None]) -> None:
        self.seed = seed
        self.folder = folder
        self.log = log
        self.arrays: list[Held] = []
        self.caches: list[Any] = []
        self.controllers: list[Any] = []
        self.storages: list[tuple[Any, Table | None]] = []
        self.devices: list[Any] = []
        self.futures: list[Any] = []
        self.others: list[Any] = []  # share tables, explanations, streams: whatever else there is
        self.tables = list(_tables(folder))
        self.random = random.Random(seed)

    def run(self, wanted: set[int] | None = None) -> None:
        for number in range(STEPS):
            if wanted is not None and number not in wanted:
                continue
            self.random = random.Random(f"{self.seed}/{number}")
            step = self.random.choices(_STEPS, _WEIGHTS)[0]
            self.log(f"{number}: {step.__name__}")
            if self.random.random() < 0.05:
                self._in_thread(step)
            else:
                step(self)
        self.random = random.Random(f"{self.seed}/end")
        self._end()

    # Calls.

    def call(self, what: str, action: Callable[[], Any], *more: type[BaseException]) -> Any:
        """Call; returns the error where it is one of those that are allowed."""
        self.log(f"   {what}")
        start = time.monotonic()
        try:
            return action()
        except (fw.errors.DeviceTimeout, fw.errors.ControllerTimeout) as error:
            raise Broken(f"{what}: waited in vain: {error!r}") from error
        except (fw.errors.FlashwarpError, *more) as error:
            self.log(f"      {type(error).__name__}: {str(error)[:100]}")
            return _Refused(error)
        except Broken:
            raise
        except BaseException as error:
            raise Broken(f"{what}: raw {type(error).__name__}: {error}") from error
        finally:
            # A million rows take seconds on a busy machine; a wait would have ended before.
            if time.monotonic() - start > 3 * TIMEOUT_S:
                raise Broken(f"{what}: took {time.monotonic() - start:.1f} s")

    def must(self, what: str, action: Callable[[], Any], *unless: Any) -> Any:
        """Call what has to work, unless one of these has been closed meanwhile."""
        result = self.call(what, action)
        if isinstance(result, _Refused) and not any(each.closed for each in unless):
            raise Broken(f"{what}: {result.error!r}")
        return result

    def _in_thread(self, step: Callable[[Sequence], None]) -> None:
        failed: list[BaseException] = []

        def work() -> None:
            try:
                step(self)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(HANG_S / 2)
        if thread.is_alive():
            raise Broken("a step in a thread did not end")
        if failed:
            raise failed[0]

    # What there is to choose from.

    def odds(self, chance: float) -> bool:
        return self.random.random() < chance

    def pick(self, values: Iterable[Any]) -> Any:
        values = list(values)
        return self.random.choice(values) if values else None

    def nasty(self) -> Any:
        make = self.random.choice(_NASTY)
        value = make() if isinstance(make, type(lambda: 0)) else make
        with contextlib.suppress(Exception):
            self.log(f"      nasty {value!r:.60}")
        return value

    def index(self, table: Table) -> Any:
        n = len(table.rows)
        count = self.random.randint(1, min(n, 40))
        return np.array(self.random.sample(range(n), count), self.pick(["i8", "i4", "u2"]))

    def values(self, table: Table, count: int) -> Any:
        low = self.random.randint(-9, 9)
        block = np.arange(count * table.rows[0].size).reshape(count, *table.rows.shape[1:])
        return (block + low).astype(table.rows.dtype)

    def device(self) -> Any:
        if self.devices and self.odds(0.7):
            return self.pick(self.devices)
        return "cpu"

    # Steps that make things.

    def open(self) -> None:
        table = self.pick(t for t in self.tables if t.memory is None)
        mode = self.pick(["r", "r", "r+"])
        options: dict[str, Any] = {"device": self.device(), "line": 512, "cache": "16 KiB"}
        path: Any = table.paths[0]
        if table.layout is not None:
            path = fw.storage.Replicated(table.paths)
        if table.layout == "stripe":
            path = fw.storage.Striped(table.paths, 4096)
            options |= {"dtype": table.rows.dtype, "shape": table.rows.shape}
        if self.odds(0.4) and self.caches:
            options["cache"] = self.pick(self.caches)
            del options["line"], options["device"]
        if self.odds(0.2) and self.controllers:
            options["controller"] = self.pick(self.controllers)
        if self.odds(0.2):
            options["o_direct"] = self.pick([True, False])
        if self.odds(0.1):
            policy = self.pick(["lru", "fifo", "clock", "sieve"])
            capacity = self.pick(["auto", "16 KiB"])
            options["cache"] = fw.Cache(capacity, line=512, policy=policy)
        self._open(f"open({table.name}, {mode})", lambda: fw.open(path, mode, **options), table)

    def open_wrongly(self) -> None:
        table = self.pick(t for t in self.tables if t.memory is None)
        options: dict[str, Any] = {"device": "cpu", "cache": "16 KiB"}
        path: Any = table.paths[0] if self.odds(0.8) else self.nasty()
        name = self.pick(
            [
                "mode",
                "dtype",
                "shape",
                "device",
                "cache",
                "line",
                "controller",
                "strict",
                "o_direct",
            ]
        )
        options[name] = self.nasty()
        if isinstance(options[name], str) and options[name] == "r+":
            return
        opened = self.call(f"open({name}=)", lambda: fw.open(path, **options), TypeError)
        if not isinstance(opened, _Refused):
            self.call("close", opened.close)

    def create(self) -> None:
        name = f"new{self.random.randint(0, 1)}.npy"
        path = self.folder / name
        known = next((t for t in self.tables if t.paths == [path]), None)
        wrong = self.odds(0.3)
        shape = self.nasty() if wrong else (self.random.randint(1, 200), 8)
        options: dict[str, Any] = {"device": "cpu", "cache": "16 KiB"}
        before = _state(path)
        was_open = known is not None and (known.writers or known.readers)
        made = self.call(
            f"create({name}, {shape!r:.20})",
            lambda: fw.create(path, "i4", shape, **options),
            TypeError,
        )
        if isinstance(made, _Refused):
            if _state(path) != before and not was_open:
                raise Broken(f"create({name}) was refused and has changed the file")
            return
        if known is not None:
            self.tables.remove(known)
        if was_open or not made.shape or len(made.shape) < 2 or 0 in made.shape:
            self.call("close", made.close)
            return
        table = Table(name, np.zeros(made.shape, "i4"), [path])
        self.tables.append(table)
        held = Held(made, table)
        table.writers.append(held)
        self.arrays.append(held)

    def open_storage(self) -> None:
        storage, table = self.pick(self.storages) or (None, None)
        if table is None:
            return
        options: dict[str, Any] = {"device": self.device(), "cache": "16 KiB"}
        if self.caches and self.odds(0.4):
            options = {"cache": self.pick(self.caches)}
        shape = table.rows.shape
        self._open(
            f"open({table.name})",
            lambda: fw.open(storage, "r+", table.rows.dtype, shape, **options),
            table,
        )

    def _open(self, what: str, action: Callable[[], Any], table: Table) -> None:
        opened = self.call(what, action)
        if isinstance(opened, _Refused):
            return
        held = Held(opened, table)
        if opened.writable:
            if table.writers:
                table.forget()
            for other in table.readers + table.writers:
                other.stale = True
            table.writers.append(held)
        else:
            table.readers.append(held)
        held.stale = held.stale or bool(set(table.writers) - {held})
        self.arrays.append(held)
        if (opened.shape, opened.dtype) != (table.rows.shape, table.rows.dtype):
            raise Broken(f"{what}: {opened!r}")

    def make_cache(self) -> None:
        options = {"line": self.pick([512, 4096]), "ways": self.pick([4, 8]), "device": "cpu"}
        if self.devices and self.odds(0.5):
            options["device"] = self.pick(self.devices)
        if self.odds(0.2):
            options["host_memory"] = "128 KiB"
        if self.odds(0.3):
            del options["device"]  # that of its first array
        capacity = self.pick(["64 KiB", "64 KiB", "auto"])
        made = self.call(f"Cache({capacity}, {options})", lambda: fw.Cache(capacity, **options))
        if not isinstance(made, _Refused):
            self.caches.append(made)

    def make_wrongly(self) -> None:
        table = self.pick(t for t in self.tables if t.memory is None)
        path = table.paths[0]
        storages = fw.storage
        whole, more = storages.Memory(8192), storages.Memory(8192)
        name, action = self.pick([
            ("Cache(n)", lambda n: fw.Cache(n, device="cpu")),
            ("Cache(line=n)", lambda n: fw.Cache("64 KiB", line=n, device="cpu")),
            ("Cache(ways=n)", lambda n: fw.Cache("64 KiB", ways=n, device="cpu")),
            ("Cache(policy=n)", lambda n: fw.Cache("64 KiB", policy=n, device="cpu")),
            ("Cache(device=n)", lambda n: fw.Cache("64 KiB", device=n)),
            ("Cache(host_memory=n)",
             lambda n: fw.Cache("64 KiB", host_memory=n, device="cpu")),
            ("Controller(n)", lambda n: fw.nvme.SoftwareController(n)),
            ("Controller(queue_pairs=n)", lambda n: fw.nvme.SoftwareController(queue_pairs=n)),
            ("Controller(depth=n)", lambda n: fw.nvme.SoftwareController(depth=n)),
            ("Controller(threads=n)", lambda n: fw.nvme.SoftwareController(threads=n)),
            ("Controller(route=n)", lambda n: fw.nvme.SoftwareController(route=n)),
            ("Controller(model=n)", lambda n: fw.nvme.SoftwareController(model=n)),
            ("Memory(n)", storages.Memory),
            ("Memory(.., n)", lambda n: storages.Memory(64, n)),
            ("File(n)", storages.File),
            ("File(offset=n)", lambda n: storages.File(path, n)),
            ("File(nbytes=n)", lambda n: storages.File(path, 0, n)),
            ("BlockDevice(n)", storages.BlockDevice),
            ("Striped(n)", storages.Striped),
            ("Striped([n])", lambda n: storages.Striped([whole, n])),
            ("Striped(stripe=n)", lambda n: storages.Striped([whole, more], n)),
            ("Striped(nbytes=n)", lambda n: storages.Striped([whole, more], 4096, n)),
            ("Replicated(n)", storages.Replicated),
            ("Replicated([n])", lambda n: storages.Replicated([whole, n])),
            ("CpuDevice(n)", fw.device.CpuDevice),
            ("Policy(n)", fw.policy.Policy),
            ("SSDModel(n)", fw.nvme.SSDModel),
            ("ShareTable(n)", fw.array.ShareTable),
            ("open(storage n)", lambda n: fw.open(n, "r+", "i4", device="cpu")),
            ("open(storage, dtype=n)", lambda n: fw.open(whole, "r+", n, device="cpu")),
            ("open(storage, shape=n)", lambda n: fw.open(whole, "r+", "i4", n, device="cpu")),
            ("Array(n)", fw.Array),
        ])  # fmt: skip
        value = self.nasty()
        made = self.call(name, lambda: action(value), TypeError)
        if isinstance(made, fw.Array | fw.Cache):
            self.call("close", made.close)

    def make_controller(self) -> None:
        options = {"threads": self.pick([None, 1, 2]), "depth": self.pick([None, 4, 64])}
        options["queue_pairs"] = self.pick([None, 1, 3])
        self.controllers.append(fw.nvme.SoftwareController(**options))

    def make_storage(self) -> None:
        table = self.pick(t for t in self.tables if t.layout is None)
        if table.memory is not None:
            made = self.call("Memory", lambda: fw.storage.Memory(table.memory))
        else:
            offset = table.paths[0].stat().st_size - table.rows.nbytes
            options = {"writable": self.odds(0.4), "lock": self.odds(0.8)}
            path = table.paths[0]
            made = self.call(
                f"File({table.name}, {options})", lambda: fw.storage.File(path, offset, **options)
            )
        if not isinstance(made, _Refused):
            self.storages.append((made, table))

    def wrap_storage(self) -> None:
        """Make another storage of one, with the same bytes."""
        storage, table = self.pick(self.storages) or (None, None)
        if storage is None:
            return
        made = self.call("Replicated", lambda: fw.storage.Replicated([storage]))
        if not isinstance(made, _Refused):
            self.storages.append((made, table))

    def make_device(self) -> None:
        self.devices.append(fw.device.CpuDevice(self.pick([1, 2, 3])))

    def make_share_table(self) -> None:
        of = self.pick([h.array for h in self.arrays] + self.caches)
        if of is not None:
            made = self.call("ShareTable", lambda: fw.array.ShareTable(of, self.pick([1, 64])))
            if not isinstance(made, _Refused):
                self.others.append(made)

    # Steps that use arrays.

    def gather(self) -> None:
        if (held := self.pick(self.arrays)) is None:
            return
        index = self.index(held.table)
        action: Callable[[], Any] = lambda: held.array.gather(index)  # noqa: E731
        if self.odds(0.3):
            out = np.empty((len(index), *held.table.rows.shape[1:]), held.table.rows.dtype)
            action = lambda: held.array.gather(index, out=out)  # noqa: E731
        self._check(held, index, self.must("gather", action, held.array))

    def getitem(self) -> None:
        if (held := self.pick(self.arrays)) is None:
            return
        n = len(held.table.rows)
        a, b = self.random.randint(-n, n), self.random.randint(-n, n)
        step = self.pick([None, 1, 2, -3])
        key = self.pick([slice(a, b, step), a % n, ..., slice(None)])
        result = self.must(f"x[{key}]", lambda: held.array[key], held.array)
        index = np.arange(n)[key]
        self._check(held, np.atleast_1d(index), result)

    def _check(self, held: Held, index: Any, result: Any) -> None:
        if isinstance(result, _Refused) or held.stale:
            return
        fine = held.table.checkable()[index]
        want = held.table.rows[index][fine]
        got = np.asarray(result).reshape(len(index), *held.table.rows.shape[1:])[fine]
        if got.dtype != want.dtype or not np.array_equal(got, want):
            raise Broken(f"wrong rows of {held.table.name}")

    def scatter(self) -> None:
        if (held := self.pick(self.arrays)) is None:
            return
        index = self.index(held.table)
        values = self.values(held.table, len(index))
        if self.odds(0.5):
            action: Callable[[], Any] = lambda: held.array.scatter(index, values)  # noqa: E731
        else:
            action = lambda: held.array.__setitem__(index, values)  # noqa: E731
        if not held.array.writable:
            result = self.call("scatter, read-only", action)
            if not isinstance(result, _Refused):
                raise Broken("a read-only array was stored to")
            return
        if isinstance(self.must("scatter", action, held.array), _Refused):
            return
        held.table.store(index, values)
        if held.stale:
            held.table.forget()

    def gather_async(self) -> None:
        if (held := self.pick(self.arrays)) is None:
            return
        index = self.index(held.table)
        future = self.must("gather_async", lambda: held.array.gather_async(index), held.array)
        if isinstance(future, _Refused):
            return
        self.futures.append(future)
        if self.odds(0.5):
            self._check(held, index, self.must("result", future.result))

    def scatter_async(self) -> None:
        held = self.pick(h for h in self.arrays if h.array.writable)
        if held is None:
            return
        table, index = held.table, self.index(held.table)
        values = self.values(table, len(index))
        future = self.must(
            "scatter_async", lambda: held.array.scatter_async(index, values), held.array
        )
        if isinstance(future, _Refused):
            return
        self.futures.append(future)
        table.unsure[index] |= table.in_flight()[index]
        table.rows[index] = values
        table.pending.append((future, index))
        if held.stale:
            table.forget()
        if self.odds(0.3):
            self.must("result", future.result)
            self._settle(table)

    def _settle(self, table: Table) -> None:
        for future, index in table.pending:
            if future.cancelled():
                table.unsure[index] = True
        table.pending = [(f, i) for f, i in table.pending if not f.done()]

    def use_future(self) -> None:
        if (future := self.pick(self.futures)) is None:
            return
        ended = (TimeoutError, concurrent.futures.CancelledError)
        name, action = self.pick([
            ("result", future.result),
            ("result(0)", lambda: future.result(0)),
            ("exception", future.exception),
            ("cancel", future.cancel),
            ("done", future.done),
            ("before", lambda: future.before(None)),
            ("callback", lambda: future.add_done_callback(lambda _: None)),
            ("copy", lambda: copy.copy(future)),
            ("repr", lambda: repr(future)),
        ])  # fmt: skip
        self.call(f"future.{name}", action, *ended, TypeError)
        for table in self.tables:
            self._settle(table)

    def whole(self) -> None:
        """Calls for the whole array."""
        if (held := self.pick(self.arrays)) is None:
            return
        x = held.array
        name, action = self.pick([
            ("flush", x.flush),
            ("flush", x.flush),
            ("drop_cache", x.drop_cache),
            ("stats", lambda: x.stats),
            ("explain", x.explain),
            ("prefetch", lambda: x.prefetch(self.index(held.table))),
            ("wait", x.wait),
            ("refresh", x.refresh),
            ("kernel_handle", lambda: x.kernel_handle),
            ("in_place", lambda: x.in_place),
        ])  # fmt: skip
        self.must(name, action, x)
        for what in (repr, lambda x: (x.shape, x.ndim, x.size, x.nbytes, x.closed, x.writable)):
            self.must("facts", lambda what=what: what(x))
        self._settle(held.table)

    def use_wrongly(self) -> None:
        if (held := self.pick(self.arrays)) is None:
            return
        x, n, table = held.array, self.nasty(), held.table
        index = self.index(table)
        values = self.values(table, len(index))
        reads = [
            ("gather(n)", lambda: x.gather(n)),
            ("gather(out=n)", lambda: x.gather(index, out=n)),
            ("x[n]", lambda: x[n]),
            ("x[n, n]", lambda: x[n, n]),
            ("prefetch(n)", lambda: x.prefetch(n)),
            ("gather_async(n)", lambda: x.gather_async(n)),
            ("gather_async(out=n)", lambda: x.gather_async(index, out=n)),
            ("drop_cache(n)", lambda: x.drop_cache(bool(n)) if isinstance(n, bool) else None),
            ("gather()", lambda: x.gather()),
            ("n in x", lambda: x.gather(index, index, index, index)),
            ("x.attribute", lambda: fw.array.ShareTable(x, n)),
        ]
        stores = [
            ("scatter(n)", lambda: x.scatter(n, values)),
            ("scatter(values=n)", lambda: x.scatter(index, n)),
            ("x[n] =", lambda: x.__setitem__(n, 0)),
            ("x[i] = n", lambda: x.__setitem__(index, n)),
            ("scatter_async(n)", lambda: x.scatter_async(n, values).result()),
            ("scatter_async(values=n)", lambda: x.scatter_async(index, n).result()),
        ]
        if self.odds(0.6):
            self.call(*self.pick(reads), TypeError)
            return
        result = self.call(*self.pick(stores), TypeError)
        if not isinstance(result, _Refused):
            table.forget()  # that it stores what numpy stores is for the tests of indices
        elif isinstance(result.error, TypeError | fw.errors.ArgumentError) and not held.stale:
            self._check(held, index, self.must("gather", lambda: x.gather(index), x))

    def copy(self) -> None:
        value = self.pick(
            [h.array for h in self.arrays]
            + self.caches
            + self.controllers
            + self.devices
            + [storage for storage, _ in self.storages]
            + self.others
        )
        if value is None:
            return
        name, action = self.pick([
            ("copy.copy", lambda: copy.copy(value)),
            ("copy.deepcopy", lambda: copy.deepcopy(value)),
            ("pickle", lambda: pickle.loads(pickle.dumps(value))),
        ])  # fmt: skip
        made = self.call(f"{name} of {type(value).__name__}", action, TypeError)
        table = next((h.table for h in self.arrays if h.array is value), None)
        if isinstance(made, fw.Array) and table is not None:
            # Opens it, which may be refused.
            writable = self.call("writable", lambda: made.writable)
            if isinstance(writable, _Refused):
                return
            held = Held(made, table, stale=bool(table.writers))
            if writable:
                raise Broken(f"{name} of a writable array made another one")
            table.readers.append(held)
            self.arrays.append(held)
        elif not isinstance(made, _Refused) and hasattr(made, "close"):
            self.others.append(made)

    # Steps that use other things.

    def use_storage(self) -> None:
        storage, table = self.pick(self.storages) or (None, None)
        if storage is None:
            return
        n = self.nasty() if self.odds(0.5) else self.random.randint(0, 4096)
        m = self.nasty() if self.odds(0.3) else self.random.randint(0, 512)
        name, action = self.pick([
            ("read", lambda: storage.read(n, m)),
            ("read", lambda: storage.read(n, m)),
            ("describe", storage.describe),
            ("flush", storage.flush),
            ("native", lambda: storage.native),
            ("facts", lambda: (storage.nbytes, storage.writable, storage.path, storage.closed)),
            ("repr", lambda: repr(storage)),
            ("write", lambda: storage.write(n, bytes(m) if type(m) is int and 0 <= m < 999 else m)),
            ("discard", lambda: storage.discard(n, m)),
            ("write_zeroes", lambda: storage.write_zeroes(n, m)),
        ])  # fmt: skip
        result = self.call(f"storage.{name}", action, TypeError)
        if name in ("write", "discard", "write_zeroes") and not isinstance(result, _Refused):
            table.forget()
        if name == "read" and not isinstance(result, _Refused) and len(result) != m:
            raise Broken(f"read({n!r}, {m!r}) gave {len(result)} bytes")

    def use_other(self) -> None:
        services = [h.array.service for h in self.arrays if "_attachment" in vars(h.array)]
        value = self.pick(self.caches + self.controllers + services + self.devices + self.others)
        if value is None:
            return
        names = [name for name in dir(value) if not name.startswith("_")]
        name = self.pick(names)
        # What only the library itself calls, and what needs arguments that hold an address.
        if name in _INTERNAL or isinstance(value, fw.Array):
            return
        attribute = self.call(f"{type(value).__name__}.{name}", lambda: getattr(value, name))
        if callable(attribute) and name in _CALLABLE:
            self.call(f"{type(value).__name__}.{name}()", attribute, TypeError)
        self.call("repr", lambda: repr(value))

    def fork(self) -> None:
        """Fork; the child uses and closes what it has inherited, and opens anew."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = self._in_child()
            os._exit(code)
        end = time.monotonic() + 20
        done, status = 0, 0
        while not done and time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if not done:
                time.sleep(0.002)
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise Broken("a forked child hangs")
        if status != 0:
            raise Broken(f"a forked child ended with {os.waitstatus_to_exitcode(status)}")

    def _in_child(self) -> int:
        faulthandler.disable()
        for held in self.arrays:
            if not held.array.closed:
                used = self.call("gather, forked", lambda held=held: held.array.gather([0]))
                if not isinstance(used, _Refused) and held.array.writable:
                    return 2
                # What a writer of the parent has stored may be in its cache alone.
                if not held.table.writers:
                    self._check(held, np.array([0]), used)
        for held in self.arrays:
            self.must("close, forked", held.array.close)
        for value in self.caches + [storage for storage, _ in self.storages]:
            self.call("close, forked", value.close)
        table = next(t for t in self.tables if t.name == "plain")
        with fw.open(table.paths[0], device=fw.device.CpuDevice(1), cache="16 KiB") as anew:
            anew.gather([0, 1])
        return 0

    # Steps that end things.

    def close_array(self) -> None:
        if (held := self.pick(self.arrays)) is not None:
            self._close(held)

    def _close(self, held: Held) -> None:
        self.must("close", held.array.close)
        if not held.array.closed:
            raise Broken("an array is not closed after close()")
        self._note_closed()
        for name, action in (
            ("gather", lambda: held.array.gather([0])),
            ("flush", held.array.flush),
            ("stats", lambda: held.array.stats),
        ):
            if not isinstance(self.call(f"{name}, closed", action), _Refused):
                raise Broken(f"{name} of a closed array works")

    def _note_closed(self) -> None:
        for table in self.tables:
            for users in (table.writers, table.readers):
                users[:] = [held for held in users if not held.array.closed]
            self._settle(table)

    def close_other(self) -> None:
        value = self.pick(
            self.caches
            + self.controllers
            + self.devices
            + [storage for storage, _ in self.storages]
            + self.others
        )
        if value is not None and hasattr(value, "close"):
            self.call(f"{type(value).__name__}.close", value.close)
            self.call(f"{type(value).__name__}.close again", value.close)
            self._note_closed()

    def lose(self) -> None:
        """Drop the last reference to something, open or not."""
        if (held := self.pick(self.arrays)) is not None:
            self.arrays.remove(held)
            # A share table holds its array.
            self.others = [o for o in self.others if getattr(o, "_array", None) is not held.array]
            for users in (held.table.writers, held.table.readers):
                if held in users:
                    users.remove(held)
            if self.odds(0.5):  # as a part of a cycle
                held.array.itself = held.array
            waits = [future for future, _ in held.table.pending]
            del held
            gc.collect()
            self.call("wait", lambda: concurrent.futures.wait(waits, TIMEOUT_S))
            self._note_closed()

    def _end(self) -> None:
        self.log("end")
        if self.odds(0.2):
            self.log("   everything is lost")
        else:
            self._close_all()
        for table in self.tables:
            for future, _ in table.pending:
                concurrent.futures.wait([future], TIMEOUT_S)
            table.readers.clear()
            table.writers.clear()
        self.arrays.clear()
        self.others.clear()
        self.futures.clear()
        self.caches.clear()
        self.controllers.clear()
        self.storages.clear()
        self.devices.clear()
        gc.collect()
        for table in self.tables:
            self._settle(table)
            self._compare(table)

    def _close_all(self) -> None:
        """Close everything, in any order."""
        things: list[Any] = [h.array for h in self.arrays] + self.caches + self.controllers
        things += self.devices + [storage for storage, _ in self.storages] + self.others
        things = [thing for thing in things if hasattr(thing, "close")]
        self.random.shuffle(things)
        for thing in things:
            self.call(f"{type(thing).__name__}.close", thing.close)
        for held in self.arrays:
            self._close(held)
        for cache in self.caches:
            self.must("cache.close", cache.close)

    def _compare(self, table: Table) -> None:
        got = _content(table)
        fine = table.checkable()
        if not np.array_equal(got[fine], table.rows[fine]):
            wrong = np.flatnonzero((got != table.rows).reshape(len(got), -1).any(1) & fine)
            raise Broken(f"{table.name} does not hold what was stored, in rows {wrong[:8]}")


@dataclass
class _Refused:
    error: BaseException


def _tables(folder: Path) -> Iterable[Table]:
    for name, shape, dtype in (
        ("plain", (64, 16), "i4"),
        ("odd", (300, 5), "f8"),
        ("narrow", (1000, 1), "i2"),
        ("wide", (3, 5000), "u1"),
    ):
        rows = np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)
        np.save(folder / f"{name}.npy", rows)
        yield Table(name, rows, [folder / f"{name}.npy"])
    rows = np.arange(8192).reshape(256, 32).astype("i4")
    stripes = rows.view("u1").reshape(8, 4096)
    paths = [folder / "stripe0", folder / "stripe1"]
    for number, path in enumerate(paths):
        path.write_bytes(stripes[number::2].tobytes())
    yield Table("striped", rows.copy(), paths, layout="stripe")
    paths = [folder / "copy0.npy", folder / "copy1.npy"]
    for path in paths:
        np.save(path, rows)
    yield Table("replicated", rows.copy(), paths, layout="replicate")
    memory = rows.copy()
    yield Table("memory", rows.copy(), [], memory=memory)


def _content(table: Table) -> Any:
    if table.memory is not None:
        return table.memory
    if table.layout == "stripe":
        parts = [np.frombuffer(path.read_bytes(), "u1").reshape(-1, 4096) for path in table.paths]
        whole = np.stack(parts, 1).reshape(-1)
        return whole.view(table.rows.dtype).reshape(table.rows.shape)
    loaded = [np.load(path) for path in table.paths]
    for other in loaded[1:]:
        if not np.array_equal(loaded[0][table.checkable()], other[table.checkable()]):
            raise Broken(f"the copies of {table.name} differ")
    return loaded[0]


def _state(path: Path) -> Any:
    """Whatever a change of a file changes, or None; of a long one not its bytes."""
    if not path.exists():
        return None
    status = path.stat()
    small = status.st_size < 1 << 20
    return status.st_ino, status.st_size, status.st_mtime_ns, path.read_bytes() if small else b""


_STEP_WEIGHTS = {
    Sequence.open: 14,
    Sequence.open_wrongly: 4,
    Sequence.create: 4,
    Sequence.open_storage: 4,
    Sequence.make_cache: 3,
    Sequence.make_wrongly: 8,
    Sequence.make_controller: 2,
    Sequence.make_storage: 4,
    Sequence.wrap_storage: 1,
    Sequence.make_device: 2,
    Sequence.make_share_table: 1,
    Sequence.gather: 8,
    Sequence.getitem: 5,
    Sequence.scatter: 10,
    Sequence.gather_async: 4,
    Sequence.scatter_async: 5,
    Sequence.use_future: 3,
    Sequence.whole: 8,
    Sequence.use_wrongly: 8,
    Sequence.copy: 3,
    Sequence.use_storage: 4,
    Sequence.use_other: 4,
    Sequence.fork: 0.3,
    Sequence.close_array: 6,
    Sequence.close_other: 4,
    Sequence.lose: 2,
}
_STEPS, _WEIGHTS = list(_STEP_WEIGHTS), list(_STEP_WEIGHTS.values())

# Of caches, controllers and their services, devices and share tables: attributes for the library's
# own use, which take or give addresses.
_INTERNAL = {
    "attach", "detach", "stop", "allocate", "allocate_host", "register_host", "upload", "download",
    "download_into", "fill", "launch", "load_program", "run_kernel", "turn", "gate", "streams",
    "empty_array", "view", "order", "close", "result", "set_result", "set_exception",
    "set_running_or_notify_cancel", "address", "addresses", "frames", "geometry", "native",
}  # fmt: skip
_CALLABLE = {
    "describe", "stats", "memory_info", "alive", "event", "default_stream", "create_stream",
    "wait", "check", "take_errors", "take_stale", "silent", "wake", "worth_looking_ahead",
}  # fmt: skip


class _Rude:
    """Raises whatever is asked of it."""

    def __index__(self) -> int:
        raise TypeError("no index")

    def __len__(self) -> int:
        raise TypeError("no length")

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        raise TypeError("no array")


_NASTY: list[Any] = [
    None, True, False, -1, 0, 1, 7, 1 << 31, -(1 << 31), (1 << 63) - 1, 1 << 63, 1 << 70,
    -(1 << 70), 0.5, float("nan"), float("inf"), 1e300, 3 + 4j, "", "x", "4 KiB", "-4 KiB", "0",
    "cuda:0", "cuda:99", "r+", "a\0b", "\ud800", b"", b"x", "x" * 5000, (), [], {}, [[]], [0],
    [[0, 1], [1, 2]], [1.0], ["a"], [None], (0, 0), (-1, 4), (1 << 40, 1 << 40), (0.5, 2),
    ("a", 2), [True, False], {0}, range(3), slice(None), slice(0, 1 << 70), slice("a", "b"),
    slice(None, None, 0), ..., object, object(), _Rude(), int, print, lambda: _tables,
    lambda: iter([0, 1]), lambda: np.zeros(0), lambda: np.zeros((0, 4), "i8"),
    lambda: np.zeros(3, bool), lambda: np.ones(64, bool), lambda: np.array(3),
    lambda: np.array([1.5]), lambda: np.array(["a"]), lambda: np.array([None]),
    lambda: np.array([1 << 40]), lambda: np.array([-(1 << 62)]), lambda: np.array([-1]),
    lambda: np.zeros(4, ">i4"), lambda: np.arange(8)[::2], lambda: np.zeros((64, 16), "i4").T,
    lambda: np.zeros(4, "M8[s]"), lambda: np.zeros(4, [("a", "i4")]), lambda: np.zeros(1, "S7"),
    lambda: np.ma.masked_array([1, 2], [True, False]), lambda: _read_only(),
    lambda: np.datetime64("now"), lambda: np.float64("nan"), lambda: np.int8(-1),
    lambda: np.zeros((2,) * 40, "i1").reshape(-1)[:4] if False else np.zeros((1,) * 32, "i1"),
    lambda: memoryview(b"abcd"), lambda: bytearray(9), lambda: np.dtype("i4"),
    lambda: np.dtype("O"), lambda: np.dtype("V0"), lambda: np.dtype(("i4", (2,))),
    lambda: Path("/"), lambda: Path("/dev/null"), lambda: Path("/dev/zero"),
    lambda: Path("/absent/file"), lambda: fw.storage.Memory(4096),
    lambda: fw.nvme.SoftwareController(),
    lambda: threading.Lock(), lambda: [fw.storage.Memory(4096)] * 2, lambda: fw.errors,
]  # fmt: skip


def _read_only() -> Any:
    values = np.zeros(4, "i8")
    values.flags.writeable = False
    return values


# Running them.


def _run(seed: int, root: Path, log: Callable[[str], None], wanted: set[int] | None) -> None:
    folder = root / str(seed)
    folder.mkdir()
    try:
        Sequence(seed, folder, log).run(wanted)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _child(first: int, count: int, root: Path) -> int:
    """Run sequences, and say which; ends at the first that fails."""
    progress = os.open(root / "progress", os.O_WRONLY | os.O_CREAT)
    # A GPU opens dozens of descriptors and threads at its first use, and keeps them.
    with fw.open(fw.storage.Memory(np.zeros(512, "u1")), "r+", "u1") as warm:
        warm[0]
    gc.collect()
    gc.freeze()
    threads = descriptors = 0
    for seed in range(first, first + count):
        os.pwrite(progress, f"{seed:020}".encode(), 0)
        try:
            _run(seed, root, lambda _: None, None)
            # The first ones start what stays: pools of the default device, logging, imports.
            if seed - first == 20:
                threads, descriptors = _tasks(), len(_descriptors())
            elif seed - first > 20 and (seed - first) % 20 == 0:
                _check_leaks(threads, descriptors)
        except Broken as error:
            print(f"{seed}: {error}", flush=True)
            return 3
    os.pwrite(progress, f"{first + count:020}".encode(), 0)
    return 0


# Of the policies, and of the kernels that sequences compile.
_PROGRAMS_MAX = 8


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def _descriptors() -> dict[int, str]:
    """What is open, by number, but for the few programs that a device keeps loaded."""
    found = {}
    programs = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
            if found[number].startswith("/memfd:flashwarp-program"):
                programs += 1
                if programs <= _PROGRAMS_MAX:
                    del found[number]
    return found


def _check_leaks(threads: int, descriptors: int) -> None:
    end = time.monotonic() + 5
    while _tasks() > threads + 1 or len(_descriptors()) > descriptors:
        if time.monotonic() > end:
            raise Broken(
                f"{_tasks()} threads, {threads} before; {descriptors} descriptors before, and now "
                f"{_descriptors()}"
            )
        gc.collect()
        time.sleep(0.05)


def _replay(seed: int, wanted: set[int] | None, root: Path) -> int:
    def log(line: str) -> None:
        print(line, flush=True)

    try:
        _run(seed, root, log, wanted)
    except Broken as error:
        print(f"BROKEN: {error}", flush=True)
        cause = error.__cause__
        if cause is not None:
            import traceback

            traceback.print_exception(cause)
        return 3
    return 0


@dataclass
class Failure:
    """A sequence that failed: how, and the fewest steps found that still do."""

    seed: int
    how: str
    log: str = ""

    def __str__(self) -> str:
        replay = f"python tests/edges/misuse.py --replay {self.seed}"
        return f"sequence {self.seed}: {self.how}\n  replay: {replay}\n{self.log}"


def run(
    first: int,
    count: int,
    *,
    workers: int = 1,
    failures_max: int = FAILURES_MAX,
    shrink: bool = True,
) -> tuple[int, list[Failure]]:
    """Run sequences `first` to `first + count`; returns how many were run, and which failed."""
    failures: list[Failure] = []
    ran = [0] * workers
    share = -(-count // workers)

    def work(number: int) -> None:
        seed, end = first + number * share, min(first + count, first + (number + 1) * share)
        while seed < end and len(failures) < failures_max:
            with _scratch() as root:
                stopped, how = _supervise(seed, end - seed, root)
            ran[number] += min(stopped + (how is not None), end) - seed
            if how is not None:
                failures.append(Failure(stopped, how))
                stopped += 1
            seed = stopped

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures if shrink else ():
        failure.log = _shrunk(failure.seed)
    return sum(ran), failures


def _supervise(first: int, count: int, root: Path) -> tuple[int, str | None]:
    """Run sequences in a child; returns where it stopped, and why."""
    with open(root / "out", "w+") as out:
        child = _start(["--child", str(first), str(count), str(root)], out)
        seen, since = first, time.monotonic()
        while child.poll() is None:
            time.sleep(0.05)
            now = _progress(root, first)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > HANG_S:
                child.send_signal(signal.SIGABRT)  # faulthandler says where
                child.wait()
                return seen, f"hangs\n{_tail(out)}"
        stopped = _progress(root, first)
        if child.returncode == 0:
            return stopped, None
        how = "" if child.returncode == 3 else f"ended with {child.returncode}\n"
        return stopped, how + _tail(out)


def _start(arguments: list[str], out: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"FLASHWARP_TIMEOUT_S": str(4 * TIMEOUT_S), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", __file__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def _progress(root: Path, first: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((root / "progress").read_text())
    return first


def _tail(out: Any) -> str:
    out.seek(0)
    return "\n".join(out.read().splitlines()[-40:])


def _shrunk(seed: int) -> str:
    """Leave steps out as long as the sequence fails; returns the log of what is left."""
    steps = list(range(STEPS))
    tries = itertools.count()
    log = _replayed(seed, steps)
    if log is None:
        return "  alone it passes: it needs the sequences before it, or luck"
    size = len(steps) // 2
    while size:
        place = 0
        while place < len(steps) and next(tries) < SHRINK_TRIES:
            fewer = steps[:place] + steps[place + size :]
            failed = _replayed(seed, fewer)
            if failed is None:
                place += size
            else:
                steps, log = fewer, failed
        size //= 2
    return f"  --steps {','.join(map(str, steps))}\n{log}"


def _replayed(seed: int, steps: list[int]) -> str | None:
    with _scratch() as root, open(root / "out", "w+") as out:
        chosen = ",".join(map(str, steps)) or "none"
        child = _start(["--replay", str(seed), "--steps", chosen], out)
        try:
            code = child.wait(HANG_S / 2)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGABRT)
            code = child.wait()
        return None if code == 0 else _tail(out)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    # Memory where there is some: closing an array makes its file durable.
    shared = Path("/dev/shm")
    where = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="flashwarp-misuse-", dir=where) as root:
        yield Path(root)


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="of the first; default from the date")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--failures", type=int, default=FAILURES_MAX, help="stop after so many")
    parser.add_argument("--no-shrink", action="store_true", help="only say which failed")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--steps", help="of a replay: their numbers")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        return _child(int(given.child[0]), int(given.child[1]), Path(given.child[2]))
    if given.replay is not None:
        steps = None
        if given.steps is not None:
            steps = {int(n) for n in given.steps.split(",") if n.isdecimal()}
        with _scratch() as root:
            return _replay(given.replay, steps, root)
    seed = int(time.strftime("%Y%m%d")) * 1_000_000 if given.seed is None else given.seed
    start = time.monotonic()
    ran, failures = run(
        seed,
        given.sequences,
        workers=given.workers,
        failures_max=given.failures,
        shrink=not given.no_shrink,
    )
    for failure in failures:
        print(failure, end="\n\n")
    print(
        f"{ran} sequences from {seed} on in {time.monotonic() - start:.0f} s: "
        f"{len(failures)} failed"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    import numpy as np

    import flashwarp as fw

    warnings.simplefilter("ignore")
    sys.exit(_main())
