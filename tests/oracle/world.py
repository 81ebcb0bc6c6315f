"""What a program works on: arrays and their models, threads, and the lines of what was done."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import flashwarp as fw
from flashwarp.file.gvdk import Gvdk
from oracle.machine import Machine, takes_direct_io
from oracle.model import Read, Rows, Wrong, bytes_of

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

RECORD = np.dtype([("key", "<i8"), ("weight", "<f4"), ("name", "S5")])  # 17 bytes

KINDS: list[tuple[Any, tuple[int, ...]]] = [
    ("u1", (12,)),
    ("u1", (100,)),
    ("i4", (25,)),
    ("f4", (128,)),
    ("f4", (1024,)),
    ("i4", (1250,)),
    ("i8", ()),
    ("f8", (3, 5)),
    ("i2", (64,)),
    ("?", (41,)),
    ("i2", (5, 70)),
    (RECORD, ()),
    ("u1", (1,)),
    ("u1", (3,)),
    ("u1", (513,)),
    (">u2", (9,)),
    ("f2", (30,)),
    ("c16", (4,)),
    ("S3", (7,)),
    ("V12", ()),
]
"""Rows that lie in a line, cross lines, and are longer than one; of 1 byte to 5,000."""

_POLICIES = ("lru", "fifo", "sieve", "s3_fifo", "random")
_POOL = 1 << 16


class ForAll(fw.nvme.SoftwareController):
    """Serves a striped or replicated storage as a whole: the host splits its commands."""

    serves_members = False


def _pool(dtype: np.dtype[Any]) -> Values:
    """Values without pattern, none of which is NaN."""
    generator = np.random.default_rng(dtype.itemsize)
    if dtype.kind == "f":
        most = 1 << 20 if dtype.itemsize > 2 else 1 << 11
        return generator.integers(-most, most, _POOL).astype(dtype)
    if dtype.names is not None:
        pool = np.zeros(_POOL, dtype)
        for name in dtype.names:
            pool[name] = generator.integers(0, 1 << 16, _POOL).astype(dtype[name])
        return pool
    if dtype.kind == "b":
        return generator.integers(0, 2, _POOL) == 1
    return generator.integers(0, 256, _POOL * dtype.itemsize, dtype=np.uint8).view(dtype)


_pools: dict[np.dtype[Any], Values] = {}


@dataclass
class Held:
    """An array under test, what it must hold, and what stands on it."""

    name: str
    model: Rows
    open: Callable[[], fw.Array]
    stored: Callable[[], bytes]  # what its storage holds
    path: Path | None = None  # of a .npy file
    array: Any = None
    pipelines: list[Any] = field(default_factory=list)
    dirty: bool = False  # whether rows were stored since the last flush by `files`
    reader: Any = None  # another array of its file, and whether it may be old
    reader_is_old: bool = False
    holder: Any = None  # the hand whose pipeline has it alone

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its elements."""
        return self.model.now.dtype

    @property
    def count(self) -> int:
        """Number of its rows."""
        return len(self.model.now)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.model.now.shape[1:]

    def check_storage(self, known: npt.NDArray[np.bool_] | None = None) -> None:
        """After a flush the storage itself holds what the model does."""
        everything = np.arange(self.count)
        stored = np.frombuffer(self.stored(), self.dtype)  # of each replica
        for got in stored.reshape(-1, *self.model.now.shape):
            try:
                self.model.read(everything).check(got, known)
            except Wrong as error:
                raise Wrong(f"in the storage: {error}") from error


@dataclass
class Pending:
    """A call in flight: how to get what it read, and what that must be."""

    held: Held
    get: Callable[[], Any] | None  # None: it stores
    read: Read | None
    line: int
    future: Any = None
    out: Any = None
    among: Any = None


class Hand:
    """A thread of a program, with the calls that it has in flight and the rows that are its own."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.machine = world.machine
        self.random = random.Random(0)
        self.pending: list[Pending] = []
        self.kept: list[Any] = []  # operands that streams may still use
        self.alone = True
        self.turn = 0

    # What it may use.

    def odds(self, chance: float) -> bool:
        """Return True so often."""
        return self.random.random() < chance

    def arrays(self) -> list[Held]:
        """The arrays that it may call."""
        return [each for each in self.world.arrays if each.holder is None]

    def own(self, held: Held) -> Ids:
        """The rows that only this thread stores to now."""
        return self.world.rows_of(held.count, None if self.alone else self.number, self.turn)

    def known(self, held: Held) -> npt.NDArray[np.bool_] | None:
        """Which rows' values it knows; None: all."""
        if self.alone:
            return None
        mask = np.zeros(held.count, bool)
        mask[self.own(held)] = True
        return mask

    def ids(self, held: Held, most: int = 0, *, repeats: bool = False) -> Ids:
        """Choose some of its rows; each once, unless they may repeat."""
        own = self.own(held)
        n = len(own)
        most = min(most or self.world.most, self.world.most, n)
        count = self.random.randint(1, max(1, min(most, n)))
        if repeats:
            return own[[self.random.randrange(n) for _ in range(count)]]
        start, step = self.random.randrange(n), self.random.choice((1, 1, 7, 11, 13))
        if n % step == 0:
            step = 1
        return own[(start + step * np.arange(count)) % n]

    def values(self, held: Held, count: int) -> Values:
        """Choose new values for some rows."""
        pool = _pools.get(held.dtype)
        if pool is None:
            pool = _pools[held.dtype] = _pool(held.dtype)
        width = int(np.prod(held.row_shape)) * count
        if width > _POOL // 2:
            return np.resize(pool[self.random.randrange(_POOL) :], (count, *held.row_shape))
        start = self.random.randrange(_POOL - width)
        return pool[start : start + width].reshape(count, *held.row_shape)

    def stream(self) -> Any:
        """Choose a stream, or None; it may be late."""
        stream = self.random.choice(self.machine.streams)
        if self.odds(0.4):
            self.machine.make_late(stream)
        return stream

    # What it does.

    def say(self, text: str, *arguments: Any) -> int:
        """Note a line of the program, and count its call; return the line's number."""
        lines = self.world.lines
        lines.append((self.number, text, arguments))
        self.world.calls += 1
        return len(lines)

    def stores(self, held: Held, line: int, rows: Ids, values: Values) -> None:
        """Note that rows have values from now on."""
        held.model.store(f"line {line}", rows, values)
        held.dirty = held.reader_is_old = True

    def check(self, held: Held, read: Read, got: Any) -> None:
        """Check what was read of rows."""
        self.world.checks += 1
        known = self.known(held)
        rows = np.asarray(got)
        if rows.size != read.right.size:
            raise Wrong(f"{rows.shape} was read of {held.name}, not {read.right.shape}")
        rows = rows.reshape(read.right.shape)
        read.check(rows, None if known is None else known[read.rows])

    def settle(self, pending: Pending, stream: Any = None) -> None:
        """Wait for a call in flight, and check what it has read."""
        self.pending.remove(pending)
        if pending.get is None:
            return
        got = pending.get()
        if pending.read is not None:
            self.world.checks += 1
            rows = self.machine.fetch(got, stream).reshape(pending.read.right.shape)
            among = pending.among
            if pending.read in pending.held.model.loose and not self.alone:
                # What other threads store meanwhile is in the model only after their calls.
                own = np.isin(pending.read.rows, self.own(pending.held))
                among = own if among is None else own & among
            pending.read.check(rows, among)

    def settle_all(self, held: Held | None = None) -> None:
        """Wait for all that it has in flight, of an array if one is named."""
        for pending in list(self.pending):
            if held is None or pending.held is held:
                self.settle(pending)


class World:
    """One program: what it opens, its threads, and what it has done."""

    def __init__(
        self, machine: Machine, seed: int, folders: dict[str, Path], most: int = 0
    ) -> None:
        self.machine, self.seed, self.folders = machine, seed, folders
        self.lines: list[tuple[int, str, tuple[Any, ...]]] = []
        self.calls = self.checks = 0
        draw = self.random = random.Random(f"{seed}/world")
        self.threads = draw.choice((1, 1, 1, 2, 3, 4))
        self.steps = draw.choice((50, 150, 400, 800))
        self.most = most or draw.choice((4, 24, 24, 1000))
        self.device = draw.randrange(len(machine.devices))
        self._rows: dict[tuple[int, int | None, int], Ids] = {}
        self.hands = [Hand(self, number) for number in range(self.threads)]
        self.cache: Any = None
        self.arrays: list[Held] = []
        self.images: list[Gvdk] = []
        self.closing: list[Any] = []
        self.extras: dict[str, Any] = {}  # what rooms keep here

    def open(self) -> None:
        """Open the cache and the arrays."""
        draw, device = self.random, self.machine.devices[self.device]
        line = draw.choice((512, 512, 512, 4096, 4096, 65536))
        ways = draw.choice((4, 8, 16))
        sets = draw.choice((1, 2, 3, 7)) * (1 if self.threads == 1 else 2)
        self.policy = policy = draw.choice(("clock", "clock", *_POLICIES))
        tier = draw.choice((None, None, sets * line, 20 * sets * line))
        self.note(f"cache = fw.Cache({sets * ways * line}, {line}, {ways}, {policy!r}, {tier!r})")
        self.cache = fw.Cache(
            sets * ways * line, line, ways, policy, device=device, host_memory=tier
        )
        for number in range(draw.choice((1, 1, 2))):
            self.arrays.append(self._make(f"x{number}"))
        for held in self.arrays:
            held.array = held.open()

    def note(self, text: str) -> None:
        """Note a line that belongs to no thread."""
        self.lines.append((-1, text, ()))

    def rows_of(self, count: int, number: int | None, turn: int) -> Ids:
        """The rows that belong to a thread; None: all rows."""
        key = count, number, turn % self.threads
        found = self._rows.get(key)
        if found is None:
            found = np.arange(count)
            if number is not None:
                found = found[found % self.threads == (number + turn) % self.threads]
            self._rows[key] = found
        return found

    def _make(self, name: str) -> Held:
        draw = self.random
        dtype, row_shape = draw.choice(KINDS)
        row = np.dtype(dtype).itemsize * int(np.prod(row_shape))
        count = draw.randint(4 * self.threads, max(5 * self.threads, min(200, 60_000 // row)))
        model = Rows(name, np.zeros((count, *row_shape), dtype))
        held = Held(name, model, lambda: None, lambda: b"")
        model.now[...] = self.hands[0].values(held, count)
        where = draw.choice(
            ("memory", "file", "file", "npy", "npy", "disk", "striped", "replicated")
        )
        # Drawn apart, so that all other programs stay what they were.
        if random.Random(f"{self.seed}/{name}/image").random() < 0.1:
            where = "image"
        direct: bool | None = None
        if where == "disk":
            direct = draw.choice((None, True, False)) if takes_direct_io() else None
        folder = self.folders["disk" if where == "disk" else "memory"]
        path = folder / f"{name}.npy"
        content = model.now.tobytes()
        options: dict[str, Any] = {"cache": self.cache}
        if where == "memory":
            buffer = bytearray(content)
            storage: Any = fw.storage.Memory(buffer)
            held.stored = lambda: bytes(buffer)
        elif where == "file":
            offset = draw.choice((128, 128, 5, 4100))
            path.write_bytes(b"\xee" * offset + content + b"behind")
            storage = path
            options["offset"] = offset
            held.stored = partial(_bytes_between, path, offset, len(content))
        elif where == "striped" and len(content) >= 8192:
            stripe = 4096
            paths = [folder / f"{name}.{k}" for k in range(2)]
            padded = content + bytes(-len(content) % (2 * stripe))
            pieces = np.frombuffer(padded, np.uint8).reshape(-1, 2, stripe)
            for k, each in enumerate(paths):
                each.write_bytes(pieces[:, k].tobytes())
            storage = fw.storage.Striped(paths, stripe)
            held.stored = partial(_bytes_of_stripes, paths, stripe, len(content))
        elif where == "replicated":
            paths = [folder / f"{name}.{k}" for k in range(2)]
            for each in paths:
                each.write_bytes(content)
            storage = fw.storage.Replicated(paths)
            held.stored = partial(_bytes_of_replicas, paths)
        elif where == "image":
            path, sparse = folder / f"{name}.gvdk", draw.random() < 0.5
            storage = Gvdk.create(path, len(content), preallocate=not sparse, overwrite=True)
            self.images.append(storage)
            storage.write(0, content)
            held.stored = partial(_bytes_of_image, path, len(content))
        else:
            np.save(path, model.now)
            storage = path
            held.path = path
            offset = path.stat().st_size - len(content)
            held.stored = partial(_bytes_of_file, path, offset, len(content))
        if held.path is None:
            options |= {"dtype": model.now.dtype, "shape": model.now.shape}
        if where == "disk":
            options["o_direct"] = direct
        if draw.random() < 0.5:
            depth, threads = draw.choice((2, 8, 64)), draw.choice((None, 1))
            way = None if self.machine.on_gpu else draw.choice((None, "bounce", "direct"))
            how = {"queue_pairs": draw.choice((1, 2)), "depth": depth, "threads": threads}
            kind = draw.choice((fw.nvme.SoftwareController, ForAll))
            options["controller"] = partial(kind, **how, route=way)
            self.note(f"controller = {kind.__name__}({how}, route={way!r})")
        shown = {key: value for key, value in options.items() if key not in ("cache", "controller")}
        self.note(
            f"{name} = fw.open({where}, 'r+', {shown}, cache=cache)  "
            f"# {count} rows of {row} bytes: {model.now.dtype}{row_shape}"
        )

        def open_it() -> fw.Array:
            controller = options.get("controller")
            made = options | ({"controller": controller()} if controller else {})
            return fw.open(storage, "r+", **made)

        held.open = open_it
        return held

    def each_line(self) -> Iterator[str]:
        """Write the program as a person reads it."""
        for number, (hand, text, arguments) in enumerate(self.lines, 1):
            who = "" if hand < 0 or self.threads == 1 else f"[thread {hand}] "
            said = text.format(*map(shown, arguments)) if arguments else text
            yield f"{number:4} {who}{said}"

    def close(self) -> None:
        """Close everything, and check what the storages hold."""
        for hand in self.hands:
            hand.alone = True
            hand.settle_all()
        for each in reversed(self.closing):
            each.close()
        for held in self.arrays:
            if self.random.random() < 0.3:
                held.array.close()  # with what stands on it
            for pipeline in list(held.pipelines):
                pipeline.close()
            if held.reader is not None:
                held.reader.close()
            held.array.close()
            self.checks += 1
            held.check_storage()
        for image in self.images:
            image.close()
        self.cache.close()
        for hand in self.hands:
            hand.kept.clear()

    def give_up(self) -> None:
        """Close what can be closed, after a failure."""
        closing = [*self.closing]
        for held in self.arrays:
            closing += [*held.pipelines, held.reader, held.array]
        for each in [*closing, *self.images, self.cache]:
            try:
                if each is not None:
                    each.close()
            except Exception as error:
                self.note(f"# close: {type(error).__name__}: {error}")


def shown(argument: Any) -> str:
    """Write an argument as in a program."""
    if isinstance(argument, np.ndarray):
        if argument.dtype.kind in "iu" and argument.ndim == 1 and argument.size <= 60:
            return str(argument.tolist())
        return f"<{argument.dtype}{argument.shape}>"
    if isinstance(argument, Held):
        return argument.name
    if hasattr(argument, "handle"):
        return f"stream {argument.handle:#x}"
    if hasattr(argument, "cuda_stream"):
        return f"torch stream {argument.cuda_stream:#x}"
    return str(argument)


def _bytes_of_file(path: Path, offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(nbytes)


def _bytes_between(path: Path, offset: int, nbytes: int) -> bytes:
    whole = path.read_bytes()
    if whole[:offset] != b"\xee" * offset or whole[offset + nbytes :] != b"behind":
        raise Wrong(f"bytes of {path} were stored to that are not the array's")
    return whole[offset : offset + nbytes]


def _bytes_of_image(path: Path, nbytes: int) -> bytes:
    """What a crash would leave, but for what is marked."""
    with Gvdk(path, lock=False) as image:
        return image.read(0, nbytes)


def _bytes_of_replicas(paths: list[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in paths)


def _bytes_of_stripes(paths: list[Path], stripe: int, nbytes: int) -> bytes:
    pieces = [np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, stripe) for path in paths]
    return np.stack(pieces, axis=1).tobytes()[:nbytes]


__all__ = ["Hand", "Held", "Ids", "Pending", "World", "bytes_of", "shown"]
