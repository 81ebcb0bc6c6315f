"""Arrays whose storages fail, against numpy under any sequence of operations, on small caches.

What numpy holds is the model. Without a fault every operation gives what numpy gives; with one it
raises the typed error and leaves each element old or new, which the model then allows both.
Sequences on storages that do not fail are the oracle's (`tests/oracle`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import flashwarp as fw
from flashwarp.errors import ControllerError, StorageError
from flashwarp.storage import File, Memory, Storage
from flashwarp.testing import Faulty
from support.samples import FUZZ_EXAMPLES

RECORD = np.dtype([("key", "<i8"), ("weight", "<f4"), ("name", "S5")])  # 17 bytes

# dtype and shape of arrays; rows of these lie in a line, cross lines, and are longer than one.
KINDS: list[tuple[Any, tuple[int, ...]]] = [
    ("<i8", (200,)),
    ("u1", (3000,)),
    ("<f4", (60, 7)),
    (RECORD, (150,)),
    ("<i2", (9, 5, 70)),
    ("<f8", ()),
    ("?", (40, 41)),
    ("<u4", (5, 400)),
]

# Harmless ones and such as make operations fail; small, for most operations must succeed.
PLANS = [
    "any eintr p=0.2; read short p=0.3; write short p=0.3; any delay=50us p=0.05",
    "read eio p=0.05",
    "write eio p=0.05; write torn p=0.05",
    "any enospc p=0.05; read enodata p=0.02",
]


def values_of(kind: np.dtype[Any], shape: tuple[int, ...], seed: int) -> npt.NDArray[Any]:
    """Values without pattern, none of which is NaN."""
    random = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if kind.names is not None:
        array = np.zeros(count, kind)
        for name in kind.names:
            array[name] = values_of(kind[name], (count,), seed + 1)
    elif kind.kind == "b":
        array = random.integers(0, 2, count) == 1
    elif kind.kind == "f":
        array = random.random(count).astype(kind)
    else:
        array = random.integers(1, 255, count * kind.itemsize, dtype=np.uint8).view(kind)
    return array.reshape(shape)


def bytes_of(array: Any) -> npt.NDArray[np.uint8]:
    """The bytes of each element along a last axis of its own."""
    held = np.ascontiguousarray(array)
    held = held.reshape((*np.shape(array), 1))
    return held.view(np.uint8)


class Model:
    """What an array may hold: one value an element, or after a failed store one of several.

    An element that lies in two lines may then be in part old and in part new.
    """

    def __init__(self, content: npt.NDArray[Any]) -> None:
        self.content = content.copy()
        # Elements with more than one possible value; those of `content` are not the only ones.
        self.unsure = np.zeros(content.shape, bool)
        self.others: list[npt.NDArray[Any]] = []

    def store(self, key: Any, value: Any) -> None:
        self.content[key] = value
        self.unsure[key] = False

    def may_store(self, key: Any, value: Any) -> None:
        """Each of the elements is old or new."""
        self.others.append(self.content.copy())
        self.content[key] = value
        self.unsure[key] = True

    def check(self, key: Any, got: Any) -> None:
        """Assert that `got` is what ``array[key]`` may be."""
        expected = self.content[key]
        assert np.shape(got) == np.shape(expected)
        mine = bytes_of(got)
        right = self.same(mine, bytes_of(expected))
        unsure = np.asarray(self.unsure[key])[..., np.newaxis]
        for other in self.others:
            right = right | (unsure & self.same(mine, bytes_of(other[key])))
        assert np.all(right), f"{np.sum(~right)} elements of [{key}] are wrong"

    def same(self, one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Compare element by element, or byte by byte where elements cross lines."""
        equal = one == other
        return equal if 512 % self.content.itemsize else equal.all(axis=-1, keepdims=True)

    def settle(self, seen: npt.NDArray[Any]) -> None:
        """From now on the elements are as they were seen."""
        self.content = seen.copy()
        self.unsure[...] = False
        self.others = []


class Held:
    """An array under test, its model, and how it is opened again."""

    def __init__(self, storage: Faulty, kind: Any, shape: tuple[int, ...]) -> None:
        self.storage = storage
        self.kind, self.shape = np.dtype(kind), shape
        nbytes = int(np.prod(shape)) * self.kind.itemsize
        self.model = Model(np.frombuffer(storage.read(0, nbytes), kind).reshape(shape))
        self.array: fw.Array | None = None

    @property
    def open_array(self) -> fw.Array:
        assert self.array is not None
        return self.array


def keys_of(draw: Callable[[Any], Any], shape: tuple[int, ...]) -> Any:
    """Draw a key that numpy would take, of every kind that arrays take."""
    if not shape:
        return draw(st.sampled_from([(), ...]))
    length = shape[0]
    rows = st.integers(-length, length - 1)
    bounds = st.none() | st.integers(-length - 2, length + 2)
    slices = st.builds(slice, bounds, bounds, st.sampled_from([None, 1, 2, 7, -1, -3]))
    first = draw(
        st.one_of(
            rows,
            slices,
            st.lists(rows, max_size=20),
            st.lists(rows, min_size=4, max_size=4).map(lambda r: np.reshape(r, (2, 2))),
            st.integers(0, 2**32).map(lambda s: np.random.default_rng(s).random(length) < 0.2),
            st.just(...),
        )
    )
    if isinstance(first, list):
        first = np.array(first, np.int64)
    if len(shape) == 1 or first is ... or draw(st.booleans()):
        return first
    inner = shape[1]
    bounds = st.none() | st.integers(-inner, inner)
    second = draw(st.integers(-inner, inner - 1) | st.builds(slice, bounds, bounds))
    return (first, second)


class ArrayMachine(RuleBasedStateMachine):
    """Several arrays on one cache of one set; any operation on any of them at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.device: fw.device.CpuDevice | None = None
        self.cache: fw.Cache | None = None
        self.arrays: list[Held] = []
        self.stored = 0

    @initialize(
        data=st.data(),
        threads=st.sampled_from([1, 2]),
        ways=st.sampled_from([4, 8]),
        sets=st.sampled_from([1, 1, 2]),
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    )
    def begin(
        self,
        data: st.DataObject,
        threads: int,
        ways: int,
        sets: int,
        kinds: list[tuple[Any, tuple[int, ...]]],
    ) -> None:
        self.device = fw.device.CpuDevice(threads)
        self.cache = fw.Cache(sets * ways * 512, 512, ways, device=self.device)
        for number, (kind, shape) in enumerate(kinds):
            content = values_of(np.dtype(kind), shape, number).tobytes()
            storage: Storage
            if data.draw(st.booleans(), label="in a file"):
                path = self.folder / str(number)
                path.write_bytes(b"\xee" * 128 + content)
                storage = File(path, 128, writable=True)
            else:
                storage = Memory(bytearray(content))
            faulty = Faulty(storage, blocking=data.draw(st.booleans(), label="in calls"))
            self.arrays.append(Held(faulty, kind, shape))
            self.reopen(self.arrays[-1], data)

    def reopen(self, held: Held, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(["bounce", "direct"]), label="route")
        controller = fw.nvme.SoftwareController(queue_pairs=1, depth=2, route=path)
        held.array = fw.open(
            held.storage, "r+", held.kind, held.shape, cache=self.cache, controller=controller
        )

    def teardown(self) -> None:
        for held in self.arrays:
            held.storage.heal()
            if held.array is not None:
                # Only a flush that failed before may fail now.
                self.attempt(held.array.close)
        if self.cache is not None:
            self.cache.close()
        if self.device is not None:
            self.device.close()
        shutil.rmtree(self.folder)

    def attempt(self, act: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether `act` succeeded, and what it returned."""
        try:
            return True, act()
        except (StorageError, ControllerError):
            return False, None

    def choose(self, data: st.DataObject) -> Held:
        return data.draw(st.sampled_from(self.arrays), label="array")

    def values(self, held: Held, key: Any) -> npt.NDArray[Any]:
        self.stored += 1
        return values_of(held.kind, np.shape(held.model.content[key]), 1000 + self.stored)

    @rule(data=st.data())
    def get_item(self, data: st.DataObject) -> None:
        held = self.choose(data)
        key = keys_of(data.draw, held.shape)
        done, got = self.attempt(lambda: held.open_array[key])
        if done:
            held.model.check(key, got)

    @rule(data=st.data())
    def set_item(self, data: st.DataObject) -> None:
        held = self.choose(data)
        key = keys_of(data.draw, held.shape)
        values = self.values(held, key)
        form = data.draw(st.sampled_from(["values", "one value", "one more axis"]), label="form")
        if form == "one value" and values.size:
            values = values.reshape(-1)[0]
        # For a mask of the whole array numpy takes no more axes, and neither do we.
        is_mask = isinstance(key, np.ndarray) and key.dtype == np.bool_
        grows = form == "one more axis" and values.ndim and not is_mask
        given = values[np.newaxis] if grows else values
        done, _ = self.attempt(lambda: held.open_array.__setitem__(key, given))
        (held.model.store if done else held.model.may_store)(key, values)

    @precondition(lambda self: any(h.shape for h in self.arrays))
    @rule(data=st.data(), count=st.integers(0, 30), seed=st.integers(0, 2**32))
    def gather(self, data: st.DataObject, count: int, seed: int) -> None:
        held = data.draw(st.sampled_from([h for h in self.arrays if h.shape]), label="array")
        length = held.shape[0]
        index = np.random.default_rng(seed).integers(-length, length, count)
        done, got = self.attempt(lambda: held.open_array.gather(index))
        if done:
            held.model.check(index, got)

    @precondition(lambda self: any(h.shape for h in self.arrays))
    @rule(data=st.data(), count=st.integers(0, 30), seed=st.integers(0, 2**32))
    def scatter(self, data: st.DataObject, count: int, seed: int) -> None:
        held = data.draw(st.sampled_from([h for h in self.arrays if h.shape]), label="array")
        length = held.shape[0]
        index = np.random.default_rng(seed).permutation(length)[:count]
        values = self.values(held, index)
        done, _ = self.attempt(lambda: held.open_array.scatter(index, values))
        (held.model.store if done else held.model.may_store)(index, values)

    @precondition(lambda self: any(h.shape for h in self.arrays))
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([h for h in self.arrays if h.shape]), label="array")
        start = data.draw(st.integers(0, held.shape[0]), label="start")
        self.attempt(lambda: held.open_array.prefetch(slice(start, start + 20)))

    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        held = self.choose(data)
        done, _ = self.attempt(held.open_array.flush)
        if done:
            self.check_storage(held)

    @rule(data=st.data())
    def drop_cache(self, data: st.DataObject) -> None:
        self.attempt(self.choose(data).open_array.drop_cache)

    @rule(data=st.data())
    def close_and_reopen(self, data: st.DataObject) -> None:
        held = self.choose(data)
        held_array = held.open_array
        done, _ = self.attempt(held_array.close)
        assert held_array.closed
        held.storage.heal()
        if done:
            self.check_storage(held)
        else:
            # What could not be written is lost, and the error said so: begin from what is there.
            held.model.settle(self.bytes_of(held))
        self.reopen(held, data)

    @rule(data=st.data(), plan=st.sampled_from(PLANS), seed=st.integers(0, 2**32))
    def inject(self, data: st.DataObject, plan: str, seed: int) -> None:
        self.choose(data).storage.inject(f"seed={seed}; {plan}")

    @rule()
    def heal_and_compare(self) -> None:
        for held in self.arrays:
            held.storage.heal()
        # The call that meets a failure of another array's write-back does so once.
        for held in self.arrays:
            self.attempt(lambda held=held: held.open_array[...])
            got = held.open_array[...]
            held.model.check(..., got)
            held.model.settle(np.asarray(got))

    def bytes_of(self, held: Held) -> npt.NDArray[Any]:
        nbytes = held.model.content.nbytes
        return np.frombuffer(held.storage.inner.read(0, nbytes), held.kind).reshape(held.shape)

    def check_storage(self, held: Held) -> None:
        """After a flush the storage itself holds what the model does."""
        held.model.check(..., self.bytes_of(held))
        if isinstance(held.storage.inner, File):
            whole = Path(str(held.storage.path)).read_bytes()
            assert whole[:128] == b"\xee" * 128, "bytes before the range were written"
            assert len(whole) == 128 + held.model.content.nbytes

    @invariant()
    def counters_make_sense(self) -> None:
        for held in self.arrays:
            if held.array is None or held.array.closed:
                continue
            stats = held.array.stats
            assert all(value >= 0 for value in stats.as_dict().values())
            assert stats.doorbells <= stats.commands


TestFaultyArray = ArrayMachine.TestCase
TestFaultyArray.settings = settings(
    max_examples=FUZZ_EXAMPLES // 10,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
